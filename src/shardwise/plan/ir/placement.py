"""Placement of a value along one mesh axis (replicated, sharded, partial, ...), and the ranges of its shards.

A placement says two things: what a rank holds of the value, and what it holds of the value's gradient. `dual_of` swaps the two.

    placement       written   value on a rank      gradient on a rank   dual
    Replicate       R         whole                whole                Replicate
    DeferredReduce  +         whole                a summand            Partial
    Partial         P         a summand            whole                DeferredReduce
    Shard           S2        a shard, or one of   a shard, or one of   Shard
                              each run             each run
    Strided         T2        a shard of each run  a shard of each run  Strided
    Halo            H2        a window of shards   summands of a window HaloPartial
    HaloPartial     W2        summands of a window a window of shards   Halo
    SingleOwner     O1        whole on rank 1      whole on rank 1      SingleOwner

Equal placements are one object: a search compares and hashes them millions of times, at the cost of a pointer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, ClassVar, Self, TypeGuard

Range = tuple[int, int]  # start, stop


class Interned:
    """Values whose equal instances are one object: compared and hashed by identity, through copies and pickles too."""

    __slots__ = ()
    _instances: ClassVar[dict[tuple[Any, ...], Any]] = {}

    def __new__(cls, *fields: Any) -> Self:
        key = (cls, *fields)
        instance: Self | None = Interned._instances.get(key)
        if instance is None:
            instance = Interned._instances.setdefault(key, object.__new__(cls))
        return instance

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), tuple(getattr(self, name) for name in self.__dataclass_fields__)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, eq=False)
class Replicate(Interned):
    """Every rank of the axis holds the whole value, and the whole gradient."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True, eq=False)
class DeferredReduce(Interned):
    """Every rank holds the whole value, but only a summand of its gradient, reduced later or on the way back."""

    def __str__(self) -> str:
        return "+"


@dataclass(frozen=True, slots=True, eq=False)
class Partial(Interned):
    """Every rank holds a summand; the value is the sum over the axis. Each has the whole gradient."""

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True, slots=True, eq=False)
class Shard(Interned):
    """Rank i of the axis holds shard i of dimension `dim`: `lengths[i]` entries, or without lengths those of `even_shard_range`: as many as
    the others, or one more on the first ranks. Built by `shard`.

    `runs`: the dimension is several runs, and of run k rank i holds `runs[k][i]` entries, so a shard of each, one after another:
    queries, keys and values of one fused weight, gates of a recurrence. Built by `shard_of_runs`.
    """

    dim: int
    lengths: tuple[int, ...] = ()
    runs: tuple[tuple[int, ...], ...] = ()

    def __new__(cls, dim: int, lengths: tuple[int, ...] = (), runs: tuple[tuple[int, ...], ...] = ()) -> Self:
        return Interned.__new__(cls, dim, lengths, runs)  # one object, whether defaults are given or not

    def ranges(self, length: int, n: int) -> tuple[Range, ...]:
        """Return (start, stop) of every rank's shard of a dimension of `length` where shards are in the order of ranks.

        >>> Shard(0, (3, 2)).ranges(5, 2), Shard(1).ranges(4, 2)
        (((0, 3), (3, 5)), ((0, 2), (2, 4)))
        """
        if not self.lengths:
            return even_shard_ranges(length, n)
        stops = tuple(accumulate(self.lengths_within(length)))
        return tuple(zip((0, *stops[:-1]), stops, strict=True))

    def lengths_within(self, length: int) -> tuple[int, ...]:
        """Return the lengths in a dimension of which another axis leaves this rank `length` entries, the same fraction of each unit of a
        shard (of each sample, some positions). () where shards are equal.

        >>> Shard(0, (34, 17)).lengths_within(51), Shard(0, (34, 17)).lengths_within(27), Shard(0).lengths_within(4)
        ((34, 17), (18, 9), ())
        """
        whole = sum(self.lengths)
        if whole == length or not self.lengths:
            return self.lengths
        lengths, remainders = zip(*(divmod(own * length, whole) for own in self.lengths), strict=True)
        if any(remainders):
            raise AssertionError(f"{length} entries are no fraction of shards of {self.lengths}")
        return lengths

    def local_range(self, length: int, n: int, index: int) -> tuple[int, int]:
        """Return (start, length) of the shard of rank `index`, which is contiguous."""
        if self.runs:
            raise AssertionError(f"a shard of each of {len(self.runs)} runs is not contiguous")
        lengths = self.lengths_within(length)
        return (sum(lengths[:index]), lengths[index]) if lengths else even_shard_range(length, n, index)

    def local_sizes(self, length: int, n: int) -> tuple[int, ...]:
        """Number of entries that every rank has."""
        return tuple(stop - start for start, stop in self.ranges(length, n))

    def spans(self, length: int, n: int, index: int) -> tuple[Range, ...]:
        """Return (start, stop) of all ranges that rank `index` has.

        >>> Shard(0).spans(4, 2, 1), shard_of_runs(0, ((2, 2), (1, 1))).spans(6, 2, 1)
        (((2, 4),), ((2, 4), (5, 6)))
        """
        if not self.runs:
            start, size = self.local_range(length, n, index)
            return ((start, start + size),)
        spans, begin = [], 0
        for run in self.runs:
            start = begin + sum(run[:index])
            spans.append((start, start + run[index]))
            begin += sum(run)
        return tuple(spans)

    def split_factor(self, n: int) -> int | float:
        """Ratio of the whole dimension to its longest shard: n where shards are equal.

        >>> Shard(0, (3, 3, 2)).split_factor(3), Shard(0).split_factor(3)
        (2.6666666666666665, 3)
        """
        return sum(self.lengths) / max(self.lengths) if self.lengths else n

    def __str__(self) -> str:
        return f"S{self.dim}"


