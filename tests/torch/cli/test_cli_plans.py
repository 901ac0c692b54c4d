"""The verbs on plans: explain, whatif, compare, estimate. Figures are checked against one another and against closed forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import run
from shardwise.cli.changes import apply_changes, neighbouring_layouts, parse_changes, refit_layout
from shardwise.cli.pricing_context import PricingContext, name_with_sequence
from shardwise.cluster.cluster import Cluster
from shardwise.cluster.resize import resize_cluster
from shardwise.errors import Infeasible, UsageError
from shardwise.plan.ir.patterns import expand_patterns
from shardwise.plan.layout import Layout
from shardwise.plan.plan_file import read_plan

MODEL, MACHINES, BATCH = "gpt-125m:layers=4", "2xp4d.24xlarge", 64


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.toml"
    words = ["plan", MODEL, "--cluster", MACHINES, "--batch", str(BATCH), "-o", str(path)]
    assert run([*words, "--layout", "data=4 tensor=2 pipeline=2 microbatches=4 zero=1 precision=bfloat16"]) == 0
    return path


def answer(words: list[str], capfd: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    capfd.readouterr()
    assert run([*words, "--json"]) == code
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def test_a_plan_says_equal_layers_once_and_means_all_of_them(plan_file: Path) -> None:
    plan = read_plan(plan_file)
    cuts = dict(plan.shards)["tensor"]
    assert any("layers.*." in name for name, _ in cuts)
    names = PricingContext(MODEL, Cluster.parse(MACHINES), BATCH).variable_names
    written_out = expand_patterns(cuts, names)
    assert len(written_out) > 2 * len(cuts)
    assert {name for name, _ in written_out} <= set(names)


def test_a_plan_reads_back_at_the_price_that_it_was_written_with(plan_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = read_plan(plan_file)
    assert plan.prediction is not None
    found = answer(["explain", str(plan_file)], capfd)
    assert found["step_time_s"] == pytest.approx(plan.prediction.step_time_s, rel=0.02)
    assert found["memory_bytes"]["total"] == pytest.approx(plan.prediction.memory.total, rel=0.02)


def test_explain_prices_other_choices_and_places_every_layer_once(plan_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = answer(["explain", str(plan_file)], capfd)
    assert {"reasons", "candidates", "bound_gap", "placements", "other_choices"} <= set(found)
    tried = {row["name"].partition("=")[0] for row in found["other_choices"]}
    assert {"tensor", "pipeline", "microbatches", "zero", "recompute", "precision"} <= tried
    by_site = {p["site"]: p for p in found["placements"]}
    up = by_site["layers.*.mlp.up/linear"]
    assert (up["count"], up["weights"]) == (4, "dim 0 by tensor")  # columns of all four layers, as one row
    assert sum(p["count"] for p in found["placements"] if "mlp.down" in p["site"]) == 4
    for row in found["candidates"]:
        # What a billion tokens cost is the step's share of them, at the price of both machines.
        tokens = BATCH * 2048 / row["step_time_s"]
        assert row["usd_per_unit"] == pytest.approx(1e9 / tokens * 2 * 32.7726 / 3600 * row_machines(row), rel=1e-3)


def row_machines(row: dict[str, Any]) -> float:
    return -(-Layout.parse(row["layout"]).num_ranks // 8) / 2


def test_a_plan_under_a_limit_holds_less(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "gpt-tiny", "--cluster", "1xcpu-2", "--batch", "64"]
    scratch = Cluster.parse("1xcpu-2").device.scratch_bytes
    free = answer(words, capfd)["memory_bytes"]["total"]
    limit = 0.8 * (free - scratch)
    assert answer([*words, "--device-memory", f"{limit:.0f}"], capfd)["memory_bytes"]["total"] <= limit + scratch < free
    assert run([*words, "--device-memory", "two"]) == 2
    assert "for example 2 GiB" in capfd.readouterr().err


def test_explain_in_words(plan_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", str(plan_file)]) == 0
    shown = capfd.readouterr().out
    for words in ("Candidates", "Why", "What another choice would cost", "How operators are placed over data=4 and tensor=2", "bound"):
        assert words in shown
    assert run(["explain", str(plan_file), "--brief"]) == 0
    assert "How operators are placed" not in capfd.readouterr().out


def test_whatif_has_a_row_a_change_and_one_for_all(plan_file: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "other.toml"
    found = answer(["whatif", str(plan_file), "gpus=32", "seq=1024", "zero=3", "-o", str(target)], capfd)["rows"]
    assert [row["name"] for row in found] == ["as it is", "gpus=32", "seq=1024", "zero=3", "all together"]
    base, more, shorter = found[:3]
    assert (more["cluster"], Layout.parse(more["layout"]).data) == ("4xp4d.24xlarge", 8)
    assert base["speed"] == 1
    assert 1.2 < more["speed"] <= 2.001
    assert shorter["step_time_s"] < base["step_time_s"]
    written = read_plan(target)
    assert (written.model, written.layout.zero, written.layout.num_ranks) == ("gpt-125m:layers=4,sequence=1024", 3, 32)


def test_as_many_devices_are_used_as_are_asked_for(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Also where a plan uses some of its machines only, and those asked for are all of them."""
    few = str(tmp_path / "few.toml")
    answer(["plan", MODEL, "--cluster", MACHINES, "--batch", "32", "--layout", "data=2", "-o", few], capfd)
    rows = [answer(["whatif", few, f"gpus={count}"], capfd)["rows"][1] for count in (8, 16)]
    assert [Layout.parse(row["layout"]).data for row in rows] == [8, 16]


