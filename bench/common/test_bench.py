"""The benchmark's arithmetic and its processes: ratios by hand, verdicts with broken twins, peers that are missing or fail."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bench.common.arithmetic import Row, Series, Target, as_json, judge, loss_difference, ratios, row
from bench.common.case import Case, Contender, from_text, to_text, window_starts
from bench.common.contenders import ALONE, CHOSEN, CHOSEN_FLOAT32, DDP, chosen_set, data_set, parts, pipeline_set, tensor_set
from bench.common.document import command, header, lines_of, markdown, show
from bench.common.measure import Effort, measure, turn
from bench.faults import protect
from bench.training import gpu, train
from shardwise.cluster.catalogue import dump
from shardwise.cluster.cluster import Cluster
from shardwise.errors import OutOfMemory

TARGETS = (Target("data, beside DDP", 1.0, lambda r: r.peer_name == "DDP"),)
CASE = Case("gpt-10m")
seconds = st.floats(1e-3, 1e3)


def compare(shardwise: float, peer: float, name: str = "DDP") -> Row:
    return row("gpt-10m, 8 x 256", "data", Series("shardwise data", (shardwise,) * 3), Series(name, (peer,) * 3))


def told(contender: Contender) -> str:
    """The precision that a contender reports: its own plan takes bfloat16 here."""
    return "bfloat16" if contender.precision == "own" else contender.precision


def test_a_page_names_the_command_without_where_its_figures_were_put() -> None:
    given = ["--models", "gpt-10m", "--json", "/home/me/x.json", "--rounds=3", "--json=y.json", "--quick"]
    assert command("train", given) == "scripts/bench train --models gpt-10m --rounds=3 --quick"
    assert command("plan", []) == "scripts/bench plan"
    pages = sorted((Path(__file__).parents[2] / "docs" / "benchmarks").glob("*.md"))
    assert pages
    assert [page.name for page in pages if "--json" in page.read_text() or "/tmp" in page.read_text()] == []


def test_ratio_is_the_median_of_ratios_by_round_not_the_ratio_of_medians() -> None:
    ours, theirs = Series("shardwise", (1.0, 2.0, 10.0)), Series("DDP", (3.0, 2.0, 11.0))
    r = row("case", "data", ours, theirs)
    assert (r.shardwise, r.peer) == (2.0, 3.0)
    assert (r.ratio, r.ratio_min, r.ratio_max) == (1.1, 1.0, 3.0)


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=9))
def test_swapping_the_two_inverts_every_ratio(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = zip(*pairs, strict=True)
    for a, b in zip(ratios(ours, theirs), ratios(theirs, ours), strict=True):
        assert a * b == pytest.approx(1.0)


@given(seconds, seconds)
def test_a_common_disturbance_of_a_round_leaves_its_ratio(a: float, b: float) -> None:
    assert ratios([a, 7 * a], [b, 7 * b]) == pytest.approx([b / a] * 2)


def test_rounds_that_were_not_measured_together_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rounds of shardwise beside 2"):
        ratios([1.0] * 3, [1.0] * 2)


def test_a_series_without_time_cannot_be() -> None:
    with pytest.raises(ValueError, match="0 rounds"):
        Series("shardwise", ())


def test_faster_meets_and_a_slower_shardwise_is_missed() -> None:
    (verdict,) = judge(TARGETS, [compare(1.0, 1.2)])
    assert verdict.word == "met"
    (verdict,) = judge(TARGETS, [compare(1.2, 1.0)])
    assert verdict.word == "missed"
    assert verdict.ratio == pytest.approx(1 / 1.2)


def test_one_slow_model_is_missed_however_fast_the_other_is() -> None:
    slow = row("gpt-50m, 8 x 256", "data", Series("shardwise data", (2.0,)), Series("DDP", (1.0,)))
    assert [v.word for v in judge(TARGETS, [compare(1.0, 9.0), slow])] == ["met", "missed"]


def test_the_page_holds_predictions_against_what_was_measured() -> None:
    close, far, peer = (
        Series("shardwise a", (1.0,), predicted=1.09),
        Series("shardwise b", (2.0, 2.0), predicted=1.5),
        Series("DDP", (1.0,)),
    )
    page = markdown({}, [], [], {}, {"gpt-10m": [close, far, peer]}, "")
    (said,) = (line for line in page.splitlines() if line.startswith("Within"))
    assert "1 of 2" in said
    assert "17.0%" in said  # of 9 % and 25 %
    assert "| shardwise b | 1.500 | 2.000 | -25% |" in page
    assert "Predicted and measured" not in markdown({}, [], [], {}, {"gpt-10m": [peer]}, "")


def test_what_was_not_measured_is_not_met() -> None:
    (verdict,) = judge(TARGETS, [compare(1.0, 2.0, "FSDP2")], {"DDP": "not installed"})
    assert (verdict.met, verdict.word, verdict.why) == (None, "not measured", "DDP: not installed")


def test_loss_difference_sees_one_wrong_step_and_no_steps() -> None:
    assert loss_difference([5.0, 4.0], [5.0, 4.0]) == 0.0
    assert loss_difference([5.0, 4.0], [5.0, 4.4]) == pytest.approx(0.1)
    assert loss_difference([], [5.0]) == float("inf")


def test_losses_that_part_are_told_and_equal_ones_are_not() -> None:
    def found(last: float, peer: str = "DDP") -> train.Found:
        a, b = Series("shardwise data", (1.0,), losses=(5.0, 4.0)), Series(peer, (1.0,), losses=(5.0, last))
        return train.Found(rows=[row(CASE.label, "data", a, b)])

    assert not train.wrong(found(4.1, ALONE)), "without exchange every rank trains a model of its own"
    assert not train.wrong(found(4.0001))
    assert "differ by 2.4e-02" in train.wrong(found(4.1))[0]
    assert train.wrong(train.Found(skipped={"shardwise data (gpt-10m)": "rank 1 died"})) == ["shardwise data (gpt-10m): rank 1 died"]


def test_own_plan_is_held_against_the_best_in_each_precision() -> None:
    group = chosen_set((DDP,))
    times = {c.name: 1.0 + i / 10 for i, c in enumerate(group.contenders)}
    series = {c.name: Series(c.name, (times[c.name],) * 3, precision=told(c)) for c in group.contenders}
    rows = train.best_rows(CASE, train.rows_of(CASE, group, series))
    verdicts = {v.target: v for v in judge(train.TARGETS, rows)}
    peers = sorted((s for s in series.values() if not s.name.startswith("shardwise")), key=lambda s: s.median)
    fast32 = next(s for s in peers if s.precision == "float32")
    fast16 = next(s for s in peers if s.precision == "bfloat16")
    for target, peer, ours in (
        ("own plan in float32, beside the best in float32", fast32, CHOSEN_FLOAT32),
        ("own plan, beside the best in float32", fast32, CHOSEN),
        ("own plan, beside the best in its precision", fast16, CHOSEN),
    ):
        assert verdicts[target].ratio == pytest.approx(peer.median / times[ours])


def test_every_target_has_a_row_in_a_run_where_everything_ran() -> None:
    rows = []
    for kind in train.SETS:
        group = train.set_of(kind, CASE, train.Found(rows=rows))
        series = {c.name: Series(c.name, (1.0,), precision=told(c)) for c in group.contenders}
        assert len(series) == len(group.contenders), "two contenders of one name"
        assert {n for pair in group.pairs for n in pair} <= set(series)
        rows += train.rows_of(CASE, group, series)
    rows += train.best_rows(CASE, rows)
    verdicts = judge(train.TARGETS, rows)
    assert [v.met for v in verdicts] == [v.at_least <= 1 for v in verdicts]
    assert {r.kind for r in rows} == set(train.SETS)


@pytest.mark.parametrize("most", [3, 4, 10])
def test_parts_of_a_set_fit_and_together_have_every_pair_once(most: int) -> None:
    for whole in (data_set(), pipeline_set(CASE), tensor_set(), chosen_set((DDP,))):
        pieces = parts(whole, most)
        assert all(len(piece.contenders) <= most for piece in pieces)
        assert all({n for pair in piece.pairs for n in pair} == {c.name for c in piece.contenders} for piece in pieces)
        assert sorted(pair for piece in pieces for pair in piece.pairs) == sorted(whole.pairs)
    with pytest.raises(ValueError, match="no room"):
        parts(chosen_set((DDP,)), 2)


def test_order_turns_so_that_everyone_is_first_once() -> None:
    names = ["a", "b", "c"]
    assert sorted(turn(names, i)[0] for i in range(3)) == names
    assert all(sorted(turn(names, i)) == names for i in range(-1, 5))


@given(st.integers(0, 10_000), st.integers(1, 16), st.integers(8, 512), st.integers(1_000, 200_000))
def test_samples_lie_inside_the_text(step: int, batch: int, sequence: int, length: int) -> None:
    starts = window_starts(Case(batch=batch, sequence=sequence, microbatches=1), step, length)
    assert len(starts) == batch
    assert all(s >= 0 and s + sequence + 1 <= length for s in starts)


def test_a_rank_reads_what_it_was_told() -> None:
    contender = Contender("x", "bench.peers.ddp", options={"a": [1]}, needs=("torch",))
    assert from_text(to_text(CASE, contender)) == (CASE, contender)


def test_equal_settings_are_equal_whoever_it_is() -> None:
    (ours, *_, peer) = data_set().contenders
    assert ours.environment() | {"OMP_NUM_THREADS": "1"} == peer.environment() == DDP.environment()  # shardwise's launcher sets threads
    assert "MALLOC_TRIM_THRESHOLD_" not in DDP.with_settings("own").environment()


def test_terminal_page_and_file_tell_the_same_rows() -> None:
    rows = [compare(1.2, 1.0), compare(1.0, 1.5, "a|b [bold]")]
    verdicts = judge(TARGETS, rows)
    skipped = {"AxoNN": "no | module"}
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    show(console, rows, verdicts, skipped)
    text = console.export_text()
    page = markdown({"command": "scripts/bench train", "versions": {"torch": "2"}}, rows, verdicts, skipped, {}, "intro")
    held = json.loads(json.dumps(as_json({}, rows, verdicts, skipped)))
    for told in (text, page):
        assert "0.83" in told
        assert "1.50" in told
        assert "missed" in told
        assert "AxoNN" in told
    assert "a|b [bold]" in text
    assert "a\\|b" in page
    assert {"case", "shardwise", "peer", "peer_name", "ratio", "unit"} <= set(held["rows"][0])
    assert held["targets"][0]["word"] == "missed"


PEER = """
import torch.distributed as dist, torch
def build(case, rank, num_ranks, fail=""):
    if fail == "build" and rank == 1:
        raise RuntimeError("it cannot be built")
    done = []
    def step(tokens):
        done.append(1)
        if fail == "later" and rank == 1 and len(done) == 2:
            raise RuntimeError("it stopped")
        x = tokens[rank].float().mean()
        return x
    return step
