"""A decoder's graph for tokens at any positions. In: graphs of its outputs for a few tokens and for the longest sequence. Out: one whose
rows are tokens of any sequences.

A decoder computes each position by itself, but for what it makes of positions (a table's row, angles) and for attention. So a row of the
graph of a few tokens is any token: what grows with the sequence and follows from no token is made for the longest one, and the rows at the
tokens' positions are taken; attention is left to read keys and values that are kept of the tokens before (`lower/kernels/paged`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weft.errors import ModelError
from weft.model.graph import Arg, Graph, Operator, Ref, Tensor, Variable, writes_buffer
from weft.ops import record_of
from weft.ops.attention import is_causal, is_fused, mask_of

POSITIONS = "positions"


def at_positions(graph: Graph, longest: Graph) -> tuple[Graph, frozenset[str]]:
    """`graph`, of outputs for T tokens a sample, with an input `POSITIONS` (T) that says where they stand; and the values of `longest` that
    are masks of its attention, to be seen to be causal. `longest`: the same model for the longest sequence.

    Raises:
        ModelError: what a token's output is may depend on others in another way than by causal attention, as far as shapes tell.
    """
    logits = _logits(graph)
    tokens, length = (one.tensors[one.inputs[0].value].shape[1] for one in (graph, longest))
    twins = {op.site: op for op in longest.operators}
    graph, masks = _attention_alone(graph, twins)
    graph = _needed(replace(graph, outputs=(logits,)))
    grows = _growing(graph, longest, twins, tokens, length)
    names = {other: value for op in graph.operators for other, value in zip(twins[op.site].outputs, op.outputs, strict=True)}
    names |= _variables(longest, graph)
    operators: list[Operator] = []
    tensors = {**graph.tensors, POSITIONS: Tensor((tokens,), "int64")}
    for op in graph.operators:
        longer = [value for value in op.outputs if value in grows]
        if not longer or any(value in grows for value in op.inputs):
            operators.append(op)
            continue
        twin, (value,) = twins[op.site], longer
        everywhere = f"{value}_everywhere"
        tensors[everywhere] = longest.tensors[twin.outputs[0]]
        made_for_all = _renamed(twin.args, names), _renamed(twin.kwargs, names)
        operators.append(replace(op, args=made_for_all[0], kwargs=made_for_all[1], outputs=(everywhere,)))  # type: ignore[arg-type]
        args = (Ref(everywhere), grows[value], Ref(POSITIONS))
        operators.append(Operator(f"{op.name}_here", "aten.index_select.default", args, (), (value,), f"{op.site}/here"))
    graph = replace(graph, operators=tuple(operators), inputs=(*graph.inputs, Variable(POSITIONS, POSITIONS, tensors[POSITIONS])))
    there = {*(v.value for v in graph.variables), *(value for op in operators for value in op.outputs)}
    return replace(graph, tensors={value: tensor for value, tensor in tensors.items() if value in there}), masks


def _logits(graph: Graph) -> str:
    """The output that has a row of numbers for each token."""
    if len(graph.inputs) != 1:
        raise ModelError(f"it is called with {len(graph.inputs)} tensors; a decoder is called with token numbers alone")
    form = graph.tensors[graph.inputs[0].value].shape
    logits = [v for v in graph.outputs if len(shape := graph.tensors[v].shape) == 3 and shape[:2] == form and graph.tensors[v].is_float]
    if not logits:
        shapes = ", ".join(str(graph.tensors[v]) for v in graph.outputs)
        raise ModelError(f"its outputs ({shapes}) are no logits of {list(form)} tokens")
    return logits[0]


def _attention_alone(graph: Graph, twins: Mapping[str, Operator]) -> tuple[Graph, frozenset[str]]:
    """The graph with attention that is causal by itself and reads each head of keys once; and the masks that this takes for granted."""
    producers, masks, operators = graph.producer(), set[str](), []
    for op in graph.operators:
        if not is_fused(op):
            operators.append(op)
            continue
        twin = twins.get(op.site)
        if twin is None or not (is_causal(twin) or mask_of(twin)):
            raise ModelError(f"attention at {op.site} sees what comes later")
        if mask := mask_of(twin):
            masks.add(mask)
        q, k, v = op.inputs[:3]
        sources = [_unrepeated(graph, producers, value) for value in (k, v)]
        if len(graph.tensors[q].shape) != 4 or len({graph.tensors[value].shape[-2] for value in (q, k, v)}) > 1:
            raise ModelError(f"attention at {op.site} reads other keys than those of its own tokens")
        kwargs = tuple((key, arg) for key, arg in op.kwargs if key == "scale")
        kwargs += (("enable_gqa", True),) * (graph.tensors[sources[0]].shape[1] != graph.tensors[q].shape[1])
        operators.append(replace(op, args=(Ref(q), *map(Ref, sources), None, 0.0, True), kwargs=kwargs))
    if not any(map(is_fused, graph.operators)):
        raise ModelError("it has no attention that weft knows (torch's scaled_dot_product_attention)")
    return replace(graph, operators=tuple(operators)), frozenset(masks)


def _unrepeated(graph: Graph, producers: Mapping[str, Operator], value: str) -> str:
    """Of keys or values whose heads are repeated, one for each of some queries, those that are."""
    shapes, at = [graph.tensors[value].shape], value
    while (op := producers.get(at)) is not None and len(op.inputs) == 1 and _reorders(op):
        at = op.inputs[0]
        shapes.append(graph.tensors[at].shape)
        batch, heads, tokens, width = shapes[0]
        if len(shapes[-1]) == 4 and shapes[-1] != shapes[0]:
            few = shapes[-1][1]
            fits = shapes[-1] == (batch, few, tokens, width) and heads % few == 0
            each = {(batch, few, 1, tokens, width), (batch, few, heads // few, tokens, width)}
            return at if fits and each <= set(shapes) else value
    return value


def _reorders(op: Operator) -> bool:
    """Whether an operator makes no other numbers than those that it reads."""
    return record_of(op).kind == "view" or record_of(op).moves in ("rows", "copy")


def _needed(graph: Graph) -> Graph:
    """Without operators of which no output follows."""
    placed = {v.value: v for v in (*graph.parameters, *graph.buffers)}
    needed, operators = set(graph.outputs), []
    for op in reversed(graph.operators):
        if writes_buffer(op, placed):
            raise ModelError(f"{op.site} changes {placed[op.inputs[0]].name} while it runs")
        if not needed.isdisjoint(op.outputs):
            operators.append(op)
            needed.update(op.inputs)
    return replace(graph, operators=tuple(reversed(operators)))


def _growing(graph: Graph, longest: Graph, twins: Mapping[str, Operator], tokens: int, length: int) -> dict[str, int]:
    """By value, the dimension that is as long as the sequence."""
    grows: dict[str, int] = {}
    pairs = [(value, other, "what it is called with") for other, value in _variables(longest, graph).items()]
    for op in graph.operators:
        twin = twins.get(op.site)
        if twin is None or twin.target != op.target or len(twin.outputs) != len(op.outputs):
            raise ModelError(f"for {length} tokens it computes something else than for {tokens}, first at {op.site}")
        pairs += [(value, other, op.site) for value, other in zip(op.outputs, twin.outputs, strict=True)]
    for value, other, where in pairs:
        few, many = graph.tensors[value].shape, longest.tensors[other].shape
        dims = [dim for dim, (a, b) in enumerate(zip(few, many, strict=True)) if a != b]
        if len(dims) > 1:
            raise ModelError(f"{where} makes {list(many)}: one token meets another there, and that is no attention that weft knows")
        if dims:
            grows[value] = dims[0]
    return grows


def _variables(longest: Graph, graph: Graph) -> dict[str, str]:
    """Values of `graph` by those of `longest`, of parameters, buffers, inputs and constants."""
    mine = {v.name: v.value for v in graph.variables}
    return {v.value: mine[v.name] for v in longest.variables if v.name in mine}


def _renamed(arg: Arg, names: Mapping[str, str]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(names[arg.value])
    return tuple(_renamed(item, names) for item in arg) if isinstance(arg, tuple) else arg
