"""Peak transient memory of a stage's backward: operator workspaces and, with ZeRO, full gradients and weights of a few layers at a time.

In: operators with their workspace and saved bytes, and the parameters that each reads. Out: the peak. A run is a sequence of operators of
one numbered block, or between two blocks: `run.residency.layers` splits stages so, and `run.state.parameters` keeps buckets of
reduce-scattered gradients within one. Backward goes from the last operator to the first. At each operator, tensors saved by later ones are
freed; the run's bucket fills while the previous bucket is reduce-scattered (`run.gradients.gradient_reducer`), in place or into a buffer;
in stage 3 the run's weights are gathered and those of the next run are prefetched; a run that passes no gradient on (look-ups) retains its
weights until backward ends (`run.residency.gathered`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.devices.recurrent import missing_gradient_fraction
from shardwise.model.graph import Operator
from shardwise.plan.plan import BUCKET_BYTES

DEFAULT_BUCKET_ELEMENTS = BUCKET_BYTES / 4  # of float32 gradients


class BatchBytes(NamedTuple):
    """Bytes that scale with the batch and are sharded over data replicas, that only scale with the batch, and that do neither. A tuple,
    since a search adds millions of them."""

    data_sharded: float = 0.0
    batched: float = 0.0
    fixed: float = 0.0

    def at(self, scale: float, data: int) -> float:
        """Return the bytes for a microbatch of `scale` times the graph's batch over `data` replicas."""
        return (self.data_sharded / data + self.batched) * scale + self.fixed

    def __add__(self, other: BatchBytes) -> BatchBytes:  # type: ignore[override]
        return BatchBytes(self[0] + other[0], self[1] + other[1], self[2] + other[2])


NO_BYTES = BatchBytes()


@dataclass(frozen=True)
class BatchBytesColumns:
    """Many `BatchBytes`s, as columns."""

    data_sharded: NDArray[np.float64]
    batched: NDArray[np.float64]
    fixed: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Sequence[BatchBytes]) -> BatchBytesColumns:
        return cls(*np.fromiter(chain.from_iterable(rows), float, 3 * len(rows)).reshape(-1, 3).T.copy())

    def take(self, rows: NDArray[np.intp]) -> BatchBytesColumns:
        """Return the selected rows."""
        return BatchBytesColumns(self.data_sharded[rows], self.batched[rows], self.fixed[rows])

    def at(self, scale: float, data: int) -> NDArray[np.float64]:
        """Return the bytes by row for a microbatch of `scale` times the graph's batch over `data` replicas."""
        return (self.data_sharded / data + self.batched) * scale + self.fixed


def saved_by_later(amounts: NDArray[np.float64]) -> NDArray[np.float64]:
    """[operator] -> bytes saved by later operators, which are freed before its backward, given the bytes that each saves.

    >>> saved_by_later(np.array([1.0, 2.0, 4.0])).tolist()
    [6.0, 4.0, 0.0]
    """
    return np.concatenate((np.cumsum(amounts[:0:-1])[::-1], [0.0]))


def run_starts(blocks: Sequence[str]) -> list[int]:
    """Return the first operators of runs, from the block of every operator.

    >>> run_starts(["", "h.0", "h.0", "h.1", ""])
    [0, 1, 3, 4]
    """
    return [i for i, name in enumerate(blocks) if i == 0 or name != blocks[i - 1]]


