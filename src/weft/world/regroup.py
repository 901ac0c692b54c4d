"""The launcher's part in going on after the loss of a rank, as a state machine: events in, instructions out, nothing else.

    Running --Hung--> Lost(rank) --Ended--> Regroup(generation + 1) --all Joined--> Running
       └────────────────Ended───────────────────┘ (again during Regroup: generation + 2)        too many losses at one step: Failed

A new generation is what tells survivors to unwind. A rank is replaced once it is gone: one that is stopped cannot wake up and write. Losses
count until a step is done, so that a long run survives any number of them and one that dies of its own step ends with the cause.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class Stage(Enum):
    """What the ranks of a launch are at."""

    RUNNING, LOST, REGROUP, FAILED = range(4)


@dataclass(frozen=True, slots=True)
class State:
    """`condemned`: ranks that were killed and are not gone yet; `absent`: of them those that did not join, which are no loss of their own;
    `missing`: ranks to be forked once the condemned are gone. `together`: with one rank all are replaced, whose connections cannot be left
    while a collective is under way (gloo, NCCL). `losses` since `steps` steps were done, and `saved` in a
    checkpoint, of which `most` are borne."""

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
    """The process of a rank is gone, `why`; all ranks had done `steps` steps, -1 where there is no snapshot; `saved`: those in the newest
    checkpoint, -1 where there is none."""

    rank: int
    why: str
    steps: int
    saved: int = -1


@dataclass(frozen=True, slots=True)
class Hung:
    """A rank holds up the others."""

    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class Joined:
    """A rank has unwound, or is new, and is of this generation."""

    rank: int
    generation: int


@dataclass(frozen=True, slots=True)
class Overdue:
    """The ranks had time to join."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Let ranks join this generation."""

    generation: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Let a new process be this rank, in this generation."""

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
    """The state after an event, and what is to be done.

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
            missing = sorted(set(range(state.num_ranks)) - state.joined - state.condemned) if state.stage is Stage.REGROUP else []
            if not missing:
                return state, []
            words = f"rank {', '.join(map(str, missing))} did not leave the lost step; replaced, too"
            after = replace(state, stage=Stage.LOST, condemned=state.condemned | set(missing), absent=state.absent | set(missing))
            return after, [Say(words), *map(Kill, missing)]


def _ended(state: State, event: Ended) -> tuple[State, list[Instruction]]:
    rank, why, steps, saved = event.rank, event.why, event.steps, event.saved
    losses = (state.losses if (steps, saved) == (state.steps, state.saved) else 0) + (rank not in state.absent)
    if losses > state.most:
        at = f"after step {max(steps, saved)}" if max(steps, saved) >= 0 else "before the first step"
        return replace(state, stage=Stage.FAILED), [Fail(rank, f"{losses} losses of a rank {at}, and no step further; the last: {why}")]
    words = f"its state after step {steps} is kept" if steps >= 0 else "it begins with the last checkpoint"
    todo: list[Instruction] = [Say(f"{why}; {words}, and a new process takes its place")] if rank not in state.condemned else []
    condemned, missing = state.condemned - {rank}, state.missing | {rank}
    with_it = frozenset(range(state.num_ranks)) - condemned - missing if state.together else frozenset()
    condemned, absent = condemned | with_it, state.absent - {rank} | with_it
    todo += map(Kill, sorted(with_it))
    after = replace(state, condemned=condemned, absent=absent, missing=missing, losses=losses, steps=steps, saved=saved, joined=frozenset())
    if condemned:
        return replace(after, stage=Stage.LOST), todo
    generation = state.generation + 1
    forks = [Fork(one, generation) for one in sorted(missing)]
    return replace(after, stage=Stage.REGROUP, generation=generation, missing=frozenset()), [*todo, Publish(generation), *forks]
