"""Profiles of workflows: against closed forms of bytes and accuracy; the file that they are written to; bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from shardwise.cli import run
from shardwise.cluster.cluster import Cluster
from shardwise.errors import ConfigError, ModelError
from shardwise.serve.deploy.dataflow import items_of, operators_on_items
from shardwise.serve.deploy.operator_runtime import example_requests, load_operator, split_rows
from shardwise.serve.deploy.profile import ProfileOptions, forward_s, profile_workflow
from shardwise.serve.placement.profile_file import with_profile
from shardwise.serve.placement.workflow import Machines, OperatorVariant, RequestSource, WorkerGroup, Workflow, WorkflowOperator
from shardwise.serve.placement.workflow_files import read_workflow

EXAMPLES = Path(__file__).parents[3] / "examples" / "serve"
HERE = Machines((WorkerGroup("edge", 0, 0.1), WorkerGroup("gpu", 1, 3.0, device="p3.16xlarge")))
CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(8, width, bias=False)

    def forward(self, x):
        return self.up(x)

def wide():
    return Net(64), (torch.zeros(8, 8),)

def narrow():
    return Net(32), (torch.zeros(8, 8),)

def sign(row):
    return int(row.sum() > 0)

def always(row):
    return 1

def labelled():
    rows = torch.randn(20, 8, generator=torch.Generator().manual_seed(0)).numpy()
    torch.manual_seed(0)
    return [{"x": row} for row in rows], [1] * 5 + [0] * 15
"""
FILE = """# a comment that stays
name = "signs"
rate = 5
[measure]
labelled = "code.py:labelled"
[source.x]
[operator.up]
inputs = ["x"]
[operator.up.variant.narrow]
model = "code.py:narrow"   # this, too
[operator.up.variant.wide]
latency_s = { edge = 7.0, gpu = 8.0 }
model = "code.py:wide"
[operator.sign]
inputs = ["up"]
variant.sign.call = "code.py:sign"
[worker.edge]
tier = 0
price_per_hour = 0.1
count = 2
[worker.gpu]
tier = 1
price_per_hour = 3.0
device = "p3.16xlarge"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "code.py").write_text(CODE)
    text = FILE.replace('variant.sign.call = "code.py:sign"', '[operator.sign.variant.sign]\ncall = "code.py:sign"')
    text = text.replace("[worker.edge]", '[operator.sign.variant.always]\ncall = "code.py:always"\n[worker.edge]')
    (tmp_path / "flow.toml").write_text(text)
    return tmp_path


def test_a_profile_is_measured_priced_and_written(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = folder / "flow.toml"
    before = file.read_text()
    assert run(["serve", "profile", str(file), "--batches", "1,4", "--seconds", "0", "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    workflow, machines, rate = read_workflow(file)
    assert machines is not None
    assert rate == 5
    text = file.read_text()
    keys = {(op.name, v.name): ({"edge": {1: 0.5}}, 1.0, 2.0) for op in workflow.operators for v in op.variants}
    once = with_profile(text, keys, ("up", "sign"), {("wide", "sign"): 3.0})
    assert with_profile(once, keys, ("up", "sign"), {("wide", "sign"): 3.0}) == once
    assert "# a comment that stays" in text
    assert "# this, too" in text
    assert "gpu = 8.0" not in text
    for name, width in (("narrow", 32), ("wide", 64)):
        variant = workflow.operator("up").variant(name)
        assert variant.output_bytes == 4 * width
        # The weight, then the stacked batch of four with what comes of it.
        row = next(one for one in answer["variants"] if one["variant"] == name)
        assert row["memory_bytes"] == 4 * (8 * width + 4 * 8 + 4 * width)
        assert [b for b, _ in variant.batches("edge")] == [1, 4]
        assert all(0 < s < 1 for _, s in variant.batches("edge"))
        assert dict(variant.batches("gpu"))[4] == pytest.approx(row["priced_s"]["p3.16xlarge"]["4"], rel=1e-3)
        assert row["measured"][0]["p99_s"] >= row["measured"][0]["median_s"]
    sign = workflow.operator("sign").variant("always")
    assert [w for w, _ in sign.latency_s] == ["edge"]  # a function has no price elsewhere
    assert any("sign.always" in line and "no cost model" in line for line in answer["skipped"])
    assert workflow.accuracy_of({"up": "wide", "sign": "always"}) == 25.0  # 5 of 20 labels are 1
    assert text.replace(" ", "") != before.replace(" ", "")
    assert run(["serve", "plan", str(file), "--accuracy", "25", "--brief"]) == 0


def test_pictures_and_spoken_questions_are_answered_as_the_file_says(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The models are trained from their seed; better ones answer better, and cost more."""
    for name in ("answers.py", "answers.toml"):
        shutil.copy(EXAMPLES / name, tmp_path)
    written, _, _ = read_workflow(EXAMPLES / "answers.toml")
    assert run(["serve", "profile", str(tmp_path / "answers.toml"), "--batches", "1", "--seconds", "0"]) == 0
    measured, _, _ = read_workflow(tmp_path / "answers.toml")
    for speech in ("short", "long"):
        choices = [{"image": image, "speech": speech, "answer": "default"} for image in ("resnet4", "resnet6", "resnet10")]
        found = [measured.accuracy_of(choice) for choice in choices]
        assert found == sorted(found)
        assert found == pytest.approx([written.accuracy_of(choice) for choice in choices], abs=4)
    capfd.readouterr()
    price: list[float] = []
    for accuracy in ("75", "90"):
        assert run(["serve", "plan", str(EXAMPLES / "answers.toml"), "--accuracy", accuracy, "--brief", "--json"]) == 0
        price.append(json.loads(capfd.readouterr().out)["price_per_hour"])
    assert price[0] < price[1]


