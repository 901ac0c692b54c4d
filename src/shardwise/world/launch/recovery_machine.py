"""The launcher's recovery after a rank has failed (elastic restart), as a state machine: events in, instructions out, no I/O.

    Running --Hung--> Lost(rank) --Ended--> Regroup(generation + 1) --all Joined--> Running
       └────────────────Ended───────────────────┘ (again during Regroup: generation + 2)        too many losses at one step: Failed

A new generation makes the surviving ranks unwind. A rank is replaced only after its process has ended: a stopped one cannot wake up and
write. Losses count until a step is done: a long run survives any number, and one that always fails in the same step ends with the cause.
Ranks that fail until all run again are one loss (a host, a switch, want of memory), unless one of them fails twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class RecoveryStage(Enum):
    """Stage of the recovery of a launch's ranks."""

    RUNNING, LOST, REGROUP, FAILED = range(4)


@dataclass(frozen=True, slots=True)
class RecoveryState:
    """State of the recovery. `being_killed`: killed ranks that have not ended yet; `not_joined`: those killed for not joining, which
    count as no failure; `to_fork`: ranks to fork after that. `replaces_all`: replace all ranks with one (if collectives cannot be aborted).
    `num_losses`: losses since `num_steps` steps were done and `num_saved_steps` checkpointed; `max_losses` are allowed.
    `ranks_of_loss`: ranks of the last of them, until all run again."""

    num_ranks: int
    max_losses: int
    generation: int = 0
    replaces_all: bool = False
    stage: RecoveryStage = RecoveryStage.REGROUP
    joined: frozenset[int] = frozenset()
    being_killed: frozenset[int] = frozenset()
    to_fork: frozenset[int] = frozenset()
    not_joined: frozenset[int] = frozenset()
    num_losses: int = 0
    ranks_of_loss: frozenset[int] = frozenset()
    num_steps: int = -1
    num_saved_steps: int = -1


@dataclass(frozen=True, slots=True)
class RankEnded:
    """The process of a rank has ended, for a `reason`; all ranks had done `num_steps` steps, -1 without a snapshot; `num_saved_steps`:
    steps in the newest checkpoint, -1 without one."""

    rank: int
    reason: str
    num_steps: int
    num_saved_steps: int = -1


@dataclass(frozen=True, slots=True)
class RankHung:
    """A rank blocks the others."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class RankJoined:
    """A rank has unwound, or is new, and has joined this generation."""

    rank: int
    generation: int


@dataclass(frozen=True, slots=True)
class RejoinOverdue:
    """The time limit for ranks to join has passed."""


@dataclass(frozen=True, slots=True)
class PublishGeneration:
    """Ask the ranks to join this generation."""

    generation: int


@dataclass(frozen=True, slots=True)
class ForkRank:
    """Start a new process as this rank, in this generation."""

    rank: int
    generation: int


@dataclass(frozen=True, slots=True)
class KillRank:
    rank: int


@dataclass(frozen=True, slots=True)
class ReportText:
    text: str


@dataclass(frozen=True, slots=True)
class FailRun:
    """End the run."""

    rank: int
    reason: str


Event = RankEnded | RankHung | RankJoined | RejoinOverdue
Instruction = PublishGeneration | ForkRank | KillRank | ReportText | FailRun


def advance_recovery(state: RecoveryState, event: Event) -> tuple[RecoveryState, list[Instruction]]:
    """Return the state after an event, and the instructions to carry out.

    >>> state, todo = advance_recovery(RecoveryState(2, max_losses=3), RankEnded(1, "rank 1 was killed by SIGKILL", 7))
    >>> state.stage.name, todo[1:]
    ('REGROUP', [PublishGeneration(generation=1), ForkRank(rank=1, generation=1)])
    """
    if state.stage is RecoveryStage.FAILED:
        return state, []
    match event:
        case RankEnded():
            return _on_rank_ended(state, event)
        case RankHung(rank, why):
            if rank in state.being_killed | state.to_fork:
                return state, []
            return replace(state, stage=RecoveryStage.LOST, being_killed=state.being_killed | {rank}), [
                ReportText(f"{why}; a new process takes its place"),
                KillRank(rank),
            ]
        case RankJoined(rank, generation):
            if generation != state.generation or state.stage is not RecoveryStage.REGROUP:
                return state, []
            joined = state.joined | {rank}
            if len(joined) < state.num_ranks:
                return replace(state, joined=joined), []
            return replace(state, joined=joined, stage=RecoveryStage.RUNNING, ranks_of_loss=frozenset()), []
        case RejoinOverdue():
            late = sorted(set(range(state.num_ranks)) - state.joined - state.being_killed) if state.stage is RecoveryStage.REGROUP else []
            if not late:
                return state, []
            text = f"rank {', '.join(map(str, late))} did not leave the failed step and is replaced, too"
            after = replace(
                state, stage=RecoveryStage.LOST, being_killed=state.being_killed | set(late), not_joined=state.not_joined | set(late)
            )
            return after, [ReportText(text), *map(KillRank, late)]


def _on_rank_ended(state: RecoveryState, event: RankEnded) -> tuple[RecoveryState, list[Instruction]]:
    rank, why, steps, saved = event.rank, event.reason, event.num_steps, event.num_saved_steps
    earlier = state.num_losses if (steps, saved) == (state.num_steps, state.num_saved_steps) else 0
    is_counted = rank not in state.not_joined
    is_new_loss = is_counted and (not earlier or not state.ranks_of_loss or rank in state.ranks_of_loss)
    losses, together = earlier + is_new_loss, frozenset[int]() if is_new_loss else state.ranks_of_loss
    if losses > state.max_losses:
        when = f"after step {max(steps, saved)}" if max(steps, saved) >= 0 else "before the first step"
        return replace(state, stage=RecoveryStage.FAILED), [
            FailRun(rank, f"{losses} losses of ranks {when}, and no step further; the last: {why}")
        ]
    source = f"its state after step {steps} is kept" if steps >= 0 else "it begins with the last checkpoint"
    todo: list[Instruction] = [ReportText(f"{why}; {source}, and a new process takes its place")] if rank not in state.being_killed else []
    condemned, missing = state.being_killed - {rank}, state.to_fork | {rank}
    also_killed = frozenset(range(state.num_ranks)) - condemned - missing if state.replaces_all else frozenset()
    condemned, absent = condemned | also_killed, state.not_joined - {rank} | also_killed
    todo += map(KillRank, sorted(also_killed))
    after = replace(
        state,
        being_killed=condemned,
        not_joined=absent,
        to_fork=missing,
        num_losses=losses,
        ranks_of_loss=together | {rank} if is_counted else together,
        num_steps=steps,
        num_saved_steps=saved,
        joined=frozenset(),
    )
    if condemned:
        return replace(after, stage=RecoveryStage.LOST), todo
    generation = state.generation + 1
    forks = [ForkRank(new_rank, generation) for new_rank in sorted(missing)]
    return replace(after, stage=RecoveryStage.REGROUP, generation=generation, to_fork=frozenset()), [
        *todo,
        PublishGeneration(generation),
        *forks,
    ]
