"""What a stage's runs of layers hold for a moment: what an operator's backward works on and, with ZeRO, whole gradients and weights.

In: operators with the bytes that each works on and keeps, and the parameters that each reads. Out: the most that is there at once. A run
is what stands in one numbered block, or between two: `run.residency.layers` cuts stages so, and `run.state.parameters` keeps buckets of
scattered gradients within one. Backward goes from the last operator to the first. While it is at one, what those behind it kept is gone;
the run's bucket fills, the bucket before is scattered and this rank's piece of it arrives, and when it is full its own
(`run.reduce.scattered`); in stage 3 the run's weights are whole, and those of the run that comes next are on their way; a run into which
no gradient goes further (look-ups) keeps its own until backward is over (`run.residency.gathered`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.model.graph import Operator
from weft.plan.plan import BUCKET_BYTES

_BUCKET = BUCKET_BYTES / 4  # elements


class Amount(NamedTuple):
    """Bytes that follow the batch and are shared by the data replicas, that follow it only, and that do neither. Added up a million times
    in a search, hence a tuple."""

    shared: float = 0.0
    batched: float = 0.0
    fixed: float = 0.0

    def at(self, scale: float, data: int) -> float:
        """For a microbatch of `scale` times the graph's batch over `data` replicas."""
        return (self.shared / data + self.batched) * scale + self.fixed

    def __add__(self, other: Amount) -> Amount:  # type: ignore[override]
        return Amount(self[0] + other[0], self[1] + other[1], self[2] + other[2])


NO_BYTES = Amount()


@dataclass(frozen=True)
class Amounts:
    """Many `Amount`s, as columns."""

    shared: NDArray[np.float64]
    batched: NDArray[np.float64]
    fixed: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Sequence[Amount]) -> Amounts:
        return cls(*np.fromiter(chain.from_iterable(rows), float, 3 * len(rows)).reshape(-1, 3).T.copy())

    def of_some(self, rows: NDArray[np.intp]) -> Amounts:
        """Some of them."""
        return Amounts(self.shared[rows], self.batched[rows], self.fixed[rows])

    def at(self, scale: float, data: int) -> NDArray[np.float64]:
        """As `Amount.at`."""
        return (self.shared / data + self.batched) * scale + self.fixed


def behind(amounts: NDArray[np.float64]) -> NDArray[np.float64]:
    """By operator: what those behind it keep, by what each does; its backward does not find that.

    >>> behind(np.array([1.0, 2.0, 4.0])).tolist()
    [6.0, 4.0, 0.0]
    """
    return np.concatenate((np.cumsum(amounts[:0:-1])[::-1], [0.0]))


def starts_of(blocks: Sequence[str]) -> list[int]:
    """Where runs begin, by the block of every operator.

    >>> starts_of(["", "h.0", "h.0", "h.1", ""])
    [0, 1, 3, 4]
    """
    return [i for i, name in enumerate(blocks) if i == 0 or name != blocks[i - 1]]


@dataclass(frozen=True)
class Runs:
    """By run, in order: where it begins among the stage's operators, the trainable parameters that it reads, those of its largest buckets,
    those of the largest that is scattered while it goes backward, and those that runs behind it have not let go of."""

    starts: tuple[int, ...]
    parameters: NDArray[np.float64]
    filled: NDArray[np.float64]
    scattered: NDArray[np.float64]
    before: NDArray[np.float64]  # of `scattered`, what the runs behind it left
    staying: NDArray[np.float64]
    missing: NDArray[np.float64]  # by operator: trainable parameters that only those before it read, which have no gradient yet

    @classmethod
    def of(
        cls,
        operators: Sequence[Operator],
        starts: Sequence[int],
        trained: Mapping[str, float],
        experts: frozenset[str],
        learns: Set[str],
        spread: float,
    ) -> Runs:
        """`trained`: the elements that a tensor rank has of each trainable parameter; of
        `experts` it has one part in `spread`. `learns`: values that have a gradient."""
        readers: dict[str, list[int]] = {}
        for run, (first, last) in enumerate(zip(starts, [*starts[1:], len(operators)], strict=True)):
            for value in dict.fromkeys(v for op in operators[first:last] for v in op.inputs if v in trained):
                readers.setdefault(value, []).append(run)
        ends = [0.0] * len(operators)
        for value, last in {v: i for i, op in enumerate(operators) for v in op.inputs if v in trained}.items():
            ends[last] += trained[value] / (spread if value in experts else 1)
        missing = np.cumsum([0.0, *ends])[:-1]
        together: dict[tuple[int, ...], list[float]] = {}  # sizes of those that the same runs read: buckets hold no others
        for value, those in readers.items():
            together.setdefault(tuple(those), []).append(trained[value] / (spread if value in experts else 1))
        parameters, filled = [0.0] * len(starts), [0.0] * len(starts)
        for runs, sizes in together.items():
            for run in runs:
                parameters[run] += sum(sizes)
                filled[run] += min(sum(sizes), max(_BUCKET, *sizes))  # a bucket is full with the parameter that brings it to its size
        scattered, left, before = [], [], 0.0
        for parameter, bucket in zip(reversed(parameters), reversed(filled), strict=True):
            left.append(before)
            scattered.append(max(before, bucket if parameter > bucket else 0.0))
            before = bucket or before
        stops = [*starts[1:], len(operators)]
        staying = behind(np.array(parameters) * [_ends(operators[a:b], learns, trained) for a, b in zip(starts, stops, strict=True)])
        return cls(tuple(starts), np.array(parameters), np.array(filled), np.array(scattered[::-1]), np.array(left[::-1]), staying, missing)

    def most(self, by_operator: NDArray[np.float64]) -> NDArray[np.float64]:
        """By run: the most bytes that there are in the backward of one of its operators."""
        most: NDArray[np.float64] = np.maximum.reduceat(by_operator, self.starts)
        return most

    def over(self, by_run: NDArray[np.float64], num_operators: int) -> NDArray[np.float64]:
        """By operator, of so many: what there is by run."""
        return np.repeat(by_run, np.diff([*self.starts, num_operators]))

    def scattering(self, gradient: float, data: int, num_operators: int) -> NDArray[np.float64]:
        """By operator, of so many: bytes of whole gradients of `gradient` bytes an element, and of the pieces that arrive, from stage 2 of
        ZeRO on. The first operator of a run is the last in backward, and completes its bucket."""
        amounts = self.over(self.filled + (1 + 1 / data) * self.scattered, num_operators)
        first = list(self.starts)
        amounts[first] = np.maximum(amounts[first], (1 + 1 / data) * (self.filled + self.before))
        return gradient * amounts

    def gathered(self, weight: float) -> NDArray[np.float64]:
        """By run: bytes of weights of `weight` bytes an element that are whole during its backward, in stage 3."""
        before = np.concatenate(([0.0], self.parameters[:-1]))
        return weight * (self.parameters + before + self.staying)


def _ends(run: Sequence[Operator], learns: Set[str], trained: Mapping[str, float]) -> bool:
    """Whether no gradient goes through a run to what came before it."""
    outputs = {value for op in run for value in op.outputs}
    return not any(v in learns and v not in outputs and v not in trained for op in run for v in op.inputs)
