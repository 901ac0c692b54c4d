"""A rank's parameters, laid out in flat buffers so that gradients are exchanged and updated without copies.

In: what this rank holds of each parameter. Out: `FlatGroup`s. All parameters of a group have the same dtype, the same ranks with
which their gradients are summed, the same share in the gradient norm and the same weight decay, so each is one tensor to
collectives and to the optimizer. Parameters lie in the order in which backward completes their gradients.

ZeRO (Rajbhandari et al. 2020): from stage 2 on a group's `grad`, in stage 3 its `data` too, are only this rank's piece of every bucket,
one after the other; a bucket then belongs to one set of layers, whose weights `residency/gathered` makes whole while one of them runs. Left
whole, as in stage 1, is what other ranks of the pipeline have too (tied embeddings, replicas of a stage), since those reach it at
other times; so is what does not train, and what the model writes itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from weft.plan.plan import BUCKET_BYTES, FIRST_BUCKET_BYTES, bucket_alone
from weft.run.state.spans import Spans, shape_of
from weft.world.world import Group


@dataclass(frozen=True)
class LocalParameter:
    """This rank's block of one parameter.

    `spans` place the block in the `global_shape`; `sum_ranks` are the ranks whose gradients add up to the
    true one; `counted` says whether this rank counts it in the gradient norm (each element is counted once in the world).
    `kind` says how it is divided, in terms that are the same on every rank: what ranks exchange together must be laid out alike.
    """

    name: str
    global_shape: tuple[int, ...]
    spans: Spans
    dtype: torch.dtype
    trainable: bool
    sum_ranks: tuple[int, ...]
    counted: bool
    counted_piece: bool  # whether a rank that has a ZeRO piece of it counts that piece
    decay: bool = True
    kind: tuple[object, ...] = ()
    ready: int = 0  # position in the order in which gradients are complete
    units: tuple[tuple[int, int], ...] = ()  # (stage, layer) of all that read it, on this rank
    across: bool = False  # whether other ranks of the pipeline have it too
    written: bool = False  # whether the model writes it while it runs

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of the block."""
        return shape_of(self.spans)

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def summed_over(self) -> tuple[str, ...]:
        """Mesh axes along which ranks have summands of its gradient."""
        _, _, axes = self.kind
        return axes  # type: ignore[return-value]


@dataclass
class Bucket:
    """A range of a flat group, exchanged as one message.

    `units`: from ZeRO-2 on, the layers that read it. `full`: of ZeRO-3, where they read it. `grad`: of gradients that come and go, where
    they are collected; it has memory from then on until the next step begins.
    """

    start: int
    stop: int
    names: tuple[str, ...]
    used: int  # elements; what is behind them fills it up
    units: tuple[tuple[int, int], ...] = ()
    full: Tensor | None = None
    grad: Tensor | None = None

    def hold(self) -> None:
        """Have memory for gradients."""
        if self.grad is not None and not (storage := self.grad.untyped_storage()).nbytes():
            storage.resize_(self.grad.nbytes)
            self.grad[self.used :].zero_()

    def release(self) -> None:
        """Let go of it."""
        if self.grad is not None:
            self.grad.untyped_storage().resize_(0)