def test_a_change_equals_pricing_the_changed_layout_by_hand(plan_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    row = answer(["whatif", str(plan_file), "recompute=full"], capfd)["rows"][1]
    words = ["plan", MODEL, "--cluster", MACHINES, "--batch", str(BATCH), "--layout", row["layout"]]
    by_hand = answer(words, capfd)
    assert row["step_time_s"] == pytest.approx(by_hand["step_time_s"], rel=0.02)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["gpuz=2"], 2, "did you mean gpus"),
        (["gpus=17"], 2, "use 16 or 24"),
        (["gpus=0"], 2, "whole number"),
        (["zero=4"], 2, "zero"),
        (["recompute=maybe"], 2, "none, selective, cheap, full"),
        (["seq"], 2, "KEY=VALUE"),
        (["seq=8", "seq=9"], 2, "twice"),
        (["cluster=8xdgx-z100"], 2, "did you mean"),
        (["data=99"], 3, "none of these changes"),
    ],
)
def test_changes_that_cannot_be(words: list[str], code: int, said: str, plan_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["whatif", str(plan_file), *words]) == code
    captured = capfd.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err


def test_compare_a_plan_with_itself_and_with_another(plan_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    same = answer(["compare", str(plan_file), str(plan_file)], capfd)["plans"]
    assert same[0]["step_time_s"] == same[1]["step_time_s"]
    assert same[1]["speed"] == 1
    assert run(["compare", str(plan_file), str(plan_file)]) == 0
    assert "same" in capfd.readouterr().out
    trace = tmp_path / "trace.json"
    assert run(["simulate", str(plan_file), "-o", str(trace)]) == 0
    found = answer(["compare", str(trace), str(trace)], capfd)
    kinds = found["kinds"]
    assert found["total_difference"] == 0
    assert found["unmatched"] == [0, 0]
    assert all(action["longer_s"] == action["later_s"] == 0 for action in found["actions"])
    assert {kind["kind"] for kind in kinds} >= {"F", "B"}
    assert all(kind["ratio"] in (1.0, None) for kind in kinds)
    assert run(["compare", str(plan_file), str(trace)]) == 2
    assert run(["compare", str(tmp_path / "a.json"), str(trace)]) == 2


def test_an_estimate_is_the_step_times_the_steps(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", MODEL, "--cluster", "p4d.24xlarge", "--batch", "64", "--tokens", "10B", "--constrain", "ranks=8"]
    found = answer(words, capfd)
    assert found["fits"]
    assert found["time_s"] == pytest.approx(found["step_time_s"] * 10e9 / (64 * 2048))
    assert found["usd"] == pytest.approx(32.7726 * found["time_s"] / 3600)
    assert set(found["memory_bytes"]) == {"parameters", "gradients", "optimizer", "activations", "buffers", "margin", "total"}
    assert found["assumptions"]


def test_what_does_not_fit_gets_the_time_of_its_arithmetic(capfd: pytest.CaptureFixture[str]) -> None:
    """175 B parameters: 6 FLOPs a parameter and token, at the rate that the catalogue has for large products."""
    model = "gpt:hidden=12288,heads=96,layers=4,sequence=2048"
    found = answer(["estimate", model, "--cluster", "dgx-a100-40", "--gpus", "1", "--tokens", "300e9", "--batch", "8"], capfd)
    device = Cluster.parse("dgx-a100-40").device
    assert not found["fits"]
    assert "fits" in found["reason"]
    assert found["num_devices"] == 1
    assert found["time_s"] == pytest.approx(found["flops"] / (device.peak("bfloat16") * device.matmul_efficiency))
    assert found["flops"] == pytest.approx(6 * 300e9 * 7.9e9, rel=0.1)  # 4 layers of 1.8 B and the vocabulary


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["resnet-18", "--tokens", "5"], "--epochs"),
        (["gpt-tiny", "--epochs", "5"], "--tokens"),
        (["gpt-tiny", "--tokens", "many"], "number"),
        (["gpt-tiny", "--tokens", "0"], "at least 1 token"),
        (["resnet-18", "--epochs", "0"], "more than 0"),
        (["gpt-tiny", "--cluster", "dgx-z9"], "did you mean"),
    ],
)
def test_estimates_of_nothing(words: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", *words, *([] if "--cluster" in words else ["--cluster", "p4d.24xlarge"])]) == 2
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    ("wanted", "ranks", "batch", "expected"),
    [
        ({"tensor": 4}, 64, 1024, "data=16 tensor=4 pipeline=1 microbatches=2"),
        ({}, 128, 1024, "data=16 tensor=8 pipeline=1 microbatches=2"),
        ({}, 64, 2048, "data=8 tensor=8 pipeline=1 microbatches=8"),
        ({"microbatches": 16}, 64, 1024, "data=8 tensor=8 pipeline=1 microbatches=16"),
        ({"pipeline": 2, "chunks": 2}, 64, 1024, "data=4 tensor=8 pipeline=2 microbatches=8 schedule=interleaved chunks=2"),
    ],
)
def test_what_hangs_on_a_change_moves_along(wanted: dict[str, int | str], ranks: int, batch: int, expected: str) -> None:
    old = Layout(data=8, tensor=8, microbatches=4)
    layout, _ = refit_layout(old, wanted, ranks, 1024, batch)
    assert layout == Layout.parse(expected)
    assert layout.num_ranks == ranks


