"""A rank's training state as pieces of the whole model's, and the whole model's from everyone's pieces.

In: a rank's parts and its optimizer. Out: `Piece`s for checkpoints, and whole tensors on rank 0.
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
    """Everything that a checkpoint holds of this rank. Of equal copies the first rank's is the owner."""
    pieces = [full_piece(name, "scalar", tensor, owner=all(i == 0 for i in at.values())) for name, tensor in counters.items()]
    pieces += weights_of(parts, at)
    for number, group in enumerate(parts.groups):
        owner = group.counted_piece if optimizer.sharded[number] else group.counted
        for (begin, _, length), slots in zip(optimizer.pieces(number), optimizer.slots(number), strict=True):
            for slot, tensor in slots.items():
                for start, spec in zip(group.starts, group.members, strict=True):
                    first, last = max(begin, start), min(begin + length, start + spec.size)
                    if first < last:
                        mine, flat = tensor[first - begin : last - begin], (first - start, last - start)
                        pieces += pieces_at(spec.name, "optimizer", spec.global_shape, spec.spans, mine, slot, owner, flat)
    return pieces


def weights_of(parts: Parts, at: Mapping[str, int]) -> list[Piece]:
    """This rank's parameters and buffers."""
    pieces = []
    gathered = {spec.name for group in parts.groups if group.gathered for spec in group.members}
    for name, spec in parts.specs.items():
        if name not in gathered:
            pieces += pieces_at(name, "parameter", spec.global_shape, spec.spans, parts.parameters[name].detach(), owner=spec.counted)
    for group in parts.groups:
        if group.gathered:
            pieces += _pieces_in(group, group.data)
    for name, tensor in parts.buffers.items():
        variable, spans = parts.blocks[name]
        cut = {axis for axis, form in parts.sharding.forms[variable.value].items() if is_shard(form) or is_owned(form)}
        first = parts.holders(variable.value)[0]
        replicated_along = {axis: i for axis, i in at.items() if axis_of(axis).cuts and axis not in cut}
        owner = at[PIPELINE] == first and not any(replicated_along.values())
        pieces += pieces_at(name, "buffer", variable.tensor.shape, spans, tensor, owner=owner)
    return pieces


def _pieces_in(group: FlatGroup, pieces: Tensor) -> list[Piece]:
    """What this rank's pieces of a group hold, laid out as `group.pieces()`."""
    of_group = []
    for spec, at, flat in group.shares():
        mine = pieces[at : at + flat[1] - flat[0]]
        of_group += pieces_at(spec.name, "parameter", spec.global_shape, spec.spans, mine, "", group.counted_piece, flat)
    return of_group


def gradient_pieces(parts: Parts) -> list[Piece]:
    """This rank's summed gradients (before clipping), as pieces."""
    pieces = []
    for group in parts.groups:
        if group.scattered:
            pieces += _pieces_in(group, group.grad)
            continue
        group.hold()
        for spec in group.members:
            pieces += pieces_at(spec.name, "parameter", spec.global_shape, spec.spans, group.views[spec.name], owner=spec.counted)
    return pieces


def state_of(parts: Parts, optimizer: Optimizer, more: Sequence[Tensor], is_served: bool) -> State:
    """All of a rank's state that steps change, `more` too, and what they leave as it is. `is_served`: some ranks alone update."""
    flat = {member.name for group in parts.groups for member in group.members}
    fixed = [p.detach() for name, p in sorted(parts.parameters.items()) if name not in flat]
    changed = [*(group.data for group in parts.groups), *(x for _, x in sorted(parts.buffers.items())), *optimizer.state_tensors(), *more]
    by_tensor = {} if is_served else optimizer.shared_by()
    return State(changed, fixed, {n: by_tensor[id(x)] for n, x in enumerate(changed) if id(x) in by_tensor})


def full_tensors(variables: Mapping[str, Variable], pieces: Sequence[Piece], everyone: Group) -> dict[str, Tensor] | None:
    """Whole tensors by name, on rank 0: owners lay their blocks into zeros, and the sum is the whole. One tensor at a time."""
    mine: dict[str, list[Piece]] = {}
    for p in pieces:
        if p.owner and p.kind in ("parameter", "buffer"):
            mine.setdefault(p.name, []).append(p)
    out: dict[str, Tensor] = {}
    for name, v in variables.items():
        dtypes = [p.tensor.dtype for p in pieces if p.name == name and p.kind in ("parameter", "buffer")]
        # Ranks without a part of it do not know its dtype; on the way it is the widest of its kind, which keeps every bit.
        widest = torch.float64 if v.tensor.is_float else torch.complex128 if v.tensor.dtype.startswith("complex") else torch.int64
        total = _joined(mine.get(name, ()), v.tensor.shape, widest, everyone)
        if everyone.index == 0:
            full = total.cpu().to(dtypes[0] if dtypes else getattr(torch, v.tensor.dtype))
            out[name] = torch.view_as_complex(full) if v.pairs else full
    return out if everyone.index == 0 else None


