"""Analyse a pipeline schedule: which stages each rank has, and how many microbatches it has in flight, and when.

In: the actions of its ranks in order, written or generated. Out: `Schedule`. Peak memory depends on the sizes of what stages save, so
`Schedule.live_microbatches` returns every moment that may be the peak: a rank with a large and a small stage peaks when it saves most
of the large. Not modelled: times, on which none of it depends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.plan.action import AHEAD, Action, Compute, Manage, ManageOp, Op
from weft.plan.program import KEPT, Program, effects

Numbers = NDArray[np.intp]
Rows = Sequence[Sequence[Action]]  # [rank] -> its actions in order

_MOVES = {ManageOp.OFFLOAD: "O", ManageOp.LOAD: "L", ManageOp.DROP: "D"}  # actions on saved tensors, as one letter
_ONE_STAGE = Program("one stage", 1, ({},), ((),), ({},))


def _kept(action: Action) -> int:
    """Return by how much an action changes the number of microbatches that a rank saves."""
    e = effects(action, _ONE_STAGE)
    return sum(v.name in KEPT for v in e.writes) - sum(v.name in KEPT for v in e.frees)


def _by_letter(numbers: dict[str, int]) -> Numbers:
    by_letter = np.zeros(128, dtype=np.intp)
    for letter, number in numbers.items():
        by_letter[ord(letter)] = number
    return by_letter


_KEEPS = _by_letter({op: _kept(Compute(op, 0, 0)) for op in Op} | {word: _kept(Manage(op, 0, 0)) for op, word in _MOVES.items()})
_NOTES = _by_letter({Op.I: 1, Op.W: -1})
_COMPUTES, _FORWARDS, _BACKWARDS = (_by_letter(dict.fromkeys(ops, 1)) for ops in (Op, (Op.F,), (Op.B, Op.I)))
# Actions that add saved tensors, and those that have a moment of their own: an action followed by one of the latter is no maximum.
_FILLS, _FOLLOWED = (_by_letter(dict.fromkeys(ops, 1)) for ops in ((Op.F, Op.R, Op.I, "L"), (Op.F, Op.R, Op.B, Op.I, "L")))


@dataclass(frozen=True, slots=True)
class Held:
    """[moment, stage of the rank in the order of `Schedule.stages_of`]: numbers of microbatches that are `in_flight`, in `backward` (one or
    none), whose stage input or its gradient is in transfer (`inputs_in_transfer`), whose output gradient is (`gradients_in_transfer`), and
    that await only their weight gradients (`awaiting_weight_gradient`)."""

    in_flight: Numbers
    backward: Numbers
    entering: Numbers
    returning: Numbers
    noted: Numbers

    @classmethod
    def of(cls, moments: Sequence[Numbers]) -> Held:
        """Return the distinct moments; `moments` has the columns of the five fields one after another."""
        stacked = np.concatenate(moments).astype(">u4")  # its bytes sort as its numbers do
        width, raw = stacked.shape[1] * stacked.itemsize, stacked.tobytes()
        distinct = b"".join(sorted({raw[start : start + width] for start in range(0, len(raw), width)}))
        return cls(*np.split(np.frombuffer(distinct, ">u4").reshape(-1, stacked.shape[1]).astype(np.intp), 5, axis=1))


@dataclass(frozen=True, slots=True)
class Order:
    """The actions of one rank on microbatches, in order: each action's letter, and the index of its stage among the rank's stages."""

    letters: NDArray[np.uint8]
    places: NDArray[np.uint16]

    @classmethod
    def of(cls, row: Sequence[Action], stages: Sequence[int]) -> Order:
        if all(type(action) is Compute for action in row):
            ops, numbers, _ = zip(*row, strict=True)
        else:
            used = [a for a in row if isinstance(a, Compute) or (isinstance(a, Manage) and a.op in _MOVES)]
            ops, numbers = [a.op if isinstance(a, Compute) else _MOVES[a.op] for a in used], [a.stage for a in used]
        return cls(np.frombuffer("".join(ops).encode(), np.uint8), np.searchsorted(stages, numbers).astype(np.uint16))

    def kept(self, num_stages: int) -> Numbers:
        """Return [action, stage] -> number of microbatches saved after it."""
        return np.cumsum(_each(self.places, num_stages) * _KEEPS[self.letters][:, None], axis=0)

    def held(self, num_stages: int) -> Held:
        """Return the state before every backward, and after every local maximum of saved memory."""
        one_hot = _each(np.arange(num_stages + 1), num_stages)  # with a row of zeros for positions behind the last
        in_flight, noted = self.kept(num_stages), np.cumsum(one_hot[self.places] * _NOTES[self.letters][:, None], axis=0)
        nothing = np.zeros((1, num_stages), dtype=np.intp)
        computes = np.flatnonzero(_COMPUTES[self.letters])
        places = np.concatenate((self.places[computes], [num_stages] * AHEAD))
        letters = np.concatenate((self.letters[computes], [0] * AHEAD))
        forwards, backwards = one_hot[places] * _FORWARDS[letters][:, None], one_hot[places] * _BACKWARDS[letters][:, None]
        at = np.flatnonzero(_BACKWARDS[letters])
        entering = np.concatenate((nothing, backwards))[at] + sum(forwards[at + ahead] for ahead in range(1, AHEAD + 1))
        returning = sum(backwards[at + ahead] for ahead in range(1, AHEAD + 1))
        before = computes[at]
        in_flight_before, noted_before = (np.concatenate((nothing, counts))[before] for counts in (in_flight, noted))
        followed = np.concatenate((_FOLLOWED[self.letters[1:]], [0]))
        after = np.flatnonzero(_FILLS[self.letters] * (1 - followed))
        during_backward = np.concatenate((in_flight_before, backwards[at], entering, returning, noted_before), axis=1)
        at_maxima = np.concatenate((in_flight[after], np.zeros((len(after), 3 * num_stages), dtype=np.intp), noted[after]), axis=1)
        return Held.of((during_backward, at_maxima))


def _each(places: NDArray[np.integer[Any]], num_stages: int) -> Numbers:
    """Return [place, stage] -> 1 at its own stage, else 0."""
    columns: Numbers = (places[:, None] == np.arange(num_stages)).astype(np.intp)
    return columns


@dataclass(frozen=True, eq=False)
class Schedule:
    """A pipeline schedule for given numbers of stages and microbatches.

    `generate_rows`: the actions of its ranks, for a number of microbatches. `pattern_microbatches`: the smallest such number with the same
    assignment of stages to ranks, so that facts independent of the number are derived from few microbatches.

    >>> from weft.plan.layout import Layout
    >>> from weft.schedules import schedule_of
    >>> both = schedule_of(Layout(pipeline=3, microbatches=8, schedule="chimera"))
    >>> both.stages_of, both.ranks_of, both.shares[0], both.splits_backward
    (((0, 2), (1,), (0, 2)), ((0, 2), (1,), (2, 0)), {0: 0.5, 2: 0.5}, False)
    """

    rows: Callable[[int], Rows]
    num_stages: int
    num_microbatches: int
    least: int
    _flying: dict[int, float] = field(default_factory=dict)
    _held: dict[int, Held] = field(default_factory=dict)

    @cached_property
    def _few(self) -> tuple[tuple[Compute, ...], ...]:
        """[rank] -> its computes, for the fewest microbatches that show the pattern."""
        return tuple(tuple(a for a in row if isinstance(a, Compute)) for row in self.rows(self.least))

    @cached_property
    def orders(self) -> tuple[Order, ...]:
        """[rank] -> its order, for all microbatches."""
        return tuple(Order.of(row, stages) for row, stages in zip(self.rows(self.num_microbatches), self.stages_of, strict=True))

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """[rank] -> the stages that it computes, in order."""
        return tuple(tuple(sorted({a.stage for a in row})) for row in self._few)

    @cached_property
    def _first(self) -> tuple[dict[int, int], ...]:
        """[stage] -> rank -> its first microbatch there."""
        first: list[dict[int, int]] = [{} for _ in range(self.num_stages)]
        for rank, row in enumerate(self._few):
            for a in row:
                if a.op is Op.F:
                    first[a.stage][rank] = min(a.microbatch, first[a.stage].get(rank, a.microbatch))
        return tuple(first)

    @cached_property
    def ranks_of(self) -> tuple[tuple[int, ...], ...]:
        """[stage] -> the ranks that compute it, that of the first microbatch first: these form one pipeline."""
        return tuple(tuple(sorted(first, key=lambda rank: first[rank])) for first in self._first)

    @cached_property
    def shares(self) -> tuple[dict[int, float], ...]:
        """[rank] -> stage -> the share of microbatches that it computes there: less than 1 if other ranks have the stage too."""
        forwards = [[a.stage for a in row if a.op is Op.F] for row in self._few]
        return tuple({s: row.count(s) / self.least for s in stages} for row, stages in zip(forwards, self.stages_of, strict=True))

    @cached_property
    def has_replicas(self) -> bool:
        """True if a stage is on several ranks, each microbatch of it on one."""
        return any(len(ranks) > 1 for ranks in self.ranks_of)

    @cached_property
    def splits_backward(self) -> bool:
        """True if weight gradients are computed separately, after input gradients."""
        return any(a.op is Op.I for row in self._few for a in row)

    @cached_property
    def waits_to_fill(self) -> bool:
        """True if ranks idle while the pipeline fills and drains: one stage each, and backwards in one part."""
        return not self.splits_backward and all(len(stages) == 1 for stages in self.stages_of)

    @cached_property
    def manages(self) -> bool:
        """True if the schedule itself contains offloads or recomputes."""
        return any((order.letters == ord(_MOVES[op])).any() for order in self.orders for op in (ManageOp.OFFLOAD, ManageOp.DROP))

    @cached_property
    def fewest(self) -> int:
        """Smallest number of microbatches with which every rank still computes each of its stages."""
        return 1 + max(first for by_rank in self._first for first in by_rank.values())

    @cached_property
    def ends(self) -> tuple[tuple[int, int | None], ...]:
        """[rank] -> the stage of its first compute, and that of its last if it sends a gradient."""
        return tuple((row[0].stage, row[-1].stage if row[-1].op in (Op.B, Op.I) else None) for row in self._few)

    def in_flight(self, stage: int) -> float:
        """Return the most microbatches of a stage that a rank saves; the mean over its stages if the rank saves several at once.

        >>> from weft.plan.layout import Layout
        >>> from weft.schedules import schedule_of
        >>> [schedule_of(Layout(pipeline=4, microbatches=8, schedule=name)).in_flight(1) for name in ("1f1b", "gpipe", "zb-h2")]
        [3.0, 8.0, 7.0]
        >>> schedule_of(Layout(pipeline=4, microbatches=8, schedule="interleaved", chunks=2)).in_flight(0)
        5.5
        """
        if stage not in self._flying:
            self._flying[stage] = max(self._most(rank, stage) for rank in self.ranks_of[stage])
        return self._flying[stage]

    def _most(self, rank: int, stage: int) -> float:
        stages = self.stages_of[rank]
        in_flight = self.orders[rank].kept(len(stages))
        if (np.count_nonzero(in_flight, axis=1) > 1).any():
            return float(in_flight.sum(axis=1).max()) / len(stages)
        return float(in_flight[:, stages.index(stage)].max())

    def held(self, rank: int) -> Held:
        """Return what a rank holds at its possible peaks; with GEMS one stage's microbatches at a time (Jain et al. 2020, section IV).

        >>> from weft.plan.layout import Layout
        >>> from weft.schedules import schedule_of
        >>> schedule_of(Layout(pipeline=2, microbatches=2, schedule="gems-mast")).held(0).in_flight.tolist()
        [[0, 1], [1, 0]]
        """
        if rank not in self._held:
            self._held[rank] = self.orders[rank].held(len(self.stages_of[rank]))
        return self._held[rank]
