"""The interleaved schedule against its closed form, the proof of its program, and the count of what is in flight."""

from __future__ import annotations

import pytest

from shardwise.errors import ProgramError, UsageError
from shardwise.plan.ir.check import check
from shardwise.plan.ir.program import Compute, ComputeOp, chain_links
from shardwise.schedules import build
from shardwise.schedules.interleaved import interleaved
from shardwise.schedules.lower import pipeline_program
from shardwise.simulate.clock import simulate
from tests.support import closed_forms

SIZES = [(p, v, m) for p in range(2, 6) for v in range(2, 5) for m in range(1, 13)]


@pytest.mark.parametrize(("p", "v", "m"), SIZES)
def test_it_is_proven_and_idles_as_its_closed_form_says(p: int, v: int, m: int) -> None:
    """(p - 1)/v·m of the compute for any m >= p: Narayanan et al. 2021, section 2.2, who have it for multiples of p."""
    program = build("interleaved", p * v, m, chunks=v)
    check(program)
    assert program.stages_of == tuple(tuple(range(r, p * v, p)) for r in range(p))
    found = simulate(program, lambda a: (1.0 if a.op is ComputeOp.F else 2.0) / v, lambda *_: 0.0).total_s
    if m >= p:
        assert found == pytest.approx(3 * m * (1 + (p - 1) / (v * m)))
    assert found <= simulate(build("1f1b", p, m), lambda a: 1.0 if a.op is ComputeOp.F else 2.0, lambda *_: 0.0).total_s + 1e-9


@pytest.mark.parametrize(("p", "v", "m"), [(p, v, m) for p, v, m in SIZES if m <= p])
@pytest.mark.parametrize(("f", "b"), [(1, 1), (1, 2), (2, 1)])
def test_with_fewer_microbatches_than_ranks_no_order_is_faster(p: int, v: int, m: int, f: int, b: int) -> None:
    """The last stage's m forwards and backwards, after pv - 1 forwards and before pv - 1 backwards."""
    found = simulate(build("interleaved", p * v, m, chunks=v), lambda a: f if a.op is ComputeOp.F else b, lambda *_: 0.0).total_s
    assert found == (p * v - 1 + m) * (f + b)


@pytest.mark.parametrize(("p", "v", "m"), SIZES)
def test_what_is_in_flight_is_what_its_order_holds(p: int, v: int, m: int) -> None:
    for rank, row in enumerate(interleaved(p * v, m, chain_links(p * v), v)):
        held = most = 0
        for action in row:
            held += 1 if action.op is ComputeOp.F else -1
            most = max(most, held)
        assert (held, most) == (0, closed_forms.interleaved(p, m, v, rank))


@pytest.mark.parametrize(("p", "v", "m"), [(4, 2, 8), (4, 3, 9), (3, 2, 7)])
def test_it_runs_where_a_send_waits_for_its_receive(p: int, v: int, m: int) -> None:
    check(build("interleaved", p * v, m, rendezvous=True, chunks=v), rendezvous=True)


def test_broken_twin_a_short_last_group_waits_for_itself() -> None:
    """9 microbatches of 4 ranks in groups of 4, 4 and 1, each rank as far ahead as groups of 4 need: no rank can move."""
    p, v, m = 4, 3, 9
    groups = [range(4), range(4, 8), range(8, 9)]
    forward = [(c, i) for g in groups for c in range(v) for i in g]
    backward = [(c, i) for g in groups for c in reversed(range(v)) for i in g]
    rows = []
    for r in range(p):
        ahead = 2 * (p - 1 - r) + (v - 1) * p
        row = [Compute(ComputeOp.F, c * p + r, i) for c, i in forward[:ahead]]
        for k, (c, i) in enumerate(backward):
            row += [Compute(ComputeOp.F, a * p + r, b) for a, b in forward[ahead + k : ahead + k + 1]]
            row.append(Compute(ComputeOp.B, c * p + r, i))
        rows.append(row)
    with pytest.raises(ProgramError, match="no rank can move"):
        check(pipeline_program("short", rows, chain_links(p * v)))
    check(build("interleaved", p * v, m, chunks=v))


def test_sizes_that_cannot_be_are_named() -> None:
    with pytest.raises(UsageError, match="7 stages do not divide into 2 chunks"):
        build("interleaved", 7, 4, chunks=2)
    with pytest.raises(UsageError, match="gpipe has one stage a rank, not 2"):
        build("gpipe", 8, 4, chunks=2)
    for name in ("interleaved", "1f1b"):
        with pytest.raises(UsageError, match="with 0 chunks a rank; it needs at least 1"):
            build(name, 8, 4, chunks=0)
