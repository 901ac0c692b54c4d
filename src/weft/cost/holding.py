"""How many microbatches a rank keeps of each of its stages, of which it runs backward meanwhile, and what is on its way to it.

In: a layout, a rank. Out: `Held`, what there is at each moment that may be the fullest, by the order of its computes. Which one is hangs on
what stages keep: a rank with a large stage and a small one holds most when it keeps most of the large. Not modelled: times, on which none
of it depends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from weft.plan.action import AHEAD, Compute, Op
from weft.plan.layout import Layout
from weft.plan.own import KEPT, own_of
from weft.plan.program import chain
from weft.schedules import rows
from weft.schedules.interleaved import forwards_and_backwards

_SETTLED = 4  # microbatches, in sizes of the pipeline, after which orders repeat: what more of them hold, these have held

Numbers = NDArray[np.intp]
Step = tuple[Compute | None, Sequence[tuple[int, int]]]  # a compute, if it is one; (stage, microbatches more that are kept) after it


@dataclass(frozen=True, slots=True)
class Held:
    """[moment, stage of the rank in the order of `Layout.stages_of`]: microbatches that are `kept`, that go backward (one or none), of
    which what enters the stage is on its way, or its gradient back (`entering`), to which gradients are `returning`, and of which only the
    gradients of weights are still to come (`noted`)."""

    kept: Numbers
    backward: Numbers
    entering: Numbers
    returning: Numbers
    noted: Numbers

    @classmethod
    def of(cls, kept: Numbers, backward: Numbers, entering: Numbers, returning: Numbers, noted: Numbers) -> Held:
        """Each moment once."""
        every = np.concatenate((kept, backward, entering, returning, noted), axis=1)
        return cls(*np.split(np.array(sorted(set(map(tuple, every.tolist())))), 5, axis=1))


def held_by(layout: Layout, rank: int) -> Held:
    """What a rank holds. Of GEMS microbatches of one stage at a time (Jain et al. 2020, section IV).

    >>> held_by(Layout(pipeline=2, microbatches=2, schedule="gems-mast"), 0).kept.tolist()
    [[0, 1], [0, 1], [1, 0], [1, 0]]
    """
    if layout.own:
        return _own(layout.schedule, layout.actions, rank)
    if layout.schedule == "interleaved":
        return _interleaved(layout.pipeline, layout.microbatches, layout.chunks, rank)
    return _named(layout.schedule, layout.pipeline, min(layout.microbatches, _SETTLED * layout.pipeline))[rank]


@lru_cache(maxsize=4096)
def _interleaved(pipeline: int, microbatches: int, chunks: int, rank: int) -> Held:
    """Of as many computes as there may be, without making each: before every backward."""
    forward, backward, ahead = forwards_and_backwards(pipeline, microbatches, chunks, rank)
    # A row more for what comes behind the last: nothing.
    one = np.concatenate((np.eye(chunks, dtype=np.intp), np.zeros((1, chunks), dtype=np.intp)))
    f, b = (np.concatenate((order, [chunks] * AHEAD)) for order in (forward, backward))
    total = len(forward)
    at = np.arange(total)
    done = np.minimum(at + ahead, total)
    made, taken = (np.concatenate((np.zeros((1, chunks), dtype=np.intp), np.cumsum(one[order[:total]], axis=0))) for order in (f, b))
    after = np.where((done < total)[:, None], 0, one[b[at + 2]])
    sent = np.where(((at > 0) & (at + ahead > total))[:, None], one[b[at - 1]], 0)
    return Held.of(made[done] - taken[at], one[b[at]], one[f[done]] + sent, one[b[at + 1]] + after, np.zeros_like(sent))


@lru_cache(maxsize=256)
def _named(schedule: str, pipeline: int, microbatches: int) -> tuple[Held, ...]:
    """By rank."""
    layout = Layout(pipeline=pipeline, microbatches=microbatches, schedule=schedule)
    orders = rows(schedule, layout.num_stages, microbatches, chain(layout.num_stages), layout.chunks)
    changes = {Op.F: 1, Op.B: -1, Op.W: -1}
    return tuple(walked([(a, ((a.stage, changes.get(a.op, 0)),)) for a in row], layout.stages_of(rank)) for rank, row in enumerate(orders))


@lru_cache(maxsize=256)
def _own(name: str, actions: str, rank: int) -> Held:
    """By the effects of its actions: it may move to the host what it keeps, or drop it."""
    program = own_of(name, actions).program
    steps: list[Step] = []
    for action, e in zip(program.actions[rank], program.effects[rank], strict=True):
        changes = [(v.index[0], 1) for v in e.writes if v.name in KEPT] + [(v.index[0], -1) for v in e.frees if v.name in KEPT]
        steps.append((action if isinstance(action, Compute) else None, changes))
    return walked(steps, program.stages_of[rank])


def walked(steps: Sequence[Step], stages: Sequence[int]) -> Held:
    """Before every backward, after every forward, and after every input part of a backward."""
    place = {stage: i for i, stage in enumerate(stages)}
    computes = [compute for compute, _ in steps if compute is not None]
    kept, noted, found, number = [0] * len(stages), [0] * len(stages), [], 0
    for compute, changes in steps:
        backward, entering, returning = ([0] * len(stages) for _ in range(3))
        if compute is not None:
            number += 1
            if compute.op in (Op.B, Op.I):
                backward[place[compute.stage]] = 1
                for before in computes[max(0, number - 2) : number - 1]:  # what it made is sent meanwhile
                    if before.op in (Op.B, Op.I):
                        entering[place[before.stage]] += 1
                _arriving(computes[number : number + AHEAD], place, entering, returning)
                found.append((*kept, *backward, *entering, *returning, *noted))
        for stage, change in changes:
            kept[place[stage]] += change
        if compute is not None and compute.op in (Op.I, Op.W):
            noted[place[compute.stage]] += 1 if compute.op is Op.I else -1
        if compute is not None and compute.op in (Op.F, Op.R, Op.I):
            found.append((*kept, *([0] * 3 * len(stages)), *noted))
    return Held.of(*np.split(np.array(found, dtype=np.intp).reshape(len(found), -1), 5, axis=1))


def _arriving(computes: Iterable[Compute], place: dict[int, int], entering: list[int], returning: list[int]) -> None:
    for compute in computes:
        if compute.op is Op.F:
            entering[place[compute.stage]] += 1
        elif compute.op in (Op.B, Op.I):
            returning[place[compute.stage]] += 1