def test_sizes_that_do_not_divide_are_said() -> None:
    with pytest.raises(Infeasible, match="do not divide into tensor=3"):
        refit_layout(Layout(data=8), {"tensor": 3}, 8, 8, 8)
    with pytest.raises(Infeasible, match="batch of 10"):
        refit_layout(Layout(data=8), {}, 16, 8, 10)


def test_neighbours_keep_the_devices_and_differ(plan_file: Path) -> None:
    plan = read_plan(plan_file)
    found = neighbouring_layouts(plan, 16)
    assert len({layout for _, layout in found}) == len(found) > 8
    assert all(layout != plan.layout for _, layout in found)
    for name, layout in found:
        assert layout.num_ranks == plan.layout.num_ranks or name.startswith("data=")


def test_a_change_of_machines_keeps_what_was_traced(plan_file: Path) -> None:
    plan = read_plan(plan_file)
    setting = PricingContext(MODEL, Cluster.parse(MACHINES), BATCH)
    graph = setting.graph
    other, layout, moved = apply_changes(plan, setting, parse_changes(["gpus=8"]))
    assert other.graph is graph
    assert (layout.num_ranks, moved) == (8, "data 4 to 2, microbatches 4 to 8")


@pytest.mark.parametrize(
    ("text", "count", "devices", "price"),
    [
        ("8xp3.16xlarge", 16, 16, 2 * 24.48),
        ("p3.16xlarge", 128, 128, 16 * 24.48),
        ("2xp3.16xlarge", 4, 4, 12.24),
        ("4xdgx-h100", 8, 8, 98.32),
        ("4xhgx-h200", 8, 8, 0.0),
        ("4 devices of p3.16xlarge", 4, 4, 12.24),
        ("4 devices of p3.16xlarge", 2, 2, 6.12),
        ("4 devices of p3.16xlarge", 16, 16, 2 * 24.48),
    ],
)
def test_more_and_fewer_devices(text: str, count: int, devices: int, price: float) -> None:
    found = resize_cluster(Cluster.parse(text), count)
    assert found.num_devices == devices
    assert found.price_per_hour == pytest.approx(price)


