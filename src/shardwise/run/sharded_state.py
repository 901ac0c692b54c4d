"""Sharded state dict: a rank's training state as shards of the global tensors, and full tensors gathered from all ranks' shards.

In: a rank's model and its optimizer. Out: `StateShard`s for checkpoints, and full tensors on rank 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from shardwise.model.graph import Variable
from shardwise.plan.ir.axis import PIPELINE, axis_of
from shardwise.plan.ir.placement import D, has_single_owner, is_shard, is_sharded
from shardwise.plan.plan import Plan
from shardwise.run.checkpoint import StateShard, full_shard
from shardwise.run.parts.rank_model import RankModel
from shardwise.run.recovery.snapshots import RankState
from shardwise.run.state.block_ranges import shards_at
from shardwise.run.state.optimizer import Optimizer
from shardwise.run.state.parameters import FlatGroup
from shardwise.run.step.dispatch import RunResult
from shardwise.world.world import Group


def checkpoint_shards(
    rank_model: RankModel, optimizer: Optimizer, coordinates: Mapping[str, int], counters: Mapping[str, Tensor]
) -> list[StateShard]:
    """Return all of this rank's state that a checkpoint holds. The first rank of several replicas is the owner."""
    shards = [full_shard(name, "scalar", tensor, is_owner=all(i == 0 for i in coordinates.values())) for name, tensor in counters.items()]
    shards += weight_shards(rank_model, coordinates)
    for number, group in enumerate(rank_model.groups):
        owner = group.is_shard_counted if optimizer.is_sharded[number] else group.is_counted
        for (begin, _, length), slots in zip(optimizer.shard_ranges(number), optimizer.slots(number), strict=True):
            for slot, tensor in slots.items():
                for start, spec in zip(group.starts, group.members, strict=True):
                    first, last = max(begin, start), min(begin + length, start + spec.size)
                    if first < last:
                        part, flat = tensor[first - begin : last - begin], (first - start, last - start)
                        shards += shards_at(spec.name, "optimizer", spec.global_shape, spec.block_ranges, part, slot, owner, flat)
    return shards


def skip_shards(skips: Mapping[str, Mapping[str, Tensor]], coordinates: Mapping[str, int]) -> list[StateShard]:
    """Return the state of parameters that updates skipped, which every rank has. See `Optimizer.skip_state`."""
    is_owner = all(i == 0 for i in coordinates.values())
    return [full_shard(name, "skips", x, slot, is_owner) for name, state in skips.items() for slot, x in state.items()]


def weight_shards(rank_model: RankModel, coordinates: Mapping[str, int]) -> list[StateShard]:
    """Return this rank's parameters and buffers as shards."""
    shards = []
    flat_groups = [group for group in rank_model.groups if group.is_gathered or group.main is not None]
    gathered_names = {spec.name for group in flat_groups for spec in group.members}
    for name, spec in rank_model.local_parameters.items():
        if name not in gathered_names:
            shards += shards_at(
                name, "parameter", spec.global_shape, spec.block_ranges, rank_model.parameters[name].detach(), is_owner=spec.is_counted
            )
    for group in flat_groups:
        if group.main is not None and group.num_shards == 1:
            for start, spec in zip(group.starts, group.members, strict=True):
                main = group.main[start : start + spec.size].view(spec.shape)
                shards += shards_at(spec.name, "parameter", spec.global_shape, spec.block_ranges, main, is_owner=spec.is_counted)
        else:
            shards += _shards_of_group(group, group.data if group.main is None else group.main)
    for name, tensor in rank_model.buffers.items():
        variable, spans = rank_model.buffer_blocks[name]
        sharded = {
            axis
            for axis, placement in rank_model.sharding.placements[variable.value].items()
            if is_shard(placement) or has_single_owner(placement)
        }
        first = rank_model.pipeline_ranks_reading(variable.value)[0]
        replicated_along = {axis: i for axis, i in coordinates.items() if axis_of(axis).shards and axis not in sharded}
        owner = coordinates[PIPELINE] == first and not any(replicated_along.values())
        shards += shards_at(name, "buffer", variable.tensor.shape, spans, tensor, is_owner=owner)
    return shards


def _shards_of_group(group: FlatGroup, data: Tensor) -> list[StateShard]:
    """Return the parameter shards in this rank's ZeRO shards of a group, laid out as `group.shard_ranges()`."""
    shards = []
    for spec, at, flat in group.members_of_shards():
        part = data[at : at + flat[1] - flat[0]]
        shards += shards_at(spec.name, "parameter", spec.global_shape, spec.block_ranges, part, "", group.is_shard_counted, flat)
    return shards


def gradient_shards(rank_model: RankModel) -> list[StateShard]:
    """Return this rank's reduced gradients (before clipping) as shards."""
    shards = []
    for group in rank_model.groups:
        if group.is_scattered:
            shards += _shards_of_group(group, group.grad)
            continue
        group.allocate()
        for spec in group.members:
            shards += shards_at(
                spec.name, "parameter", spec.global_shape, spec.block_ranges, group.views[spec.name], is_owner=spec.is_counted
            )
    return shards


def rank_state(rank_model: RankModel, optimizer: Optimizer, more: Sequence[Tensor], is_served: bool) -> RankState:
    """Return a rank's state: tensors that steps change (`more` included), and constant ones. `is_served`: parameter servers update."""
    in_groups = {member.name for group in rank_model.groups for member in group.members}
    constant = [p.detach() for name, p in sorted(rank_model.parameters.items()) if name not in in_groups]
    mutable = [
        *(group.data for group in rank_model.groups),
        *(x for _, x in sorted(rank_model.buffers.items())),
        *optimizer.state_tensors(),
        *more,
    ]
    by_tensor = {} if is_served else optimizer.replicated_on()
    return RankState(mutable, constant, {n: by_tensor[id(x)] for n, x in enumerate(mutable) if id(x) in by_tensor})


