"""Functions with a backward of the user's own (`torch.autograd.Function`), as operators of a captured graph.

In: a call that a trace recorded, and what its tensors are. Out: a `Function`: how it can be cut, what it costs, and how it is called.
Its own `apply` runs on every rank, on that rank's tensors, so that its gradients are the user's, whatever its forward would suggest.
Not modelled: functions that write what they are given, read tensors that are no arguments, or ask for values: refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from weft.capture.functions.follow import Places, follow, is_linear, rule_by_following
from weft.capture.functions.recording import BASE, Call, Record, plainly, recorded, recording, refusal
from weft.capture.functions.trace import Joint, joint
from weft.errors import LayoutError, ModelError
from weft.model.graph import Function, Operator, Tensor
from weft.model.work import kind_of, operator_bytes, operator_flops
from weft.ops import Rule, draws

__all__ = ["BASE", "Call", "Record", "call_of", "check_cut", "function_of", "plainly", "recorded", "recording"]

Specs = tuple[Tensor, ...]


def function_of(call: Call, specs: Specs, cache: dict[tuple[Call, Specs], tuple[Function, Joint]]) -> tuple[Function, Joint]:
    """What a call on tensors like `specs` is, and what it does. `cache`: those of one capture, in which equal calls are followed once.

    Raises:
        ModelError: the function does what no graph of operators holds, by name.
    """
    if (call, specs) not in cache:
        cache[call, specs] = _function_of(call, specs)
    return cache[call, specs]


def _function_of(call: Call, specs: Specs) -> tuple[Function, Joint]:
    learns = tuple(t.is_float or t.dtype.startswith("complex") for t in specs)
    traced = joint(call, specs, learns)
    reached = tuple(gradient is not None for gradient in traced.gradients)
    if reached != learns:  # those it has no gradient for are not asked for one
        learns, traced = reached, joint(call, specs, reached)
    if traced.operators != joint(call, specs, learns).operators:
        raise refusal(call, "computes otherwise when it is called again; what it computes may follow from its arguments alone")
    full = _ways(call, specs, learns)

    def cut(places: Places, n: int) -> list[tuple[Joint, Joint]]:
        return _pairs(call, full, _pieces(specs, places, n), learns)

    rule = rule_by_following(traced, cut)
    return replace(_priced(call, specs, learns, traced, rule), linear=all(map(is_linear, full))), traced


def check_cut(function: Function, specs: Specs, cuts: Sequence[tuple[str, int, Mapping[int, int]]], site: str) -> None:
    """Raise LayoutError where a function does not compute, on the pieces that one rank will have, what it computes of the whole.

    `cuts`: one axis after the other, (axis, parts, [number of a tensor] -> dimension that is cut). The rule was tried with few sizes; code
    may take another way at others.
    """
    call, at = call_of(function), [specs]
    for _, n, places in cuts:
        at.append(_pieces(at[-1], places, n))
    for (axis, n, places), (before, after) in zip(cuts, pairwise(at), strict=True):
        pairs = _pairs(call, _ways(call, before, function.learns), after, function.learns)
        if not pairs or any(follow(a, b, places, n) is None for a, b in pairs):
            shapes = ", ".join(str(list(t.shape)) for t in after)
            raise LayoutError(
                f"{site} computes otherwise on pieces of {shapes}, as {axis}={n} would have them, than on the whole; use fewer ranks there"
            )


def call_of(function: Function) -> Call:
    """The call as it was recorded."""
    return Call(function.cls, function.arguments, function.keywords, function.key)


def _ways(call: Call, specs: Specs, learns: tuple[bool, ...]) -> list[Joint]:
    """How it runs with a gradient for all of its outputs, and for each alone, where there are several: the others may be read by nobody."""
    traced = joint(call, specs, learns)
    seeded = [i for i, seed in enumerate(traced.seeds) if seed is not None]
    return [traced, *(joint(call, specs, learns, i) for i in seeded if len(seeded) > 1)]


def _pairs(call: Call, full: Sequence[Joint], pieces: Specs, learns: tuple[bool, ...]) -> list[tuple[Joint, Joint]]:
    """The same on pieces, beside each; nothing where it does not run on such pieces."""
    try:
        cut = _ways(call, pieces, learns)
    except ModelError:
        return []
    return list(zip(full, cut, strict=True)) if len(cut) == len(full) else []


def _pieces(specs: Specs, places: Places, n: int) -> Specs:
    def piece(i: int, t: Tensor) -> Tensor:
        if i not in places:
            return t
        return Tensor(tuple(size // n if d == places[i] else size for d, size in enumerate(t.shape)), t.dtype)

    return tuple(piece(i, t) for i, t in enumerate(specs))


def _priced(call: Call, specs: Specs, learns: tuple[bool, ...], traced: Joint, rule: Rule) -> Function:
    name = call.cls.__name__
    function = Function(name, call.cls, call.arguments, call.keywords, call.key, learns, rule)
    outs = [traced.tensors[v] for v in traced.outputs]
    moved = float(sum(t.size_bytes for t in (*specs, *outs)))

    if traced.operators is None:
        return replace(function, bytes=moved, backward_bytes=moved, keeps=tuple(range(len(specs))))
    tensors = dict(traced.tensors)
    forward, backward = traced.operators[: traced.num_forward], traced.operators[traced.num_forward :]
    flops = [sum(operator_flops(op, tensors) for op in part) for part in (forward, backward)]
    sizes = [sum(operator_bytes(op, tensors) for op in part) for part in (forward, backward)]
    root: dict[str, str] = {}
    for op in traced.operators:
        root.update((v, root.get(op.inputs[0], op.inputs[0])) for v in op.outputs if kind_of(op) == "view" and op.inputs)
    early = {*traced.inputs, *(v for op in forward for v in op.outputs)}
    saved = dict.fromkeys(root.get(v, v) for op in backward for v in op.inputs if v in early)
    numbers = {root.get(v, v): i for i, v in reversed(list(enumerate((*traced.inputs, *traced.outputs))))}
    return replace(
        function,
        kind="view" if len(outs) == 1 and traced.shared == (0,) else "linear" if flops[0] else "elementwise",
        flops=flops[0],
        backward_flops=flops[1],
        bytes=sizes[0],
        backward_bytes=sizes[1],
        keeps=tuple(sorted(numbers[v] for v in saved if v in numbers)),
        extra_bytes=float(sum(tensors[v].size_bytes for v in saved if v not in numbers and v not in traced.literals)),
        working_bytes=_working_bytes(traced, backward, root),
        draws=any(draws(op) for op in traced.operators),
    )


def _working_bytes(traced: Joint, backward: Sequence[Operator], root: Mapping[str, str]) -> float:
    """The most bytes that lie there while backward runs beside the gradients that it is given and makes, each freed after its last use."""
    ends = {root.get(v, v) for v in (*traced.seeds, *traced.gradients) if v is not None}
    sizes = {root.get(v, v): traced.tensors[v].size_bytes for op in backward for v in op.outputs if root.get(v, v) == v and v not in ends}
    last = {root.get(v, v): i for i, op in enumerate(backward) for v in (*op.outputs, *op.inputs)}
    here = most = 0.0
    for i, op in enumerate(backward):
        here += sum(sizes.get(v, 0) for v in op.outputs)
        most = max(most, here)
        here -= sum(size for v, size in sizes.items() if last[v] == i)
    return most