@dataclass(frozen=True, slots=True, eq=False)
class Strided(Interned):
    """Dimension `dim` is runs of `size` positions of `inner` entries each: rank i holds shard i of the positions of every run.

    For positions of a sequence where samples and positions are one dimension. `zigzag_ranges`: a rank's shard is a range from the front
    and one
    from the back (`zigzag_ranges`), which balances the work of causal attention.
    """

    dim: int
    size: int
    inner: int
    zigzag: bool

    def run_shard(self, n: int) -> Shard:
        """Return the shard of a run's positions, in the order of ranks."""
        return shard(self.dim, self.size, n)

    def split_factor(self, n: int) -> int | float:
        """Ratio of the whole dimension to the longest shard."""
        return self.run_shard(n).split_factor(n)

    def __str__(self) -> str:
        return f"T{self.dim}"


@dataclass(frozen=True, slots=True, eq=False)
class Halo(Interned):
    """Rank i holds the entries `windows[i]` of the `size` entries of dimension `dim`. Windows may overlap, or leave entries out."""

    dim: int
    size: int
    windows: tuple[Range, ...]

    def __str__(self) -> str:
        return f"H{self.dim}"


@dataclass(frozen=True, slots=True, eq=False)
class HaloPartial(Interned):
    """Rank i holds summands of the entries `windows[i]`; where windows overlap the value is their sum."""

    dim: int
    size: int
    windows: tuple[Range, ...]

    def __str__(self) -> str:
        return f"W{self.dim}"


@dataclass(frozen=True, slots=True, eq=False)
class SingleOwner(Interned):
    """Rank `rank` of the axis holds the whole value and its whole gradient; the others hold nothing."""

    rank: int

    def __str__(self) -> str:
        return f"O{self.rank}"


Placement = Replicate | DeferredReduce | Partial | Shard | Strided | Halo | HaloPartial | SingleOwner
R, D, P = Replicate(), DeferredReduce(), Partial()


def is_shard(placement: Placement | None) -> TypeGuard[Shard]:
    """Return whether ranks hold shards."""
    return type(placement) is Shard


def has_equal_pieces(placement: Shard) -> bool:
    """Return whether all ranks' shards are equally long, and each is one piece."""
    return not placement.lengths and not placement.runs


def is_disjoint_shard(placement: Placement | None) -> TypeGuard[Shard | Strided]:
    """Return whether ranks hold shards, in any order, each entry once."""
    return type(placement) is Shard or type(placement) is Strided


def is_halo(placement: Placement | None) -> TypeGuard[Halo]:
    """Return whether ranks hold windows of shards."""
    return type(placement) is Halo


def is_fully_replicated(placement: Placement) -> bool:
    """Return whether every rank holds the whole value."""
    return placement is R or placement is D


def is_sharded(placement: Placement | None) -> TypeGuard[Shard | Strided | Halo]:
    """Return whether ranks hold shards, or windows of them."""
    return type(placement) is Shard or type(placement) is Strided or type(placement) is Halo


def has_single_owner(placement: Placement | None) -> TypeGuard[SingleOwner]:
    """Return whether a single rank holds the value."""
    return type(placement) is SingleOwner


def has_partial_gradient(placement: Placement | None) -> bool:
    """Return whether a gradient that comes back through this placement is a rank's summand of the whole one."""
    return placement is D or is_sharded(placement) or has_single_owner(placement)


def across_stages(placement: Placement) -> Placement:
    """Return the placement in which a value is sent to another pipeline stage: partial sums reduced, shards of several runs gathered."""
    return R if placement is P or (is_shard(placement) and placement.runs) else placement


def dual_of(placement: Placement) -> Placement:
    """Return the placement of the gradient of a value with this placement.

    >>> str(dual_of(D)), str(dual_of(Shard(1)))
    ('P', 'S1')
    """
    match placement:
        case DeferredReduce():
            return P
        case Partial():
            return D
        case Halo(dim, size, windows):
            return HaloPartial(dim, size, windows)
        case HaloPartial(dim, size, windows):
            return Halo(dim, size, windows)
    return placement


