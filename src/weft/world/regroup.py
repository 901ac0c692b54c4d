"""The launcher's recovery after a rank has failed (elastic restart), as a state machine: events in, instructions out, no I/O.

    Running --Hung--> Lost(rank) --Ended--> Regroup(generation + 1) --all Joined--> Running
       └────────────────Ended───────────────────┘ (again during Regroup: generation + 2)        too many losses at one step: Failed

A new generation makes the surviving ranks unwind. A rank is replaced only after its process has ended: a stopped one cannot wake up and
write. Failures count until a step is done: a long run survives any number, and one that always fails in the same step ends with the cause.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class Stage(Enum):
    """Stage of the recovery of a launch's ranks."""

    RUNNING, LOST, REGROUP, FAILED = range(4)


@dataclass(frozen=True, slots=True)
class State:
    """State of the recovery. `being_killed`: killed ranks that have not ended yet; `not_joined`: those killed for not joining, which
    count as no failure; `to_fork`: ranks to fork after that. `replaces_all`: replace all ranks with one (if collectives cannot be aborted).
    `num_losses`: failures since `num_steps` steps were done and `num_saved_steps` checkpointed; `max_losses` are allowed."""

    num_ranks: int
    most: int
    generation: int = 0
    together: bool = False
    stage: Stage = Stage.REGROUP
    joined: frozenset[int] = frozenset()
    condemned: frozenset[int] = frozenset()
    missing: frozenset[int] = frozenset()
    absent: frozenset[int] = frozenset()
    losses: int = 0
    steps: int = -1
    saved: int = -1


@dataclass(frozen=True, slots=True)
class Ended:
    """The process of a rank has ended, for a `reason`; all ranks had done `num_steps` steps, -1 without a snapshot; `num_saved_steps`:
    steps in the newest checkpoint, -1 without one."""

    rank: int
    why: str
    steps: int
    saved: int = -1


@dataclass(frozen=True, slots=True)
class Hung:
    """A rank blocks the others."""

    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class Joined:
    """A rank has unwound, or is new, and has joined this generation."""

    rank: int
    generation: int


@dataclass(frozen=True, slots=True)
class Overdue:
    """The time limit for ranks to join has passed."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Ask the ranks to join this generation."""

    generation: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Start a new process as this rank, in this generation."""

    rank: int
    generation: int


@dataclass(frozen=True, slots=True)
class Kill:
    rank: int


@dataclass(frozen=True, slots=True)
class Say:
    text: str


@dataclass(frozen=True, slots=True)
class Fail:
    """End the run."""

    rank: int
    why: str


Event = Ended | Hung | Joined | Overdue
Instruction = Publish | Fork | Kill | Say | Fail


def advance(state: State, event: Event) -> tuple[State, list[Instruction]]:
    """Return the state after an event, and the instructions to carry out.

    >>> state, todo = advance(State(2, most=3), Ended(1, "rank 1 was killed by SIGKILL", 7))
    >>> state.stage.name, todo[1:]
    ('REGROUP', [Publish(generation=1), Fork(rank=1, generation=1)])
    """
    if state.stage is Stage.FAILED:
        return state, []
    match event:
        case Ended():
            return _ended(state, event)
        case Hung(rank, why):
            if rank in state.condemned | state.missing:
                return state, []
            return replace(state, stage=Stage.LOST, condemned=state.condemned | {rank}), [
                Say(f"{why}; a new process takes its place"),
                Kill(rank),
            ]
        case Joined(rank, generation):
            if generation != state.generation or state.stage is not Stage.REGROUP:
                return state, []
            joined = state.joined | {rank}
            return replace(state, joined=joined, stage=Stage.RUNNING if len(joined) == state.num_ranks else Stage.REGROUP), []
        case Overdue():
            late = sorted(set(range(state.num_ranks)) - state.joined - state.condemned) if state.stage is Stage.REGROUP else []
            if not late:
                return state, []
            text = f"rank {', '.join(map(str, late))} did not leave the failed step and is replaced, too"
            after = replace(state, stage=Stage.LOST, condemned=state.condemned | set(late), absent=state.absent | set(late))
            return after, [Say(text), *map(Kill, late)]


def _ended(state: State, event: Ended) -> tuple[State, list[Instruction]]:
    rank, why, steps, saved = event.rank, event.why, event.steps, event.saved
    losses = (state.losses if (steps, saved) == (state.steps, state.saved) else 0) + (rank not in state.absent)
    if losses > state.most:
        when = f"after step {max(steps, saved)}" if max(steps, saved) >= 0 else "before the first step"
        return replace(state, stage=Stage.FAILED), [Fail(rank, f"{losses} losses of a rank {when}, and no step further; the last: {why}")]
    source = f"its state after step {steps} is kept" if steps >= 0 else "it begins with the last checkpoint"
    todo: list[Instruction] = [Say(f"{why}; {source}, and a new process takes its place")] if rank not in state.condemned else []
    condemned, missing = state.condemned - {rank}, state.missing | {rank}
    also_killed = frozenset(range(state.num_ranks)) - condemned - missing if state.together else frozenset()
    condemned, absent = condemned | also_killed, state.absent - {rank} | also_killed
    todo += map(Kill, sorted(also_killed))
    after = replace(state, condemned=condemned, absent=absent, missing=missing, losses=losses, steps=steps, saved=saved, joined=frozenset())
    if condemned:
        return replace(after, stage=Stage.LOST), todo
    generation = state.generation + 1
    forks = [Fork(new_rank, generation) for new_rank in sorted(missing)]
    return replace(after, stage=Stage.REGROUP, generation=generation, missing=frozenset()), [*todo, Publish(generation), *forks]
