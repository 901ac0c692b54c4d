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

from shardwise.plan.ir.action import RECEIVE_LOOKAHEAD, Action, Compute, ComputeOp, Manage, ManageOp
from shardwise.plan.ir.program import SAVED_VALUES, Program, effects_of

Numbers = NDArray[np.intp]
Rows = Sequence[Sequence[Action]]  # [rank] -> its actions in order

_MEMORY_LETTERS = {ManageOp.OFFLOAD: "O", ManageOp.LOAD: "L", ManageOp.DROP: "D"}  # actions on saved tensors, as one letter
_ONE_STAGE = Program("one stage", 1, ({},), ((),), ({},))


def _saved_change(action: Action) -> int:
    """Return by how much an action changes the number of microbatches that a rank saves."""
    e = effects_of(action, _ONE_STAGE)
    return sum(v.name in SAVED_VALUES for v in e.writes) - sum(v.name in SAVED_VALUES for v in e.frees)


def _letter_table(numbers: dict[str, int]) -> Numbers:
    by_letter = np.zeros(128, dtype=np.intp)
    for letter, number in numbers.items():
        by_letter[ord(letter)] = number
    return by_letter


_SAVED_CHANGES = _letter_table(
    {op: _saved_change(Compute(op, 0, 0)) for op in ComputeOp}
    | {word: _saved_change(Manage(op, 0, 0)) for op, word in _MEMORY_LETTERS.items()}
)
_PENDING_WEIGHT_CHANGES = _letter_table({ComputeOp.I: 1, ComputeOp.W: -1})
_COMPUTES_WEIGHT_GRADIENTS = _letter_table(dict.fromkeys((ComputeOp.B, ComputeOp.W), 1))
NO_GRADIENTS, FIRST_GRADIENTS, ALL_GRADIENTS = range(3)
_COMPUTES, _FORWARDS, _BACKWARDS = (_letter_table(dict.fromkeys(ops, 1)) for ops in (ComputeOp, (ComputeOp.F,), (ComputeOp.B, ComputeOp.I)))
# Actions that add saved tensors, and those that have a moment of their own: an action followed by one of the latter is no maximum.
_FILLS, _FOLLOWED = (
    _letter_table(dict.fromkeys(ops, 1))
    for ops in ((ComputeOp.F, ComputeOp.R, ComputeOp.I, "L"), (ComputeOp.F, ComputeOp.R, ComputeOp.B, ComputeOp.I, "L"))
)


@dataclass(frozen=True, slots=True)
class LiveMicrobatches:
    """[moment, stage of the rank in the order of `Schedule.stages_of`]: numbers of microbatches that are `in_flight`, in `backward` (one or
    none), whose stage input or its gradient is in transfer (`inputs_in_transfer`), whose output gradient is (`gradients_in_transfer`), and
    that await only their weight gradients (`awaiting_weight_gradient`). `weight_gradients`: NO_GRADIENTS, FIRST_GRADIENTS while the step's
    first are computed, ALL_GRADIENTS."""

    in_flight: Numbers
    backward: Numbers
    inputs_in_transfer: Numbers
    gradients_in_transfer: Numbers
    awaiting_weight_gradient: Numbers
    weight_gradients: Numbers

    @classmethod
    def from_moments(cls, moments: Sequence[Numbers]) -> LiveMicrobatches:
        """Return the distinct moments; `moments` has the columns of the six fields one after another."""
        stacked = np.concatenate(moments).astype(">u4")  # its bytes sort as its numbers do
        width, raw = stacked.shape[1] * stacked.itemsize, stacked.tobytes()
        distinct = b"".join(sorted({raw[start : start + width] for start in range(0, len(raw), width)}))
        return cls(*np.split(np.frombuffer(distinct, ">u4").reshape(-1, stacked.shape[1]).astype(np.intp), 6, axis=1))


