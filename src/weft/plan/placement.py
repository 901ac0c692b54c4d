"""How a value lies along one mesh axis, and how its shards are cut.

A placement says two things: what a rank holds of the value, and what it holds of the value's gradient. `dual` swaps the two.

    placement       written   value on a rank      gradient on a rank   dual
    Replicate       R         whole                whole                Replicate
    Deferred        +         whole                a summand            Partial
    Partial         P         a summand            whole                Deferred
    Shard           S2        a piece              a piece              Shard
    Halo            H2        a window of pieces   summands of a window HaloPartial
    HaloPartial     W2        summands of a window a window of pieces   Halo

Equal placements are one object: a search compares and hashes them millions of times, at the cost of a pointer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeGuard

from weft.errors import LayoutError

Range = tuple[int, int]  # start, stop


class Interned:
    """Values whose equal instances are one: compared and hashed by identity, through copies and pickles too."""

    __slots__ = ()
    _made: ClassVar[dict[tuple[Any, ...], Any]] = {}

    def __new__(cls, *fields: Any) -> Self:
        key = (cls, *fields)
        made: Self | None = Interned._made.get(key)
        if made is None:
            made = Interned._made.setdefault(key, object.__new__(cls))
        return made

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), tuple(getattr(self, name) for name in self.__dataclass_fields__)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, eq=False)
class Replicate(Interned):
    """Every rank of the axis holds the whole value, and the whole gradient."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True, eq=False)
class Deferred(Interned):
    """Every rank holds the whole value, but of its gradient a summand, which is summed later or on the way back."""

    def __str__(self) -> str:
        return "+"


@dataclass(frozen=True, slots=True, eq=False)
class Partial(Interned):
    """Every rank holds a summand; the value is the sum over the axis. Each has the whole gradient."""

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True, slots=True, eq=False)
class Shard(Interned):
    """Rank i of the axis holds piece i (`piece`) of dimension `dim`; the first pieces are one longer where it does not divide."""

    dim: int

    def __str__(self) -> str:
        return f"S{self.dim}"


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


Placement = Replicate | Deferred | Partial | Shard | Halo | HaloPartial
R, D, P = Replicate(), Deferred(), Partial()


def is_shard(placement: Placement | None) -> TypeGuard[Shard]:
    """Whether ranks hold pieces."""
    return type(placement) is Shard


def is_halo(placement: Placement | None) -> TypeGuard[Halo]:
    """Whether ranks hold windows of pieces."""
    return type(placement) is Halo


def is_whole(placement: Placement) -> bool:
    """Whether every rank holds the whole value."""
    return placement is R or placement is D


def is_cut(placement: Placement | None) -> TypeGuard[Shard | Halo]:
    """Whether ranks hold pieces, or windows of them."""
    return type(placement) is Shard or type(placement) is Halo


def dual(placement: Placement) -> Placement:
    """The placement of the gradient of a value that lies so.

    >>> str(dual(D)), str(dual(Shard(1)))
    ('P', 'S1')
    """
    match placement:
        case Deferred():
            return P
        case Partial():
            return D
        case Halo(dim, size, windows):
            return HaloPartial(dim, size, windows)
        case HaloPartial(dim, size, windows):
            return Halo(dim, size, windows)
    return placement


def halo(dim: int, size: int, windows: Sequence[Range]) -> Shard | Halo:
    """The placement in which rank i reads `windows[i]`, clipped to the dimension; a shard where these are just the pieces.

    >>> halo(2, 8, [(-1, 5), (3, 9)]).windows, str(halo(2, 8, [(0, 4), (4, 8)]))
    (((0, 5), (3, 8)), 'S2')
    """
    clipped = tuple((min(max(a, 0), size), max(min(b, size), min(max(a, 0), size))) for a, b in windows)
    return Shard(dim) if clipped == pieces(size, len(clipped)) else Halo(dim, size, clipped)


def parse_placement(text: str) -> Placement:
    """`R`, `+`, `P` or `S<dim>`, as they print.

    Raises:
        LayoutError: another text.
    """
    for placement in (R, D, P):
        if text == str(placement):
            return placement
    if text[:1] == "S" and text[1:].isdecimal() and len(text) < 10:
        return Shard(int(text[1:]))
    raise LayoutError(f"placement {text!r} is not R, +, P or S<dim>")


def piece(length: int, num_pieces: int, index: int) -> tuple[int, int]:
    """(start, length) of piece `index`: the first `length % num_pieces` pieces are one longer."""
    base, extra = divmod(length, num_pieces)
    return index * base + min(index, extra), base + (index < extra)


def pieces(length: int, num_pieces: int) -> tuple[Range, ...]:
    """(start, stop) of every piece.

    >>> pieces(5, 2)
    ((0, 3), (3, 5))
    """
    found = (piece(length, num_pieces, i) for i in range(num_pieces))
    return tuple((start, start + size) for start, size in found)
