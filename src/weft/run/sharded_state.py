"""Sharded state dict: a rank's training state as shards of the global tensors, and full tensors gathered from all ranks' shards.

In: a rank's model and its optimizer. Out: `StateShard`s for checkpoints, and full tensors on rank 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from weft.model.graph import Variable
from weft.plan.axis import PIPELINE, axis_of
from weft.plan.placement import D, is_cut, is_owned, is_shard
from weft.plan.plan import Plan
from weft.run.state.checkpoint import Piece, full_piece
from weft.run.state.optimizer import Optimizer
from weft.run.state.parameters import FlatGroup
from weft.run.state.snapshots import State
from weft.run.state.spans import pieces_at
from weft.run.step.dispatch import Result
from weft.run.training_parts import Parts
from weft.world.world import Group


def pieces_of(parts: Parts, optimizer: Optimizer, at: Mapping[str, int], counters: Mapping[str, Tensor]) -> list[Piece]:
    """Return all of this rank's state that a checkpoint holds. The first rank of several replicas is the owner."""
    shards = [full_piece(name, "scalar", tensor, owner=all(i == 0 for i in at.values())) for name, tensor in counters.items()]
    shards += weights_of(parts, at)
    for number, group in enumerate(parts.groups):
        owner = group.counted_piece if optimizer.sharded[number] else group.counted
        for (begin, _, length), slots in zip(optimizer.pieces(number), optimizer.slots(number), strict=True):
            for slot, tensor in slots.items():
                for start, spec in zip(group.starts, group.members, strict=True):
                    first, last = max(begin, start), min(begin + length, start + spec.size)
                    if first < last:
                        part, flat = tensor[first - begin : last - begin], (first - start, last - start)
                        shards += pieces_at(spec.name, "optimizer", spec.global_shape, spec.spans, part, slot, owner, flat)
    return shards


def weights_of(parts: Parts, at: Mapping[str, int]) -> list[Piece]:
    """Return this rank's parameters and buffers as shards."""
    shards = []
    gathered_names = {spec.name for group in parts.groups if group.gathered for spec in group.members}
    for name, spec in parts.specs.items():
        if name not in gathered_names:
            shards += pieces_at(name, "parameter", spec.global_shape, spec.spans, parts.parameters[name].detach(), owner=spec.counted)
    for group in parts.groups:
        if group.gathered:
            shards += _pieces_in(group, group.data)
    for name, tensor in parts.buffers.items():
        variable, spans = parts.blocks[name]
        sharded = {axis for axis, placement in parts.sharding.forms[variable.value].items() if is_shard(placement) or is_owned(placement)}
        first = parts.holders(variable.value)[0]
        replicated_along = {axis: i for axis, i in at.items() if axis_of(axis).cuts and axis not in sharded}
        owner = at[PIPELINE] == first and not any(replicated_along.values())
        shards += pieces_at(name, "buffer", variable.tensor.shape, spans, tensor, owner=owner)
    return shards


def _pieces_in(group: FlatGroup, pieces: Tensor) -> list[Piece]:
    """Return the parameter shards in this rank's ZeRO shards of a group, laid out as `group.shard_ranges()`."""
    shards = []
    for spec, at, flat in group.shares():
        part = pieces[at : at + flat[1] - flat[0]]
        shards += pieces_at(spec.name, "parameter", spec.global_shape, spec.spans, part, "", group.counted_piece, flat)
    return shards


def gradient_pieces(parts: Parts) -> list[Piece]:
    """Return this rank's reduced gradients (before clipping) as shards."""
    shards = []
    for group in parts.groups:
        if group.scattered:
            shards += _pieces_in(group, group.grad)
            continue
        group.hold()
        for spec in group.members:
            shards += pieces_at(spec.name, "parameter", spec.global_shape, spec.spans, group.views[spec.name], owner=spec.counted)
    return shards


def state_of(parts: Parts, optimizer: Optimizer, more: Sequence[Tensor], is_served: bool) -> State:
    """Return a rank's state: tensors that steps change (`more` included), and constant ones. `is_served`: parameter servers update."""
    in_groups = {member.name for group in parts.groups for member in group.members}
    constant = [p.detach() for name, p in sorted(parts.parameters.items()) if name not in in_groups]
    mutable = [*(group.data for group in parts.groups), *(x for _, x in sorted(parts.buffers.items())), *optimizer.state_tensors(), *more]
    by_tensor = {} if is_served else optimizer.shared_by()
    return State(mutable, constant, {n: by_tensor[id(x)] for n, x in enumerate(mutable) if id(x) in by_tensor})