def test_a_part_of_a_machine_is_a_cluster_by_its_name() -> None:
    """The name that a plan keeps of such a cluster leads back to it."""
    found = Cluster.parse("4 devices of p3.16xlarge")
    assert (found.num_devices, len(found.levels), found.price_per_hour) == (4, 1, pytest.approx(12.24))
    assert Cluster.parse(found.name) == found
    assert Cluster.parse("16 devices of p3.16xlarge") == Cluster.parse("2xp3.16xlarge")
    assert Cluster.parse("4 devices of p3.16xlarge@torch").stack == "torch"
    with pytest.raises(UsageError, match="at least 1 device"):
        Cluster.parse("0 devices of p3.16xlarge")


def test_devices_that_are_no_whole_machines() -> None:
    with pytest.raises(UsageError, match="use 16 or 24"):
        resize_cluster(Cluster.parse("8xp3.16xlarge"), 20)


def test_a_sequence_becomes_part_of_the_name() -> None:
    assert name_with_sequence("gpt-39b", None) == ("gpt-39b", None)
    assert name_with_sequence("gpt-39b:layers=2", 64) == ("gpt-39b:layers=2,sequence=64", None)
    assert name_with_sequence("net.py:make", 64) == ("net.py:make", 64)


CLUSTER = """name = "mine"
price_per_hour = 10.0
power_w = 3000.0
[device]
kind = "gpu"
peak_flops = { float32 = 19.5e12, bfloat16 = 312e12 }
memory_bytes = 42.5e9
memory_bandwidth_bytes_per_s = 1555e9
[[level]]
name = "node"
size = 4
latency_s = 3e-6
bandwidth_bytes_per_s = 300e9
[[level]]
name = "cluster"
size = 2
latency_s = 1e-5
bandwidth_bytes_per_s = 25e9
"""


def test_a_plan_for_a_cluster_file_finds_it_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the plan's own folder, whatever the folder in which the verb runs, and of other numbers of its devices too."""
    (tmp_path / "plans").mkdir()
    (tmp_path / "mine.toml").write_text(CLUSTER)
    monkeypatch.chdir(tmp_path)
    words = ["plan", "gpt-tiny", "--cluster", "mine.toml", "--batch", "16", "--layout", "data=8 zero=1 precision=bfloat16"]
    made = answer([*words, "-o", "plans/plan.toml"], capfd)
    assert 'cluster = "../mine.toml"' in (tmp_path / "plans/plan.toml").read_text()
    monkeypatch.chdir(tmp_path / "plans")
    assert answer(["explain", "plan.toml", "--brief"], capfd)["step_time_s"] == made["step_time_s"]
    assert answer(["simulate", "plan.toml"], capfd)["step_time_s"] <= made["step_time_s"]
    assert len(answer(["compare", "plan.toml", "plan.toml"], capfd)["plans"]) == 2
    for count in (16, 4, 2):
        changed = answer(["whatif", "plan.toml", f"gpus={count}", "-o", "other.toml"], capfd)["rows"][1]
        again = answer(["explain", "other.toml", "--brief"], capfd)
        assert Layout.parse(again["layout"]).num_ranks == count
        assert again["step_time_s"] == pytest.approx(changed["step_time_s"])