@dataclass(frozen=True, slots=True)
class RankOrder:
    """The actions of one rank on microbatches, in order: each action's letter, and the index of its stage among the rank's stages."""

    letters: NDArray[np.uint8]
    stage_indices: NDArray[np.uint16]

    @classmethod
    def from_actions(cls, row: Sequence[Action], stages: Sequence[int]) -> RankOrder:
        if all(type(action) is Compute for action in row):
            ops, numbers, _ = zip(*row, strict=True)
        else:
            used = [a for a in row if isinstance(a, Compute) or (isinstance(a, Manage) and a.op in _MEMORY_LETTERS)]
            ops, numbers = [a.op if isinstance(a, Compute) else _MEMORY_LETTERS[a.op] for a in used], [a.stage for a in used]
        return cls(np.frombuffer("".join(ops).encode(), np.uint8), np.searchsorted(stages, numbers).astype(np.uint16))

    def num_saved(self, num_stages: int) -> Numbers:
        """Return [action, stage] -> number of microbatches saved after it."""
        return np.cumsum(_one_hot(self.stage_indices, num_stages) * _SAVED_CHANGES[self.letters][:, None], axis=0)

    def live_microbatches(self, num_stages: int) -> LiveMicrobatches:
        """Return the state before every backward, after every local maximum of saved memory, and after first weight gradients."""
        one_hot = _one_hot(np.arange(num_stages + 1), num_stages)  # with a row of zeros for positions behind the last
        in_flight, noted = (
            self.num_saved(num_stages),
            np.cumsum(one_hot[self.stage_indices] * _PENDING_WEIGHT_CHANGES[self.letters][:, None], axis=0),
        )
        nothing = np.zeros((1, num_stages), dtype=np.intp)
        computes = np.flatnonzero(_COMPUTES[self.letters])
        places = np.concatenate((self.stage_indices[computes], [num_stages] * RECEIVE_LOOKAHEAD))
        letters = np.concatenate((self.letters[computes], [0] * RECEIVE_LOOKAHEAD))
        forwards, backwards = one_hot[places] * _FORWARDS[letters][:, None], one_hot[places] * _BACKWARDS[letters][:, None]
        at = np.flatnonzero(_BACKWARDS[letters])
        entering = np.concatenate((nothing, backwards))[at] + sum(forwards[at + ahead] for ahead in range(1, RECEIVE_LOOKAHEAD + 1))
        returning = sum(backwards[at + ahead] for ahead in range(1, RECEIVE_LOOKAHEAD + 1))
        before = computes[at]
        in_flight_before, noted_before = (np.concatenate((nothing, counts))[before] for counts in (in_flight, noted))
        followed = np.concatenate((_FOLLOWED[self.letters[1:]], [0]))
        after = np.flatnonzero(_FILLS[self.letters] * (1 - followed))
        completed = np.cumsum(one_hot[self.stage_indices] * _COMPUTES_WEIGHT_GRADIENTS[self.letters][:, None], axis=0) > 0
        completed_before = np.concatenate((nothing > 0, completed))[before]
        first = FIRST_GRADIENTS * backwards[at] * _COMPUTES_WEIGHT_GRADIENTS[letters[at]][:, None]
        gradients = np.where(completed_before, ALL_GRADIENTS, first)
        firsts = completed.argmax(axis=0)[completed.any(axis=0)] if len(completed) else after[:0]
        after = np.union1d(after, firsts)
        during_backward = np.concatenate((in_flight_before, backwards[at], entering, returning, noted_before, gradients), axis=1)
        nothing_else, gradients_after = np.zeros((len(after), 3 * num_stages), dtype=np.intp), ALL_GRADIENTS * completed[after]
        at_maxima = np.concatenate((in_flight[after], nothing_else, noted[after], gradients_after), axis=1)
        return LiveMicrobatches.from_moments((during_backward, at_maxima))


def _one_hot(places: NDArray[np.integer[Any]], num_stages: int) -> Numbers:
    """Return [place, stage] -> 1 at its own stage, else 0."""
    columns: Numbers = (places[:, None] == np.arange(num_stages)).astype(np.intp)
    return columns


