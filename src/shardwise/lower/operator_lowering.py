"""Lowering of operators that need more than a local call: sharded labels that need a kernel, random draws, writes to buffers.

An operator's record may name its lowering function in `LOWERINGS`. Where a function returns nothing, the next one is tried: random draws,
kernels of sharded labels, means, biases added after a reduction, views, and at last the operator as it is.
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable
from dataclasses import replace
from functools import cache, reduce
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.capture.autograd_functions import FUNCTION_BASE, call_of, check_sharded_function
from shardwise.lower.call import OperatorCall
from shardwise.lower.float64_mode import Float64Casts, compute_in_float64
from shardwise.lower.kernels.expert_dispatch import combine_from_ranks, dispatch_to_ranks, expert_matmul
from shardwise.lower.kernels.paged import paged_attention
from shardwise.lower.kernels.randomness import attention, draw_random, dropout
from shardwise.lower.kernels.recurrent import recurrent_cell, recurrent_layers
from shardwise.lower.kernels.ring import Ring, causal_mask_at, local_causal_ring, ring_attention
from shardwise.lower.kernels.sharded_dims import masked_scatter, running_sum, sharded_extreme
from shardwise.lower.kernels.statistics import batch_norm, group_norm, instance_norm, write_buffer
from shardwise.lower.kernels.ulysses_ring import head_exchange_of, shared_heads, ulysses_ring_attention
from shardwise.lower.kernels.vocabulary import cross_entropy, embedding, nll
from shardwise.lower.lowering import bind_named
from shardwise.model.dims.expert_rows import expert_rows
from shardwise.model.dims.fused_dims import find_fused_dims
from shardwise.model.graph import Function
from shardwise.ops import is_random
from shardwise.ops.attention import attention_mask_of, has_score_dropout, is_causal
from shardwise.ops.experts import EXPERT
from shardwise.ops.recurrent import HIDDEN_UNITS
from shardwise.ops.vocabulary import CostKind, LoweringKind, Reduction, ViewKind
from shardwise.plan.ir.placement import P, R, Shard, even_shard_range, is_disjoint_shard, is_shard
from shardwise.world.attention_backend import scaled_dot_product_attention

LoweringFunction = Callable[[OperatorCall], fx.Node | None]


def lower_operator(call: OperatorCall, writes_buffer: bool) -> fx.Node:
    """Return the node of the operator's output. `writes`: it updates a buffer in place."""
    if call.op.function is not None:
        return _lower_user_function(call, call.op.function)
    _promote_operands(call)
    if writes_buffer:
        return call.nodes.add(bind_named(write_buffer, call.torch_operator, call.lowering.draw_state), tuple(call.args), call.kwargs)
    candidates = (
        LOWERINGS.get(call.record.lowering),
        _lower_random,
        _force_dense_gradient,
        _lower_by_kernel,
        _lower_mean,
        _lower_bias_after_sum,
        _lower_view,
    )
    for lower_call in candidates:
        node = lower_call(call) if lower_call is not None else None
        if node is not None:
            return node
    return call.call_operator()


def _promote_operands(call: OperatorCall) -> None:
    """Cast floating-point operands to the widest of their dtypes, as autocast does with operators that take one dtype only."""
    nodes = [i for i, a in enumerate(call.args) if isinstance(a, fx.Node)]
    if call.op.name in call.lowering.sharding.promoted and len(nodes) > 1:
        together = call.add_call(cast_to_widest, *(call.args[i] for i in nodes))
        for k, i in enumerate(nodes):
            call.args[i] = call.add_call(python_operator.getitem, together, k)


def cast_to_widest(*operands: Tensor) -> list[Tensor]:
    """Return the operands, those of floating-point numbers in the widest of their dtypes."""
    dtypes = [x.dtype for x in operands if x.is_floating_point()]
    widest = reduce(torch.promote_types, dtypes) if dtypes else torch.float32
    return [x.to(widest) if x.is_floating_point() else x for x in operands]


def _lower_user_function(call: OperatorCall, captured: Function) -> fx.Node:
    """Lower a user's autograd function, after checking it on shards as large as this rank's."""
    low, op, cut = call.lowering, call.op, call.cut_labels
    rows = low.sharding.input_placements[op.name]
    shard_dims = {axis: {i: form.dim for i, row in enumerate(rows) if is_disjoint_shard(form := row[axis])} for axis in cut}
    cuts = [(axis, low.sharding.sizes[axis], shard_dims[axis]) for axis in cut]
    specs = tuple(low.graph.tensors[v] for v in op.inputs)
    key = (captured, specs, str(cuts))
    if cuts and key not in low.tried_functions:
        check_sharded_function(captured, specs, cuts, op.site)
        low.tried_functions.add(key)
    target = _wrap_user_function(captured, low.device, prod(call.sample_share(axis) for axis in call.mean_axes()))
    if captured.is_random:
        target = bind_named(draw_random, target, low.draw_state, call.draw_site())
    return call.emit(target, call.args[1:])


