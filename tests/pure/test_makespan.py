"""The pipeline's seconds against the clock of the whole program, on random times, links and schedules."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import ProgramError
from weft.plan.program import Compute, Links, Op, chain
from weft.schedules import SCHEDULES, build
from weft.schedules.interleaved import interleaved
from weft.simulate.clock import simulate
from weft.simulate.makespan import makespan_s


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, int, int, int, Links, int]:
    name = draw(st.sampled_from(["gpipe", "1f1b", "sequential", "interleaved"]))
    p, m = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    v = draw(st.integers(1, 3)) if name == "interleaved" and p > 1 else 1
    more = [(a, b) for b in range(p) for a in range(b - 1)]
    links = (*chain(p * v), *(draw(st.sets(st.sampled_from(more))) if more and v == 1 else ()))
    return name, p, m, v, tuple(sorted(links)), draw(st.integers(0, 2**32))


@given(pipelines(), st.sampled_from([0.0, 0.1, 2.0]))
def test_it_equals_the_clock(case: tuple[str, int, int, int, Links, int], scale: float) -> None:
    name, p, m, v, links, seed = case
    rng = random.Random(seed)
    forward, backward = [rng.random() for _ in range(p * v)], [rng.random() for _ in range(p * v)]
    sent = {link: scale * rng.random() for link in links}
    rows = interleaved(p * v, m, links, v) if name == "interleaved" else SCHEDULES[name](p, m, links)
    timeline = simulate(
        build(name, p * v, m, links, chunks=v),
        lambda a: forward[a.stage] if a.op is Op.F else backward[a.stage],
        lambda value, source, to: sent[min(value.index[:2]), max(value.index[:2])],
    )
    assert makespan_s(rows, links, forward, backward, sent) == pytest.approx(timeline.total_s)


def test_an_order_that_cannot_run_is_refused() -> None:
    with pytest.raises(ProgramError, match="no rank can move"):
        makespan_s([[Compute(Op.B, 0, 0), Compute(Op.F, 0, 0)], [Compute(Op.F, 1, 0), Compute(Op.B, 1, 0)]], ((0, 1),), [1, 1], [1, 1], {})
    with pytest.raises(ProgramError, match="microbatch 0 of stage 0 is on ranks 0 and 1"):
        makespan_s([[Compute(Op.F, 0, 0)], [Compute(Op.F, 0, 0)]], (), [1], [1], {})
