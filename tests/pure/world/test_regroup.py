"""The machine of recovery on lists of events, and the vote on all orders in which ranks may die."""

from __future__ import annotations

from itertools import product

import pytest

from weft.world.regroup import Ended, Event, Fail, Fork, Hung, Instruction, Joined, Kill, Overdue, Publish, Say, Stage, State, advance


def after(*events: Event, num_ranks: int = 2, most: int = 3) -> tuple[State, list[list[Instruction]]]:
    """The last state, and the instructions of each event but what is said."""
    state, told = State(num_ranks, most), []
    for event in events:
        state, todo = advance(state, event)
        told.append([one for one in todo if not isinstance(one, Say)])
    return state, told


def joined(generation: int, num_ranks: int = 2) -> list[Joined]:
    return [Joined(rank, generation) for rank in range(num_ranks)]


def test_a_lost_rank_is_forked_again_in_a_new_generation() -> None:
    state, told = after(*joined(0), Ended(1, "killed", 7), *joined(1))
    assert told[2] == [Publish(1), Fork(1, 1)]
    assert (state.stage, state.generation) == (Stage.RUNNING, 1)


def test_a_rank_that_hangs_is_killed_once_and_replaced_when_it_is_gone() -> None:
    state, told = after(*joined(0), Hung(1, "hangs"), Hung(1, "hangs"))
    assert told[2:] == [[Kill(1)], []]
    assert state.stage is Stage.LOST
    state, todo = advance(state, Ended(1, "killed", 7))
    assert todo == [Publish(1), Fork(1, 1)]
    assert state.stage is Stage.REGROUP


def test_a_rank_that_is_gone_and_waits_to_be_replaced_cannot_hang() -> None:
    state, told = after(Hung(0, ""), Hung(1, ""), Ended(0, "", 7), Hung(0, ""), Ended(1, "", 7))
    assert told[2:] == [[], [], [Publish(1), Fork(0, 1), Fork(1, 1)]]
    assert state.stage is Stage.REGROUP


def test_a_loss_in_recovery_opens_another_generation() -> None:
    state, told = after(*joined(0), Ended(1, "killed", 7), Joined(1, 1), Ended(0, "killed", 7), Joined(0, 1), *joined(2))
    assert told[4] == [Publish(2), Fork(0, 2)]
    assert (state.stage, state.generation) == (Stage.RUNNING, 2)


def test_ranks_that_do_not_come_are_replaced_too() -> None:
    state, told = after(*joined(0, 3), Ended(1, "killed", 7), Joined(1, 1), Overdue(), Overdue(), num_ranks=3)
    assert told[-2:] == [[Kill(0), Kill(2)], []]
    assert state.stage is Stage.LOST
    state, told = after(Ended(1, "killed", 7), Joined(1, 1), Overdue(), Ended(2, "", 7), Ended(0, "", 7), num_ranks=3)
    assert told[-2:] == [[], [Publish(2), Fork(0, 2), Fork(2, 2)]]
    assert state.losses == 1
    state, _ = after(*joined(0), Overdue())
    assert state.stage is Stage.RUNNING


def test_ranks_that_cannot_leave_a_collective_are_replaced_together() -> None:
    state = State(3, most=1, together=True)
    state, todo = advance(state, Ended(1, "killed", 7))
    assert todo[1:] == [Kill(0), Kill(2)]
    state, todo = advance(state, Ended(2, "killed", 7))
    assert todo == []
    state, todo = advance(state, Ended(0, "killed", 7))
    assert todo == [Publish(1), *(Fork(rank, 1) for rank in range(3))]
    assert (state.stage, state.losses) == (Stage.REGROUP, 1)


def test_a_crash_loop_ends_with_its_cause_and_progress_forgives() -> None:
    losses = [Ended(1, "rank 1 was killed by SIGSEGV", 7)] * 3
    assert after(*losses)[0].stage is Stage.REGROUP
    state, told = after(*losses, *losses[:1])
    assert state.stage is Stage.FAILED
    assert told[-1] == [Fail(1, "4 losses of a rank after step 7, and no step further; the last: rank 1 was killed by SIGSEGV")]
    assert after(*losses, *[Ended(1, "", 8)] * 3)[0].stage is Stage.REGROUP


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_any_order_of_faults_ends_running_or_failed(num_ranks: int) -> None:
    """All sequences of four: once those that were killed have ended and all have joined, ranks run again."""
    ranks = range(num_ranks)
    kinds: list[Event] = [*(Ended(r, "", r) for r in ranks), *(Hung(r, "") for r in ranks), *(Joined(r, 0) for r in ranks), Overdue()]
    for events in product(kinds, repeat=4):
        gone, possible = set[int](), list[Event]()
        state = State(num_ranks, 9)
        for event in events:
            if isinstance(event, Ended) and event.rank in gone:
                continue  # it has ended, and was not forked again
            possible.append(event)
            state, todo = advance(state, event)
            gone |= {event.rank} if isinstance(event, Ended) else set()
            gone -= {one.rank for one in todo if isinstance(one, Fork)}
        for rank in sorted(state.condemned):
            assert rank not in gone, possible
            state, _ = advance(state, Ended(rank, "", 5))
        for event in joined(state.generation, num_ranks):
            state, _ = advance(state, event)
        assert state.stage is Stage.RUNNING


def test_losses_without_a_snapshot_count_until_something_is_saved() -> None:
    def lost(saved: list[int]) -> Stage:
        events = [event for n, at in enumerate(saved) for event in (Ended(1, "killed", -1, at), *joined(n + 1))]
        return after(*joined(0), *events)[0].stage

    assert lost([1, 2, 3, 4, 5, 6]) is Stage.RUNNING
    assert lost([-1, 1, 1, 1, 1]) is Stage.FAILED
