"""Lowering of operators that need more than a local call: sharded labels that need a kernel, random draws, writes to buffers.

An operator's record may name its lowering function in `LOWERINGS`. Where a function returns nothing, the next one is tried: random draws,
kernels of sharded labels, means, biases added after a reduction, views, and at last the operator as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from weft.capture.functions import check_cut
from weft.lower.call import Call
from weft.lower.kernels.attention import seen
from weft.lower.kernels.exchanged import exchange_of, exchanged_attention
from weft.lower.kernels.experts import from_ranks, product, to_ranks
from weft.lower.kernels.extremes import extreme
from weft.lower.kernels.functions import function
from weft.lower.kernels.heads import shared_heads
from weft.lower.kernels.masked import masked_scatter
from weft.lower.kernels.paged import paged_attention
from weft.lower.kernels.randomness import attention, drawn, dropout
from weft.lower.kernels.recurrent import cell, layers
from weft.lower.kernels.ring import Ring, causal, ring_attention
from weft.lower.kernels.running import running_sum
from weft.lower.kernels.statistics import group_norm
from weft.lower.kernels.vocabulary import cross_entropy, embedding, nll
from weft.lower.kernels.written import batch_norm, instance_norm, write_buffer
from weft.lower.lowering import bind
from weft.model.graph import Function
from weft.ops import draws
from weft.ops.attention import drops_scores, is_causal, mask_of
from weft.ops.experts import EXPERT
from weft.ops.recurrent import UNITS
from weft.plan.placement import P, R, Shard, is_shard, piece
from weft.world.attention_backend import scaled_dot_product_attention

Way = Callable[[Call], fx.Node | None]


def called(call: Call, writes: bool) -> fx.Node:
    """Return the node of the operator's output. `writes`: it updates a buffer in place."""
    if call.op.function is not None:
        return _function(call, call.op.function)
    if writes:
        return call.nodes.add(bind(write_buffer, call.operator, call.low.draw), tuple(call.args), call.kwargs)
    candidates = (BY_WORD.get(call.record.lowering), _drawn, _dense, _by_kernel, _averaged, _biased, _shaped)
    for lower_call in candidates:
        node = lower_call(call) if lower_call is not None else None
        if node is not None:
            return node
    return call.local()


def _function(call: Call, captured: Function) -> fx.Node:
    """Lower a user's autograd function, after checking it on shards as large as this rank's."""
    low, op, cut = call.low, call.op, call.cut
    rows = low.sharding.needs[op.name]
    shard_dims = {axis: {i: form.dim for i, row in enumerate(rows) if is_shard(form := row[axis])} for axis in cut}
    cuts = [(axis, low.sharding.sizes[axis], shard_dims[axis]) for axis in cut]
    specs = tuple(low.graph.tensors[v] for v in op.inputs)
    key = (captured, specs, str(cuts))
    if cuts and key not in low.tried:
        check_cut(captured, specs, cuts, op.site)
        low.tried.add(key)
    target = function(captured, low.device, prod(call.share(axis) for axis in call.averages()))
    if captured.draws:
        target = bind(drawn, target, low.draw, call.where())
    return call.emit(target, call.args[1:])


def _drop(call: Call) -> fx.Node:
    x, p, *trains = call.args
    if not (trains[0] if trains else True) or p == 0.0:
        return x  # type: ignore[no-any-return]
    if p == 1.0:
        return call.add(torch.ops.aten.mul.Tensor, x, 0.0)
    return call.add(bind(dropout, draw=call.low.draw, where=call.where()), x, p)


def _attention(call: Call) -> fx.Node | None:
    args, low = call.args, call.low
    _pick_heads(call)
    if low.pages is not None:
        return call.emit(bind(paged_attention, low.pages, call.op.site, call.kwargs.get("scale")), args[:3])
    if (round_ := call.round()) is not None:
        return _ring(call, Ring(*round_, is_causal(call.op), call.kwargs.get("scale")))
    target = bind(scaled_dot_product_attention, call.operator) if low.device.type == "cpu" else call.operator
    at = call.queries() if is_causal(call.op) else None
    if drops_scores(call.op):
        q, k, v, mask, p, hides = (*args, False)[:6]
        mask, hides = (mask, hides) if at is None else (call.add(bind(seen, at), q, k), False)
        return call.add(bind(attention, drawing=(low.draw, call.where())), q, k, v, mask, p, hides, call.kwargs.get("scale"))
    if at is not None:
        return call.emit(bind(ring_attention, causal(at, call.read(1).shape[-2], call.kwargs.get("scale"))), args[:3])
    return call.emit(target, args, call.kwargs) if low.device.type == "cpu" else None