@dataclass
class FlatGroup:
    """Parameters as views of `data`, gradients as views of `grad` (of `padded` elements, a multiple of the number of shards).

    `index`: this rank among the `shards` between which buckets are divided, -1 where others have them all (`reduce/servers`).
    `scattered`: `grad` is this rank's pieces only, and there are no views; `gathered`: so is `data`. `grad` is empty where buckets have
    gradients of their own.
    """

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
    index: int = 0
    shards: int = 1
    scattered: bool = False
    gathered: bool = False
    turns: list[Tensor] = field(default_factory=list)  # where gradients of steps that are under way at once lie; `grad` is one of them

    def collect_in(self, grad: Tensor) -> None:
        """Let gradients lie in `grad` from now on: flat, zeroed, as long as the old one."""
        self.grad = grad
        for member, start in zip(self.members, self.starts, strict=True):
            self.views[member.name] = grad[start : start + member.size].view(member.shape)

    def come_and_go(self) -> None:
        """Let gradients have memory only from when they are collected until the next step begins: a bucket each, in the place of `grad`."""
        self.grad = self.grad.new_empty(0)
        at = dict(zip((member.name for member in self.members), zip(self.starts, self.members, strict=True), strict=True))
        for bucket in self.buckets:
            bucket.grad = self.grad.new_zeros(bucket.stop - bucket.start)
            for start, member in map(at.__getitem__, bucket.names):
                begin = start - bucket.start
                self.views[member.name] = bucket.grad[begin : begin + member.size].view(member.shape)

    def gradients(self, bucket: Bucket) -> Tensor:
        """Of a bucket, flat."""
        return self.grad[bucket.start : bucket.stop] if bucket.grad is None else bucket.grad

    @property
    def rooms(self) -> list[Tensor]:
        """Where gradients lie."""
        return [*self.turns, *(bucket.grad for bucket in self.buckets if bucket.grad is not None)]

    def hold(self) -> None:
        """Have memory for all gradients."""
        for bucket in self.buckets:
            bucket.hold()

    @property
    def comes_and_goes(self) -> bool:
        """Whether gradients have memory only from when they are collected until the next step begins."""
        return any(bucket.grad is not None for bucket in self.buckets)

    def pieces(self) -> list[tuple[int, int, int]]:
        """(start in the flat group, start in the pieces, length) of this rank's share of every bucket."""
        pieces, at = [], 0
        for bucket in self.buckets if self.index >= 0 else ():
            length = (bucket.stop - bucket.start) // self.shards
            pieces.append((bucket.start + self.index * length, at, length))
            at += length
        return pieces

    def shares(self) -> list[tuple[LocalParameter, int, tuple[int, int]]]:
        """What this rank's pieces hold: (parameter, start in the pieces, range of the parameter's elements), none of them empty."""
        shares = []
        for member, start in zip(self.members, self.starts, strict=True):
            for begin, at, length in self.pieces():
                first, last = max(begin, start), min(begin + length, start + member.size)
                if first < last:
                    shares.append((member, at + first - begin, (first - start, last - start)))
        return shares

    def gradient(self, name: str) -> Tensor | None:
        """The summed gradient of a parameter: this rank's block, or the flat piece of it that it has. None where it has another group."""
        if not self.scattered:
            self.hold()
            return self.views.get(name)
        if all(member.name != name for member in self.members):
            return None
        return next((self.grad[at : at + last - first] for m, at, (first, last) in self.shares() if m.name == name), self.grad[:0])

    def fill(self, name: str, value: Tensor) -> None:
        """Give a parameter of a gathered group its value, of which the pieces take their share."""
        flat = value.detach().reshape(-1)
        for member, at, (first, last) in self.shares():
            if member.name == name:
                self.data[at : at + last - first].copy_(flat[first:last])


