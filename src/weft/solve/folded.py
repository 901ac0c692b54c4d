"""A `Pricer` that prices repeated layers once. In: what a pricer takes. Out: the same prices, in the time that a few layers take.

Operators of equal layers cost the same, so they are priced on the graph in which each kind stands once (`model/fold`). A stage of
many equal layers is priced with two and with three of them: what one more adds is what every further one adds. Stages of few
layers, graphs that do not fold and shardings that treat equal layers differently are priced as they are.
Not modelled: costs that are not linear in the number of equal layers of a stage (collectives of few small gradient buckets).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from weft.cost.compute import Seconds
from weft.cost.step import Pricer
from weft.model.fold import Fold
from weft.model.sharding import Sharding
from weft.model.stages import Cut, Stage
from weft.plan.layout import Layout

WORTH = 200  # operators left out from which folding is worth its overhead
LEAST = 5  # equal layers of a stage that are worth pricing once
T = TypeVar("T")


class _Small(Pricer):
    """The pricer of the small graph; its shardings are the whole's, as far as they go."""

    given: dict[tuple[bool, int, str], Sharding | None]

    def sharding(self, layout: Layout) -> Sharding | None:
        return self.given[layout.data > 1, layout.tensor, layout.sequence_parallel]


@dataclass
class FoldedPricer(Pricer):
    """As `Pricer`; `operators` and `stages` give the same numbers sooner."""

    _joined: dict[int, bool] = field(default_factory=dict)
    _lists: dict[tuple[object, ...], tuple[list[Seconds], list[Seconds]]] = field(default_factory=dict)
    _arrays: dict[tuple[object, ...], NDArray[np.float64]] = field(default_factory=dict)
    _reduced: dict[int, tuple[Stage, Stage | None, Stage | None, int, tuple[object, ...]]] = field(default_factory=dict)
    _kinds: dict[tuple[object, ...], Any] = field(default_factory=dict)

    @cached_property
    def fold(self) -> Fold | None:
        found = self.graph.fold
        return found if found is not None and len(found.index) - len(found.small.operators) >= WORTH else None

    @cached_property
    def small(self) -> _Small:
        assert self.fold is not None
        found = _Small(self.fold.small, self.cluster, self.batch_size, self.optimizer_states, None)
        found.given = {}
        return found

    def operators(self, layout: Layout) -> tuple[list[Seconds], list[Seconds]]:
        key = _operators_key(layout)
        if key not in self._lists:
            if self.fold is None or not self._folds(layout):
                self._lists[key] = super().operators(layout)
            else:
                compute, collectives = self.small.operators(layout)
                self._lists[key] = [compute[i] for i in self.fold.index], [collectives[i] for i in self.fold.index]
        return self._lists[key]

    def seconds(self, layout: Layout) -> NDArray[np.float64]:
        """Seconds of every operator for one microbatch, rows forward and backward: compute and collectives, shape [2, operators]."""
        key = _operators_key(layout)
        if key not in self._arrays:
            folds = self.fold is not None and self._folds(layout)
            compute, collectives = self.small.operators(layout) if folds else self.operators(layout)
            rows = np.array(
                [
                    [a.forward + b.forward for a, b in zip(compute, collectives, strict=True)],
                    [a.backward + b.backward for a, b in zip(compute, collectives, strict=True)],
                ]
            )
            self._arrays[key] = rows[:, self._index] if folds else rows
        return self._arrays[key]

    @cached_property
    def _index(self) -> NDArray[np.int64]:
        assert self.fold is not None
        return np.asarray(self.fold.index)

    def _folds(self, layout: Layout) -> bool:
        """Whether equal layers are cut alike, so that the small graph's prices are the whole's; makes the small pricer's sharding."""
        assert self.fold is not None
        key = (layout.data > 1, layout.tensor, layout.sequence_parallel)
        whole = self.sharding(layout)
        if key in self.small.given:
            return self._joined[id(whole)]
        if whole is None:
            self.small.given[key] = None
            self._joined[id(whole)] = True
            return True
        operator, value = self.fold.operator, self.fold.value
        alike = all(
            whole.ops[name] == whole.ops[other] and whole.needs[name] == whole.needs[other] for name, other in operator.items()
        ) and all(whole.forms[u] == whole.forms[v] for u, v in value.items())
        names = {op.name for op in self.fold.small.operators}
        per_operator: dict[str, int] = {}
        for move in whole.moves:
            per_operator[move.op] = per_operator.get(move.op, 0) + 1
        alike = alike and all(per_operator.get(name, 0) == per_operator.get(other, 0) for name, other in operator.items())
        moves = tuple(replace(move, value=value[move.value]) for move in whole.moves if move.op in names)
        self.small.given[key] = replace(whole, moves=moves)
        self._joined[id(whole)] = alike
        return alike

    def _base(self, layout: Layout, stage: Stage) -> Any:
        short, shorter, more, key = self._reduce(stage)
        if shorter is None or not self._folds(layout):
            return super()._base(layout, stage)
        full = (*_base_key(layout), key)
        if full not in self._kinds:
            three, two = super()._base(layout, short), super()._base(layout, shorter)
            self._kinds[full] = extrapolate(two, three, more)
        return self._kinds[full]

    def _reduce(self, stage: Stage) -> tuple[Stage, Stage | None, int, tuple[object, ...]]:
        """(the stage with three equal layers, with two, layers left out of the first, what tells it from other stages)."""
        found = self._reduced.get(id(stage))
        if found is not None:
            return cast(Stage, found[1]), found[2], found[3], found[4]
        whole: tuple[Stage, Stage | None, int, tuple[object, ...]] = (stage, None, 0, ())
        if self.fold is not None:
            numbers = [self._place[op.name] for op in stage.operators]
            present = set(numbers)
            for run in self.fold.runs:
                copies = [
                    c
                    for c in range(run.count)
                    if run.start + c * run.period in present and run.start + (c + 1) * run.period - 1 in present
                ]
                if len(copies) >= LEAST and copies[-1] - copies[0] == len(copies) - 1:
                    inner = range(run.start + (copies[0] + 2) * run.period, run.start + copies[-1] * run.period)
                    second = range(run.start + (copies[0] + 1) * run.period, inner.stop)
                    key = (tuple(self.fold.index[i] for i in numbers if i not in inner), len(copies), self._entering(stage))
                    whole = self._without(stage, inner), self._without(stage, second), len(copies) - 3, key
                    break
        self._reduced[id(stage)] = (stage, *whole)
        return whole

    def _entering(self, stage: Stage) -> tuple[float, ...]:
        return tuple(float(self.graph.tensors[v].size_bytes) for _, values in stage.receives for v in values)

    def _without(self, stage: Stage, left_out: range) -> Stage:
        operators = tuple(op for op in stage.operators if self._place[op.name] not in left_out)
        read = {value for op in operators for value in op.inputs}
        before = {value for op in stage.operators for value in op.inputs}
        return replace(stage, operators=operators, variables=tuple(v for v in stage.variables if v in read or v not in before))

    @cached_property
    def _place(self) -> dict[str, int]:
        return {op.name: i for i, op in enumerate(self.graph.operators)}