def full_tensor(pieces: Sequence[Piece], everyone: Group, rank: int) -> Tensor | None:
    """The whole of a tensor of which every rank has pieces, on the CPU of one of them; None elsewhere. Every rank calls it."""
    dtype = pieces[0].tensor.dtype
    wide = dtype if dtype in (torch.float32, torch.float64, torch.int64) else torch.float32 if dtype.is_floating_point else torch.int64
    total = _joined([p for p in pieces if p.owner], pieces[0].global_shape, wide, everyone)
    return total.cpu().to(dtype) if everyone.index == rank else None


def _joined(owned: Sequence[Piece], shape: Sequence[int], dtype: torch.dtype, everyone: Group) -> Tensor:
    """The whole, on every rank, of what owners have."""
    total = torch.zeros(tuple(shape), dtype=dtype, device=everyone.device)
    for piece in owned:
        block = _laid_out(piece)
        place = tuple(slice(o, o + n) for o, n in zip(piece.offsets, block.shape, strict=True))
        total[place] = block.to(dtype)
    everyone.all_reduce(total)
    return total


def _laid_out(piece: Piece) -> Tensor:
    """A piece as its block, with zeros where it has nothing."""
    if piece.flat is None or piece.block is None:
        return piece.tensor.detach()
    block = torch.zeros(piece.block, dtype=piece.tensor.dtype, device=piece.tensor.device)
    block.view(-1)[piece.flat[0] : piece.flat[1]] = piece.tensor.detach()
    return block


def full_state(parts: Parts, pieces: Sequence[Piece], everyone: Group, every: bool = False) -> dict[str, Tensor] | None:
    """The model's state dict on rank 0, tied tensors under each of their names; with `every` also buffers that are no part of it."""
    variables = {v.name: v for v in (*parts.graph.parameters, *parts.graph.buffers)}
    wanted = {name: v for name, v in variables.items() if every or not parts.saved.isdisjoint((name, *v.aliases))}
    state = full_tensors(wanted, pieces, everyone)
    if state is None:
        return None
    for name, v in wanted.items():
        state.update(dict.fromkeys(v.aliases, state[name]))
    return state if every else {name: x for name, x in state.items() if name in parts.saved}


def narrowed(x: Tensor, places: Iterable[tuple[int, int, int]]) -> Tensor:
    """The part of a tensor at (dimension, start, length) each: a view, so that what nobody reads of it need not be copied."""
    for dim, start, length in places:
        x = x.narrow(dim, start, length)
    return x


def input_gradients(parts: Parts, plan: Plan, result: Result, at: Mapping[str, int], everyone: Group) -> dict[str, Tensor] | None:
    """Gradients of the floating-point inputs over all microbatches, by path, on rank 0; None elsewhere.

    Every stage that reads an input has a summand of its gradient; over an axis it is a piece, a summand, or the same everywhere.
    """
    out: dict[str, Tensor] = {}
    sizes = plan.microbatch_sizes
    starts = [sum(sizes[:m]) for m in range(len(sizes))]
    for v in parts.graph.inputs:
        if not v.tensor.is_float:
            continue
        shape = (plan.batch_size, *v.tensor.shape[1:]) if v.batched else v.tensor.shape
        total = torch.zeros(shape, dtype=torch.float64, device=everyone.device)
        forms = parts.sharding.forms[v.value]
        if all((is_cut(form) or form is D) or at[axis] == 0 for axis, form in forms.items()):
            for m, by_value in zip(result.order, result.input_gradients, strict=True):
                gradient = by_value.get(v.value)
                if gradient is None:
                    continue
                place = total.narrow(0, starts[m], sizes[m]) if v.batched else total
                place = narrowed(place, parts.of_size(sizes[m], plan.batch_size).sharding.held(v.value, place.shape, at))
                place += gradient.double()
        everyone.all_reduce(total)
        out[v.name] = total.cpu()
    return out if everyone.index == 0 else None