def build_groups(
    parameters: Sequence[LocalParameter],
    device: torch.device,
    zero: int = 0,
    rank: int = 0,
    bucket_bytes: int = 0,
    servers: Sequence[int] = (),
) -> tuple[list[FlatGroup], dict[str, torch.nn.Parameter]]:
    """Allocate flat groups; returns them and the parameters (views of them) by name.

    With `zero` every bucket is padded so that the ranks that sum it get equal pieces; `rank` is this one's number.
    `servers`: ranks that get equal pieces of every bucket instead.
    `bucket_bytes`: of gradients that are summed at once, 0 for `BUCKET_BYTES`; what is complete first is summed in a bucket of 1 MiB.
    """
    keyed: dict[tuple[object, ...], list[LocalParameter]] = {}
    for p in sorted((p for p in parameters if p.trainable), key=lambda p: p.ready):
        keyed.setdefault((p.dtype, p.sum_ranks, p.kind, p.decay, p.across, p.written), []).append(p)
    groups: list[FlatGroup] = []
    by_name: dict[str, torch.nn.Parameter] = {}
    for members in keyed.values():
        first = members[0]
        shards = len(servers) if servers else len(first.sum_ranks) if zero else 1
        in_pieces = zero > 0 and shards > 1 and not (first.across or first.written)
        scattered, gathered = in_pieces and zero >= 2, in_pieces and zero == 3
        if scattered:
            members = sorted(members, key=lambda p: tuple((-s, -layer) for s, layer in reversed(p.units)))
        limit = bucket_bytes or BUCKET_BYTES
        if len(first.sum_ranks) == 1:
            limit = min(limit, int(bucket_alone(sum(p.size for p in members) * first.dtype.itemsize)))
        starts, buckets = _place(members, shards, scattered, limit)
        size = buckets[-1].stop
        data = torch.zeros(size // shards if gathered else size, dtype=first.dtype, device=device)
        grad = torch.zeros(size // shards if scattered else size, dtype=first.dtype, device=device)
        of = tuple(servers) or first.sum_ranks
        index = 0 if shards == 1 and not servers else of.index(rank) if rank in of else -1
        group = FlatGroup(
            first.sum_ranks, first.counted, first.counted_piece, first.decay, data, grad, tuple(members), tuple(starts),
            buckets, {}, index, shards, scattered, gathered,
        )  # fmt: skip
        if not scattered:
            group.collect_in(grad)
        for bucket in buckets if gathered else ():
            bucket.full = torch.empty(bucket.stop - bucket.start, dtype=first.dtype, device=device)
        for p, start in zip(members, starts, strict=True):
            bucket = next(b for b in buckets if b.start <= start and p.name in b.names)
            flat, at = (data, start) if bucket.full is None else (bucket.full, start - bucket.start)
            by_name[p.name] = torch.nn.Parameter(flat[at : at + p.size].view(p.shape))
        groups.append(group)
    for p in parameters:
        if not p.trainable:
            by_name[p.name] = torch.nn.Parameter(torch.zeros(p.shape, dtype=p.dtype, device=device), requires_grad=False)
    return groups, by_name


def _place(members: Sequence[LocalParameter], shards: int, by_unit: bool, bucket_bytes: int) -> tuple[list[int], list[Bucket]]:
    """Where each parameter starts, and the buckets. `by_unit`: no bucket holds parameters that different layers read."""
    starts: list[int] = []
    buckets: list[Bucket] = []
    at = begin = 0
    names: list[str] = []
    item = torch.empty((), dtype=members[0].dtype).element_size()
    for i, p in enumerate(members):
        starts.append(at)
        at += p.size
        names.append(p.name)
        limit = min(FIRST_BUCKET_BYTES, bucket_bytes) if not buckets else bucket_bytes
        ends = i == len(members) - 1 or (by_unit and members[i + 1].units != p.units)
        if (at - begin) * item >= limit or ends:
            used = at - begin
            at = begin + -(-used // shards) * shards
            buckets.append(Bucket(begin, at, tuple(names), used, p.units if by_unit else ()))
            begin, names = at, []
    return starts, buckets


def share(groups: Sequence[FlatGroup], sums: Sequence[Group | None], turns: int = 1, keep: bool = True) -> None:
    """Connect the sums, and move gradients into memory that all ranks of their sum can read, where the transport has such memory. Elsewhere
    whole gradients come and go, unless several steps' are there at once, or they are to be kept (`keep`).

    `turns`: steps whose gradients are kept apart, where gradients are whole. Every rank goes through its sums in the order of their
    ranks: two that met in different orders would wait for one another.
    """
    for _, number in sorted((over.ranks, number) for number, over in enumerate(sums) if over is not None and over.size > 1):
        over, group = sums[number], groups[number]
        assert over is not None
        over.connect()  # before that nobody knows what it shares
        if not group.scattered and (over if over.levels is None else over.levels.box).shares_memory:
            group.turns = [over.shared_buffer(group.grad.numel(), group.grad.dtype) for _ in range(turns)]
            group.collect_in(group.turns[0])
    for group in groups:
        if not (group.turns or group.scattered or keep or turns > 1):
            group.come_and_go()
        group.turns = group.turns or [group.grad, *(torch.zeros_like(group.grad) for _ in range(turns - 1))]


def place(model: nn.Module, parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]) -> None:
    """Put this rank's tensors where the module had its parameters and buffers, tied ones under each of their names."""
    first: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        first.setdefault(id(tensor), name)
    for module in model.modules():
        for local, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, local, parameters[first[id(p)]])
        for local, b in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if first[id(b)] in buffers:
                setattr(module, local, buffers[first[id(b)]])