def test_a_plan_keeps_the_order_of_the_parts_of_a_cluster_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A small old machine before two new ones, or after them: what was planned is what is explained."""
    part = CLUSTER.replace("[device]", "[part.device]").replace("[[level]]", "[[part.level]]")
    old = part.replace('"mine"', '"old"').replace("19.5e12", "5e12").replace("312e12", "30e12").replace("42.5e9", "16e9")
    between = 'name = "both"\n[between]\nlatency_s = 1e-5\nbandwidth_bytes_per_s = 2e9\n'
    (tmp_path / "both.toml").write_text(f"{between}[[part]]\n{part}[[part]]\n{old}")
    words = ["plan", "gpt-125m:layers=4,sequence=512", "--cluster", f"{tmp_path}/both.toml", "--batch", "16"]
    made = answer([*words, "--constrain", "data=2 tensor=2", "-o", f"{tmp_path}/plan.toml"], capfd)
    assert answer(["explain", f"{tmp_path}/plan.toml", "--brief"], capfd)["step_time_s"] == pytest.approx(made["step_time_s"], rel=1e-3)
    for order in ("mine+old", "old+mine"):
        names = [one.name for one in Cluster.parse(f"{tmp_path}/both.toml:{order}").parts]
        assert "+".join(names) == order
    with pytest.raises(UsageError, match="several kinds"):
        resize_cluster(Cluster.parse(f"{tmp_path}/both.toml"), 4)


def test_planning_asks_a_batch_for_no_values(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A factory's batch follows its weights, whose draws would all be repeated for it; and a large batch has no place in memory."""
    (tmp_path / "models.py").write_text(
        "import torch\n"
        "class Tables(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.rows, self.top = torch.nn.Embedding(10**11, 64), torch.nn.Linear(64, 1)\n"
        "    def forward(self, ids):\n"
        "        return self.top(self.rows(ids)).square().mean()\n"
        "def make():\n"
        "    return Tables(), {'ids': torch.randint(10**11, (64,))}\n"
    )
    found = answer(["plan", f"{tmp_path}/models.py:make", "--cluster", "8xdgx-a100-80", "--constrain", "tensor=1 pipeline=1"], capfd, 3)
    assert "devices of" in found["error"]  # 6.4e12 parameters: no number of such devices would do
    found = answer(["plan", "gpt-tiny", "--cluster", "dgx-a100-80", "--batch", str(10**9), "--layout", "data=8 microbatches=8192"], capfd)
    assert found["batch_size"] == 10**9


def test_contradictory_constraints_are_no_question_of_memory(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", "gpt-tiny", "--cluster", "dgx-a100-80", "--constrain", "tensor<=2 tensor>=4"]
    assert "tensor<=2 and tensor>=4" in answer(words, capfd, 3)["error"]


@pytest.mark.parametrize(
    ("old", "new", "code", "said"),
    [
        ("tensor = 2", "tensor = 999", 3, "needs 7992 devices, 2xp4d.24xlarge has 16"),
        ("batch_size = 64", "batch_size = 7", 3, "a batch of 7 samples"),
        ("[shards.tensor]", "[shards.sideways]", 2, "[shards.sideways] names no axis"),
        ('attention.q.weight" = 0', 'attention.q.weight" = -1', 2, "dimensions are counted from 0"),
        ("layers=4", "layers=1", 2, "layers.2"),
        ('cluster = "2xp4d.24xlarge"', 'cluster = "none.toml"', 2, "none.toml"),
    ],
)
@pytest.mark.parametrize("verb", ["explain", "whatif", "simulate"])
def test_plans_that_were_edited_to_nonsense(
    verb: str, old: str, new: str, code: int, said: str, plan_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = plan_file.read_text()
    assert old in text
    (tmp_path / "edited.toml").write_text(text.replace(old, new, 1))
    assert run([verb, str(tmp_path / "edited.toml"), *(["zero=0"] if verb == "whatif" else [])]) == code
    captured = capfd.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recompute=full:99"], "99 layers of stage 0"),
        (["offload=activations:99"], "99 layers of stage 0"),
        (["expert=2"], "it has none"),
        (["threads=4"], "processors' cores"),
        (["staleness=-1"], "a whole number from 0"),
        (["gpus=10000000000"], "from 1 to 999,999,999"),
        (["compress=int9"], "int9"),
    ],
)
def test_changes_of_what_is_not_there(words: list[str], said: str, plan_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["whatif", str(plan_file), *words]) == 2
    assert said in capfd.readouterr().err


def test_a_change_that_cannot_be_writes_no_plan(plan_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["whatif", str(plan_file), "data=99", "-o", str(tmp_path / "other.toml")]) == 3
    assert "nothing is written" in capfd.readouterr().err
    assert not (tmp_path / "other.toml").exists()


def test_every_key_of_the_layout_can_be_changed(plan_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = answer(["whatif", str(plan_file), "compress=int8", "zero=0", "staleness=0"], capfd)["rows"]
    assert Layout.parse(rows[-1]["layout"]).compress == "int8"
