"""Flat parameters: a rank's parameters in contiguous buffers, so that gradients are reduced in buckets and updated without copies.

In: this rank's shard of each parameter. Out: `FlatGroup`s. All parameters of a group have the same dtype, gradient reduction ranks, share
in the gradient norm and weight decay, so a group is one tensor to collectives and to the optimizer. Parameters are in the order in which
backward completes their gradients.

ZeRO (Rajbhandari et al. 2020): from stage 2 on a group's `grad`, in stage 3 its `data` too, are only this rank's shards of all buckets,
concatenated; a bucket then belongs to one set of layers, whose weights `run/residency/weight_gatherer` all-gathers while one of them runs.
Parameters shared with other pipeline ranks (tied embeddings, replicas of a stage) stay replicated as in stage 1, since those use them at
other times; so do parameters that are frozen, or that the model itself writes.

In the field's terms: gradient bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from shardwise.collectives import build
from shardwise.plan.ir.choice import NATIVE
from shardwise.plan.plan import BUCKET_BYTES, FIRST_BUCKET_BYTES, Plan, unshared_bucket_bytes
from shardwise.run.state.block_ranges import BlockRanges, block_shape
from shardwise.world.comm.all_reduce import CollectiveDispatcher
from shardwise.world.world import Group, World


@dataclass(frozen=True)
class LocalParameter:
    """This rank's block of one parameter.

    `block_ranges` place the block in the `global_shape`; `sum_ranks` are the ranks whose gradients add up to the true one;
    `is_counted`: whether this rank counts it in the gradient norm (each element is counted once in the world).
    `sharding_key` describes its sharding in rank-independent terms: what ranks exchange in one message must have the same layout.
    """

    name: str
    global_shape: tuple[int, ...]
    block_ranges: BlockRanges
    dtype: torch.dtype
    is_trainable: bool
    sum_ranks: tuple[int, ...]
    is_counted: bool
    is_shard_counted: bool  # whether a rank counts its ZeRO shard of it
    has_weight_decay: bool = True
    sharding_key: tuple[object, ...] = ()
    gradient_order: int = 0  # in which gradients are completed
    layers: tuple[tuple[int, int], ...] = ()  # (stage, layer) of its readers on this rank
    is_on_several_stages: bool = False  # whether other pipeline ranks have it too
    is_written_by_model: bool = False  # whether the model writes it in forward
    held_dtype: torch.dtype | None = None  # of the weights that the model reads, if it is not `dtype`
    gradient_dtype: torch.dtype | None = None  # of its accumulated gradient, if it is not `dtype`

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the block."""
        return block_shape(self.block_ranges)

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def reduction_axes(self) -> tuple[str, ...]:
        """Mesh axes along which its gradient is partial."""
        _, _, axes = self.sharding_key
        return axes  # type: ignore[return-value]


@dataclass
class Bucket:
    """A range of a flat group, exchanged as one message.

    `layers`: from ZeRO-2 on, the layers that read it. `gathered_data`: in ZeRO-3, the all-gathered weights. `grad`: gradient buffer if
    allocated per bucket; it has memory from the first accumulation to the start of the next step.
    """

    start: int
    stop: int
    names: tuple[str, ...]
    num_elements: int  # without padding
    layers: tuple[tuple[int, int], ...] = ()
    gathered_data: Tensor | None = None
    grad: Tensor | None = None

    def allocate(self) -> None:
        """Allocate the gradient buffer if it is freed."""
        if self.grad is not None and not (storage := self.grad.untyped_storage()).nbytes():
            storage.resize_(self.grad.nbytes)
            if self.num_elements < self.stop - self.start:
                self.grad[self.num_elements :].zero_()

    def free(self) -> None:
        """Free the memory of the gradient buffer."""
        if self.grad is not None:
            self.grad.untyped_storage().resize_(0)