def full_tensors(variables: Mapping[str, Variable], pieces: Sequence[Piece], everyone: Group) -> dict[str, Tensor] | None:
    """Gather full tensors by name on rank 0, one at a time: owners write their shards into zeros, which are all-reduced."""
    owned: dict[str, list[Piece]] = {}
    for p in pieces:
        if p.owner and p.kind in ("parameter", "buffer"):
            owned.setdefault(p.name, []).append(p)
    full_by_name: dict[str, Tensor] = {}
    for name, v in variables.items():
        dtypes = [p.tensor.dtype for p in pieces if p.name == name and p.kind in ("parameter", "buffer")]
        # Ranks without a shard do not know the dtype; the widest of its kind, which preserves every bit, is sent.
        widest = torch.float64 if v.tensor.is_float else torch.complex128 if v.tensor.dtype.startswith("complex") else torch.int64
        total = _joined(owned.get(name, ()), v.tensor.shape, widest, everyone)
        if everyone.index == 0:
            full = total.cpu().to(dtypes[0] if dtypes else getattr(torch, v.tensor.dtype))
            full_by_name[name] = torch.view_as_complex(full) if v.pairs else full
    return full_by_name if everyone.index == 0 else None


def full_tensor(pieces: Sequence[Piece], everyone: Group, rank: int) -> Tensor | None:
    """Gather a tensor of which every rank has shards, to the CPU of one rank; None elsewhere. Every rank calls it."""
    dtype = pieces[0].tensor.dtype
    wide = dtype if dtype in (torch.float32, torch.float64, torch.int64) else torch.float32 if dtype.is_floating_point else torch.int64
    total = _joined([p for p in pieces if p.owner], pieces[0].global_shape, wide, everyone)
    return total.cpu().to(dtype) if everyone.index == rank else None


def _joined(owned: Sequence[Piece], shape: Sequence[int], dtype: torch.dtype, everyone: Group) -> Tensor:
    """Assemble the full tensor on every rank from the owners' shards."""
    total = torch.zeros(tuple(shape), dtype=dtype, device=everyone.device)
    for shard in owned:
        block = _laid_out(shard)
        index = tuple(slice(o, o + n) for o, n in zip(shard.offsets, block.shape, strict=True))
        total[index] = block.to(dtype)
    everyone.all_reduce(total)
    return total


def _laid_out(piece: Piece) -> Tensor:
    """Return a flat shard as its block, with zeros elsewhere."""
    if piece.flat is None or piece.block is None:
        return piece.tensor.detach()
    block = torch.zeros(piece.block, dtype=piece.tensor.dtype, device=piece.tensor.device)
    block.view(-1)[piece.flat[0] : piece.flat[1]] = piece.tensor.detach()
    return block


def full_state(parts: Parts, pieces: Sequence[Piece], everyone: Group, every: bool = False) -> dict[str, Tensor] | None:
    """Gather the full state dict on rank 0, tied tensors under each name; `includes_all_buffers`: also non-persistent ones."""
    variables = {v.name: v for v in (*parts.graph.parameters, *parts.graph.buffers)}
    included = {name: v for name, v in variables.items() if every or not parts.saved.isdisjoint((name, *v.aliases))}
    state = full_tensors(included, pieces, everyone)
    if state is None:
        return None
    for name, v in included.items():
        state.update(dict.fromkeys(v.aliases, state[name]))
    return state if every else {name: x for name, x in state.items() if name in parts.saved}


def narrowed(x: Tensor, places: Iterable[tuple[int, int, int]]) -> Tensor:
    """Return the view of a tensor at (dimension, start, length) ranges, so that the rest need not be copied."""
    for dim, start, length in places:
        x = x.narrow(dim, start, length)
    return x


def input_gradients(parts: Parts, plan: Plan, result: Result, at: Mapping[str, int], everyone: Group) -> dict[str, Tensor] | None:
    """Gather the gradients of the floating-point inputs over all microbatches, by path, on rank 0; None elsewhere.

    Every stage that reads an input has a summand of its gradient; on an axis it is sharded, partial, or replicated.
    """
    gradients: dict[str, Tensor] = {}
    sizes = plan.microbatch_sizes
    starts = [sum(sizes[:m]) for m in range(len(sizes))]
    for v in parts.graph.inputs:
        if not v.tensor.is_float:
            continue
        shape = (plan.batch_size, *v.tensor.shape[1:]) if v.batched else v.tensor.shape
        total = torch.zeros(shape, dtype=torch.float64, device=everyone.device)
        placements = parts.sharding.forms[v.value]
        if all((is_cut(placement) or placement is D) or at[axis] == 0 for axis, placement in placements.items()):
            for m, by_value in zip(result.order, result.input_gradients, strict=True):
                gradient = by_value.get(v.value)
                if gradient is None:
                    continue
                target = total.narrow(0, starts[m], sizes[m]) if v.batched else total
                target = narrowed(target, parts.of_size(sizes[m], plan.batch_size).sharding.held(v.value, target.shape, at))
                target += gradient.double()
        everyone.all_reduce(total)
        gradients[v.name] = total.cpu()
    return gradients if everyone.index == 0 else None
