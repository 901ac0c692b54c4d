"""The pipeline's seconds against the clock of the whole program, on random times, links and schedules."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_sizes import fit

from weft.errors import ProgramError
from weft.plan.program import Compute, Links, Op, chain
from weft.schedules import NAMES, build, rows
from weft.simulate.clock import simulate
from weft.simulate.makespan import makespan_s


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, int, int, int, Links, int]:
    name = draw(st.sampled_from(NAMES))
    p, m = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    v = draw(st.integers(1, 3)) if name == "interleaved" and p > 1 else 1
    stages, m = fit(name, p * v, m)
    more = [(a, b) for b in range(stages) for a in range(b - 1)]
    links = (*chain(stages), *(draw(st.sets(st.sampled_from(more))) if more and v == 1 else ()))
    return name, stages, m, v, tuple(sorted(links)), draw(st.integers(0, 2**32))


@given(pipelines(), st.sampled_from([0.0, 0.1, 2.0]))
def test_it_equals_the_clock(case: tuple[str, int, int, int, Links, int], scale: float) -> None:
    """Of all schedules; the exchange of gradients between replicas takes nothing."""
    name, stages, m, v, links, seed = case
    rng = random.Random(seed)
    forward, backward = [rng.random() for _ in range(stages)], [rng.random() for _ in range(stages)]
    weights = [rng.random() * b for b in backward]
    sent = {link: scale * rng.random() for link in links}

    def compute_s(a: Compute) -> float:
        s = a.stage
        return {Op.F: forward[s], Op.B: backward[s], Op.I: backward[s] - weights[s], Op.W: weights[s]}[a.op]

    timeline = simulate(
        build(name, stages, m, links, chunks=v),
        compute_s,
        lambda value, source, to: sent[min(value.index[:2]), max(value.index[:2])] if value.name != "dw" else 0.0,
    )
    found = makespan_s(rows(name, stages, m, links, v), links, forward, backward, sent, weights)
    assert found == pytest.approx(timeline.total_s)


def test_an_order_that_cannot_run_is_refused() -> None:
    with pytest.raises(ProgramError, match="no rank can move"):
        makespan_s([[Compute(Op.B, 0, 0), Compute(Op.F, 0, 0)], [Compute(Op.F, 1, 0), Compute(Op.B, 1, 0)]], ((0, 1),), [1, 1], [1, 1], {})
    with pytest.raises(ProgramError, match="microbatch 0 of stage 0 is on ranks 0 and 1"):
        makespan_s([[Compute(Op.F, 0, 0)], [Compute(Op.F, 0, 0)]], (), [1], [1], {})