def _ring(call: Call, ring: Ring) -> fx.Node:
    if drops_scores(call.op):
        dropped = call.args[4] if len(call.args) > 4 else call.kwargs["dropout_p"]
        ring = replace(ring, p=dropped, drawing=(call.low.draw, call.where()))
    mask = call.args[3] if len(call.args) > 3 else call.kwargs.get("attn_mask")
    if (groups := call.exchange()) is not None:
        rows = (value := mask_of(call.op)) is not None and call.low.graph.tensors[value].shape[-2] > 1
        return call.emit(bind(exchanged_attention, exchange_of(*groups, ring, rows)), [*call.args[:3], mask])
    return call.emit(bind(ring_attention, ring), [*call.args[:3], mask])


def _pick_heads(call: Call) -> None:
    """Select, from replicated keys and values of attention sharded by query heads, those that this rank's queries read."""
    rows, rule = call.low.sharding.needs[call.op.name], call.rule if call.cut else None
    for axis, label in call.cut.items():
        if rule is None or rule.inputs[0] is None or label not in rule.inputs[0][-3:-2]:
            continue
        heads, form, group = call.read(0).shape[-3], rows[0][axis], call.low.groups[axis]
        assert isinstance(form, Shard)
        first, count = form.part(heads, group.size, group.index)
        for i in (1, 2):
            if label in (rule.inputs[i] or ()) and not is_shard(rows[i][axis]):
                call.args[i] = call.add(shared_heads, call.args[i], first, count, heads)


def _batch_norm(call: Call) -> fx.Node | None:
    if len(call.args) > 5 and call.args[5]:
        return call.add(bind(batch_norm, call.low.draw, call.statistics()), *call.args)
    return None


def _group_norm(call: Call) -> fx.Node | None:
    if not (parts := call.statistics()):
        return None
    x, num_groups, weight, bias, *eps = call.args
    return call.emit(bind(group_norm, num_groups=num_groups, eps=eps[0] if eps else 1e-5, parts=parts), [x, weight, bias])


def _instance_norm(call: Call) -> fx.Node | None:
    args = call.args
    if parts := call.statistics():
        return call.emit(bind(group_norm, num_groups=call.read(0).shape[1], eps=args[7], parts=parts), args[:3])
    if len(args) > 5 and args[5] and args[3] is not None:
        return call.add(bind(instance_norm, call.low.draw), *args)
    return None


def _in_groups(call: Call) -> None:
    """Set a convolution's number of groups to this rank's."""
    if "groups" in call.kernels():
        call.args[6] = call.args[6] * call.shape[1] // call.made.shape[1]


def _in_rows(call: Call) -> fx.Node:
    """Make the input contiguous, as traced: the operator reads memory directly."""
    return call.emit(call.operator, [call.add(torch.ops.aten.contiguous.default, call.args[0]), *call.args[1:]], call.kwargs)


def _in_pairs(call: Call) -> fx.Node:
    """Clone the input: a parameter may begin anywhere in a shared buffer, a complex number only at an even offset."""
    return call.emit(call.operator, [call.add(torch.ops.aten.clone.default, call.args[0])], call.kwargs)


