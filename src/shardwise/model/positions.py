"""Decoder graphs with paged attention: a graph whose rows are tokens of any sequences at any positions.

A decoder computes each position independently, except for position embeddings (a table's row, angles) and attention. So a row of the graph
of a few tokens can be any token: values that grow with the sequence and depend on no token are computed for the maximum length and indexed
by the tokens' positions; attention reads cached keys and values of earlier tokens (`lower/kernels/paged`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwise.errors import ModelError
from shardwise.model.dataflow import required_operators
from shardwise.model.graph import Graph, Operator, Ref, Tensor, Variable, rename_inputs, writes_buffer
from shardwise.ops import record_of
from shardwise.ops.attention import attention_mask_of, is_causal, is_fused_attention
from shardwise.ops.vocabulary import CostKind, ViewKind

POSITIONS = "positions"


def decoder_at_positions(graph: Graph, longest: Graph) -> tuple[Graph, frozenset[str]]:
    """Return `graph`, of outputs for T tokens per sample, with an input `POSITIONS` (T) of their positions; and the values of `longest`
    that are masks of its attention, which the caller must check to be causal. `longest`: the same model for the maximum sequence length.

    Raises:
        ModelError: a token's output may depend on others by other means than causal attention, as far as shapes tell.
    """
    logits = _logits_output(graph)
    tokens, length = (either.tensors[either.inputs[0].value].shape[1] for either in (graph, longest))
    twins = {op.site: op for op in longest.operators}
    graph, masks = _with_causal_attention(graph, twins)
    graph = _prune_unused(replace(graph, outputs=(logits,)))
    sequence_dims = _sequence_dims(graph, longest, twins, tokens, length)
    names = {other: value for op in graph.operators for other, value in zip(twins[op.site].outputs, op.outputs, strict=True)}
    names |= _match_variables(longest, graph)
    operators: list[Operator] = []
    tensors = {**graph.tensors, POSITIONS: Tensor((tokens,), "int64")}
    for op in graph.operators:
        sequence_values = [value for value in op.outputs if value in sequence_dims]
        if not sequence_values or any(value in sequence_dims for value in op.inputs):
            operators.append(op)
            continue
        twin, (value,) = twins[op.site], sequence_values
        full_value = f"{value}_everywhere"
        tensors[full_value] = longest.tensors[twin.outputs[0]]
        operators.append(rename_inputs(replace(op, args=twin.args, kwargs=twin.kwargs, outputs=(full_value,)), names.__getitem__))
        args = (Ref(full_value), sequence_dims[value], Ref(POSITIONS))
        operators.append(Operator(f"{op.name}_here", "aten.index_select.default", args, (), (value,), f"{op.site}/here"))
    graph = replace(graph, operators=tuple(operators), inputs=(*graph.inputs, Variable(POSITIONS, POSITIONS, tensors[POSITIONS])))
    live_values = {*(v.value for v in graph.variables), *(value for op in operators for value in op.outputs)}
    return replace(graph, tensors={value: tensor for value, tensor in tensors.items() if value in live_values}), masks


def _logits_output(graph: Graph) -> str:
    """Return the output with one row of logits per token."""
    if len(graph.inputs) != 1:
        raise ModelError(f"it is called with {len(graph.inputs)} tensors; a decoder is called with token numbers alone")
    tokens = graph.tensors[graph.inputs[0].value].shape
    logits = [v for v in graph.outputs if len(shape := graph.tensors[v].shape) == 3 and shape[:2] == tokens and graph.tensors[v].is_float]
    if not logits:
        shapes = ", ".join(str(graph.tensors[v]) for v in graph.outputs)
        raise ModelError(f"its outputs ({shapes}) are no logits of {list(tokens)} tokens")
    return logits[0]


def _with_causal_attention(graph: Graph, twins: Mapping[str, Operator]) -> tuple[Graph, frozenset[str]]:
    """Return the graph with `is_causal` attention that reads each head of keys once; and the masks that this assumes to be causal."""
    masks, operators = set[str](), []
    for op in graph.operators:
        if not is_fused_attention(op):
            operators.append(op)
            continue
        twin = twins.get(op.site)
        if twin is None or not (is_causal(twin) or attention_mask_of(twin)):
            raise ModelError(f"attention at {op.site} attends to later tokens")
        if mask := attention_mask_of(twin):
            masks.add(mask)
        q, k, v = op.inputs[:3]
        sources = [_unrepeated_heads(graph, value) for value in (k, v)]
        if len(graph.tensors[q].shape) != 4 or len({graph.tensors[value].shape[-2] for value in (q, k, v)}) > 1:
            raise ModelError(f"attention at {op.site} reads other keys than those of its own tokens")
        kwargs = tuple((key, arg) for key, arg in op.kwargs if key == "scale")
        kwargs += (("enable_gqa", True),) * (graph.tensors[sources[0]].shape[1] != graph.tensors[q].shape[1])
        operators.append(replace(op, args=(Ref(q), *map(Ref, sources), None, 0.0, True), kwargs=kwargs))
    if not any(map(is_fused_attention, graph.operators)):
        raise ModelError("it has no attention that shardwise supports (torch's scaled_dot_product_attention)")
    return replace(graph, operators=tuple(operators)), frozenset(masks)


def _unrepeated_heads(graph: Graph, value: str) -> str:
    """Return the source of keys or values whose heads are repeated for groups of queries."""
    shapes, at = [graph.tensors[value].shape], value
    while (op := graph.producers.get(at)) is not None and len(op.inputs) == 1 and _only_reorders(op):
        at = op.inputs[0]
        shapes.append(graph.tensors[at].shape)
        batch, heads, tokens, width = shapes[0]
        if len(shapes[-1]) == 4 and shapes[-1] != shapes[0]:
            few = shapes[-1][1]
            fits = shapes[-1] == (batch, few, tokens, width) and heads % few == 0
            each = {(batch, few, 1, tokens, width), (batch, few, heads // few, tokens, width)}
            return at if fits and each <= set(shapes) else value
    return value


def _only_reorders(op: Operator) -> bool:
    """Return whether an operator only rearranges its input."""
    return record_of(op).kind == CostKind.VIEW or record_of(op).view.kind in (ViewKind.CONTIGUOUS, ViewKind.COPY)


def _prune_unused(graph: Graph) -> Graph:
    """Return the graph without operators that no output depends on."""
    for op in reversed(graph.operators):
        if writes_buffer(op, graph.state):
            raise ModelError(f"{op.site} changes {graph.state[op.inputs[0]].name} while it runs")
    return replace(graph, operators=required_operators(graph.operators, graph.outputs))


def _sequence_dims(graph: Graph, longest: Graph, twins: Mapping[str, Operator], tokens: int, length: int) -> dict[str, int]:
    """Return, by value, the dimension that is the sequence length."""
    sequence_dims: dict[str, int] = {}
    pairs = [(value, other, "what it is called with") for other, value in _match_variables(longest, graph).items()]
    for op in graph.operators:
        twin = twins.get(op.site)
        if twin is None or twin.target != op.target or len(twin.outputs) != len(op.outputs):
            raise ModelError(f"for {length} tokens it computes something else than for {tokens}, first at {op.site}")
        pairs += [(value, other, op.site) for value, other in zip(op.outputs, twin.outputs, strict=True)]
    for value, other, where in pairs:
        few, many = graph.tensors[value].shape, longest.tensors[other].shape
        dims = [dim for dim, (a, b) in enumerate(zip(few, many, strict=True)) if a != b]
        if len(dims) > 1:
            raise ModelError(f"{where} makes {list(many)}: tokens interact there other than by attention that shardwise supports")
        if dims:
            sequence_dims[value] = dims[0]
    return sequence_dims


def _match_variables(longest: Graph, graph: Graph) -> dict[str, str]:
    """Return values of `graph` by those of `longest`, of parameters, buffers, inputs and constants."""
    value_of = {v.name: v.value for v in graph.variables}
    return {v.value: value_of[v.name] for v in longest.variables if v.name in value_of}