@dataclass
class FlatGroup:
    """Parameters as views of `data`, gradients as views of `grad` (of `padded` elements, a multiple of the number of shards).

    `shard_index`: this rank among the `num_shards` of each bucket, -1 if others have them all (`run/gradients/parameter_servers`).
    `is_scattered`: `grad` is this rank's shards only, and there are no views; `is_gathered`: so is `data`. `grad` is empty if buckets have
    gradient buffers of their own. `main`: where `data` has fewer bits than the optimizer updates, this rank's shards of all buckets,
    concatenated, with all bits. `shard_ranks`: the ranks that have the other shards, this one among them; `replica_ranks`: those of
    `sum_ranks` that have the same shards, which is this rank alone unless state is sharded inside groups of replicas.
    """

    sum_ranks: tuple[int, ...]
    is_counted: bool
    is_shard_counted: bool
    has_weight_decay: bool
    data: Tensor
    grad: Tensor
    members: tuple[LocalParameter, ...]
    starts: tuple[int, ...]
    buckets: list[Bucket] = field(default_factory=list)
    views: dict[str, Tensor] = field(default_factory=dict)  # name -> gradient view
    shard_index: int = 0
    num_shards: int = 1
    is_scattered: bool = False
    is_gathered: bool = False
    main: Tensor | None = None
    shard_ranks: tuple[int, ...] = ()
    replica_ranks: tuple[int, ...] = ()
    step_buffers: list[Tensor] = field(default_factory=list)  # gradients of concurrent steps (staleness); `grad` is one of them

    def hold_weights(self, dtype: torch.dtype, parameters: Mapping[str, nn.Parameter]) -> None:
        """Hold the weights in `dtype` from now on, and what they were as `main`. Gradients keep the dtype of their buffers."""
        wide = self.data
        pieces = [wide[start : start + length] for start, _, length in self.shard_ranges()]
        self.main = wide if self.is_gathered or self.num_shards == 1 else torch.cat(pieces)
        self.data = wide.to(dtype)
        for bucket in self.buckets:
            if bucket.gathered_data is not None:
                bucket.gathered_data = torch.empty(bucket.stop - bucket.start, dtype=dtype, device=wide.device)
            flat = self.data[bucket.start : bucket.stop] if bucket.gathered_data is None else bucket.gathered_data
            for member, at in zip(self.members, self.starts, strict=True):
                if member.name in bucket.names:
                    parameters[member.name].data = flat[at - bucket.start : at - bucket.start + member.size].view(member.shape)
                    parameters[member.name].grad_dtype = self.grad.dtype

    def use_gradient_buffer(self, grad: Tensor) -> None:
        """Accumulate gradients in `grad` from now on: flat, zeroed, as long as the old one."""
        self.grad = grad
        for member, start in zip(self.members, self.starts, strict=True):
            self.views[member.name] = grad[start : start + member.size].view(member.shape)

    def free_gradient_memory(self) -> None:
        """Have no memory for gradients, which nothing reduces and parameters have themselves (in a plain loop)."""
        self.grad = self.grad.new_empty(0)
        self.views.clear()
        self.step_buffers.clear()

    def allocate_per_bucket(self) -> None:
        """Replace `grad` by a buffer per bucket, which has memory only from first accumulation to the start of the next step."""
        self.grad = self.grad.new_empty(0)
        start_and_member = dict(zip((member.name for member in self.members), zip(self.starts, self.members, strict=True), strict=True))
        for bucket in self.buckets:
            bucket.grad = self.grad.new_zeros(bucket.stop - bucket.start)
            for start, member in map(start_and_member.__getitem__, bucket.names):
                begin = start - bucket.start
                self.views[member.name] = bucket.grad[begin : begin + member.size].view(member.shape)

    def bucket_gradient(self, bucket: Bucket) -> Tensor:
        """Return the flat gradient of a bucket."""
        return self.grad[bucket.start : bucket.stop] if bucket.grad is None else bucket.grad

    @property
    def gradient_buffers(self) -> list[Tensor]:
        """Return all gradient buffers."""
        return [*self.step_buffers, *(bucket.grad for bucket in self.buckets if bucket.grad is not None)]

    def allocate(self) -> None:
        """Allocate the gradient buffers of all buckets."""
        for bucket in self.buckets:
            bucket.allocate()

    @property
    def is_allocated_per_bucket(self) -> bool:
        """Return whether gradient buffers are allocated per bucket and freed between steps."""
        return any(bucket.grad is not None for bucket in self.buckets)

    def shard_ranges(self) -> list[tuple[int, int, int]]:
        """Return (start in the flat group, start in the shards, length) of this rank's shard of every bucket."""
        ranges, shard_start = [], 0
        for bucket in self.buckets if self.shard_index >= 0 else ():
            length = (bucket.stop - bucket.start) // self.num_shards
            ranges.append((bucket.start + self.shard_index * length, shard_start, length))
            shard_start += length
        return ranges

    def members_of_shards(self) -> list[tuple[LocalParameter, int, tuple[int, int]]]:
        """Return the non-empty contents of this rank's shards: (parameter, start in the shards, range of the parameter's elements)."""
        contents = []
        for member, start in zip(self.members, self.starts, strict=True):
            for begin, shard_start, length in self.shard_ranges():
                first, last = max(begin, start), min(begin + length, start + member.size)
                if first < last:
                    contents.append((member, shard_start + first - begin, (first - start, last - start)))
        return contents

    def segment_bounds(self, start: int, length: int, names: frozenset[str]) -> list[tuple[int, int, str]]:
        """Return (start, length, name) of the segments of a shard: one for each of these parameters, "" for those between."""
        bounds: list[tuple[int, int, str]] = []
        at = start
        for member, begin in zip(self.members, self.starts, strict=True):
            first, last = max(begin, start), min(begin + member.size, start + length)
            if member.name in names and first < last:
                bounds += [(at - start, first - at, "")] if first > at else []
                bounds.append((first - start, last - first, member.name))
                at = last
        return [*bounds, (at - start, start + length - at, "")] if at < start + length else bounds

    def gradient(self, name: str) -> Tensor | None:
        """Return the reduced gradient of a parameter: this rank's block, or its flat ZeRO shard of it. None if not in this group."""
        if not self.is_scattered:
            self.allocate()
            return self.views.get(name)
        if all(member.name != name for member in self.members):
            return None
        return next(
            (self.grad[at : at + last - first] for m, at, (first, last) in self.members_of_shards() if m.name == name), self.grad[:0]
        )

    def fill_parameter(self, name: str, value: Tensor) -> None:
        """Copy this rank's shard of a parameter's value into a ZeRO-3 group."""
        flat = value.detach().reshape(-1)
        for member, at, (first, last) in self.members_of_shards():
            if member.name == name:
                self.data[at : at + last - first].copy_(flat[first:last])