def _part(call: Call) -> fx.Node | None:
    """Lower slices of a dimension sharded by runs: this rank's shards of the runs in each slice."""
    op, low = call.op, call.low
    axis = next((axis for axis, label in call.cut.items() if (op.name, label) in low.graph.fused.labels), "")
    if not axis or call.record.along is None:
        return None
    form, group = low.sharding.needs[op.name][0][axis], low.groups[axis]
    assert is_shard(form)
    tensors, dim = low.graph.tensors, form.dim
    spans = form.spans(tensors[op.inputs[0]].shape[dim], group.size, group.index)
    (along,) = call.record.along(op, [tensors[v].shape for v in op.inputs], [tensors[v].shape for v in op.outputs])
    parts = [runs[0] for number, _, runs in along.places if number]
    local = [[sum(min(stop, border) - start for start, stop in spans if start < border) for border in part] for part in parts]
    if op.multiple:
        return call.add(torch.ops.aten.split_with_sizes.default, call.args[0], [stop - start for start, stop in local], dim)
    return call.add(torch.ops.aten.slice.Tensor, call.args[0], dim, *local[0])


def _units(call: Call) -> fx.Node | None:
    """Lower a recurrence with sharded hidden units."""
    op, low = call.op, call.low
    axes, recurrence = call.axes_of(UNITS), call.record.recurrence
    if not axes or recurrence is None:
        return None
    (axis,) = axes
    kind, group = op.target.split(".")[1].removesuffix("_cell"), low.groups[axis]
    form = low.sharding.forms[op.outputs[-1]][axis]
    assert is_shard(form)
    if recurrence.is_cell:
        return call.emit(bind(cell, kind, *form.part(call.made.shape[-1], group.size, group.index)), call.args)
    return call.emit(bind(layers, group, form, kind, not is_shard(low.sharding.forms[op.outputs[0]][axis])), call.args)


def _scatter(call: Call) -> fx.Node | None:
    if call.made.dtype.startswith("complex"):
        return call.nodes.add(bind(_complex_scatter, call.operator), tuple(call.args), call.kwargs)
    return None


def _classes(call: Call) -> fx.Node | None:
    args, kwargs, kernels = call.args, call.kwargs, call.kernels()
    soft = call.read(0).shape == call.read(1).shape
    if not kernels or soft:
        return None
    weight, reduction, ignore, smoothing = (*args, *(None, 1, -100, 0.0)[len(args) - 2 :])[2:6]
    bound = bind(
        cross_entropy,
        rows=kernels.get("average", ()),
        classes=(call.begins("vocabulary"), kernels["vocabulary"][0]) if "vocabulary" in kernels else None,
        smoothing=kwargs.get("label_smoothing", smoothing),
        mean=kwargs.get("reduction", reduction) == 1,
    )
    return call.add(bound, args[0], args[1], ignore, weight=weight)


def _targets(call: Call) -> fx.Node | None:
    rows = call.kernels().get("average")
    return call.add(bind(nll, rows), *call.args) if rows else None


def _experts_here(call: Call, number: int) -> tuple[str, int, int]:
    """Return (axis over which `number` experts are sharded or "", first local expert, number of local experts). Of several such axes each
    shards the shards of those before it again, and all ranks have the same tokens."""
    axes, first = call.axes_of(EXPERT), 0
    for axis in axes:
        start, number = piece(number, call.low.groups[axis].size, call.low.groups[axis].index)
        first += start
    return (axes[0], first, number) if axes else ("", 0, -1)


def _to_experts(call: Call) -> fx.Node | None:
    x, which, experts = call.args
    axis, first, num_local = _experts_here(call, experts)
    if not axis:
        return None
    if is_shard(call.low.sharding.needs[call.op.name][0][axis]):  # ranks of an expert axis have different tokens
        return call.add(bind(to_ranks, call.low.groups[axis]), x, which, experts)
    return call.add(call.operator, x, which, experts, first, num_local)


def _of_experts(call: Call) -> fx.Node:
    _, first, _ = _experts_here(call, call.read(2).shape[0])
    shares = prod(call.low.sharding.sizes[axis] for axis in call.contracted() if call.cut[axis] != EXPERT)
    return call.emit(bind(product, first=first, shares=shares), call.args)


def _from_experts(call: Call) -> fx.Node | None:
    axis, *_ = _experts_here(call, call.args[3])
    if axis and is_shard(call.low.sharding.forms[call.op.outputs[0]][axis]):
        return call.add(bind(from_ranks, call.low.groups[axis]), *call.args)
    return None