@dataclass(frozen=True)
class BlockRuns:
    """Runs of a stage, in order: first operator, and numbers of trainable parameters: those it reads, those of its largest buckets, those
    of the largest bucket reduce-scattered during its backward, and those whose gathered weights later runs retain."""

    starts: tuple[int, ...]
    parameters: NDArray[np.float64]
    bucket_elements: NDArray[np.float64]
    scattering_elements: NDArray[np.float64]
    scattering_before: NDArray[np.float64]  # of `scattering_elements`, those left by later runs
    retained_elements: NDArray[np.float64]
    missing_gradients: NDArray[np.float64]  # by operator: trainable parameters that no later operator reads, without a gradient yet
    largest_parameter: float = 0.0  # elements

    @classmethod
    def of(
        cls,
        operators: Sequence[Operator],
        starts: Sequence[int],
        trained: Mapping[str, float],
        experts: frozenset[str],
        differentiable: Set[str],
        expert_divisor: float,
        bucket_elements: float = DEFAULT_BUCKET_ELEMENTS,
    ) -> BlockRuns:
        """Build the runs. `trained`: elements of each trainable parameter on a tensor rank; of `experts` it has the fraction
        1/`expert_divisor`. `differentiable`: values with a gradient. `bucket_elements`: elements that complete a bucket of gradients."""
        readers: dict[str, list[int]] = {}
        for run, (first, last) in enumerate(zip(starts, [*starts[1:], len(operators)], strict=True)):
            for value in dict.fromkeys(v for op in operators[first:last] for v in op.inputs if v in trained):
                readers.setdefault(value, []).append(run)
        last_reads = np.zeros(len(operators))
        for value, last in {v: i for i, op in enumerate(operators) for v in op.inputs if v in trained}.items():
            last_reads[last] += trained[value] / (expert_divisor if value in experts else 1)
        missing = np.cumsum(np.concatenate(([0.0], last_reads)))[:-1]
        missing += last_reads * [missing_gradient_fraction(op) for op in operators]
        shared_sizes: dict[tuple[int, ...], list[float]] = {}  # sizes of parameters read by the same runs: buckets mix no others
        for value, reading_runs in readers.items():
            shared_sizes.setdefault(tuple(reading_runs), []).append(trained[value] / (expert_divisor if value in experts else 1))
        parameters, filled = [0.0] * len(starts), [0.0] * len(starts)
        for runs, sizes in shared_sizes.items():
            for run in runs:
                parameters[run] += sum(sizes)
                filled[run] += min(sum(sizes), max(bucket_elements, *sizes))  # the parameter that reaches the size completes a bucket
        scattered, prev, before = [], [], 0.0
        for parameter, bucket in zip(reversed(parameters), reversed(filled), strict=True):
            prev.append(before)
            scattered.append(max(before, bucket if parameter > bucket else 0.0))
            before = bucket or before
        stops = [*starts[1:], len(operators)]
        staying = saved_by_later(
            np.array(parameters) * [_stops_gradient(operators[a:b], differentiable, trained) for a, b in zip(starts, stops, strict=True)]
        )
        largest = max((size for sizes in shared_sizes.values() for size in sizes), default=0.0)
        scattering, scattering_before = np.array(scattered[::-1]), np.array(prev[::-1])
        return cls(
            tuple(starts), np.array(parameters), np.array(filled), scattering, scattering_before, staying, missing, largest,
        )  # fmt: skip

    def max_by_run(self, by_operator: NDArray[np.float64]) -> NDArray[np.float64]:
        """[run] -> the maximum over its operators."""
        maxima: NDArray[np.float64] = np.maximum.reduceat(by_operator, self.starts)
        return maxima

    def expand_to_operators(self, by_run: NDArray[np.float64], num_operators: int) -> NDArray[np.float64]:
        """[operator] -> the value of its run."""
        return np.repeat(by_run, np.diff([*self.starts, num_operators]))

    def scattering_bytes(self, gradient: float, arriving: float, num_operators: int) -> NDArray[np.float64]:
        """[operator] -> bytes of full gradients of `gradient` bytes per element, from ZeRO stage 2 on, and of what arrives beside a bucket
        that is scattered, the fraction `arriving` of it. The first operator of a run is the last in backward, and completes its bucket."""
        amounts = self.expand_to_operators(self.bucket_elements + (1 + arriving) * self.scattering_elements, num_operators)
        first_operators = list(self.starts)
        amounts[first_operators] = np.maximum(amounts[first_operators], (1 + arriving) * (self.bucket_elements + self.scattering_before))
        return gradient * amounts

    def gathered_bytes(self, weight: float) -> NDArray[np.float64]:
        """[run] -> bytes of all-gathered weights of `weight` bytes per element during its backward, in ZeRO stage 3."""
        before = np.concatenate(([0.0], self.parameters[:-1]))
        return weight * (self.parameters + before + self.retained_elements)


def _stops_gradient(run: Sequence[Operator], learns: Set[str], trained: Mapping[str, float]) -> bool:
    """Return whether a run passes no gradient on to earlier operators."""
    outputs = {value for op in run for value in op.outputs}
    return not any(v in learns and v not in outputs and v not in trained for op in run for v in op.inputs)
