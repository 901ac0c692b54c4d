"""Cross-mesh resharding: the transfers that move a tensor to another mesh with other placements (Zhuang et al., MLSys 2023, as in Alpa).

From a tensor's shape, and for both sides the mesh, the stage and the placement along each axis: boxes of the tensor, each from one sender
to one receiver, so that every element crosses between the meshes once; receivers that need the same block receive a part of it each, and
all-gather the parts among themselves.

Not modelled: blocks that do not divide into as many parts as receivers need them; each of these receives the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from shardwise.plan.ir.mesh import Mesh
from shardwise.plan.ir.placement import Placement, is_shard

Box = tuple[tuple[int, int], ...]  # (start, stop) in every dimension of the whole tensor


@dataclass(frozen=True, slots=True)
class ReshardEndpoint:
    """One mesh's ranks of one pipeline stage; `placements`: the placement by axis; along others the tensor is whole."""

    mesh: Mesh
    stage: int
    placements: Mapping[str, Placement]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the stage's ranks."""
        return self.mesh.stage_ranks(self.stage)

    def box(self, rank: int, shape: tuple[int, ...]) -> Box:
        """Return the box that a rank holds of a tensor of global `shape`."""
        at, box = self.mesh.coordinates(rank), [(0, n) for n in shape]
        for axis, placement in self.placements.items():
            if is_shard(placement):
                dim = placement.dim
                start, stop = box[dim]
                first, length = placement.local_range(stop - start, self.mesh.size(axis), at[axis])
                box[dim] = (start + first, start + first + length)
        return tuple(box)


@dataclass(frozen=True, slots=True)
class ReshardTransfer:
    """A box that one rank sends to another."""

    sender: int
    receiver: int
    box: Box


@dataclass(frozen=True)
class Resharding:
    """Transfers of one resharding. `received_boxes`: by receiver. Where that is not its block, the ranks in `peers` have the rest of it,
    which they gather along dimension `gather_dims`."""

    transfers: tuple[ReshardTransfer, ...]
    received_boxes: Mapping[int, Box]
    peers: Mapping[int, tuple[int, ...]]
    gather_dims: Mapping[int, int]

    @property
    def num_elements(self) -> int:
        """Number of elements that cross between the meshes."""
        return sum(num_box_elements(p.box) for p in self.transfers)


def num_box_elements(box: Box) -> int:
    """Number of elements of a box.

    >>> num_box_elements(((0, 2), (1, 4)))
    6
    """
    return prod(stop - start for start, stop in box)


def slices_within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices of `box` in a block that is `outer`."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, outer, strict=True))


def plan_resharding(shape: tuple[int, ...], source: ReshardEndpoint, target: ReshardEndpoint) -> Resharding:
    """Plan the transfers of a tensor of global `shape` from `source` to `target`.

    >>> from shardwise.plan.ir.placement import Shard
    >>> mesh = Mesh((("pipeline", 2), ("data", 2), ("tensor", 2)))
    >>> plan_resharding((4, 6), ReshardEndpoint(mesh, 0, {"data": Shard(0)}), ReshardEndpoint(mesh, 1, {"tensor": Shard(1)})).num_elements
    24
    """
    holders: dict[Box, list[int]] = {}
    for rank in source.ranks:
        holders.setdefault(source.box(rank, shape), []).append(rank)
    needed: dict[Box, list[int]] = {}
    for rank in target.ranks:
        needed.setdefault(target.box(rank, shape), []).append(rank)
    pieces: list[ReshardTransfer] = []
    parts: dict[int, Box] = {}
    peers: dict[int, tuple[int, ...]] = {}
    dims: dict[int, int] = {}
    count = 0
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
            for box, senders in holders.items():
                common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(part, box, strict=True))
                if all(start < stop for start, stop in common):
                    pieces.append(ReshardTransfer(senders[count % len(senders)], rank, common))
                    count += 1
    return Resharding(tuple(pieces), parts, peers, dims)
