"""User-defined `torch.autograd.Function`s as operators of a captured graph: sharding rule, cost, and the call itself.

The function's own `apply` runs on every rank, on that rank's shards, so that gradients are those of the user's backward. Refused by name:
functions that write their inputs, read tensors that are no arguments, or depend on values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from shardwise.capture.autograd_functions.recording import (
    FUNCTION_BASE,
    FunctionCall,
    TraceRecord,
    apply_recorded,
    apply_unrecorded,
    recording_calls,
    refusal_error,
)
from shardwise.capture.autograd_functions.rule_inference import ShardedDims, has_linear_backward, infer_factor_rule, propagate_placements
from shardwise.capture.autograd_functions.trace import JointGraph, trace_joint_graph
from shardwise.errors import LayoutError, ModelError
from shardwise.model.graph import Function, Operator, Tensor
from shardwise.model.work import kind_of, operator_bytes, operator_flops
from shardwise.ops import Rule, is_random

__all__ = [
    "FUNCTION_BASE", "FunctionCall", "TraceRecord", "apply_recorded", "apply_unrecorded", "call_of", "check_sharded_function",
    "function_of", "recording_calls",
]  # fmt: skip

Specs = tuple[Tensor, ...]


def function_of(
    call: FunctionCall, specs: Specs, cache: dict[tuple[FunctionCall, Specs], tuple[Function, JointGraph]]
) -> tuple[Function, JointGraph]:
    """Return the `Function` of a call on tensors like `specs`, and its joint graph. `cache`: results for equal calls of one capture.

    Raises:
        ModelError: the function does something that a graph of operators does not represent; the message names it.
    """
    if (call, specs) not in cache:
        cache[call, specs] = _analyse_call(call, specs)
    return cache[call, specs]


def _analyse_call(call: FunctionCall, specs: Specs) -> tuple[Function, JointGraph]:
    learns = tuple(t.is_differentiable for t in specs)
    traced = trace_joint_graph(call, specs, learns)
    reached = tuple(gradient is not None for gradient in traced.gradients)
    if reached != learns:  # inputs that get no gradient must not require one
        learns, traced = reached, trace_joint_graph(call, specs, reached)
    if traced.operators != trace_joint_graph(call, specs, learns).operators:
        raise refusal_error(call, "computes something else when it is called again; its result must depend on its arguments alone")
    full = _joint_graphs_by_gradient(call, specs, learns)

    def cut(places: ShardedDims, n: int) -> list[tuple[JointGraph, JointGraph]]:
        return _pair_with_shards(call, full, _shard_specs(specs, places, n), learns)

    rule = infer_factor_rule(traced, cut)
    return replace(_price_function(call, specs, learns, traced, rule), has_linear_backward=all(map(has_linear_backward, full))), traced


def check_sharded_function(function: Function, specs: Specs, shardings: Sequence[tuple[str, int, Mapping[int, int]]], site: str) -> None:
    """Raise LayoutError if a function on the shards of one rank does not compute shards of its result on global tensors.

    `shardings`: for each axis in turn, (axis, number of shards, [number of a tensor] -> sharded dimension). The rule was inferred at few
    sizes; code may branch on others.
    """
    call, specs_by_axis = call_of(function), [specs]
    for _, n, places in shardings:
        specs_by_axis.append(_shard_specs(specs_by_axis[-1], places, n))
    for (axis, n, places), (before, after) in zip(shardings, pairwise(specs_by_axis), strict=True):
        if uneven := next((before[i].shape for i, dim in places.items() if before[i].shape[dim] % n), None):
            raise LayoutError(
                f"{site} has a backward of its own, which is checked on equal shards, and {axis}={n} cuts {list(uneven)} "
                f"unequally; use fewer ranks there, or sizes that divide"
            )
        pairs = _pair_with_shards(call, _joint_graphs_by_gradient(call, before, function.requires_grad), after, function.requires_grad)
        if not pairs or any(propagate_placements(a, b, places, n) is None for a, b in pairs):
            shapes = ", ".join(str(list(t.shape)) for t in after)
            raise LayoutError(
                f"{site} computes something else on shards of {shapes}, as under {axis}={n}, than on global tensors; use fewer ranks there"
            )


def call_of(function: Function) -> FunctionCall:
    """Return the call as it was recorded."""
    return FunctionCall(function.cls, function.arguments, function.keywords, function.key)


def _joint_graphs_by_gradient(call: FunctionCall, specs: Specs, requires_grad: tuple[bool, ...]) -> list[JointGraph]:
    """Return the joint graphs with gradients for all outputs, and for each single one if there are several: others may be unused."""
    traced = trace_joint_graph(call, specs, requires_grad)
    seeded = [i for i, seed in enumerate(traced.seeds) if seed is not None]
    return [traced, *(trace_joint_graph(call, specs, requires_grad, i) for i in seeded if len(seeded) > 1)]


def _pair_with_shards(
    call: FunctionCall, full: Sequence[JointGraph], shard_specs: Specs, requires_grad: tuple[bool, ...]
) -> list[tuple[JointGraph, JointGraph]]:
    """Pair each joint graph with its trace on shards; empty if the function fails on such shards."""
    try:
        cut = _joint_graphs_by_gradient(call, shard_specs, requires_grad)
    except ModelError:
        return []
    return list(zip(full, cut, strict=True)) if len(cut) == len(full) else []


def _shard_specs(specs: Specs, dims: ShardedDims, n: int) -> Specs:
    def shard(i: int, t: Tensor) -> Tensor:
        if i not in dims:
            return t
        return Tensor(tuple(size // n if d == dims[i] else size for d, size in enumerate(t.shape)), t.dtype)

    return tuple(shard(i, t) for i, t in enumerate(specs))


def _price_function(call: FunctionCall, specs: Specs, requires_grad: tuple[bool, ...], traced: JointGraph, rule: Rule) -> Function:
    name = call.cls.__name__
    function = Function(name, call.cls, call.arguments, call.keywords, call.key, requires_grad, rule)
    outs = [traced.tensors[v] for v in traced.outputs]
    io_bytes = float(sum(t.size_bytes for t in (*specs, *outs)))

    if traced.operators is None:
        return replace(function, bytes=io_bytes, backward_bytes=io_bytes, saved=tuple(range(len(specs))))
    tensors = dict(traced.tensors)
    forward, backward = traced.operators[: traced.num_forward], traced.operators[traced.num_forward :]
    flops = [sum(operator_flops(op, tensors) for op in part) for part in (forward, backward)]
    sizes = [sum(operator_bytes(op, tensors) for op in part) for part in (forward, backward)]
    root: dict[str, str] = {}
    for op in traced.operators:
        root.update((v, root.get(op.inputs[0], op.inputs[0])) for v in op.outputs if kind_of(op) == "view" and op.inputs)
    forward_values = {*traced.inputs, *(v for op in forward for v in op.outputs)}
    saved = dict.fromkeys(root.get(v, v) for op in backward for v in op.inputs if v in forward_values)
    numbers = {root.get(v, v): i for i, v in reversed(list(enumerate((*traced.inputs, *traced.outputs))))}
    return replace(
        function,
        kind="view" if len(outs) == 1 and traced.aliased_inputs == (0,) else "linear" if flops[0] else "elementwise",
        flops=flops[0],
        backward_flops=flops[1],
        bytes=sizes[0],
        backward_bytes=sizes[1],
        saved=tuple(sorted(numbers[v] for v in saved if v in numbers)),
        extra_bytes=float(sum(tensors[v].size_bytes for v in saved if v not in numbers and v not in traced.literals)),
        working_bytes=_working_bytes(traced, backward, root),
        is_random=any(is_random(op) for op in traced.operators),
    )


def _working_bytes(traced: JointGraph, backward: Sequence[Operator], root: Mapping[str, str]) -> float:
    """Peak bytes of backward's temporaries, each freed after its last use; gradients of inputs and outputs are not counted."""
    ends = {root.get(v, v) for v in (*traced.seeds, *traced.gradients) if v is not None}
    sizes = {root.get(v, v): traced.tensors[v].size_bytes for op in backward for v in op.outputs if root.get(v, v) == v and v not in ends}
    last = {root.get(v, v): i for i, op in enumerate(backward) for v in (*op.outputs, *op.inputs)}
    live = peak = 0.0
    for i, op in enumerate(backward):
        live += sum(sizes.get(v, 0) for v in op.outputs)
        peak = max(peak, live)
        live -= sum(size for v, size in sizes.items() if last[v] == i)
    return peak