def _wrap_user_function(captured: Function, device: torch.device, scale: float = 1.0) -> Callable[..., tuple[Tensor, ...]]:
    """Return a callable of the function's tensors. `device`: replaces device arguments; `scale`: of its output, if that is a mean over a
    sharded label."""
    call = call_of(captured)

    def localized(a: object) -> object:
        return device if isinstance(a, torch.device) else torch.float64 if captured.is_float64 and a is torch.float32 else a

    call = replace(call, arguments=tuple(map(localized, call.arguments)), keywords=tuple((k, localized(a)) for k, a in call.keywords))
    cls = _float64_class(captured.cls) if captured.is_float64 else captured.cls

    def called(*tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = call.arguments_with(tensors)
        out = cls.apply(*args, **kwargs)
        outputs = [y for y in (out if isinstance(out, tuple) else (out,)) if isinstance(y, Tensor)]
        return tuple(y * scale for y in outputs) if scale != 1.0 else tuple(outputs)

    called.__name__ = called.__qualname__ = "function"
    called.__module__ = __name__
    return called


@cache
def _float64_class(cls: Any) -> Any:
    """Return the class with its code in float64."""

    def under(name: str, code: Callable[..., Any]) -> Any:
        def wide(*args: Any, **kwargs: Any) -> Any:
            # As in the serial run, where torch function modes do not apply to code called by autograd.
            with Float64Casts() if name in ("backward", "vjp") else compute_in_float64(True):  # type: ignore[no-untyped-call]  # untyped in torch
                return code(*args, **kwargs)

        return staticmethod(wide)

    methods = {name: getattr(cls, name) for name in ("forward", "backward", "vjp", "setup_context")}
    return type(
        cls.__name__, (cls,), {name: under(name, code) for name, code in methods.items() if code is not getattr(FUNCTION_BASE, name)}
    )


def _lower_dropout(call: OperatorCall) -> fx.Node:
    x, p, *trains = call.args
    if not (trains[0] if trains else True) or p == 0.0:
        return x  # type: ignore[no-any-return]
    if p == 1.0:
        return call.add_call(torch.ops.aten.mul.Tensor, x, 0.0)
    return call.add_call(bind_named(dropout, draw=call.lowering.draw_state, where=call.draw_site()), x, p)


def _lower_attention(call: OperatorCall) -> fx.Node | None:
    args, low = call.args, call.lowering
    _select_shared_heads(call)
    if low.pages is not None:
        return call.emit(bind_named(paged_attention, low.pages, call.op.site, call.kwargs.get("scale")), args[:3])
    if (round_ := call.ring_groups()) is not None:
        group, queries, keys = round_
        return _lower_ring_attention(call, Ring(group, queries, keys, is_causal(call.op), call.kwargs.get("scale")))
    target = bind_named(scaled_dot_product_attention, call.torch_operator) if low.device.type == "cpu" else call.torch_operator
    at = call.query_positions() if is_causal(call.op) else None
    if has_score_dropout(call.op):
        q, k, v, mask, p, hides = (*args, False)[:6]
        mask, hides = (mask, hides) if at is None else (call.add_call(bind_named(causal_mask_at, at), q, k), False)
        return call.add_call(
            bind_named(attention, drawing=(low.draw_state, call.draw_site())), q, k, v, mask, p, hides, call.kwargs.get("scale")
        )
    if at is not None:
        return call.emit(
            bind_named(ring_attention, local_causal_ring(at, call.input_spec(1).shape[-2], call.kwargs.get("scale"))), args[:3]
        )
    return call.emit(target, args, call.kwargs) if low.device.type == "cpu" else None


def _lower_ring_attention(call: OperatorCall, ring: Ring) -> fx.Node:
    if has_score_dropout(call.op):
        dropped = call.args[4] if len(call.args) > 4 else call.kwargs["dropout_p"]
        ring = replace(ring, dropout_p=dropped, drawing=(call.lowering.draw_state, call.draw_site()))
    mask = call.args[3] if len(call.args) > 3 else call.kwargs.get("attn_mask")
    if (groups := call.ulysses_groups()) is not None:
        rows = (value := attention_mask_of(call.op)) is not None and call.lowering.graph.tensors[value].shape[-2] > 1
        inner_group, outer_group = groups
        exchange = head_exchange_of(inner_group, outer_group, ring, rows)
        return call.emit(bind_named(ulysses_ring_attention, exchange), [*call.args[:3], mask])
    return call.emit(bind_named(ring_attention, ring), [*call.args[:3], mask])


def _select_shared_heads(call: OperatorCall) -> None:
    """Select, from replicated keys and values of attention sharded by query heads, those that this rank's queries read."""
    rows, rule = call.lowering.sharding.input_placements[call.op.name], call.rule if call.cut_labels else None
    for axis, label in call.cut_labels.items():
        if rule is None or rule.inputs[0] is None or label not in rule.inputs[0][-3:-2]:
            continue
        heads, form, group = call.input_spec(0).shape[-3], rows[0][axis], call.lowering.groups[axis]
        assert isinstance(form, Shard)
        spans = form.spans(heads, group.size, group.index)
        for i in (1, 2):
            if label in (rule.inputs[i] or ()) and not is_shard(rows[i][axis]):
                parts = [call.add_call(shared_heads, call.args[i], start, stop - start, heads) for start, stop in spans]
                call.args[i] = parts[0] if len(parts) == 1 else call.add_call(torch.cat, parts, -3)


def _lower_batch_norm(call: OperatorCall) -> fx.Node | None:
    if len(call.args) > 5 and call.args[5]:
        return call.add_call(bind_named(batch_norm, call.lowering.draw_state, call.statistics_groups()), *call.args)
    return None


def _lower_group_norm(call: OperatorCall) -> fx.Node | None:
    if not (parts := call.statistics_groups()):
        return None
    x, num_groups, weight, bias, *eps = call.args
    return call.emit(bind_named(group_norm, num_groups=num_groups, eps=eps[0] if eps else 1e-5, parts=parts), [x, weight, bias])


def _lower_instance_norm(call: OperatorCall) -> fx.Node | None:
    args = call.args
    if parts := call.statistics_groups():
        return call.emit(bind_named(group_norm, num_groups=call.input_spec(0).shape[1], eps=args[7], parts=parts), args[:3])
    if len(args) > 5 and args[5] and args[3] is not None:
        return call.add_call(bind_named(instance_norm, call.lowering.draw_state), *args)
    return None


def _set_local_groups(call: OperatorCall) -> None:
    """Set a convolution's number of groups to this rank's."""
    if "groups" in call.kernel_groups():
        call.args[6] = call.args[6] * call.local_shape[1] // call.output_spec.shape[1]


def _lower_contiguous(call: OperatorCall) -> fx.Node:
    """Make the input contiguous, as traced: the operator reads memory directly."""
    return call.emit(call.torch_operator, [call.add_call(torch.ops.aten.contiguous.default, call.args[0]), *call.args[1:]], call.kwargs)


def _lower_complex_clone(call: OperatorCall) -> fx.Node:
    """Clone the input: a parameter may begin anywhere in a shared buffer, a complex number only at an even offset."""
    return call.emit(call.torch_operator, [call.add_call(torch.ops.aten.clone.default, call.args[0])], call.kwargs)


def _lower_slice_of_runs(call: OperatorCall) -> fx.Node | None:
    """Lower slices of a dimension sharded by runs: this rank's shards of the runs in each slice."""
    op, low = call.op, call.lowering
    axis = next((axis for axis, label in call.cut_labels.items() if (op.name, label) in find_fused_dims(low.graph).labels), "")
    if not axis or call.record.along is None:
        return None
    form, group = low.sharding.input_placements[op.name][0][axis], low.groups[axis]
    assert is_shard(form)
    tensors, dim = low.graph.tensors, form.dim
    spans = form.spans(tensors[op.inputs[0]].shape[dim], group.size, group.index)
    (along,) = call.record.along(op, [tensors[v].shape for v in op.inputs], [tensors[v].shape for v in op.outputs])
    parts = [runs[0] for number, _, runs in along.dims if number]
    local = [[sum(min(stop, border) - start for start, stop in spans if start < border) for border in part] for part in parts]
    if op.returns_sequence:
        return call.add_call(torch.ops.aten.split_with_sizes.default, call.args[0], [stop - start for start, stop in local], dim)
    return call.add_call(torch.ops.aten.slice.Tensor, call.args[0], dim, *local[0])


def _lower_recurrence(call: OperatorCall) -> fx.Node | None:
    """Lower a recurrence with sharded hidden units."""
    op, low = call.op, call.lowering
    axes, recurrence = call.axes_of(HIDDEN_UNITS), call.record.recurrence
    if not axes or recurrence is None:
        return None
    (axis,) = axes
    kind, group = op.target.split(".")[1].removesuffix("_cell"), low.groups[axis]
    form = low.sharding.placements[op.outputs[-1]][axis]
    assert is_shard(form)
    if recurrence.is_cell:
        return call.emit(
            bind_named(recurrent_cell, kind, *form.local_range(call.output_spec.shape[-1], group.size, group.index)), call.args
        )
    return call.emit(bind_named(recurrent_layers, group, form, kind, not is_shard(low.sharding.placements[op.outputs[0]][axis])), call.args)


def _lower_scatter(call: OperatorCall) -> fx.Node | None:
    if call.output_spec.dtype.startswith("complex"):
        return call.nodes.add(bind_named(_complex_scatter, call.torch_operator), tuple(call.args), call.kwargs)
    return None


def _lower_cross_entropy(call: OperatorCall) -> fx.Node | None:
    args, kwargs, kernels = call.args, call.kwargs, call.kernel_groups()
    soft = call.input_spec(0).shape == call.input_spec(1).shape
    if not kernels or soft:
        return None
    weight, reduction, ignore, smoothing = (*args, *(None, 1, -100, 0.0)[len(args) - 2 :])[2:6]
    bound = bind_named(
        cross_entropy,
        rows=kernels.get("average", ()),
        class_shard=(call.shard_offset("vocabulary"), kernels["vocabulary"][0]) if "vocabulary" in kernels else None,
        smoothing=kwargs.get("label_smoothing", smoothing),
        mean=kwargs.get("reduction", reduction) == 1,
    )
    return call.add_call(bound, args[0], args[1], ignore, weight=weight)


def _lower_nll(call: OperatorCall) -> fx.Node | None:
    rows = call.kernel_groups().get("average")
    return call.add_call(bind_named(nll, rows), *call.args) if rows else None


def _local_experts(call: OperatorCall, number: int) -> tuple[str, int, int]:
    """Return (axis over which `number` experts are sharded or "", first local expert, number of local experts). Of several such axes each
    shards the shards of those before it again, and all ranks have the same tokens."""
    axes, first = call.axes_of(EXPERT), 0
    for axis in axes:
        start, number = even_shard_range(number, call.lowering.groups[axis].size, call.lowering.groups[axis].index)
        first += start
    return (axes[0], first, number) if axes else ("", 0, -1)


def _lower_expert_dispatch(call: OperatorCall) -> fx.Node | None:
    x, which, experts = call.args
    axis, first, num_local = _local_experts(call, experts)
    if not axis:
        return None
    if is_shard(call.lowering.sharding.input_placements[call.op.name][0][axis]):  # ranks of an expert axis have different tokens
        return call.add_call(bind_named(dispatch_to_ranks, call.lowering.groups[axis]), x, which, experts)
    return call.add_call(call.torch_operator, x, which, experts, first, num_local)


def _lower_expert_matmul(call: OperatorCall) -> fx.Node:
    _, first, _ = _local_experts(call, call.input_spec(2).shape[0])
    shares = prod(call.lowering.sharding.sizes[axis] for axis in call.contracted_axes() if call.cut_labels[axis] != EXPERT)
    return call.emit(bind_named(expert_matmul, first=first, num_bias_shares=shares), call.args)


def _lower_expert_combine(call: OperatorCall) -> fx.Node | None:
    axis, *_ = _local_experts(call, call.args[3])
    if axis and is_shard(call.lowering.sharding.placements[call.op.outputs[0]][axis]):
        return call.add_call(bind_named(combine_from_ranks, call.lowering.groups[axis]), *call.args)
    return None


LOWERINGS: dict[str, LoweringFunction] = {
    LoweringKind.EXPERT_DISPATCH: _lower_expert_dispatch,
    LoweringKind.EXPERT_MATMUL: _lower_expert_matmul,
    LoweringKind.EXPERT_COMBINE: _lower_expert_combine,
    LoweringKind.DROPOUT: _lower_dropout,
    LoweringKind.ATTENTION: _lower_attention,
    LoweringKind.BATCH_NORM: _lower_batch_norm,
    LoweringKind.GROUP_NORM: _lower_group_norm,
    LoweringKind.INSTANCE_NORM: _lower_instance_norm,
    LoweringKind.GROUPED_CONVOLUTION: _set_local_groups,
    LoweringKind.CONTIGUOUS: _lower_contiguous,
    LoweringKind.COMPLEX_CLONE: _lower_complex_clone,
    LoweringKind.SLICE: _lower_slice_of_runs,
    LoweringKind.HIDDEN_UNITS: _lower_recurrence,
    LoweringKind.SCATTER: _lower_scatter,
    LoweringKind.CROSS_ENTROPY: _lower_cross_entropy,
    LoweringKind.NLL: _lower_nll,
}


def _lower_random(call: OperatorCall) -> fx.Node | None:
    if is_random(call.op):
        return call.nodes.add(
            bind_named(draw_random, call.torch_operator, call.lowering.draw_state, call.draw_site()), tuple(call.args), call.kwargs
        )
    return None


def _force_dense_gradient(call: OperatorCall) -> None:
    """Force dense gradients: they are stored in dense buffers with others."""
    at = call.record.product.sparse_at
    if at is not None and len(call.args) > at:
        call.args[at] = False


def _lower_by_kernel(call: OperatorCall) -> fx.Node | None:
    kernels, args = call.kernel_groups(), call.args
    if "counted" in kernels:
        return call.add_call(bind_named(masked_scatter, *kernels["counted"]), *args)
    if "running" in kernels:
        return call.emit(bind_named(running_sum, *kernels["running"]), args, call.kwargs)
    if "extreme" in kernels:
        return call.emit(bind_named(sharded_extreme, kernels["extreme"], call.record.reduction == Reduction.MAX), args, call.kwargs)
    if call.record.product.is_lookup and "vocabulary" in kernels:
        padding = args[2] if len(args) > 2 else -1
        return call.add_call(embedding, args[0], args[1], padding, call.shard_offset("vocabulary"))
    return None


def _lower_mean(call: OperatorCall) -> fx.Node | None:
    """Lower a mean over a sharded dimension: this rank's share of the global mean."""
    axes = call.mean_axes()
    if not axes:
        return None
    return call.add_call(torch.ops.aten.mul.Tensor, call.call_operator(), prod(call.sample_share(axis) for axis in axes))


def _lower_bias_after_sum(call: OperatorCall) -> fx.Node | None:
    """Lower a reduction over ranks whose bias is added once, after it."""
    position, args, axes = call.record.product.bias, call.args, call.contracted_axes()
    if position is None or len(args) <= position or args[position] is None or not axes:
        return None
    bias, args[position] = args[position], None
    partial_sum = call.call_operator()
    form = call.lowering.sharding.placements[call.op.outputs[0]]
    for axis in axes:
        if form[axis] is P:  # reduced later: every rank adds its share of the bias
            bias = call.add_call(torch.ops.aten.div.Tensor, bias, call.lowering.sharding.sizes[axis])
        else:
            partial_sum = call.nodes.redistribute(partial_sum, call.lowering.groups[axis], P, R)
    num_trailing = len(call.output_spec.shape) - 2 if call.record.kind == CostKind.CONVOLUTION else 0  # dimensions that follow the features
    bias = call.add_call(torch.ops.aten.reshape.default, bias, [-1] + [1] * num_trailing) if num_trailing else bias
    return call.add_call(_add_bias, partial_sum, bias)


def _lower_view(call: OperatorCall) -> fx.Node | None:
    """Lower an operator with a shape argument, which becomes that of this rank's shard."""
    shapers = {ViewKind.RESHAPE: torch.ops.aten.reshape.default, ViewKind.EXPAND: torch.ops.aten.expand.default}
    shaper = shapers.get(call.record.view.kind)
    ragged, value = expert_rows(call.lowering.graph), call.op.outputs[0]
    shape = [-1 if (value, dim) in ragged else size for dim, size in enumerate(call.local_shape)]
    return None if shaper is None else call.emit(shaper, [call.args[0], shape])


def _complex_scatter(target: Callable[..., Tensor], x: Tensor, source: Tensor, dim: int = 0, *rest: Any, **kwargs: Any) -> Tensor:
    """Compute `slice_scatter` and `select_scatter` of complex numbers, which torch cannot differentiate, on their real pairs."""
    parts = target(torch.view_as_real(x), torch.view_as_real(source.to(x.dtype)), dim % x.dim(), *rest, **kwargs)
    return torch.view_as_complex(parts.contiguous())


def _add_bias(x: Tensor, bias: Tensor) -> Tensor:
    return x + bias.to(x.dtype)
