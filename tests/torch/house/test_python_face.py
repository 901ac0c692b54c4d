"""The verbs in Python: they say what the command line says, show in a notebook, and type-check in a user's script."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise
from shardwise.cli import run
from shardwise.cli.output import JSON_VERSION
from shardwise.errors import Infeasible, UsageError
from shardwise.plan.plan_file import write_plan

SCRIPT = Path(__file__).parents[2].joinpath("support", "user_script.py")


@pytest.fixture(scope="module")
def plan() -> shardwise.Plan:
    return shardwise.plan("gpt-tiny", 8, cluster="1xcpu-2")


class Tags(HTMLParser):
    """Every tag opens and closes in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (["explain", "PLAN", "--brief"], lambda plan: shardwise.explain(plan, brief=True)),
        (["whatif", "PLAN", "zero=1", "gpus=1"], lambda plan: shardwise.whatif(plan, "zero=1", "gpus=1")),
        (["estimate", "gpt-tiny", "--cluster", "1xcpu-2", "--tokens", "1e6", "--batch", "8"],
         lambda plan: shardwise.estimate("gpt-tiny", 8, cluster="1xcpu-2", tokens=1e6)),
        (["scaling", "gpt-tiny", "--cluster", "1xcpu-2", "--devices", "1,2", "--batch", "8"],
         lambda plan: shardwise.scaling("gpt-tiny", 8, cluster="1xcpu-2", devices=[1, 2])),
    ],
    ids=["explain", "whatif", "estimate", "scaling"],
)  # fmt: skip
def test_a_verb_says_in_python_what_it_says_on_the_command_line(
    words: list[str], call: object, plan: shardwise.Plan, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.toml"
    write_plan(plan, file)
    assert run([word.replace("PLAN", str(file)) for word in words] + ["--json"]) == 0
    there = json.loads(capfd.readouterr().out)
    answer = call(plan)  # type: ignore[operator]
    here = json.loads(json.dumps(answer.record))
    assert there.pop("version") == JSON_VERSION
    for record in (here, there):
        record.pop("plan", None)  # the file's name
        record.pop("planning_time_s", None)  # of the search, which the file does not have
        record.pop("bound", None)
    assert here == there
    assert "│" not in str(answer)
    assert plan.model in str(answer)
    assert {"table", "tr", "td"} <= set(Tags(answer._repr_html_()).seen)


def test_a_plan_and_a_timeline_show_in_a_notebook(plan: shardwise.Plan) -> None:
    assert {"table", "td"} <= set(Tags(plan._repr_html_()).seen)
    assert str(plan.layout) in plan._repr_html_()
    timeline = shardwise.simulate(plan)
    assert "svg" in Tags(timeline._repr_html_()).seen
    many = shardwise.Timeline("many", 100, tuple(s._replace(rank=r) for r in range(100) for s in timeline.spans))
    assert "the first 32 of 100 ranks" in many._repr_html_()


def test_plans_timelines_and_proofs_are_a_line_each_and_show_a_picture(plan: shardwise.Plan) -> None:
    timeline = shardwise.simulate(plan)
    errors = {"loss": 1e-16, "gradients": 3e-12, "weights": 1e-6}
    proof = shardwise.Verification(False, errors, "weight", (), 1e-9, layout="data=2", steps=2)
    for one in (plan, timeline, proof):
        assert "\n" not in repr(one)
        assert len(repr(one)) < 200
        assert "svg" in Tags(one._repr_html_()).seen
    assert str(plan.layout) in repr(plan)
    page = proof._repr_html_()
    assert page.count("#e45756") == 1  # of three bars the one above the tolerance
    assert replace(proof, worst={"loss": 0.0}, ok=True)._repr_html_().count("#e45756") == 0


def test_two_plans_and_two_timelines_compare_and_one_of_each_does_not(plan: shardwise.Plan) -> None:
    other = shardwise.plan("gpt-tiny", 8, cluster="1xcpu-2", layout="data=2 zero=1")
    assert "step time" in str(shardwise.compare(plan, other))
    timeline = shardwise.simulate(plan)
    assert shardwise.compare(timeline, timeline)["total_difference"] == 0
    with pytest.raises(UsageError, match="two of a kind"):
        shardwise.compare(plan, timeline)


def test_a_model_that_is_no_name_is_given_beside_the_plan(tmp_path: Path) -> None:
    model, batch = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)), (torch.randn(8, 8),)

    def loss(output: torch.Tensor, batch: object) -> torch.Tensor:
        return output.square().mean()

    plan = shardwise.plan(model, batch, loss=loss, cluster="1xcpu-2", layout="data=2")
    assert shardwise.explain(plan, model, batch, loss=loss)["layout"] == str(plan.layout)
    answer = shardwise.whatif(plan, "data=1", model=model, batch=batch, loss=loss)
    assert len(answer.tables) == 1
    with pytest.raises((UsageError, Infeasible), match="Sequential"):
        shardwise.explain(plan)
    with pytest.raises(UsageError, match="batch of 8 samples, and 16"):
        shardwise.whatif(plan, "batch=16", model=model, batch=batch, loss=loss)
    page = shardwise.report(plan, tmp_path / "page.html")
    assert "data=2" in page.read_text()


@pytest.mark.parametrize("checker", ["mypy", "basedpyright"])
def test_a_user_s_script_type_checks_and_its_mistakes_are_told(checker: str, tmp_path: Path) -> None:
    source = Path(shardwise.__file__).parents[1]
    cache = source.parent / ".mypy_cache"  # which `scripts/check` has filled
    options = {"mypy": ["--strict", f"--cache-dir={cache}"], "basedpyright": ["--level", "error"]}[checker]
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(source)], "typeCheckingMode": "standard"}))
    (tmp_path / "good.py").write_text(SCRIPT.read_text())
    (tmp_path / "bad.py").write_text("import shardwise\n\nshardwise.plan(3)\nshardwise.plann\nshardwise.simulate('x').layout\n")
    program = Path(sys.executable).with_name(checker)
    environment = {"MYPYPATH": str(source), "PATH": str(program.parent), "HOME": str(tmp_path)}
    done = subprocess.run(
        [program, *options, "good.py", "bad.py"], cwd=tmp_path, capture_output=True, text=True, check=False, env=environment
    )
    told = re.findall(r"(good|bad)\.py:(\d+):.*error", done.stdout)
    assert sorted(set(told)) == [("bad", "3"), ("bad", "4"), ("bad", "5")], done.stdout + done.stderr
