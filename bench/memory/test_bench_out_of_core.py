"""The benchmark of training under a limit: what it searches, what it computes, that each way is a layout, and one try of each outcome."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]

from bench.common.arithmetic import judge  # noqa: E402
from bench.memory import out_of_core  # noqa: E402
from bench.memory.out_of_core import SUBJECTS, options, rates_of, subjects  # noqa: E402
from bench.memory.out_of_core_gems import measured_shape, shape_of_gems  # noqa: E402
from bench.memory.out_of_core_tries import LATE, OWN, SWAPS, Size, Tried, Tries, largest, ways  # noqa: E402
from shardwise.plan.layout import Layout  # noqa: E402

SMALL = Size("resnet-tiny:base=8", 64, 4)


SIZES = [Size("m", n, 1) for n in (1, 2, 3, 4)]


@pytest.mark.parametrize("expected", range(6))
@pytest.mark.parametrize("fits", range(6))
def test_the_largest_is_the_last_that_fits_whatever_was_expected(fits: int, expected: int) -> None:
    """Where the guess is right, two tries suffice; each larger or smaller size that was missed is one more."""
    tried: list[int] = []

    def tries(size: Size) -> Tried:
        tried.append(size.extent)
        return Tried(seconds=(1.0,)) if size.extent <= fits else Tried(why="too much")

    found, gave, refused = largest(SIZES, tries, lambda size: size.extent <= expected)
    fits, expected = min(fits, 4), min(max(expected, 1), 4)
    assert found == (SIZES[fits - 1] if fits else None)
    assert bool(gave.why) is (fits == 0)
    assert refused is (fits < 4)
    assert len(tried) == len(set(tried)) <= 2 + abs(fits - expected)


def test_what_time_forbids_is_no_size_that_does_not_fit() -> None:
    late = Tried(why=LATE, is_late=True)
    assert largest(SIZES, lambda size: late, lambda size: True) == (None, late, False)
    held = {2: Tried(seconds=(1.0,)), 3: late}
    assert largest(SIZES, lambda size: held[size.extent], lambda size: size.extent == 2) == (SIZES[1], held[2], False)


def test_the_shape_of_gems_is_its_closed_form() -> None:
    """MP-Basic takes n·D·(tf + tb); GEMS D·(tf + tb) + (n - 1)·(D·tb + tf), here with tf = 1 and tb = 2."""
    for p in shape_of_gems((2, 4, 6), (2, 4)):
        d, n = p.stages, p.batches
        assert p.simulated == pytest.approx(n * d * 3 / (d * 3 + (n - 1) * (2 * d + 1)))


def test_the_shape_of_gems_is_measured_or_says_why_not() -> None:
    model = "resnet:blocks=2x1,bottleneck=false,base=4,image=16,classes=4"
    (two,) = measured_shape(shape_of_gems((2,), (2,)), (2,), 2, model, 2, "1xcpu-2")
    assert 0 < two.least <= two.measured <= two.most
    (deep,) = measured_shape(shape_of_gems((2,), (64,)), (64,), 1, model, 2, "1xcpu-2")
    assert not deep.measured
    assert "pipeline=64" in deep.why


def test_every_way_is_a_layout_of_two_ranks() -> None:
    assert [way.name for way in ways(4)][-2:] == [SWAPS, OWN]
    for way in ways(4)[:-2]:
        layout = Layout.parse(way.layout)
        assert layout.num_ranks == 2


def test_ways_run_or_say_why_not() -> None:
    roomy = Tries(64e6, "1xcpu-2")
    by_name = {way.name: way for way in ways(2)}
    found = {name: roomy.run(SMALL, by_name[name], 1) for name in ("GEMS MASTER", SWAPS)}
    for tried in found.values():
        assert not tried.why
        assert 0 < tried.held_bytes < 64e6
    assert found["GEMS MASTER"].losses == pytest.approx(found[SWAPS].losses, rel=0.2)  # batch norm over other samples
    assert all(roomy.expected(SMALL, by_name[name]) for name in found)
    tight = Tries(1e6, "1xcpu-2").run(SMALL, by_name["MP-Basic"], 1)
    assert "MiB" in tight.why or "KiB" in tight.why
    assert not tight.seconds
    assert not Tries(1e6, "1xcpu-2").expected(SMALL, by_name["MP-Basic"])


def test_two_runs_of_one_plan_judge_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target was missed by 21 % where shardwise's choice and the other way were one plan, run once each."""
    took = {OWN: iter((4.2, 3.3, 3.4)), SWAPS: iter((3.3, 3.4, 4.2)), "GPipe": iter((4.4, 4.2, 4.3))}

    def run(self: Tries, size: Size, way: out_of_core.Way, steps: int) -> Tried:
        plan = "pipeline=2" if way.name == "GPipe" else "data=2"
        return Tried((9.0, next(took[way.name])), (1.0, 0.5), 1e6, plan)

    monkeypatch.setattr(Tries, "run", run)
    found = out_of_core.Found()
    rates_of(Size("resnet-18", 64, 4), [way for way in ways(4) if way.name in took], Tries(1e9, "1xcpu-2"), 3, found, print)
    rows = {row.peer_name: row for row in found.rows}
    same = rows[f"{SWAPS} (the same plan)"]
    assert (same.ratio, same.ratio_min, same.ratio_max) == pytest.approx((3.4 / 3.3, 3.3 / 4.2, 4.2 / 3.4))
    (verdict,) = judge(out_of_core.TARGETS, found.rows, {})
    assert verdict.met
    assert verdict.ratio == rows["GPipe"].ratio == pytest.approx(4.3 / 3.4)
    shown = StringIO()
    Console(file=shown, width=200).print(out_of_core.rates_table(found))
    assert "1.18 (0.952 to 1.21)" in shown.getvalue()  # four images in 3.4, 4.2 and 3.3 seconds


