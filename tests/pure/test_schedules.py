"""Schedules: orders, proofs, counts of microbatches in flight, and which orders run where a send waits for its receive."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import ProgramError, UsageError
from weft.plan.check import check
from weft.plan.program import Compute, Links, Op, Program, Recv, Send, Value, chain
from weft.plan.text import default_wants
from weft.schedules import NAMES, build
from weft.schedules.lower import pipeline
from weft.simulate.memory import in_flight

SIZES = [(1, 1), (1, 5), (2, 1), (2, 2), (3, 3), (4, 3), (4, 8), (8, 3), (8, 32)]


def u_net(num_stages: int) -> Links:
    """A chain, and skips from each stage of the first half to its mirror image."""
    return tuple(sorted({*chain(num_stages), *((s, num_stages - 1 - s) for s in range(num_stages // 2))}))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_every_schedule_is_proven(name: str, p: int, m: int) -> None:
    check(build(name, p, m))
    check(build(name, p, m, u_net(p)))


@given(st.sampled_from(NAMES), st.integers(1, 7), st.integers(1, 7), st.data())
def test_every_schedule_is_proven_on_any_links_and_under_rendezvous(name: str, p: int, m: int, data: st.DataObject) -> None:
    pairs = [(a, b) for b in range(p) for a in range(b)]
    links = tuple(sorted(data.draw(st.sets(st.sampled_from(pairs))))) if pairs else ()
    check(build(name, p, m, links))
    in_time = build(name, p, m, links, rendezvous=True)
    check(in_time, rendezvous=True)
    check(in_time)


@pytest.mark.parametrize("links", [chain, u_net])
def test_which_schedules_run_under_rendezvous_without_a_change(links: Callable[[int], Links]) -> None:
    """Sends into the direction of travel only: sequential and gpipe. 1f1b sends both ways at once and needs the change."""
    for p, m in SIZES:
        for name in ("sequential", "gpipe"):
            program = build(name, p, m, links(p))
            check(program, rendezvous=True)
            assert build(name, p, m, links(p), rendezvous=True) == program
    with pytest.raises(
        ProgramError, match=r"rank 0 step 3: x\(0,1,1\)>1 waits for rank 1 to receive it; rank 1 is at step 3: g\(1,0,0\)>0"
    ):
        check(build("1f1b", 2, 2), rendezvous=True)


def test_rendezvous_moves_receives_and_nothing_else() -> None:
    def others(program: Program) -> list[list[str]]:
        return [[str(a) for a in row if not isinstance(a, Recv)] for row in program.actions]

    assert others(build("1f1b", 4, 8)) == others(build("1f1b", 4, 8, rendezvous=True))


def test_rendezvous_cannot_help_a_program_that_never_runs() -> None:
    rows = [[Compute(Op.B, 0, 0), Compute(Op.F, 0, 0)], [Compute(Op.F, 1, 0), Compute(Op.B, 1, 0)]]
    with pytest.raises(ProgramError, match="no rank can move"):
        pipeline("backward first", rows, rendezvous=True)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_microbatches_in_flight(p: int, m: int) -> None:
    assert in_flight(build("gpipe", p, m)) == (m,) * p
    assert in_flight(build("1f1b", p, m)) == tuple(min(p - rank, m) for rank in range(p))
    assert in_flight(build("sequential", p, m)) == (1,) * p


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_numbers_of_actions(name: str, p: int, m: int) -> None:
    program = build(name, p, m)
    actions = [a for row in program.actions for a in row]
    assert sum(isinstance(a, Compute) for a in actions) == 2 * p * m
    assert sum(isinstance(a, Send) for a in actions) == sum(isinstance(a, Recv) for a in actions) == 2 * (p - 1) * m


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_accumulated_in_the_serial_order(name: str) -> None:
    """So that sums round as in one process."""
    for row in build(name, 4, 6).actions:
        assert [a.microbatch for a in row if isinstance(a, Compute) and a.op is Op.B] == list(range(6))


def test_one_f_one_b_by_hand() -> None:
    computes = [" ".join(str(a) for a in row if isinstance(a, Compute)) for row in build("1f1b", 3, 4).actions]
    assert computes == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_parallel_branches_hold_no_more_than_their_way_to_the_end() -> None:
    """Stages 0 and 1 both feed 2: two encoders need two microbatches each, not three and two."""
    assert in_flight(build("1f1b", 3, 6, ((0, 2), (1, 2)))) == (2, 2, 1)


def test_several_stages_on_a_rank_keep_their_values_there() -> None:
    rows = [
        [Compute(Op.F, 0, 0), Compute(Op.F, 1, 0), Compute(Op.B, 1, 0), Compute(Op.B, 0, 0)],
        [Compute(Op.F, 2, 0), Compute(Op.B, 2, 0)],
    ]
    program = pipeline("two and one", rows)
    check(program)
    assert str(program).splitlines()[1] == "rank 0: 0F0 1F0 x(1,2,0)>1 g(2,1,0)<1 1B0 0B0"


def test_two_replicas_in_opposite_directions_are_proven() -> None:
    """Each stage on two ranks, each microbatch on one of them; then each stage's two sums are exchanged and added."""
    rows = [[Compute(op, stage, m) for m, stage in ((0, rank), (1, 1 - rank)) for op in (Op.F, Op.B)] for rank in range(2)]
    half = pipeline("both ways", rows)
    with pytest.raises(ProgramError, match="lacks contribution 1"):
        check(half)
    sums = [Value("dw", (0,)), Value("dw", (1,))]
    actions = tuple(
        (*row, *(Send(dw, 1 - rank) for dw in sums), *(Recv(dw, 1 - rank, add=True) for dw in sums))
        for rank, row in enumerate(half.actions)
    )
    check(Program("both ways", 2, ({}, {}), actions, default_wants(actions)))


def test_a_stage_and_microbatch_on_two_ranks_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"saved\(0,0\) is made on ranks 0 and 1; 0F0 is one too many"):
        pipeline("twice", [[Compute(Op.F, 0, 0)], [Compute(Op.F, 0, 0)]])


def test_a_name_or_size_that_is_wrong_is_refused() -> None:
    with pytest.raises(UsageError, match=r"unknown schedule gpip .did you mean gpipe"):
        build("gpip", 2, 2)
    with pytest.raises(UsageError, match="0 stages and 2 microbatches"):
        build("gpipe", 0, 2)
    with pytest.raises(UsageError, match="2 stages and 0 microbatches"):
        build("1f1b", 2, 0)
