"""Numbers of a shard's elements in the tensor of the whole batch, for random draws. No torch.

From a tensor's shape in one microbatch, its sample dimension, its sharding, and the microbatch's samples to an `ElementBox`: row-major
numbers in the batch's tensor, the same under every layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from shardwise.errors import LayoutError
from shardwise.model.batch.random_draws import SampleFold

Steps = tuple[tuple[int, int], ...]  # (count, distance), outermost first


@dataclass(frozen=True, slots=True)
class MicrobatchSamples:
    """Samples of a batch of `total` in a microbatch: from `start` on, in `steps` of (count, distance)."""

    start: int
    total: int
    steps: Steps

    @classmethod
    def contiguous(cls, start: int, count: int, total: int) -> MicrobatchSamples:
        """Return `count` consecutive samples."""
        return cls(start, total, ((count, 1),))

    @property
    def count(self) -> int:
        return prod(count for count, _ in self.steps)


@dataclass(frozen=True, slots=True)
class ElementBox:
    """Elements of a global tensor: number `base`, and from there the steps of every dimension of the shard."""

    base: int
    dims: tuple[Steps, ...]

    @property
    def size(self) -> int:
        return prod(count for steps in self.dims for count, _ in steps)


def narrow_box(box: ElementBox, dim: int, start: int, count: int) -> ElementBox:
    """Return `count` entries of a dimension of a box, from `start` on.

    >>> narrow_box(ElementBox(7, (((2, 6),), ((6, 1),))), -1, 2, 3)
    ElementBox(base=9, dims=(((2, 6),), ((3, 1),)))

    Raises:
        LayoutError: entries that begin inside of a step.
    """
    dims = list(box.dims)
    offset, dims[dim] = _narrow_steps(dims[dim], start, count, box.dims)
    return ElementBox(box.base + offset, tuple(dims))


@dataclass(frozen=True, slots=True)
class DrawnShard:
    """A shard of a draw: global `shape` in one microbatch, and of each cut: dimension, start within the shard that earlier cuts leave,
    length. `runs`, cut after these: dimension, entries of each run of it, start of this rank's part of every run, its length.

    `fold`: location of its samples; None where it has none, or the microbatch is the batch.
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, int, int], ...] = ()
    fold: SampleFold | None = None
    runs: tuple[tuple[int, int, int, int], ...] = ()

    def with_shape(self, shape: Sequence[int]) -> DrawnShard:
        """Return the same cuts of a tensor of another shape, whose dimensions of size 1 are replicated."""
        cuts = tuple(cut for cut in self.cuts if cut[0] < len(shape) and shape[cut[0]] > 1)
        runs = tuple(run for run in self.runs if run[0] < len(shape) and shape[run[0]] > 1)
        return DrawnShard(tuple(shape), cuts, self.fold, runs)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Local shape of the shard."""
        shape = list(self.shape)
        for dim, _, count in self.cuts:
            shape[dim] = count
        for dim, run, _, count in self.runs:
            shape[dim] = shape[dim] // run * count
        return tuple(shape)

    def box(self, samples: MicrobatchSamples | None = None) -> ElementBox:
        """Return the numbers of this rank's elements, of a microbatch of these samples; None: of all.

        >>> DrawnShard((2, 3), ((1, 2, 1),)).box()
        ElementBox(base=2, dims=(((2, 3),), ((1, 1),)))
        >>> DrawnShard((8,), runs=((0, 4, 2, 2),)).box()
        ElementBox(base=2, dims=(((2, 4), (2, 1)),))
        >>> DrawnShard((2, 3), fold=SampleFold(0)).box(MicrobatchSamples.contiguous(4, 2, 8))
        ElementBox(base=12, dims=(((2, 3),), ((3, 1),)))

        Raises:
            LayoutError: shards that begin inside of a step.
        """
        fold = self.fold if samples is not None else None
        shape = list(self.shape)
        if fold is not None and samples is not None:
            shape[fold.dim] = fold.outer * samples.total * fold.inner
        base, dims = 0, []
        for dim, count in enumerate(self.shape):
            stride = prod(shape[dim + 1 :])
            if fold is not None and samples is not None and dim == fold.dim:
                sample_stride = fold.inner * stride
                base += samples.start * sample_stride
                sample_steps = [(n, step * sample_stride) for n, step in samples.steps]
                steps = merge_steps([(fold.outer, samples.total * sample_stride), *sample_steps, (fold.inner, stride)])
            else:
                steps = ((count, stride),)
            dims.append(steps)
        for dim, start, count in self.cuts:
            offset, dims[dim] = _narrow_steps(dims[dim], start, count, self.shape)
            base += offset
        for dim, run, start, count in self.runs:
            outer, run_steps = _split_runs(dims[dim], run, self)
            offset, run_steps = _narrow_steps(run_steps, start, count, self.shape)
            base, dims[dim] = base + offset, (*outer, *run_steps)
        return ElementBox(base, tuple(dims))


def merge_steps(steps: Iterable[tuple[int, int]]) -> Steps:
    """Return the same elements in as few steps as possible."""
    merged: list[tuple[int, int]] = []
    for count, distance in steps:
        if count == 1:
            continue
        if merged and merged[-1][1] == count * distance:
            merged[-1] = (merged[-1][0] * count, distance)
        else:
            merged.append((count, distance))
    return tuple(merged) or ((1, 1),)


def _split_runs(steps: Steps, run: int, place: DrawnShard) -> tuple[Steps, Steps]:
    """Return the steps between runs of so many elements, and those inside of a run."""
    outer, inner = list(steps), list[tuple[int, int]]()
    while run > 1 and outer:
        count, distance = outer.pop()
        if count > run and count % run == 0:
            outer.append((count // run, run * distance))
            count = run
        if run % count:
            break
        inner.insert(0, (count, distance))
        run //= count
    if run > 1:
        raise LayoutError(f"random numbers for {list(place.shape)} are drawn in runs {place.runs} that do not align with positions")
    return tuple(outer), tuple(inner)


def _narrow_steps(steps: Steps, start: int, count: int, shape: Sequence[object]) -> tuple[int, Steps]:
    """Return (offset of the first, steps) of `count` elements from number `start` on: complete steps of one kind."""
    base, remaining = 0, list(steps)
    while remaining:
        number, distance = remaining.pop(0)
        inner_size = prod(n for n, _ in remaining)
        if start % inner_size == 0 and count % inner_size == 0:
            return base + start // inner_size * distance, ((count // inner_size, distance), *remaining)
        first, start = divmod(start, inner_size)
        base += first * distance
        if start + count > inner_size or first >= number:
            break
    raise LayoutError(f"random numbers for {list(shape)} are drawn in shards from {start} on, {count} long, that do not align with samples")
