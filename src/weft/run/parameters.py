"""A rank's parameters, laid out in flat buffers so that gradients are exchanged and updated without copies.

In: what this rank holds of each parameter. Out: `FlatGroup`s. All parameters of a group have the same dtype, the same ranks with
which their gradients are summed, the same share in the gradient norm and the same weight decay, so each is one tensor to
collectives and to the optimizer. Parameters lie in the order in which backward completes their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.world.world import Group

BUCKET_BYTES = 25 << 20  # as DistributedDataParallel (Li et al., VLDB 2020)
FIRST_BUCKET_BYTES = 1 << 20


@dataclass(frozen=True)
class LocalParameter:
    """This rank's block of one parameter.

    `offsets` and `shape` place the block in the `global_shape`; `sum_ranks` are the ranks whose gradients add up to the
    true one; `counted` says whether this rank counts it in the gradient norm (each element is counted once in the world).
    `kind` says how it is divided, in terms that are the same on every rank: what ranks exchange together must be laid out alike.
    """

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    sum_ranks: tuple[int, ...]
    counted: bool
    counted_piece: bool  # whether a rank that has a ZeRO piece of it counts that piece
    decay: bool = True
    kind: tuple[object, ...] = ()
    ready: int = 0  # position in the order in which gradients are complete

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass
class Bucket:
    """A range of a flat group, exchanged as one message."""

    start: int
    stop: int
    names: tuple[str, ...]


@dataclass
class FlatGroup:
    """Parameters as views of `data`, gradients as views of `grad` (of `padded` elements, a multiple of the number of shards)."""

    sum_ranks: tuple[int, ...]
    counted: bool
    counted_piece: bool
    decay: bool
    data: Tensor
    grad: Tensor
    members: tuple[LocalParameter, ...]
    starts: tuple[int, ...]
    buckets: list[Bucket] = field(default_factory=list)
    views: dict[str, Tensor] = field(default_factory=dict)  # name -> gradient view

    def collect_in(self, grad: Tensor) -> None:
        """Let gradients lie in `grad` from now on: flat, zeroed, as long as the old one."""
        self.grad = grad
        for member, start in zip(self.members, self.starts, strict=True):
            self.views[member.name] = grad[start : start + member.size].view(member.shape)


def build_groups(
    parameters: Sequence[LocalParameter], device: torch.device, sharded: bool = False
) -> tuple[list[FlatGroup], dict[str, torch.nn.Parameter]]:
    """Allocate flat groups; returns them and the parameters (views of them) by name.

    With `sharded` (ZeRO) every bucket is padded so that the ranks that sum it get equal pieces.
    """
    keyed: dict[tuple[object, ...], list[LocalParameter]] = {}
    for p in sorted((p for p in parameters if p.trainable), key=lambda p: p.ready):
        keyed.setdefault((p.dtype, p.sum_ranks, p.kind, p.decay), []).append(p)
    groups: list[FlatGroup] = []
    made: dict[str, torch.nn.Parameter] = {}
    for members in keyed.values():
        first = members[0]
        shards = len(first.sum_ranks) if sharded else 1
        starts: list[int] = []
        buckets: list[Bucket] = []
        at = begin = 0
        names: list[str] = []
        item = torch.empty((), dtype=first.dtype).element_size()
        for i, p in enumerate(members):
            starts.append(at)
            at += p.size
            names.append(p.name)
            limit = FIRST_BUCKET_BYTES if not buckets else BUCKET_BYTES
            if (at - begin) * item >= limit or i == len(members) - 1:
                at = begin + -(-(at - begin) // shards) * shards
                buckets.append(Bucket(begin, at, tuple(names)))
                begin, names = at, []
        data = torch.zeros(at, dtype=first.dtype, device=device)
        grad = torch.zeros(at, dtype=first.dtype, device=device)
        group = FlatGroup(
            first.sum_ranks, first.counted, first.counted_piece, first.decay, data, grad, tuple(members), tuple(starts), buckets
        )
        group.collect_in(grad)
        for p, start in zip(members, starts, strict=True):
            made[p.name] = torch.nn.Parameter(data[start : start + p.size].view(p.shape))
        groups.append(group)
    for p in parameters:
        if not p.trainable:
            made[p.name] = torch.nn.Parameter(torch.zeros(p.shape, dtype=p.dtype, device=device), requires_grad=False)
    return groups, made


def share(groups: Sequence[FlatGroup], sums: Sequence[Group | None]) -> None:
    """Connect the sums, and move gradients into memory that all ranks of their sum can read, where the transport has such memory.

    Every rank goes through its sums in the order of their ranks: two that met in different orders would wait for one another.
    """
    order = sorted((over.ranks, number) for number, over in enumerate(sums) if over is not None and over.size > 1)
    for _, number in order:
        over = sums[number]
        assert over is not None
        groups[number].collect_in(over.shared_buffer(groups[number].grad.numel(), groups[number].grad.dtype))
