"""The machine of recovery on lists of events, and the vote on all orders in which ranks may die."""

from __future__ import annotations

from itertools import product

import pytest

from shardwise.world.launch.recovery_machine import (
    Event,
    FailRun,
    ForkRank,
    Instruction,
    KillRank,
    PublishGeneration,
    RankEnded,
    RankHung,
    RankJoined,
    RecoveryStage,
    RecoveryState,
    RejoinOverdue,
    ReportText,
    advance_recovery,
)


def after(*events: Event, num_ranks: int = 2, most: int = 3) -> tuple[RecoveryState, list[list[Instruction]]]:
    """The last state, and the instructions of each event but what is said."""
    state, told = RecoveryState(num_ranks, most), []
    for event in events:
        state, todo = advance_recovery(state, event)
        told.append([one for one in todo if not isinstance(one, ReportText)])
    return state, told


def joined(generation: int, num_ranks: int = 2) -> list[RankJoined]:
    return [RankJoined(rank, generation) for rank in range(num_ranks)]


def test_a_lost_rank_is_forked_again_in_a_new_generation() -> None:
    state, told = after(*joined(0), RankEnded(1, "killed", 7), *joined(1))
    assert told[2] == [PublishGeneration(1), ForkRank(1, 1)]
    assert (state.stage, state.generation) == (RecoveryStage.RUNNING, 1)


def test_a_rank_that_hangs_is_killed_once_and_replaced_when_it_is_gone() -> None:
    state, told = after(*joined(0), RankHung(1, "hangs"), RankHung(1, "hangs"))
    assert told[2:] == [[KillRank(1)], []]
    assert state.stage is RecoveryStage.LOST
    state, todo = advance_recovery(state, RankEnded(1, "killed", 7))
    assert todo == [PublishGeneration(1), ForkRank(1, 1)]
    assert state.stage is RecoveryStage.REGROUP


def test_a_rank_that_is_gone_and_waits_to_be_replaced_cannot_hang() -> None:
    state, told = after(RankHung(0, ""), RankHung(1, ""), RankEnded(0, "", 7), RankHung(0, ""), RankEnded(1, "", 7))
    assert told[2:] == [[], [], [PublishGeneration(1), ForkRank(0, 1), ForkRank(1, 1)]]
    assert state.stage is RecoveryStage.REGROUP


def test_a_loss_in_recovery_opens_another_generation() -> None:
    state, told = after(*joined(0), RankEnded(1, "killed", 7), RankJoined(1, 1), RankEnded(0, "killed", 7), RankJoined(0, 1), *joined(2))
    assert told[4] == [PublishGeneration(2), ForkRank(0, 2)]
    assert (state.stage, state.generation) == (RecoveryStage.RUNNING, 2)


def test_ranks_that_do_not_come_are_replaced_too() -> None:
    state, told = after(*joined(0, 3), RankEnded(1, "killed", 7), RankJoined(1, 1), RejoinOverdue(), RejoinOverdue(), num_ranks=3)
    assert told[-2:] == [[KillRank(0), KillRank(2)], []]
    assert state.stage is RecoveryStage.LOST
    state, told = after(RankEnded(1, "killed", 7), RankJoined(1, 1), RejoinOverdue(), RankEnded(2, "", 7), RankEnded(0, "", 7), num_ranks=3)
    assert told[-2:] == [[], [PublishGeneration(2), ForkRank(0, 2), ForkRank(2, 2)]]
    assert state.num_losses == 1
    state, _ = after(*joined(0), RejoinOverdue())
    assert state.stage is RecoveryStage.RUNNING


def test_ranks_that_cannot_leave_a_collective_are_replaced_together() -> None:
    state = RecoveryState(3, max_losses=1, replaces_all=True)
    state, todo = advance_recovery(state, RankEnded(1, "killed", 7))
    assert todo[1:] == [KillRank(0), KillRank(2)]
    state, todo = advance_recovery(state, RankEnded(2, "killed", 7))
    assert todo == []
    state, todo = advance_recovery(state, RankEnded(0, "killed", 7))
    assert todo == [PublishGeneration(1), *(ForkRank(rank, 1) for rank in range(3))]
    assert (state.stage, state.num_losses) == (RecoveryStage.REGROUP, 1)