"""


def test_contenders_take_turns_and_those_that_fail_are_skipped_with_their_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shardwise_test_peer.py").write_text(PEER)
    monkeypatch.setattr("bench.common.processes.EXTRA_PATH", str(tmp_path))
    contenders = [
        Contender("sound", "shardwise_test_peer"),
        Contender("unbuilt", "shardwise_test_peer", options={"fail": "build"}),
        Contender("stops", "shardwise_test_peer", options={"fail": "later"}),
        Contender("missing", "shardwise_test_peer", needs=("no_such_package_of_shardwise",)),
    ]
    series, skipped = measure(CASE, contenders, Effort(2, 1, 1), lambda _: None)
    assert list(series) == ["sound"]
    assert len(series["sound"].seconds) == 2
    assert len(series["sound"].losses) == 3
    assert "it cannot be built" in skipped["unbuilt"]
    assert "it stopped" in skipped["stops"]
    assert "no_such_package_of_shardwise" in skipped["missing"]


def test_gpu_benchmark_says_why_it_is_skipped_and_ends_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.device_count():
        pytest.skip("there is a GPU here")
    assert gpu.main(["--json", str(tmp_path / "rows.json")]) == 0
    assert "skipped: " in capsys.readouterr().out
    assert not (tmp_path / "rows.json").exists()


def test_gpu_benchmark_halves_the_batch_until_both_sides_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def measure(case: gpu.Case, *_: object) -> int:
        tried.append(case.samples)
        if case.samples > 2:
            raise OutOfMemory("full") if case.samples > 4 else torch.OutOfMemoryError("full")
        return case.samples

    monkeypatch.setattr(gpu, "measure", measure)
    assert gpu.measure_what_fits(gpu.Case("gpt-tiny", 8), torch.device("cpu"), Effort(1, 1, 1)) == 2  # type: ignore[comparison-overlap]
    assert tried == [8, 4, 2]


def test_gpu_benchmark_trains_the_same_model_on_both_sides_and_predicts_what_it_measured(tmp_path: Path) -> None:
    found = gpu.measure(gpu.Case("gpt-tiny", 4), torch.device("cpu"), Effort(2, 1, 1))
    ours, theirs = found.pair
    assert found.flops > 0
    assert loss_difference(theirs.losses, ours.losses) < 1e-2
    assert ours.losses[-1] < ours.losses[0]
    assert len(ours.seconds) == len(theirs.seconds) == 2
    kept = replace(found, memory_bytes=1 << 30, busy_s=1.0)
    card = dump(replace(Cluster.parse("1xhgx-h200@eager"), name="here"))
    file = {"header": header("scripts/bench gpu", {}, gpu="NVIDIA H200"), "peak": 1e12, "card": card, "measured": [asdict(kept)]}
    (tmp_path / "gpu.json").write_text(json.dumps(file))
    assert gpu.main(["--again", str(tmp_path / "gpu.json"), "--page", str(tmp_path / "gpu.md")]) == 0
    lines = (tmp_path / "gpu.md").read_text().splitlines()
    line = next(line for line in lines if line.startswith("| gpt-tiny, 4 samples | ") and "GiB" in line)
    by_card, by_name = (cell.partition(" (")[0] for cell in line.split(" | ")[3:5])
    assert by_card == by_name != ""  # the same card, by the rates of its name


def test_what_protection_costs_is_told_by_round() -> None:
    one = protect.Found(
        "data=2", [{"none": 2.0, "memory": 2.02}, {"none": 1.0, "memory": 1.05}, {"none": 4.0, "memory": 4.08}], 0.01, 0.005, 1 << 20
    )
    assert one.costs == pytest.approx([0.01, 0.05, 0.02])
    assert lines_of(protect.table([one]))[-2] == "| data=2 | 2.0000 | 2.0200 | 2.0 % | 1.0 % | 5.0 % | 0.0100 | 0.0050 | 1.00 MiB |"
