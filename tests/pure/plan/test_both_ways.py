"""GEMS and Chimera: closed forms, what they hold, the exchange between replicas, and twins without it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import LayoutError, ProgramError, UsageError
from shardwise.plan.ir.check import check, final_contents
from shardwise.plan.ir.program import Compute, ComputeOp, Program, Value
from shardwise.plan.ir.timeline import Timeline
from shardwise.plan.layout import Layout
from shardwise.schedules import build, schedule_of
from shardwise.simulate.clock import simulate
from shardwise.simulate.memory import in_flight, peak_memory
from tests.support.closed_forms import BOTH_WAYS


def timed(name: str, p: int, m: int, f: float, b: float, c: float = 0.0) -> Timeline:
    """`c`: seconds of an activation or its gradient; the exchange of gradients at the end is left out."""
    return simulate(
        build(name, p, m), lambda a: f if a.op is ComputeOp.F else b, lambda value, source, to: c if value.name in ("x", "g") else 0.0
    )


@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 5), st.integers(0, 5))
def test_gems_takes_what_was_derived_for_it(p: int, repeats: int, f: int, more: int) -> None:
    """D(F + B) + (n - 1)(D·B + F) for n microbatches and B >= F, where MP-Basic takes n·D(F + B)."""
    b, n = f + more, 2 * repeats
    assert timed("gems-master", p, n, f, b).total_s == p * (f + b) + (n - 1) * (p * b + f)
    assert timed("sequential", p, n, f, b).total_s == n * p * (f + b)


@pytest.mark.parametrize(("n", "speed_up"), [(2, 1.143), (4, 1.231), (400, 1.333)])
def test_gems_is_as_much_faster_than_mp_basic_as_was_derived(n: int, speed_up: float) -> None:
    """D = 4, B = 2F: 1.143 at two batches, 1.231 at four, 4/3 in the limit."""
    found = timed("sequential", 4, n, 1, 2).total_s / timed("gems-master", 4, n, 1, 2).total_s
    assert found == pytest.approx(speed_up, abs=1e-3)


@given(st.integers(1, 9), st.integers(1, 5), st.lists(st.integers(1, 100), min_size=9, max_size=9))
def test_gems_holds_one_microbatch_of_either_stage_whatever_the_repeats(p: int, repeats: int, sizes: list[int]) -> None:
    program = build("gems-master", p, 2 * repeats)
    assert in_flight(program) == (1,) * p
    found = peak_memory(program, lambda value: float(sizes[value.index[0]]) if value.name == "saved" else 0.0)
    assert [peak.size_bytes for peak in found] == [max(sizes[r], sizes[p - 1 - r]) for r in range(p)]


@pytest.mark.parametrize("p", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("units", [1, 2, 3, 4])
def test_chimera_idles_as_its_closed_form_says(p: int, units: int) -> None:
    """(p - 2)/(2m + p - 2) of the time where F = B; and with p microbatches p·F + (2p - 2)B, whatever B."""
    m = p * units
    assert timed("chimera", p, m, 1, 1).bubble == pytest.approx((p - 2) / (2 * m + p - 2))
    for b in (1, 2, 3):
        assert timed("chimera", p, m, 1, b).total_s == p + (2 * p - 2) * b + (m - p) * (1 + b)


@given(st.integers(1, 9), st.integers(1, 12))
def test_chimera_holds_little_more_than_1f1b_and_is_no_slower(p: int, half: int) -> None:
    m = 2 * half
    held = in_flight(build("chimera", p, m))
    assert held == tuple(min(m, p + (m > p), m // 2 + 1 + min(r, p - 1 - r)) for r in range(p))
    assert timed("chimera", p, m, 1, 1).total_s <= timed("1f1b", p, m, 1, 1).total_s


@given(st.sampled_from(BOTH_WAYS), st.integers(1, 9), st.integers(1, 6))
def test_both_replicas_end_with_the_whole_gradient_of_their_stages(name: str, p: int, half: int) -> None:
    m = 2 if name == "gems-mast" else 2 * half
    for rendezvous in (False, True):
        program = build(name, p, m, rendezvous=rendezvous)
        check(program, rendezvous)
        assert program.stages_of == schedule_of(Layout(pipeline=p, microbatches=m, schedule=name)).stages_of
        every = dict.fromkeys(range(m), 1)
        assert final_contents(program, rendezvous) == tuple({Value("dw", (s,)): every for s in stages} for stages in program.stages_of)


def without(program: Program, rank: int, *texts: str) -> Program:
    rows = [tuple(a for a in row if r != rank or str(a) not in texts) for r, row in enumerate(program.actions)]
    return replace(program, actions=tuple(rows))


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_broken_twins_of_the_exchange(name: str) -> None:
    """Missing in one replica, in both, and doubled."""
    program = build(name, 4, 2 if name == "gems-mast" else 4)
    one = without(without(program, 0, "dw(0)+<3"), 3, "dw(0)>0")
    with pytest.raises(ProgramError, match=r"rank 0 step \d+ \(its end\): wanted dw\(0\) lacks contribution 1"):
        check(one)
    with pytest.raises(ProgramError, match=r"rank 3 step \d+: dw\(0\)>0 is never received; rank 0 needs dw\(0\)<3"):
        check(without(program, 0, "dw(0)+<3"))
    late = [a for a in program.actions[3] if str(a) == "dw(0)>0"]
    doubled = replace(program, actions=(*program.actions[:3], (*program.actions[3], *late)))
    received = [a for a in program.actions[0] if str(a) == "dw(0)+<3"]
    doubled = replace(doubled, actions=((*program.actions[0], *received), *doubled.actions[1:]))
    with pytest.raises(ProgramError, match="twice"):
        check(doubled)


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_posted_sends_of_both_replicas_block_where_sends_wait(name: str) -> None:
    with pytest.raises(ProgramError, match="no rank can move, where a send waits for its receive"):
        check(build(name, 4, 2 if name == "gems-mast" else 4), rendezvous=True)


def test_the_exchange_goes_on_beside_the_computes_that_follow() -> None:
    """Stage 1 of rank 1 is complete at 3, and sent after the activation that rank 0 waits for; what is complete last is waited for."""
    program = build("gems-mast", 2, 2)
    timeline = simulate(program, lambda a: 1.0, lambda value, *_: 0.5 if value.name == "dw" else 0.0)
    sends = {s.name: (s.start_s, s.end_s) for s in timeline.spans if s.lane == "send" and s.name.startswith("dw") and s.rank == 1}
    assert sends == {"dw(1)>0": (4.0, 4.5), "dw(0)>0": (7.0, 7.5)}
    assert timeline.total_s == 7.5
    assert [a.microbatch for a in program.actions[0] if isinstance(a, Compute)] == [0, 0, 1, 1]


def test_sizes_that_cannot_be_are_named() -> None:
    with pytest.raises(UsageError, match="gems-mast has 2 microbatches, one a replica, not 4; use gems-master for 4"):
        build("gems-mast", 4, 4)
    with pytest.raises(LayoutError, match="chimera has as many microbatches for either replica, not 3; use an even number"):
        Layout(pipeline=2, microbatches=3, schedule="chimera")
    assert Layout.parse("pipeline=4 microbatches=8 schedule=zb-v").num_stages == 8
    assert Layout.parse(str(Layout(pipeline=4, schedule="zb-v"))) == Layout(pipeline=4, schedule="zb-v", chunks=2)
    with pytest.raises(LayoutError, match="chunks=3 needs schedule=interleaved"):
        Layout(pipeline=4, schedule="zb-v", chunks=3)