def test_a_crash_loop_ends_with_its_cause_and_progress_forgives() -> None:
    losses = [RankEnded(1, "rank 1 was killed by SIGSEGV", 7)] * 3
    assert after(*losses)[0].stage is RecoveryStage.REGROUP
    state, told = after(*losses, *losses[:1])
    assert state.stage is RecoveryStage.FAILED
    assert told[-1] == [FailRun(1, "4 losses of ranks after step 7, and no step further; the last: rank 1 was killed by SIGSEGV")]
    assert after(*losses, *[RankEnded(1, "", 8)] * 3)[0].stage is RecoveryStage.REGROUP


def killed_at_once(num_ranks: int, times: int, most: int) -> RecoveryState:
    """The state after all ranks were killed together, and came again, so many times at one step."""
    events: list[Event] = [*joined(0, num_ranks)]
    for generation in range(num_ranks, num_ranks * times + 1, num_ranks):
        events += [*(RankEnded(rank, "killed", 7) for rank in range(num_ranks)), *joined(generation, num_ranks)]
    return after(*events, num_ranks=num_ranks, most=most)[0]


def test_all_ranks_of_a_host_are_one_loss() -> None:
    """Eight ranks, three times at one step; of them alone one is too many by count of ranks."""
    state = killed_at_once(8, 3, most=3)
    assert (state.stage, state.num_losses) == (RecoveryStage.RUNNING, 3)
    assert killed_at_once(8, 4, most=3).stage is RecoveryStage.FAILED
    assert killed_at_once(1, 3, most=3).stage is RecoveryStage.RUNNING


def test_ranks_that_always_fail_together_before_they_run_end_the_run() -> None:
    events = [RankEnded(rank, "out of memory", -1) for rank in range(4)]
    state, _ = after(*events * 3, num_ranks=4, most=3)
    assert (state.stage, state.num_losses) == (RecoveryStage.REGROUP, 3)
    assert after(*events * 4, num_ranks=4, most=3)[0].stage is RecoveryStage.FAILED
    hung = [*joined(0), RankHung(0, ""), RankEnded(0, "", 7), RankEnded(1, "", 7), *joined(2), RankHung(1, ""), RankEnded(1, "", 7)]
    assert after(*hung)[0].num_losses == 2


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_any_order_of_faults_ends_running_or_failed(num_ranks: int) -> None:
    """All sequences of four: once those that were killed have ended and all have joined, ranks run again."""
    ranks = range(num_ranks)
    kinds: list[Event] = [
        *(RankEnded(r, "", r) for r in ranks),
        *(RankHung(r, "") for r in ranks),
        *(RankJoined(r, 0) for r in ranks),
        RejoinOverdue(),
    ]
    for events in product(kinds, repeat=4):
        gone, possible = set[int](), list[Event]()
        state = RecoveryState(num_ranks, 9)
        for event in events:
            if isinstance(event, RankEnded) and event.rank in gone:
                continue  # it has ended, and was not forked again
            possible.append(event)
            state, todo = advance_recovery(state, event)
            gone |= {event.rank} if isinstance(event, RankEnded) else set()
            gone -= {one.rank for one in todo if isinstance(one, ForkRank)}
        for rank in sorted(state.being_killed):
            assert rank not in gone, possible
            state, _ = advance_recovery(state, RankEnded(rank, "", 5))
        for event in joined(state.generation, num_ranks):
            state, _ = advance_recovery(state, event)
        assert state.stage is RecoveryStage.RUNNING


def test_losses_without_a_snapshot_count_until_something_is_saved() -> None:
    def lost(saved: list[int]) -> RecoveryStage:
        events = [event for n, at in enumerate(saved) for event in (RankEnded(1, "killed", -1, at), *joined(n + 1))]
        return after(*joined(0), *events)[0].stage

    assert lost([1, 2, 3, 4, 5, 6]) is RecoveryStage.RUNNING
    assert lost([-1, 1, 1, 1, 1]) is RecoveryStage.FAILED
