"""Routes, against their programs: carried out on contributions they leave what the program wants, in as few messages as are published."""

from __future__ import annotations

from collections import Counter
from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.collectives import ALGORITHMS, build
from shardwise.errors import ProgramError
from shardwise.plan.ir.check import check
from shardwise.plan.ir.program import Program, Value
from shardwise.world.comm.programs import ReceiveStep, ReduceStep, Route, SendStep, build_routes

SWAP = """
given 0: chunk(0)=0
given 1: chunk(0)=1
wants 0: chunk(0)=1
wants 1: chunk(0)=0
rank 0: chunk(0)>1 chunk(0)<1
rank 1: chunk(0)>0 chunk(0)<0
"""


def places(program: Program) -> list[Value]:
    return sorted(
        {value for row in program.actions for action in row for value in [action.value]} | {v for g in program.initial for v in g}
    )  # type: ignore[union-attr]


def carried_out(program: Program, every: tuple[Route, ...], order: list[int]) -> list[dict[Value, Counter[int]]]:
    """What each rank holds at the end. Ranks move in turns of `order`; what a send reads is read when it is received, unless copied."""
    lineup = places(program)
    held: list[list[Counter[int]]] = [[Counter(dict(g.get(v, {}))) for v in lineup] for g in program.initial]
    wire: dict[tuple[int, int, int], object] = {}
    ended: set[tuple[int, int]] = set()  # (rank, step) of sends that were received
    at = [0] * program.num_ranks

    def receive(source: int, rank: int, number: int) -> list[Counter[int]] | None:
        sent = wire.pop((source, rank, number), None)
        if sent is None:
            return None
        step, copy = sent  # type: ignore[misc]
        ended.add((source, step.step))
        return copy if step.is_copied else [Counter(c) for c in held[source][step.first : step.last]]

    stuck = 0
    while any(step < len(route.steps) for step, route in zip(at, every, strict=True)):
        moved = False
        for rank in order:
            if at[rank] == len(every[rank].steps):
                continue
            step = every[rank].steps[at[rank]]
            if isinstance(step, SendStep):
                wire[rank, step.peer, step.number] = (step, [Counter(c) for c in held[rank][step.first : step.last]])
            else:
                peers, numbers = (step.peers, step.numbers) if isinstance(step, ReduceStep) else ((step.peer,), (step.number,))
                if any((peer, rank, number) not in wire for peer, number in zip(peers, numbers, strict=True)):
                    continue
                if isinstance(step, ReduceStep):
                    arrived = [receive(peer, rank, number) for peer, number in zip(peers, numbers, strict=True)]
                    if any((rank, send) not in ended for send in step.wait_for_sends):
                        # What has come stays in its room until the sends that read this place are done.
                        for peer, number, parts in zip(peers, numbers, arrived, strict=True):
                            wire[peer, rank, number] = (SendStep(-1, rank, step.first, step.last, number, True), parts)
                        continue
                    for parts in arrived:
                        for place, part in zip(range(step.first, step.last), parts or (), strict=True):
                            held[rank][place] = held[rank][place] + part
                else:
                    if any((rank, send) not in ended for send in step.wait_for_sends):
                        continue
                    held[rank][step.first : step.last] = receive(peers[0], rank, numbers[0]) or []
            at[rank] += 1
            moved = True
        stuck = 0 if moved else stuck + 1
        assert stuck < 3, f"{program.name}: ranks are stuck at {at}"
    return [dict(zip(lineup, row, strict=True)) for row in held]


@pytest.mark.parametrize("name", ALGORITHMS["all_reduce"])
@settings(max_examples=12, deadline=None)
@given(num_ranks=st.integers(1, 11), seed=st.randoms(use_true_random=False))
def test_routes_leave_what_the_program_wants(name: str, num_ranks: int, seed: object) -> None:
    program = build("all_reduce", name, num_ranks)
    order = list(range(num_ranks))
    seed.shuffle(order)  # type: ignore[attr-defined]
    every = build_routes(program, places(program))
    assert not any(step.is_copied for route in every for step in route.steps if isinstance(step, SendStep))
    for got, wanted in zip(carried_out(program, every, order), program.wants, strict=True):
        for value, content in wanted.items():
            assert got[value] == Counter(dict(content)), (name, num_ranks, str(value))


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_neighbouring_pieces_are_one_message(num_ranks: int) -> None:
    steps = int(log2(num_ranks))
    for name, count in (("ring", 2 * (num_ranks - 1)), ("halving_doubling", 2 * steps), ("recursive_doubling", steps)):
        program = build("all_reduce", name, num_ranks)
        for route in build_routes(program, places(program)):
            assert sum(isinstance(step, SendStep) for step in route.steps) == count


def test_summands_in_a_row_are_added_in_the_order_of_ranks() -> None:
    for rank, route in enumerate(build_routes(build("all_reduce", "naive", 5), [Value("chunk", (0,))])):
        (added,) = [step for step in route.steps if isinstance(step, ReduceStep)]
        assert added.peers == tuple(r for r in range(5) if r != rank)
        assert added.own_position == rank


def test_sends_that_would_stop_the_ranks_leave_from_copies() -> None:
    program = Program.parse(SWAP)
    check(program)
    every = build_routes(program, places(program))
    assert all(step.is_copied for route in every for step in route.steps if isinstance(step, SendStep))
    assert all(step.wait_for_sends == () for route in every for step in route.steps if isinstance(step, ReceiveStep))
    assert [got[Value("chunk", (0,))] for got in carried_out(program, every, [0, 1])] == [Counter({1: 1}), Counter({0: 1})]


def test_what_is_no_collective_is_refused() -> None:
    for text, reason in (
        ("rank 0: 0F0", "is no transfer"),
        ("rank 0: chunk(1)>1\nrank 1: chunk(1)<0", "is none of the values"),
        ("rank 0: chunk(0)>1\nrank 1:", "is never received"),
        ("rank 0:\nrank 1: chunk(0)<0", "is never sent"),
    ):
        with pytest.raises(ProgramError, match=reason):
            build_routes(Program.parse(text), [Value("chunk", (0,))])