def full_tensors(variables: Mapping[str, Variable], shards: Sequence[StateShard], world_group: Group) -> dict[str, Tensor] | None:
    """Gather full tensors by name on rank 0, one at a time: owners write their shards into zeros, which are all-reduced."""
    owned: dict[str, list[StateShard]] = {}
    for p in shards:
        if p.is_owner and p.kind in ("parameter", "buffer"):
            owned.setdefault(p.name, []).append(p)
    full_by_name: dict[str, Tensor] = {}
    for name, v in variables.items():
        dtypes = [p.tensor.dtype for p in shards if p.name == name and p.kind in ("parameter", "buffer")]
        # Ranks without a shard do not know the dtype; the widest of its kind, which preserves every bit, is sent.
        widest = torch.float64 if v.tensor.is_float else torch.complex128 if v.tensor.dtype.startswith("complex") else torch.int64
        total = _assemble_tensor(owned.get(name, ()), v.tensor.shape, widest, world_group)
        if world_group.index == 0:
            full = total.cpu().to(dtypes[0] if dtypes else getattr(torch, v.tensor.dtype))
            full_by_name[name] = torch.view_as_complex(full) if v.is_complex_pairs else full
    return full_by_name if world_group.index == 0 else None


def full_tensor(shards: Sequence[StateShard], world_group: Group, rank: int) -> Tensor | None:
    """Gather a tensor of which every rank has shards, to the CPU of one rank; None elsewhere. Every rank calls it."""
    dtype = shards[0].tensor.dtype
    wide = dtype if dtype in (torch.float32, torch.float64, torch.int64) else torch.float32 if dtype.is_floating_point else torch.int64
    total = _assemble_tensor([p for p in shards if p.is_owner], shards[0].global_shape, wide, world_group)
    return total.cpu().to(dtype) if world_group.index == rank else None


def _assemble_tensor(owned: Sequence[StateShard], shape: Sequence[int], dtype: torch.dtype, world_group: Group) -> Tensor:
    """Assemble the full tensor on every rank from the owners' shards."""
    total = torch.zeros(tuple(shape), dtype=dtype, device=world_group.device)
    for shard in owned:
        block = _unflatten_shard(shard)
        index = tuple(slice(o, o + n) for o, n in zip(shard.offsets, block.shape, strict=True))
        total[index] = block.to(dtype)
    world_group.all_reduce(total)
    return total


def _unflatten_shard(shard: StateShard) -> Tensor:
    """Return a flat shard as its block, with zeros elsewhere."""
    if shard.flat is None or shard.block is None:
        return shard.tensor.detach()
    block = torch.zeros(shard.block, dtype=shard.tensor.dtype, device=shard.tensor.device)
    block.view(-1)[shard.flat[0] : shard.flat[1]] = shard.tensor.detach()
    return block


def full_state(
    rank_model: RankModel, shards: Sequence[StateShard], world_group: Group, includes_all_buffers: bool = False
) -> dict[str, Tensor] | None:
    """Gather the full state dict on rank 0, tied tensors under each name; `includes_all_buffers`: also non-persistent ones."""
    variables = {v.name: v for v in (*rank_model.graph.parameters, *rank_model.graph.buffers)}
    included = {
        name: v for name, v in variables.items() if includes_all_buffers or not rank_model.state_dict_names.isdisjoint((name, *v.aliases))
    }
    state = full_tensors(included, shards, world_group)
    if state is None:
        return None
    for name, v in included.items():
        state.update(dict.fromkeys(v.aliases, state[name]))
    return state if includes_all_buffers else {name: x for name, x in state.items() if name in rank_model.state_dict_names}


def narrow_to(x: Tensor, ranges: Iterable[tuple[int, int, int]]) -> Tensor:
    """Return the view of a tensor at (dimension, start, length) ranges, so that the rest need not be copied."""
    for dim, start, length in ranges:
        x = x.narrow(dim, start, length)
    return x


def input_gradients(
    rank_model: RankModel, plan: Plan, result: RunResult, coordinates: Mapping[str, int], world_group: Group
) -> dict[str, Tensor] | None:
    """Gather the gradients of the floating-point inputs over all microbatches, by path, on rank 0; None elsewhere.

    Every stage that reads an input has a summand of its gradient; on an axis it is sharded, partial, or replicated.
    """
    gradients: dict[str, Tensor] = {}
    sizes = plan.microbatch_sizes
    starts = [sum(sizes[:m]) for m in range(len(sizes))]
    for v in rank_model.graph.inputs:
        if not v.tensor.is_float:
            continue
        shape = (plan.batch_size, *v.tensor.shape[1:]) if v.batched else v.tensor.shape
        total = torch.zeros(shape, dtype=torch.float64, device=world_group.device)
        placements = rank_model.sharding.placements[v.value]
        if all((is_sharded(placement) or placement is D) or coordinates[axis] == 0 for axis, placement in placements.items()):
            for m, by_value in zip(result.gradient_microbatches, result.input_gradients, strict=True):
                gradient = by_value.get(v.value)
                if gradient is None:
                    continue
                target = total.narrow(0, starts[m], sizes[m]) if v.batched else total
                target = narrow_to(
                    target, rank_model.microbatch_variant(sizes[m], plan.batch_size).sharding.stored(v.value, target.shape, coordinates)
                )
                target += gradient.double()
        world_group.all_reduce(total)
        gradients[v.name] = total.cpu()
    return gradients if world_group.index == 0 else None