def extrapolate(two: T, three: T, more: int) -> T:
    """A record of numbers, `more` equal steps beyond `three`, as `three` is one beyond `two`.

    >>> extrapolate((1.0, 5.0), (2.0, 5.0), 3)
    (5.0, 5.0)
    """
    if isinstance(three, int | float):
        return cast(T, three + more * (three - cast(float, two)))
    if isinstance(three, tuple):
        return cast(T, tuple(extrapolate(a, b, more) for a, b in zip(cast(tuple[Any, ...], two), three, strict=True)))
    if isinstance(three, Mapping):
        return cast(T, {key: extrapolate(cast(Mapping[Any, Any], two).get(key, 0.0), b, more) for key, b in three.items()})
    if is_dataclass(three) and not isinstance(three, type):
        return cast(T, replace(three, **{f.name: extrapolate(getattr(two, f.name), getattr(three, f.name), more) for f in fields(three)}))
    return three


def unit_seconds(pricer: FoldedPricer, layout: Layout, tried: Sequence[Cut]) -> NDArray[np.float64]:
    """Seconds of one microbatch, rows forward and backward, of the operators between the cuts `tried`."""
    rows = np.concatenate([np.zeros((2, 1)), np.cumsum(pricer.seconds(layout), axis=1)], axis=1)
    ends = np.array([0, *(cut.index for cut in tried), rows.shape[1] - 1])
    return cast("NDArray[np.float64]", np.diff(rows[:, ends], axis=1))


def _operators_key(layout: Layout) -> tuple[object, ...]:
    """What an operator's seconds depend on."""
    return (
        layout.data, layout.tensor, layout.num_ranks, layout.threads, layout.microbatches, layout.precision, layout.sequence_parallel,
        layout.expert,
    )  # fmt: skip


def _base_key(layout: Layout) -> tuple[object, ...]:
    return (*_operators_key(layout), layout.pipeline)