@dataclass(frozen=True, slots=True)
class UpdatedSegment:
    """A part of a flat tensor that is updated by itself; `name`: of its parameter, which some steps skip."""

    start: int
    name: str
    tensor: Tensor


def host_buffer(x: Tensor) -> Tensor:
    """Allocate a host buffer like a tensor."""
    return torch.zeros(x.shape, dtype=x.dtype, pin_memory=x.device.type == "cuda")


def build_groups(
    parameters: Sequence[LocalParameter],
    device: torch.device,
    zero: int = 0,
    rank: int = 0,
    bucket_bytes: int = 0,
    servers: Sequence[int] = (),
    zero_groups: int = 1,
) -> tuple[list[FlatGroup], dict[str, torch.nn.Parameter]]:
    """Allocate flat groups; returns them and the parameters (views of them) by name.

    With `zero` every bucket is padded so that the ranks that reduce it get equal shards; `rank` is this one.
    `servers`: parameter servers, which get equal shards of every bucket instead. `zero_groups`: equal groups of the ranks that reduce a
    bucket, each of which shards it.
    `bucket_bytes`: size of a gradient bucket, 0 for `BUCKET_BYTES`; the first bucket has 1 MiB, so that its reduction starts early.
    """
    keyed: dict[tuple[object, ...], list[LocalParameter]] = {}
    for p in sorted((p for p in parameters if p.is_trainable), key=lambda p: p.gradient_order):
        keyed.setdefault(
            (p.dtype, p.held_dtype, p.sum_ranks, p.sharding_key, p.has_weight_decay, p.is_on_several_stages, p.is_written_by_model), []
        ).append(p)
    groups: list[FlatGroup] = []
    by_name: dict[str, torch.nn.Parameter] = {}
    for members in keyed.values():
        first = members[0]
        sharing, replicas = split_into_groups(first.sum_ranks, zero_groups if zero else 1, rank)
        shards = len(servers) if servers else len(sharing) if zero else 1
        is_sharded = zero > 0 and shards > 1 and not (first.is_on_several_stages or first.is_written_by_model)
        scattered, gathered = is_sharded and zero >= 2, is_sharded and zero == 3
        if scattered:
            members = sorted(members, key=lambda p: tuple((-s, -layer) for s, layer in reversed(p.layers)))
        limit = bucket_bytes or BUCKET_BYTES
        if len(first.sum_ranks) == 1:
            limit = min(limit, int(unshared_bucket_bytes(sum(p.size for p in members) * first.dtype.itemsize)))
        starts, buckets = _place_in_buckets(members, shards, scattered, limit)
        size = buckets[-1].stop
        data = torch.zeros(size // shards if gathered else size, dtype=first.dtype, device=device)
        grad = torch.zeros(size // shards if scattered else size, dtype=first.gradient_dtype or first.dtype, device=device)
        shard_ranks = tuple(servers) or sharing
        index = 0 if shards == 1 and not servers else shard_ranks.index(rank) if rank in shard_ranks else -1
        group = FlatGroup(
            first.sum_ranks, first.is_counted, first.is_shard_counted and replicas.index(rank) == 0, first.has_weight_decay, data, grad,
            tuple(members), tuple(starts), buckets, {}, index, shards, scattered, gathered, None, sharing, replicas,
        )  # fmt: skip
        if not scattered:
            group.use_gradient_buffer(grad)
        for bucket in buckets if gathered else ():
            bucket.gathered_data = torch.empty(bucket.stop - bucket.start, dtype=first.dtype, device=device)
        for p, start in zip(members, starts, strict=True):
            bucket = next(b for b in buckets if b.start <= start and p.name in b.names)
            flat, flat_start = (data, start) if bucket.gathered_data is None else (bucket.gathered_data, start - bucket.start)
            by_name[p.name] = torch.nn.Parameter(flat[flat_start : flat_start + p.size].view(p.shape))
        groups.append(group)
    for p in parameters:
        if not p.is_trainable:
            by_name[p.name] = torch.nn.Parameter(torch.zeros(p.shape, dtype=p.dtype, device=device), requires_grad=False)
    return groups, by_name


def split_into_groups(ranks: tuple[int, ...], num_groups: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (the ranks of a rank's group, those at its place in every group) of `num_groups` equal groups of adjacent `ranks`; one group
    where they do not divide, or would have one rank each.

    >>> split_into_groups((0, 2, 4, 6), 2, 4)
    ((4, 6), (0, 4))
    """
    size = len(ranks) // num_groups
    if rank not in ranks or len(ranks) % num_groups or size == 1:
        return ranks, (rank,)
    place = ranks.index(rank)
    return ranks[place - place % size :][:size], ranks[place % size :: size]


def shard_groups_of(world: World, groups: Sequence[FlatGroup]) -> tuple[list[Group | None], list[Group | None]]:
    """Return the ranks among which each flat group is summed and sharded, and those with the same shards, which are summed after; None for
    this rank alone."""
    inside, beyond = ([group.shard_ranks for group in groups], [group.replica_ranks for group in groups])
    return tuple([world.group(ranks) if len(ranks) > 1 else None for ranks in each] for each in (inside, beyond))  # type: ignore[return-value]


def gather_order(groups: Sequence[FlatGroup]) -> list[tuple[int, int]]:
    """Return (group, bucket) of every bucket in the order in which a forward reads its weights: backward's, reversed."""
    ready = {member.name: member.gradient_order for group in groups for member in group.members}
    places = [(g, k) for g, group in enumerate(groups) for k in range(len(group.buckets))]
    return sorted(places, key=lambda place: -max(ready[name] for name in groups[place[0]].buckets[place[1]].names))


def _place_in_buckets(members: Sequence[LocalParameter], shards: int, by_layer: bool, bucket_bytes: int) -> tuple[list[int], list[Bucket]]:
    """Place parameters in buckets; return the start of each, and the buckets. `by_layer`: no bucket is shared by different layers."""
    starts: list[int] = []
    buckets: list[Bucket] = []
    offset = bucket_start = 0
    names: list[str] = []
    item = torch.empty((), dtype=members[0].dtype).element_size()
    for i, p in enumerate(members):
        starts.append(offset)
        offset += p.size
        names.append(p.name)
        limit = min(FIRST_BUCKET_BYTES, bucket_bytes) if not buckets else bucket_bytes
        is_last = i == len(members) - 1 or (by_layer and members[i + 1].layers != p.layers)
        if (offset - bucket_start) * item >= limit or is_last:
            num_elements = offset - bucket_start
            offset = bucket_start + -(-num_elements // shards) * shards
            buckets.append(Bucket(bucket_start, offset, tuple(names), num_elements, p.layers if by_layer else ()))
            bucket_start, names = offset, []
    return starts, buckets


def share_gradient_memory(
    groups: Sequence[FlatGroup], reduction_groups: Sequence[Group | None], num_step_buffers: int = 1, keeps_gradients: bool = True
) -> None:
    """Connect the reduction groups, and place gradients in shared memory if the transport has it; otherwise full gradients are allocated
    per bucket, unless several steps are in flight, or they must persist (`keeps_gradients`).

    `num_step_buffers`: steps with separate gradients, if gradients are not sharded. Every rank connects its groups in the order of their
    ranks: different orders would deadlock.
    """
    for _, number in sorted((over.ranks, number) for number, over in enumerate(reduction_groups) if over is not None and over.size > 1):
        over, group = reduction_groups[number], groups[number]
        assert over is not None
        over.connect()  # determines whether it has shared memory
        if not group.is_scattered and shares_memory(over):
            group.step_buffers = [over.shared_buffer(group.grad.numel(), group.grad.dtype) for _ in range(num_step_buffers)]
            group.use_gradient_buffer(group.step_buffers[0])
    for group in groups:
        if not (group.step_buffers or group.is_scattered or keeps_gradients or num_step_buffers > 1):
            group.allocate_per_bucket()
        group.step_buffers = group.step_buffers or [group.grad, *(torch.zeros_like(group.grad) for _ in range(num_step_buffers - 1))]


def shares_memory(over: Group) -> bool:
    """Return whether the ranks of a group, or those of its hosts, reduce gradients in memory that they share."""
    return (over if over.hierarchical is None else over.hierarchical.host_group).shares_memory


def install_tensors(model: nn.Module, parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]) -> None:
    """Replace the module's parameters and buffers by this rank's tensors, tied ones under each of their names."""
    first_name: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        first_name.setdefault(id(tensor), name)
    for module in model.modules():
        for local, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, local, parameters[first_name[id(p)]])
        for local, b in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if first_name[id(b)] in buffers:
                setattr(module, local, buffers[first_name[id(b)]])


def choose_all_reduce(plan: Plan, world: World, groups: Sequence[FlatGroup]) -> None:
    """Set the all-reduce algorithms of the gradients' groups; call on all ranks, before the groups connect."""
    choices, compresses = plan.all_reduce, plan.layout.compress != "none"
    scatters = plan.layout.zero > 0
    for ranks in sorted({group.shard_ranks for group in groups if len(group.shard_ranks) > 1}):
        over = world.group(ranks)
        over.use_dispatcher(
            CollectiveDispatcher(over, choices, build, compresses, scatters)
            if compresses or scatters or choices.names != (NATIVE,)
            else None
        )
