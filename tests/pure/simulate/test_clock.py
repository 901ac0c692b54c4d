"""The clock against closed forms, a published table, and an independent computation of the longest path."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ProgramError
from shardwise.plan.ir.program import Compute, ComputeOp, Links, Program, Value
from shardwise.schedules import NAMES, build, computes_by_rank
from shardwise.simulate.clock import simulate
from shardwise.simulate.memory import in_flight, peak_memory, peak_saved_bytes
from tests.support.schedule_sizes import fit

SIZES = [(1, 1), (1, 4), (2, 2), (3, 3), (4, 8), (8, 32), (8, 2)]


def free(*_: object) -> float:
    return 0.0


def per_op(f: float, b: float):  # type: ignore[no-untyped-def]
    return lambda action: f if action.op is ComputeOp.F else b


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("f", "b"), [(1.0, 1.0), (1.0, 2.0), (3.0, 1.0)])
def test_gpipe_and_1f1b_equal_their_closed_form(p: int, m: int, f: float, b: float) -> None:
    """Time (m + p - 1)(f + b), idle (p - 1)/(m + p - 1): Huang et al. 2019; Narayanan et al. 2021."""
    for name in ("gpipe", "1f1b"):
        timeline = simulate(build(name, p, m), per_op(f, b), free)
        assert timeline.total_s == pytest.approx((m + p - 1) * (f + b))
        assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_sequential_is_busy_1_in_p(p: int, m: int) -> None:
    timeline = simulate(build("sequential", p, m), per_op(1.0, 2.0), free)
    assert timeline.total_s == pytest.approx(3.0 * p * m)
    assert [timeline.busy(rank) for rank in range(p)] == pytest.approx([1 / p] * p)


def test_gpipe_of_3_and_3_is_busy_in_18_of_30_squares() -> None:
    timeline = simulate(build("gpipe", 3, 3), per_op(1.0, 1.0), free)
    assert 3 * timeline.total_s == 30
    assert sum(timeline.busy_s(rank) for rank in range(3)) == 18


# p, m, milliseconds of F, B (input part), W and a transfer, and the share of time in which 1F1B idles: tables 5 and 6 of
# Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024 (GPT of 1.5, 6.2, 14.6 and 28.3 B parameters).
ZERO_BUBBLE_TABLE = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646),
    (32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352),
]


@pytest.mark.parametrize(("p", "m", "f", "b", "w", "c", "published"), ZERO_BUBBLE_TABLE)
def test_1f1b_idles_as_published(p: int, m: int, f: float, b: float, w: float, c: float, published: float) -> None:
    timeline = simulate(build("1f1b", p, m), per_op(f, b + w), lambda *_: c)
    assert round(timeline.bubble, 4) == published


def longest_path_s(program: Program, compute: dict[Compute, float], transfer: dict[Value, float]) -> float:
    """The end of the last compute, by recursion over what each one must wait for. Shares no code with the clock."""
    rows = [[a for a in row if isinstance(a, Compute)] for row in program.actions]
    place = {a: (rank, i) for rank, row in enumerate(rows) for i, a in enumerate(row)}
    back = ComputeOp.I if any(a.op is ComputeOp.I for a in place) else ComputeOp.B

    def sent_to(a: Compute) -> list[tuple[int, int]]:
        """(stage, rank) to which a compute sends, in the order of sending: the nearest first."""
        if a.op is ComputeOp.W:
            return []
        ends = [q if a.op is ComputeOp.F else p for p, q in program.links if (p if a.op is ComputeOp.F else q) == a.stage]
        here = [(s, place[Compute(a.op, s, a.microbatch)][0]) for s in sorted(ends, key=lambda s: abs(s - a.stage))]
        return [(s, rank) for s, rank in here if rank != place[a][0]]

    @cache
    def arrival(maker: Compute, to: int) -> float:
        """A link carries one at a time: what the same rank sent to the same one before goes first."""
        rank, i = place[maker]
        there = place[Compute(maker.op, to, maker.microbatch)][0]
        if there == rank:
            return end(maker)
        queue = [(a, s) for a in rows[rank][: i + 1] for s, r in sent_to(a) if r == there]
        before = queue[: queue.index((maker, to))]
        start = max(end(maker), arrival(*before[-1])) if before else end(maker)
        return start + transfer[Value("x" if maker.op is ComputeOp.F else "g", (maker.stage, to, maker.microbatch))]

    @cache
    def end(a: Compute) -> float:
        rank, i = place[a]
        waits = [end(rows[rank][i - 1])] if i else [0.0]
        for p, q in program.links:
            if a.op is ComputeOp.F and q == a.stage:
                waits.append(arrival(Compute(ComputeOp.F, p, a.microbatch), q))
            if a.op is back and p == a.stage:
                waits.append(arrival(Compute(back, q, a.microbatch), p))
        return max(waits) + compute[a]

    return max(end(row[-1]) for row in rows)


@st.composite
def timed(draw: st.DrawFn) -> tuple[str, int, int, Links, int]:
    name = draw(st.sampled_from(NAMES))
    p, m = fit(name, draw(st.integers(1, 5)), draw(st.integers(1, 5)))
    pairs = [(a, b) for b in range(p) for a in range(b)]
    links = tuple(sorted(draw(st.sets(st.sampled_from(pairs))))) if pairs else ()
    return name, p, m, links, draw(st.integers(0, 2**32))


@given(timed(), st.sampled_from([0.0, 0.3, 3.0]))
def test_random_times_on_random_links_equal_the_longest_path(case: tuple[str, int, int, Links, int], scale: float) -> None:
    name, p, m, links, seed = case
    program, rng = build(name, p, m, links), random.Random(seed)
    compute = {a: rng.random() for row in program.actions for a in row if isinstance(a, Compute)}
    ends = [*links, *((b, a) for a, b in links)]
    transfer = {Value("x" if a < b else "g", (a, b, i)): scale * rng.random() for a, b in ends for i in range(m)}
    timeline = simulate(program, compute.__getitem__, lambda value, source, to: transfer.get(value, 0.0))
    last = max(s.end_s for s in timeline.spans if s.lane == "compute")
    assert last == pytest.approx(longest_path_s(program, compute, transfer))


def test_a_link_carries_one_transfer_at_a_time() -> None:
    """Two forwards of 1 s, transfers of 5 s: the second is sent from 6 s to 11 s, though it was ready at 2 s."""
    timeline = simulate(
        Program.parse("rank 0: 0F0 x(0,1,0)>1 0F1 x(0,1,1)>1\nrank 1: x(0,1,0)<0 1F0 x(0,1,1)<0 1F1"), per_op(1, 1), lambda *_: 5
    )
    sends = [(s.start_s, s.end_s) for s in timeline.spans if s.lane == "send"]
    assert sends == [(1, 6), (6, 11)]
    assert timeline.total_s == 12


def test_under_rendezvous_a_transfer_keeps_both_ranks() -> None:
    """The second send starts at 7 s, when its receiver has computed: 0F0 1, transfer to 6, 1F0 to 7, transfer to 12, 1F1."""
    program = Program.parse("rank 0: 0F0 x(0,1,0)>1 0F1 x(0,1,1)>1\nrank 1: x(0,1,0)<0 1F0 x(0,1,1)<0 1F1")
    timeline = simulate(program, per_op(1, 1), lambda *_: 5, rendezvous=True)
    assert [(s.start_s, s.end_s) for s in timeline.spans if s.lane == "send"] == [(1, 6), (7, 12)]
    assert [s.start_s for s in timeline.spans if s.name == "0F1"] == [6]
    assert timeline.total_s == 13


@pytest.mark.parametrize("name", ["sequential", "gpipe", "1f1b", "interleaved"])
def test_rendezvous_with_free_transfers_costs_nothing_where_the_order_is_made_for_it(name: str) -> None:
    program = build(name, 4, 8, rendezvous=True)
    assert simulate(program, per_op(1.0, 2.0), free, rendezvous=True).total_s == simulate(build(name, 4, 8), per_op(1.0, 2.0), free).total_s


def test_a_program_that_cannot_run_is_refused() -> None:
    with pytest.raises(ProgramError, match="no rank can move"):
        simulate(Program.parse("rank 0: g(1,0,0)<1\nrank 1: x(0,1,0)<0"), per_op(1, 1), free)


def test_the_peak_counts_what_passes_into_another_value_once() -> None:
    """Stage 1 of 3, one microbatch, x 10, g 10, saved 100 (with its x), dw 7."""
    sizes = {"x": 10.0, "g": 10.0, "saved": 100.0, "dw": 7.0}
    found = peak_memory(build("gpipe", 3, 1), lambda value: sizes[value.name])[1]
    # Backward: saved 100, the gradient from above 10, the one it makes 10, dw 7. Forward: saved 100 and its output 10.
    assert (found.size_bytes, found.action) == (127.0, "1B0")
    assert dict(found.parts) == {"x": 0.0, "g": 20.0, "saved": 100.0, "dw": 7.0}


@given(timed())
def test_what_is_in_flight_is_the_peak_of_what_is_kept(case: tuple[str, int, int, Links, int]) -> None:
    program = build(*case[:4])
    assert in_flight(program) == tuple(p.size_bytes for p in peak_memory(program, lambda value: float(value.name in ("saved", "half"))))


@given(timed(), st.lists(st.integers(1, 99), min_size=20, max_size=20))
def test_what_is_kept_follows_from_the_computes_alone(case: tuple[str, int, int, Links, int], sizes: list[int]) -> None:
    name, stages, m, links, _ = case
    saved, half = [float(n) for n in sizes[:10]], [float(n) for n in sizes[10:]]
    size = {"saved": saved, "half": [min(a, b) for a, b in zip(saved, half, strict=True)]}
    found = peak_memory(build(name, stages, m, links), lambda value: size[value.name][value.index[0]] if value.name in size else 0.0)
    assert peak_saved_bytes(computes_by_rank(name, stages, m, links), size["saved"], size["half"]) == [p.size_bytes for p in found]


def test_the_peak_of_a_forward_only_program_is_at_its_last_forward() -> None:
    found = peak_memory(Program.parse("rank 0: 0F0 x(0,1,0)>1 0F1 x(0,1,1)>1\nrank 1: x(0,1,0)<0 1F0 x(0,1,1)<0 1F1"), lambda value: 1.0)
    assert [(p.size_bytes, p.step) for p in found] == [(3.0, 2), (2.0, 2)]
    assert found[0].action == "0F1"


def test_the_peak_of_a_sum_counts_the_buffer_that_it_receives_into() -> None:
    value = Value("sum", (0,))
    text = "rank 0: sum(0)>1 sum(0)+<1\nrank 1: sum(0)>0 sum(0)+<0\ngiven 0: sum(0)=0\ngiven 1: sum(0)=1\nwants 0: sum(0)=0,1"
    assert [p.size_bytes for p in peak_memory(Program.parse(text), {value: 8.0}.__getitem__)] == [16.0, 16.0]
