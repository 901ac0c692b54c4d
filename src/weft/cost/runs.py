"""What a stage's runs of layers hold for a moment: what an operator's backward works on and, with ZeRO, whole gradients and weights.

In: operators with the bytes that each works on and keeps, and the parameters that each reads. Out: the most that is there at once. A
run is what stands in one numbered block, or between two: `run.layers` cuts stages so, and `run.parameters` keeps buckets of scattered
gradients within one. Backward goes from the last run to the first. While it is in one, what those behind it kept is gone, its own
bucket fills, the bucket before is scattered and this rank's piece of it arrives (`run.scattered`); in stage 3 the run's weights are
whole, and those of the run that comes next are on their way (`run.gathered`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.model.graph import Operator
from weft.plan.plan import BUCKET_BYTES

_BUCKET = BUCKET_BYTES / 4  # elements


@dataclass(frozen=True, slots=True)
class Amount:
    """Bytes that follow the batch and are shared by the data replicas, that follow it only, and that do neither."""

    shared: float = 0.0
    batched: float = 0.0
    fixed: float = 0.0

    def at(self, scale: float, data: int) -> float:
        """For a microbatch of `scale` times the graph's batch over `data` replicas."""
        return (self.shared / data + self.batched) * scale + self.fixed

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.shared + other.shared, self.batched + other.batched, self.fixed + other.fixed)


def starts_of(blocks: Sequence[str]) -> list[int]:
    """Where runs begin, by the block of every operator.

    >>> starts_of(["", "h.0", "h.0", "h.1", ""])
    [0, 1, 3, 4]
    """
    return [i for i, name in enumerate(blocks) if i == 0 or name != blocks[i - 1]]


@dataclass(frozen=True)
class Runs:
    """By run, in order: where it begins among the stage's operators, what the runs behind it keep and it does not, the trainable parameters
    that it reads, those of its largest buckets, and those of the largest that is scattered while it goes backward."""

    starts: tuple[int, ...]
    behind: tuple[Amount, ...]
    parameters: NDArray[np.float64]
    filled: NDArray[np.float64]
    scattered: NDArray[np.float64]

    @classmethod
    def of(
        cls,
        operators: Sequence[Operator],
        starts: Sequence[int],
        kept: Sequence[Amount],
        trained: Mapping[str, float],
        experts: frozenset[str],
        spread: int,
    ) -> Runs:
        """`kept`: by run, what none before it keeps. `trained`: the elements that a tensor rank has of each trainable parameter; of
        `experts` it has one part in `spread`."""
        readers: dict[str, list[int]] = {}
        for run, (first, last) in enumerate(zip(starts, [*starts[1:], len(operators)], strict=True)):
            for value in dict.fromkeys(v for op in operators[first:last] for v in op.inputs if v in trained):
                readers.setdefault(value, []).append(run)
        together: dict[tuple[int, ...], list[float]] = {}  # sizes of those that the same runs read: buckets hold no others
        for value, those in readers.items():
            together.setdefault(tuple(those), []).append(trained[value] / (spread if value in experts else 1))
        parameters, filled = [0.0] * len(starts), [0.0] * len(starts)
        for runs, sizes in together.items():
            for run in runs:
                parameters[run] += sum(sizes)
                filled[run] += min(sum(sizes), max(_BUCKET, *sizes))  # a bucket is full with the parameter that brings it to its size
        scattered, before, behind = [], 0.0, [Amount()]
        for whole, bucket, amount in zip(reversed(parameters), reversed(filled), reversed(kept), strict=True):
            scattered.append(max(before, bucket if whole > bucket else 0.0))
            before = bucket or before
            behind.append(behind[-1] + amount)
        return cls(tuple(starts), tuple(behind[-2::-1]), np.array(parameters), np.array(filled), np.array(scattered[::-1]))

    def working(self, by_operator: NDArray[np.float64]) -> NDArray[np.float64]:
        """By run: the most bytes that one of its operators works on."""
        found: NDArray[np.float64] = np.maximum.reduceat(by_operator, self.starts)
        return found

    def gone(self, scale: float, data: int) -> NDArray[np.float64]:
        """By run: bytes that those behind it kept of a microbatch, which its backward does not find."""
        return np.array([amount.at(scale, data) for amount in self.behind])

    def scattering(self, gradient: float, data: int) -> NDArray[np.float64]:
        """By run: bytes of whole gradients of `gradient` bytes an element, and of the piece that arrives, from stage 2 of ZeRO on."""
        return gradient * (self.filled + (1 + 1 / data) * self.scattered)

    def gathered(self, weight: float) -> NDArray[np.float64]:
        """By run: bytes of weights of `weight` bytes an element that are whole during its backward, in stage 3."""
        before = np.concatenate(([0.0], self.parameters[:-1]))
        return weight * (self.parameters + before)