def halo_placement(dim: int, size: int, windows: Sequence[Range]) -> Shard | Halo:
    """Return the placement in which rank i reads `windows[i]`, clipped to the dimension; a `Shard` where these are just the shards.

    >>> halo_placement(2, 8, [(-1, 5), (3, 9)]).windows, str(halo_placement(2, 8, [(0, 4), (4, 8)]))
    (((0, 5), (3, 8)), 'S2')
    """
    clipped = tuple((min(max(a, 0), size), max(min(b, size), min(max(a, 0), size))) for a, b in windows)
    return shard(dim, size, len(clipped)) if clipped == even_shard_ranges(size, len(clipped)) else Halo(dim, size, clipped)


def shard_of_runs(dim: int, runs: Sequence[tuple[int, ...]]) -> Shard:
    """Return the placement with a shard of each run: of run k, `runs[k][i]` entries for rank i.

    >>> shard_of_runs(0, ((3, 2), (2, 2))).lengths, shard_of_runs(0, ((2, 2),)) is Shard(0)
    ((5, 4), True)
    """
    totals = tuple(map(sum, zip(*runs, strict=True)))
    return Shard(dim, totals if len(set(totals)) > 1 else (), tuple(runs) if len(runs) > 1 else ())


@cache
def shard(dim: int, length: int, num_shards: int, unit: int = 1, shares: tuple[int, ...] = ()) -> Shard:
    """Shard a dimension of `length` over n ranks, in whole units of so many entries: equally, or one unit longer on the first ranks where
    it must be; in these `shares` where given.

    >>> shard(0, 512, 3, 64).lengths, shard(0, 512, 4, 64).lengths, shard(0, 16, 2, 2, (3, 1)).lengths
    ((192, 192, 128), (), (12, 4))
    """
    units = length // unit
    counts = apportion_units(units, shares or (1,) * num_shards) if shares or units % num_shards else ()
    return Shard(dim, tuple(unit * count for count in counts) if len(set(counts)) > 1 else ())


def apportion_units(units: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Apportion so many units in these shares, at least one each, by largest remainders (Hamilton's method), the first of equals.

    >>> apportion_units(8, (3, 2, 2, 1)), apportion_units(8, (1, 1, 1)), apportion_units(4, (9, 1, 1))
    ((3, 2, 2, 1), (3, 3, 2), (2, 1, 1))
    """
    total = sum(shares)
    counts = [max(1, units * share // total) for share in shares]
    order = sorted(range(len(shares)), key=lambda i: (counts[i] * total - units * shares[i], i))  # largest remainder first
    missing = units - sum(counts)
    for k in range(max(0, missing)):
        counts[order[k % len(order)]] += 1
    for _ in range(max(0, -missing)):  # minimum units are taken from those with the largest excess
        most = max((i for i, count in enumerate(counts) if count > 1), key=lambda i: counts[i] * total - units * shares[i], default=None)
        if most is None:
            break
        counts[most] -= 1
    return tuple(counts)


def even_shard_range(length: int, num_shards: int, index: int) -> tuple[int, int]:
    """Return (start, length) of shard `index`: the first `length % num_shards` shards are one longer."""
    base, extra = divmod(length, num_shards)
    return index * base + min(index, extra), base + (index < extra)


def even_shard_ranges(length: int, num_shards: int) -> tuple[Range, ...]:
    """Return (start, stop) of every shard.

    >>> even_shard_ranges(5, 2)
    ((0, 3), (3, 5))
    """
    ranges = (even_shard_range(length, num_shards, i) for i in range(num_shards))
    return tuple((start, start + size) for start, size in ranges)


@cache
def zigzag_ranges(length: int, num_shards: int) -> tuple[tuple[Range, Range], ...]:
    """Return the two ranges of positions of every rank: rank i has the i-th from the front and the i-th from the back, as many together as
    `even_shard_range` gives it.

    >>> zigzag_ranges(8, 2), zigzag_ranges(7, 2)
    ((((0, 2), (6, 8)), ((2, 4), (4, 6))), (((0, 2), (5, 7)), ((2, 4), (4, 5))))
    """
    lengths = [even_shard_range(length, num_shards, i)[1] for i in range(num_shards)]
    pairs, front, back = [], 0, length
    for n in lengths:
        early = n - n // 2
        pairs.append(((front, front + early), (back - n // 2, back)))
        front, back = front + early, back - n // 2
    return tuple(pairs)


def position_ranges(placement: Shard | Strided, length: int, num_shards: int, index: int) -> tuple[Range, ...]:
    """Return the ranges of positions that a rank holds, of a run of them; `length`: of a shard's dimension.

    >>> position_ranges(Shard(1), 5, 2, 1), position_ranges(Strided(0, 8, 1, True), 16, 2, 0)
    (((3, 5),), ((0, 2), (6, 8)))
    """
    if isinstance(placement, Strided):
        if placement.zigzag:
            return tuple(r for r in zigzag_ranges(placement.size, num_shards)[index] if r[0] < r[1])
        length, placement = placement.size, placement.run_shard(num_shards)
    return (placement.ranges(length, num_shards)[index],)
