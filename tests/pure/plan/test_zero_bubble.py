"""Zero-bubble schedules against their closed forms, the bubbles that were published of them, and what they may hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ProgramError, UsageError
from shardwise.plan.ir.action import Compute, ComputeOp
from shardwise.plan.ir.check import check
from shardwise.plan.ir.program import chain_links
from shardwise.plan.ir.timeline import COMPUTE_LANE, Timeline
from shardwise.schedules import build, computes_by_rank
from shardwise.schedules.lower import pipeline_program
from shardwise.simulate.clock import simulate
from shardwise.simulate.memory import in_flight
from shardwise.simulate.summary import bubble_in_window, window_s

# p, m, milliseconds of F, I, W and a transfer, and the bubbles of 1F1B, ZB-H1 and ZB-H2: tables 5 and 6 of Qi et al., ICLR 2024.
TABLE = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045, 0.0559),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397, 0.0672),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088, 0.0516),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576, 0.0266),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421, 0.0641),
    (32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1106, 0.0490),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0594, 0.0257),
]


def timed(name: str, stages: int, m: int, f: float, i: float, w: float, c: float = 0.0) -> Timeline:
    seconds = {ComputeOp.F: f, ComputeOp.I: i, ComputeOp.W: w, ComputeOp.B: i + w}
    return simulate(build(name, stages, m), lambda a: seconds[a.op], lambda *_: c)


@pytest.mark.parametrize(("p", "m", "f", "i", "w", "c", "b_1f1b", "b_h1", "b_h2"), TABLE)
def test_bubbles_as_published(p: int, m: int, f: float, i: float, w: float, c: float, b_1f1b: float, b_h1: float, b_h2: float) -> None:
    """Of a rank's time from its first to its last compute, as the paper counts."""
    found = [round(bubble_in_window(timed(name, p, m, f, i, w, c)), 4) for name in ("1f1b", "zb-h1", "zb-h2")]
    assert found == [b_1f1b, b_h1, b_h2]


sizes = st.integers(1, 7).flatmap(lambda p: st.tuples(st.just(p), st.integers(2 * p - 1, 4 * p)))


@given(sizes, st.integers(2, 9), st.integers(2, 9), st.integers(1, 9))
def test_h1_idles_as_its_closed_form_says(size: tuple[int, int], f: int, i: int, w: int) -> None:
    """(p-1)(F + I - W), if W is the shortest of the three."""
    (p, m), w = size, min(f, i, w)
    assert timed("zb-h1", p, m, f, i, w).total_s == m * (f + i + w) + (p - 1) * (f + i - w)
    assert in_flight(build("zb-h1", p, m)) == (p,) * p


@given(sizes, st.integers(2, 9), st.integers(1, 9))
def test_h2_idles_as_its_closed_form_says(size: tuple[int, int], f: int, w: int) -> None:
    """(p-1)(F + I - 2W) within a rank's own time, here for F = I >= W."""
    (p, m), w = size, min(f, w)
    timeline = timed("zb-h2", p, m, f, f, w)
    assert max(window_s(timeline, rank) for rank in range(p)) == m * (2 * f + w) + (p - 1) * (2 * f - 2 * w)
    assert timeline.total_s <= m * (2 * f + w) + (p - 1) * (2 * f - 2 * w) + (p - 1) * f
    assert in_flight(build("zb-h2", p, m)) == (2 * p - 1,) * p


@given(sizes)
def test_v_idles_nowhere_and_holds_what_1f1b_does(size: tuple[int, int]) -> None:
    """F = I = W: every rank is busy from its first to its last compute; rank r starts r after the first."""
    p, m = size
    timeline = timed("zb-v", 2 * p, m, 1, 1, 1)
    assert bubble_in_window(timeline) == 0
    assert timeline.total_s == 6 * m + p - 1
    assert in_flight(build("zb-v", 2 * p, m)) == (2 * p,) * p


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_any_sizes_are_proven_and_hold_no_more(p: int, m: int, f: int, i: int, w: int) -> None:
    work = m * (f + i + w)
    for name, stages, most in (("zb-h1", p, p), ("zb-h2", p, 2 * p - 1), ("zb-v", 2 * p, 2 * p)):
        program = build(name, stages, m)
        check(program)
        assert max(in_flight(program)) <= most
        timeline = timed(name, stages, m, f, i, w)
        assert sum(timeline.busy_s(rank) for rank in range(p)) == pytest.approx(stages * work)
    # Filling idle time with weights parts is never worse than 1F1B's whole backwards.
    assert timed("zb-h1", p, m, f, i, w).total_s <= timed("1f1b", p, m, f, i, w).total_s


@pytest.mark.parametrize(("p", "m"), [(2, 1), (3, 2), (4, 4), (8, 8), (8, 14)])
def test_v_with_few_microbatches_is_no_slower_than_1f1b_with_split_backward(p: int, m: int) -> None:
    assert timed("zb-v", 2 * p, m, 0.5, 0.5, 0.5).total_s <= timed("zb-h1", p, m, 1, 1, 1).total_s


def test_broken_twin_a_weights_part_before_its_input_part() -> None:
    twisted = computes_by_rank("zb-h1", 2, 2, chain_links(2))
    at = twisted[0].index(Compute(ComputeOp.I, 0, 0))
    twisted[0][at : at + 2] = twisted[0][at + 1], twisted[0][at]
    with pytest.raises(ProgramError, match=r"rank 0 step .: 0W0 reads half\(0,0\), which is not held: it comes only at step . with 0I0"):
        check(pipeline_program("twisted", twisted))


def test_v_needs_an_even_number_of_stages() -> None:
    with pytest.raises(UsageError, match="zb-v has two stages a rank, and 7 is odd"):
        build("zb-v", 7, 8)


def test_a_window_is_from_the_first_compute_to_the_last() -> None:
    timeline = timed("gpipe", 2, 1, 1, 1, 1)
    assert [window_s(timeline, rank) for rank in (0, 1)] == [6, 3]
    assert next(s.start_s for s in timeline.spans if s.lane == COMPUTE_LANE and s.rank == 1) == 1
    assert bubble_in_window(timeline) == 0.5
