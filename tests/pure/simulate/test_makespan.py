"""The pipeline's seconds against the clock of the whole program, on random times, links and schedules."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ProgramError
from shardwise.plan.ir.program import Compute, ComputeOp, Links, Value, chain_links
from shardwise.schedules import NAMES, build, computes_by_rank
from shardwise.simulate.clock import simulate
from shardwise.simulate.makespan import StageTimes, makespan_s
from tests.support.schedule_sizes import fit

ONES = StageTimes([1, 1], [1, 1], {})


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, int, int, int, Links, int]:
    name = draw(st.sampled_from(NAMES))
    p, m = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    v = draw(st.integers(1, 3)) if name == "interleaved" and p > 1 else 1
    stages, m = fit(name, p * v, m)
    more = [(a, b) for b in range(stages) for a in range(b - 1)]
    links = (*chain_links(stages), *(draw(st.sets(st.sampled_from(more))) if more and v == 1 else ()))
    return name, stages, m, v, tuple(sorted(links)), draw(st.integers(0, 2**32))


@given(pipelines(), st.sampled_from([0.0, 0.1, 2.0]))
def test_it_equals_the_clock(case: tuple[str, int, int, int, Links, int], scale: float) -> None:
    """Of all schedules; the exchange of gradients between replicas takes nothing."""
    name, stages, m, v, links, seed = case
    rng = random.Random(seed)

    def drawn() -> StageTimes:
        forward, backward = [rng.random() for _ in range(stages)], [rng.random() for _ in range(stages)]
        return StageTimes(forward, backward, {link: scale * rng.random() for link in links}, [rng.random() * b for b in backward])

    usual, unusual, first = drawn(), drawn(), rng.randrange(m + 1)

    def compute_s(a: Compute) -> float:
        s, times = a.stage, usual if a.microbatch < first else unusual
        weight = (times.weight_s or [])[s]
        return {
            ComputeOp.F: times.forward_s[s],
            ComputeOp.B: times.backward_s[s],
            ComputeOp.I: times.backward_s[s] - weight,
            ComputeOp.W: weight,
        }[a.op]

    def transfer_s(value: Value, source: int, to: int) -> float:
        if value.name == "dw":
            return 0.0
        return (usual if value.index[2] < first else unusual).transfer_s[min(value.index[:2]), max(value.index[:2])]

    timeline = simulate(build(name, stages, m, links, chunks=v), compute_s, transfer_s)
    found = makespan_s(computes_by_rank(name, stages, m, links, v), links, usual, (first, unusual))
    assert found == pytest.approx(timeline.total_s)
    assert makespan_s(computes_by_rank(name, stages, m, links, v), links, usual, (m, unusual)) == makespan_s(
        computes_by_rank(name, stages, m, links, v), links, usual
    )


def test_an_order_that_cannot_run_is_refused() -> None:
    with pytest.raises(ProgramError, match="no rank can move"):
        makespan_s(
            [[Compute(ComputeOp.B, 0, 0), Compute(ComputeOp.F, 0, 0)], [Compute(ComputeOp.F, 1, 0), Compute(ComputeOp.B, 1, 0)]],
            ((0, 1),),
            ONES,
        )
    with pytest.raises(ProgramError, match="microbatch 0 of stage 0 is on ranks 0 and 1"):
        makespan_s([[Compute(ComputeOp.F, 0, 0)], [Compute(ComputeOp.F, 0, 0)]], (), StageTimes([1], [1], {}))
