"""What moves where a tensor goes from one mesh to another on which it lies otherwise (Zhuang et al., MLSys 2023, as Alpa has it).

In: a tensor's shape, and on both sides the mesh, the stage and the form along each axis. Out: `Resharding`: boxes of the tensor, each from
one sender to one receiver, so that every element crosses between the meshes once; receivers that need the same block get a part of it
each, and gather the parts among themselves.

Not modelled: blocks that do not divide into as many parts as receivers need them; each of these gets the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from weft.plan.mesh import Mesh
from weft.plan.placement import Placement, is_shard

Box = tuple[tuple[int, int], ...]  # (start, stop) in every dimension of the whole tensor


@dataclass(frozen=True, slots=True)
class Side:
    """One mesh's ranks of one pipeline stage; `forms`: the placement by axis; what has none is whole."""

    mesh: Mesh
    stage: int
    forms: Mapping[str, Placement]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The stage's ranks."""
        return self.mesh.stage(self.stage)

    def box(self, rank: int, shape: tuple[int, ...]) -> Box:
        """What a rank holds of a tensor of global `shape`."""
        at, box = self.mesh.coordinates(rank), [(0, n) for n in shape]
        for axis, form in self.forms.items():
            if is_shard(form):
                dim = form.dim
                start, stop = box[dim]
                first, length = form.part(stop - start, self.mesh.size(axis), at[axis])
                box[dim] = (start + first, start + first + length)
        return tuple(box)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box that one rank sends to another."""

    sender: int
    receiver: int
    box: Box


@dataclass(frozen=True)
class Resharding:
    """`pieces`: what crosses. `parts`: of each receiver, what it gets. Where that is not its block, the ranks in `peers` have the rest of
    it, which they join along dimension `dims`."""

    pieces: tuple[Piece, ...]
    parts: Mapping[int, Box]
    peers: Mapping[int, tuple[int, ...]]
    dims: Mapping[int, int]

    @property
    def elements(self) -> int:
        """Elements that cross between the meshes."""
        return sum(volume(p.box) for p in self.pieces)


def volume(box: Box) -> int:
    """Elements of a box.

    >>> volume(((0, 2), (1, 4)))
    6
    """
    return prod(stop - start for start, stop in box)


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Where `box` lies in a block that is `outer`."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, outer, strict=True))


def reshard(shape: tuple[int, ...], source: Side, target: Side) -> Resharding:
    """What moves a tensor of global `shape` from `source` to `target`.

    >>> from weft.plan.placement import Shard
    >>> mesh = Mesh((("pipeline", 2), ("data", 2), ("tensor", 2)))
    >>> reshard((4, 6), Side(mesh, 0, {"data": Shard(0)}), Side(mesh, 1, {"tensor": Shard(1)})).elements
    24
    """
    holders: dict[Box, list[int]] = {}
    for rank in source.ranks:
        holders.setdefault(source.box(rank, shape), []).append(rank)
    needed: dict[Box, list[int]] = {}
    for rank in target.ranks:
        needed.setdefault(target.box(rank, shape), []).append(rank)
    pieces: list[Piece] = []
    parts: dict[int, Box] = {}
    peers: dict[int, tuple[int, ...]] = {}
    dims: dict[int, int] = {}
    turn = 0
    for block, ranks in needed.items():
        n = len(ranks)
        dim = next((d for d, (start, stop) in enumerate(block) if stop > start and (stop - start) % n == 0), -1)
        for number, rank in enumerate(ranks):
            part = block
            if n > 1 and dim >= 0:
                start, stop = block[dim]
                length = (stop - start) // n
                part = (*block[:dim], (start + number * length, start + (number + 1) * length), *block[dim + 1 :])
                peers[rank], dims[rank] = tuple(ranks), dim
            parts[rank] = part
            for box, having in holders.items():
                both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(part, box, strict=True))
                if all(start < stop for start, stop in both):
                    pieces.append(Piece(having[turn % len(having)], rank, both))
                    turn += 1
    return Resharding(tuple(pieces), parts, peers, dims)
