"""Where the elements of a rank's piece lie in the tensor of the whole batch. No torch.

In: a tensor's shape in one microbatch, which dimension counts samples, how ranks cut it, and which samples of the batch the microbatch
has. Out: `Box`, the numbers of the elements: row-major in the whole batch's tensor, the same under every layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from weft.errors import LayoutError
from weft.model.batch.drawn import Fold

Steps = tuple[tuple[int, int], ...]  # (how many, how far apart), the outermost first


@dataclass(frozen=True, slots=True)
class Samples:
    """Which samples of a batch of `total` a microbatch has: from `start` on, in `steps` of so many at such distances."""

    start: int
    total: int
    steps: Steps

    @classmethod
    def range(cls, start: int, count: int, total: int) -> Samples:
        """`count` that follow one another."""
        return cls(start, total, ((count, 1),))

    @property
    def count(self) -> int:
        return prod(count for count, _ in self.steps)


@dataclass(frozen=True, slots=True)
class Box:
    """Elements of a whole tensor: number `base`, and from there for every dimension of the piece its steps."""

    base: int
    dims: tuple[Steps, ...]

    @property
    def size(self) -> int:
        return prod(count for steps in self.dims for count, _ in steps)


def narrowed(box: Box, dim: int, start: int, count: int) -> Box:
    """`count` entries of a dimension of a box, from `start` on.

    >>> narrowed(Box(7, (((2, 6),), ((6, 1),))), -1, 2, 3)
    Box(base=9, dims=(((2, 6),), ((3, 1),)))

    Raises:
        LayoutError: entries that begin in the midst of what lies together.
    """
    dims = list(box.dims)
    more, dims[dim] = _cut(dims[dim], start, count, box.dims)
    return Box(box.base + more, tuple(dims))


@dataclass(frozen=True, slots=True)
class Place:
    """`shape` of a whole tensor in one microbatch, and of each cut: which dimension, where this rank's part of what the cuts before left
    begins, and how long it is. `runs`, cut behind these: which dimension, of how many entries each run of it is, where this rank's part of
    every run begins, and how long that is.

    `fold`: where its samples lie; None where it has none, or the microbatch is the batch.
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, int, int], ...] = ()
    fold: Fold | None = None
    runs: tuple[tuple[int, int, int, int], ...] = ()

    def over(self, shape: Sequence[int]) -> Place:
        """The same cuts of a tensor of another shape, of which dimensions of size 1 are on every rank."""
        held = tuple(cut for cut in self.cuts if cut[0] < len(shape) and shape[cut[0]] > 1)
        runs = tuple(run for run in self.runs if run[0] < len(shape) and shape[run[0]] > 1)
        return Place(tuple(shape), held, self.fold, runs)

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of this rank's piece."""
        shape = list(self.shape)
        for dim, _, count in self.cuts:
            shape[dim] = count
        for dim, run, _, count in self.runs:
            shape[dim] = shape[dim] // run * count
        return tuple(shape)

    def box(self, samples: Samples | None = None) -> Box:
        """The numbers of this rank's elements, of a microbatch of these samples; None: of all.

        >>> Place((2, 3), ((1, 2, 1),)).box()
        Box(base=2, dims=(((2, 3),), ((1, 1),)))
        >>> Place((8,), runs=((0, 4, 2, 2),)).box()
        Box(base=2, dims=(((2, 4), (2, 1)),))
        >>> Place((2, 3), fold=Fold(0)).box(Samples.range(4, 2, 8))
        Box(base=12, dims=(((2, 3),), ((3, 1),)))

        Raises:
            LayoutError: pieces that begin in the midst of what lies together.
        """
        fold = self.fold if samples is not None else None
        shape = list(self.shape)
        if fold is not None and samples is not None:
            shape[fold.dim] = fold.outer * samples.total * fold.inner
        base, dims = 0, []
        for dim, count in enumerate(self.shape):
            apart = prod(shape[dim + 1 :])
            if fold is not None and samples is not None and dim == fold.dim:
                each = fold.inner * apart
                base += samples.start * each
                inside = [(n, step * each) for n, step in samples.steps]
                steps = joined([(fold.outer, samples.total * each), *inside, (fold.inner, apart)])
            else:
                steps = ((count, apart),)
            dims.append(steps)
        for dim, start, count in self.cuts:
            more, dims[dim] = _cut(dims[dim], start, count, self.shape)
            base += more
        for dim, run, start, count in self.runs:
            outer, within = _runs(dims[dim], run, self)
            more, within = _cut(within, start, count, self.shape)
            base, dims[dim] = base + more, (*outer, *within)
        return Box(base, tuple(dims))


def joined(steps: Iterable[tuple[int, int]]) -> Steps:
    """The same elements in as few steps as can be."""
    merged: list[tuple[int, int]] = []
    for count, apart in steps:
        if count == 1:
            continue
        if merged and merged[-1][1] == count * apart:
            merged[-1] = (merged[-1][0] * count, apart)
        else:
            merged.append((count, apart))
    return tuple(merged) or ((1, 1),)


def _runs(steps: Steps, run: int, place: Place) -> tuple[Steps, Steps]:
    """Steps between runs of so many elements, and those inside of a run."""
    outer, inside = list(steps), list[tuple[int, int]]()
    while run > 1 and outer:
        count, apart = outer.pop()
        if count > run and count % run == 0:
            outer.append((count // run, run * apart))
            count = run
        if run % count:
            break
        inside.insert(0, (count, apart))
        run //= count
    if run > 1:
        raise LayoutError(f"random numbers for {list(place.shape)} are drawn in runs {place.runs} that do not lie along positions")
    return tuple(outer), tuple(inside)


def _cut(steps: Steps, start: int, count: int, shape: Sequence[object]) -> tuple[int, Steps]:
    """(how far it begins from the first, steps) of `count` elements from number `start` on: whole steps of one kind."""
    base, rest = 0, list(steps)
    while rest:
        number, apart = rest.pop(0)
        inside = prod(n for n, _ in rest)
        if start % inside == 0 and count % inside == 0:
            return base + start // inside * apart, ((count // inside, apart), *rest)
        first, start = divmod(start, inside)
        base += first * apart
        if start + count > inside or first >= number:
            break
    raise LayoutError(f"random numbers for {list(shape)} are drawn in pieces from {start} on, {count} long, that do not lie along samples")
