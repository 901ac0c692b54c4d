"""How one tensor lies along one mesh axis, and how its shards are cut."""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis holds the whole tensor, with the same values. Its gradient is replicated too."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank i of the axis holds piece i of dimension `dim`."""

    dim: int

    def __str__(self) -> str:
        return f"S{self.dim}"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds a summand; the tensor is the sum over the axis. Its gradient is replicated."""

    def __str__(self) -> str:
        return "P"


Placement = Replicate | Shard | Partial
R = Replicate()
P = Partial()


def parse_placement(text: str) -> Placement:
    """`R`, `P` or `S<dim>`, as they print."""
    if text == "R":
        return R
    if text == "P":
        return P
    if text[:1] == "S" and text[1:].isdecimal() and len(text) < 10:
        return Shard(int(text[1:]))
    raise LayoutError(f"placement {text!r} is not R, P or S<dim>")


def piece(length: int, num_pieces: int, index: int) -> tuple[int, int]:
    """(start, length) of piece `index`: the first `length % num_pieces` pieces are one longer."""
    base, extra = divmod(length, num_pieces)
    return index * base + min(index, extra), base + (index < extra)