def test_one_way_that_fails_is_named_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three rounds fails for one way, and time is over in the third: the first two rounds count, of the others."""
    calls: list[str] = []

    def run(self: Tries, size: Size, way: out_of_core.Way, steps: int) -> Tried:
        calls.append(way.name)
        if len(calls) > 4:
            return Tried(why=LATE, is_late=True)
        if way.name == "GPipe" and len(calls) > 2:
            return Tried(why="rank 0 holds too much")
        return Tried((9.0, 2.0 if way.name == OWN else 4.0), (1.0, 0.5), 1e6, "data=2")

    monkeypatch.setattr(Tries, "run", run)
    found, said = out_of_core.Found(), list[str]()
    mine = [way for way in ways(4) if way.name in ("GPipe", OWN)]
    rates_of(Size("resnet-18", 64, 4), mine, Tries(1e9, "1xcpu-2"), 3, found, said.append)
    assert found.skipped == {"GPipe (resnet-18, image 64, batch 4)": "rank 0 holds too much"}
    assert [(s.name, s.seconds) for s in found.series["resnet-18, image 64, batch 4"]] == [(OWN, (2.0, 2.0))]
    assert "after 2 rounds" in said[-1]
    assert not found.failed


def test_what_is_measured_by_default_and_by_hand() -> None:
    assert subjects(options([])) == list(SUBJECTS.values())
    assert SUBJECTS["resnet"].at.extent == 1024
    assert SUBJECTS["resnet"].limit == "2GiB"
    (own,) = subjects(options(["--model", "gpt-tiny", "--at", "64", "8", "--batches", "8", "4", "--limit", "9MiB"]))
    assert (own.at, own.batches, own.limit, own.at.key) == (Size("gpt-tiny", 64, 8), (4, 8), "9MiB", "sequence")
    with pytest.raises(SystemExit):
        options(["--at", "64", "8"])