def test_a_price_elsewhere_is_the_training_sides(folder: Path) -> None:
    workflow, _, _ = read_workflow(folder / "flow.toml")
    cluster = Cluster.parse("p3.16xlarge")
    found = profile_workflow(workflow, HERE, ProfileOptions((1, 8), 0.0, devices={"p3.16xlarge": cluster}))
    priced = found.priced["up", "wide"]["p3.16xlarge"]
    assert 0 < priced[1] <= priced[8] < 1e-3
    assert ("sign", "sign") not in found.priced


def test_what_the_zoo_others_and_export_make_is_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 11, "n_positions": 4})
    )
    program = torch.export.export(nn.Linear(3, 2), (torch.zeros(4, 3),))
    torch.export.save(program, tmp_path / "linear.pt2")
    for model, answer in (("resnet-tiny", None), ("hf:config.json", (4, 11)), ("export:linear.pt2", (2,))):
        op = WorkflowOperator("one", (("x", 1.0),), (OperatorVariant("v", (), model=model),))
        made = load_operator(op, op.variants[0], str(tmp_path))
        requests = example_requests(made, 4) or [(np.ones(3, np.float32),)] * 4
        rows = made.run(requests)
        assert len(rows) == 4
        assert answer is None or rows[0].shape == answer
        if made.module is not None and made.resolved is not None:
            one = made.run(requests[:1])[0]
            np.testing.assert_allclose(one, rows[0], rtol=2e-4, atol=2e-5)  # what comes together is what comes alone


def test_bad_variants_and_labels_are_named(folder: Path) -> None:
    workflow, _, _ = read_workflow(folder / "flow.toml")
    bare = WorkflowOperator("one", (("x", 1.0),), (OperatorVariant("v", ()),))
    with pytest.raises(ConfigError, match=r"one\.v has neither model nor call"):
        load_operator(bare, bare.variants[0], "")
    with pytest.raises(ModelError, match="did you mean labelled"):
        profile_workflow(Workflow("w", workflow.sources, workflow.operators, measure=type(workflow.measure)("code.py:labeled"),
            folder=str(folder)),
                HERE, ProfileOptions((1,), 0.0))  # fmt: skip
    wide = workflow.operator("up")
    made = load_operator(wide, wide.variant("wide"), str(folder))
    with pytest.raises(ModelError, match=r"up\.wide does not take a request of \(5,\)"):
        made.run([(np.zeros(5, np.float32),)])
    with pytest.raises(ModelError, match="returned dict"):
        split_rows({"other": 1})


def test_a_request_is_divided_once_and_collected_again() -> None:
    def flow(*ratios: float) -> Workflow:
        ops, before = [], "x"
        for i, ratio in enumerate(ratios):
            ops.append(WorkflowOperator(f"o{i}", ((before, ratio),), (OperatorVariant("v", ()),)))
            before = f"o{i}"
        return Workflow("w", (RequestSource("x"),), tuple(ops))

    assert operators_on_items(flow(1, 4, 1, 0.25)) == {"o1", "o2"}
    for bad in ((4, 4), (0.5,)):
        with pytest.raises(ConfigError, match="cannot be run"):
            operators_on_items(flow(*bad))
    assert items_of((np.arange(2), np.arange(4).reshape(2, 2)))[1][0] == 1


def test_a_file_that_cannot_be_edited_is_refused() -> None:
    text = '[operator]\none = { inputs = ["x"], variant = { v = { model = "m" } } }\n'
    with pytest.raises(ConfigError, match="headed by lines of their own"):
        with_profile(text, {("one", "v"): ({"w": {1: 0.5}}, 1.0, 2.0)}, ("one",), {})


def test_a_machine_of_several_kinds_is_no_worker() -> None:
    mixed = Cluster.parse("1xdgx-h100+1xdgx-a100-80")
    with pytest.raises(Exception, match="several kinds"):
        forward_s(None, mixed, 1)  # type: ignore[arg-type]