BY_WORD: dict[str, Way] = {
    "into": _to_experts,
    "in experts": _of_experts,
    "out of": _from_experts,
    "drop": _drop,
    "attention": _attention,
    "batch": _batch_norm,
    "groups": _group_norm,
    "instances": _instance_norm,
    "grouped": _in_groups,
    "memory": _in_rows,
    "pairs": _in_pairs,
    "part": _part,
    "units": _units,
    "scatter": _scatter,
    "classes": _classes,
    "targets": _targets,
}


def _drawn(call: Call) -> fx.Node | None:
    if draws(call.op):
        return call.nodes.add(bind(drawn, call.operator, call.low.draw, call.where()), tuple(call.args), call.kwargs)
    return None


def _dense(call: Call) -> None:
    """Force dense gradients: they are stored in dense buffers with others."""
    at = call.record.sparse_at
    if at is not None and len(call.args) > at:
        call.args[at] = False


def _by_kernel(call: Call) -> fx.Node | None:
    kernels, args = call.kernels(), call.args
    if "counted" in kernels:
        return call.add(bind(masked_scatter, *kernels["counted"]), *args)
    if "running" in kernels:
        return call.emit(bind(running_sum, *kernels["running"]), args, call.kwargs)
    if "extreme" in kernels:
        return call.emit(bind(extreme, kernels["extreme"], call.record.extreme == "largest"), args, call.kwargs)
    if call.record.looks_up and "vocabulary" in kernels:
        padding = args[2] if len(args) > 2 else -1
        return call.add(embedding, args[0], args[1], padding, call.begins("vocabulary"))
    return None


def _averaged(call: Call) -> fx.Node | None:
    """Lower a mean over a sharded dimension: this rank's share of the global mean."""
    axes = call.averages()
    if not axes:
        return None
    return call.add(torch.ops.aten.mul.Tensor, call.local(), prod(call.share(axis) for axis in axes))


def _biased(call: Call) -> fx.Node | None:
    """Lower a reduction over ranks whose bias is added once, after it."""
    position, args, axes = call.record.bias, call.args, call.contracted()
    if position is None or len(args) <= position or args[position] is None or not axes:
        return None
    bias, args[position] = args[position], None
    partial_sum = call.local()
    form = call.low.sharding.forms[call.op.outputs[0]]
    for axis in axes:
        if form[axis] is P:  # reduced later: every rank adds its share of the bias
            bias = call.add(torch.ops.aten.div.Tensor, bias, call.low.sharding.sizes[axis])
        else:
            partial_sum = call.nodes.move(partial_sum, call.low.groups[axis], P, R)
    num_trailing = len(call.made.shape) - 2 if call.record.kind == "convolution" else 0  # dimensions that follow the features
    bias = call.add(torch.ops.aten.reshape.default, bias, [-1] + [1] * num_trailing) if num_trailing else bias
    return call.add(_add_bias, partial_sum, bias)


def _shaped(call: Call) -> fx.Node | None:
    """Lower an operator with a shape argument, which becomes that of this rank's shard."""
    shapers = {"reshape": torch.ops.aten.reshape.default, "expand": torch.ops.aten.expand.default}
    shaper = shapers.get(call.record.moves)
    ragged, value = call.low.graph.ragged, call.op.outputs[0]
    shape = [-1 if (value, dim) in ragged else size for dim, size in enumerate(call.shape)]
    return None if shaper is None else call.emit(shaper, [call.args[0], shape])


def _complex_scatter(target: Callable[..., Tensor], x: Tensor, source: Tensor, dim: int = 0, *rest: Any, **kwargs: Any) -> Tensor:
    """Compute `slice_scatter` and `select_scatter` of complex numbers, which torch cannot differentiate, on their real pairs."""
    parts = target(torch.view_as_real(x), torch.view_as_real(source.to(x.dtype)), dim % x.dim(), *rest, **kwargs)
    return torch.view_as_complex(parts.contiguous())


def _add_bias(x: Tensor, bias: Tensor) -> Tensor:
    return x + bias.to(x.dtype)