@dataclass(frozen=True, eq=False)
class Schedule:
    """A pipeline schedule for given numbers of stages and microbatches.

    `generate_rows`: the actions of its ranks, for a number of microbatches. `pattern_microbatches`: the smallest such number with the same
    assignment of stages to ranks, so that facts independent of the number are derived from few microbatches.

    >>> from shardwise.plan.layout import Layout
    >>> from shardwise.schedules import schedule_of
    >>> both = schedule_of(Layout(pipeline=3, microbatches=8, schedule="chimera"))
    >>> both.stages_of, both.ranks_of, both.shares[0], both.splits_backward
    (((0, 2), (1,), (0, 2)), ((0, 2), (1,), (2, 0)), {0: 0.5, 2: 0.5}, False)
    """

    generate_rows: Callable[[int], Rows]
    num_stages: int
    num_microbatches: int
    pattern_microbatches: int
    _in_flight: dict[int, float] = field(default_factory=dict)
    _live: dict[int, LiveMicrobatches] = field(default_factory=dict)

    @cached_property
    def _pattern_computes(self) -> tuple[tuple[Compute, ...], ...]:
        """[rank] -> its computes, for the fewest microbatches that show the pattern."""
        return tuple(tuple(a for a in row if isinstance(a, Compute)) for row in self.generate_rows(self.pattern_microbatches))

    @cached_property
    def orders(self) -> tuple[RankOrder, ...]:
        """[rank] -> its order, for all microbatches."""
        return tuple(
            RankOrder.from_actions(row, stages)
            for row, stages in zip(self.generate_rows(self.num_microbatches), self.stages_of, strict=True)
        )

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """[rank] -> the stages that it computes, in order."""
        return tuple(tuple(sorted({a.stage for a in row})) for row in self._pattern_computes)

    @cached_property
    def _first_microbatch(self) -> tuple[dict[int, int], ...]:
        """[stage] -> rank -> its first microbatch there."""
        first: list[dict[int, int]] = [{} for _ in range(self.num_stages)]
        for rank, row in enumerate(self._pattern_computes):
            for a in row:
                if a.op is ComputeOp.F:
                    first[a.stage][rank] = min(a.microbatch, first[a.stage].get(rank, a.microbatch))
        return tuple(first)

    @cached_property
    def ranks_of(self) -> tuple[tuple[int, ...], ...]:
        """[stage] -> the ranks that compute it, that of the first microbatch first: these form one pipeline."""
        return tuple(tuple(sorted(first, key=lambda rank: first[rank])) for first in self._first_microbatch)

    @cached_property
    def shares(self) -> tuple[dict[int, float], ...]:
        """[rank] -> stage -> the share of microbatches that it computes there: less than 1 if other ranks have the stage too."""
        forwards = [[a.stage for a in row if a.op is ComputeOp.F] for row in self._pattern_computes]
        return tuple(
            {s: row.count(s) / self.pattern_microbatches for s in stages} for row, stages in zip(forwards, self.stages_of, strict=True)
        )

    @cached_property
    def has_replicas(self) -> bool:
        """True if a stage is on several ranks, each microbatch of it on one."""
        return any(len(ranks) > 1 for ranks in self.ranks_of)

    @cached_property
    def splits_backward(self) -> bool:
        """True if weight gradients are computed separately, after input gradients."""
        return any(a.op is ComputeOp.I for row in self._pattern_computes for a in row)

    @cached_property
    def has_fill_drain_bubble(self) -> bool:
        """True if ranks idle while the pipeline fills and drains: one stage each, and backwards in one part."""
        return not self.splits_backward and all(len(stages) == 1 for stages in self.stages_of)

    @cached_property
    def manages_memory(self) -> bool:
        """True if the schedule itself contains offloads or recomputes."""
        return any((order.letters == ord(_MEMORY_LETTERS[op])).any() for order in self.orders for op in (ManageOp.OFFLOAD, ManageOp.DROP))

    @cached_property
    def min_microbatches(self) -> int:
        """Smallest number of microbatches with which every rank still computes each of its stages."""
        return 1 + max(first for by_rank in self._first_microbatch for first in by_rank.values())

    @cached_property
    def first_and_last_stages(self) -> tuple[tuple[int, int | None], ...]:
        """[rank] -> the stage of its first compute, and that of its last if it sends a gradient."""
        return tuple((row[0].stage, row[-1].stage if row[-1].op in (ComputeOp.B, ComputeOp.I) else None) for row in self._pattern_computes)

    def in_flight(self, stage: int) -> float:
        """Return the most microbatches of a stage that a rank saves; the mean over its stages if the rank saves several at once.

        >>> from shardwise.plan.layout import Layout
        >>> from shardwise.schedules import schedule_of
        >>> [schedule_of(Layout(pipeline=4, microbatches=8, schedule=name)).in_flight(1) for name in ("1f1b", "gpipe", "zb-h2")]
        [3.0, 8.0, 7.0]
        >>> schedule_of(Layout(pipeline=4, microbatches=8, schedule="interleaved", chunks=2)).in_flight(0)
        5.5
        """
        if stage not in self._in_flight:
            self._in_flight[stage] = max(self._max_in_flight(rank, stage) for rank in self.ranks_of[stage])
        return self._in_flight[stage]

    def _max_in_flight(self, rank: int, stage: int) -> float:
        stages = self.stages_of[rank]
        in_flight = self.orders[rank].num_saved(len(stages))
        if (np.count_nonzero(in_flight, axis=1) > 1).any():
            return float(in_flight.sum(axis=1).max()) / len(stages)
        return float(in_flight[:, stages.index(stage)].max())

    def live_microbatches(self, rank: int) -> LiveMicrobatches:
        """Return what a rank holds at its possible peaks; with GEMS one stage's microbatches at a time (Jain et al. 2020, section IV).

        >>> from shardwise.plan.layout import Layout
        >>> from shardwise.schedules import schedule_of
        >>> schedule_of(Layout(pipeline=2, microbatches=2, schedule="gems-mast")).live_microbatches(0).in_flight.tolist()
        [[0, 1], [1, 0]]
        """
        if rank not in self._live:
            self._live[rank] = self.orders[rank].live_microbatches(len(self.stages_of[rank]))
        return self._live[rank]
