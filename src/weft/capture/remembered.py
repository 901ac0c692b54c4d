"""Whether a call computes the same by what an earlier one left in attributes: a mask or a table that is made once and kept.

In: captures of a call, of the next one, which reads as constants what the first left, and of these tensors as the first made them. Out:
whether both compute the same, where what is kept comes of constants alone: not of the batch, parameters, buffers or random numbers. Two
values are the same that the same operators make of the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from weft.model.graph import Arg, Graph, Ref
from weft.ops import draws, writes

Equal = Callable[[Tensor, Tensor], bool]


class _Numbers:
    """One number for all that is the same."""

    def __init__(self, equal: Equal) -> None:
        self._equal = equal
        self._of: dict[object, int] = {}
        self._constants: list[tuple[Tensor, int]] = []

    def of(self, key: object) -> int:
        return self._of.setdefault(key, len(self._of))

    def keep(self, x: Tensor, number: int) -> None:
        """Let a constant be what has this number already."""
        self._constants.append((x, number))

    def of_constant(self, x: Tensor) -> int:
        for other, number in self._constants:
            if x is other or self._equal(x, other):
                return number
        self.keep(x, self.of(("constant", len(self._constants))))
        return self._constants[-1][1]

    def of_graph(self, graph: Graph, constants: Mapping[str, Tensor]) -> tuple[dict[str, int], list[int]]:
        """Numbers of a graph's values, and of its draws and writes in order."""
        numbers = {v.value: self.of_constant(constants[v.value]) for v in graph.constants}
        numbers |= {v.value: self.of(("given", v.name)) for v in (*graph.parameters, *graph.buffers, *graph.inputs)}
        effects: list[int] = []

        def told(a: Arg) -> object:
            return ("value", numbers[a.value]) if isinstance(a, Ref) else tuple(map(told, a)) if isinstance(a, tuple) else (type(a), a)

        for op in graph.operators:
            kwargs = tuple((key, told(a)) for key, a in op.kwargs)
            key: object = (op.target, told(op.args), kwargs, tuple(graph.tensors[v] for v in op.outputs), op.autocast)
            if draws(op) or writes(op):
                key = (key, "effect", len(effects))
                effects.append(self.of(key))
            numbers |= {v: self.of((key, "result", i)) for i, v in enumerate(op.outputs)}
            if writes(op):
                numbers[op.inputs[0]] = self.of((key, "written"))
        return numbers, effects


Capture = tuple[Graph, Mapping[str, Tensor]]  # with the values of its constants


def computes_equally(first: Capture, later: Capture, attributes: Capture, left: Sequence[Tensor], equal: Equal) -> bool:
    """`attributes`: a capture whose outputs are the tensors `left` as the first call makes them."""
    graph = attributes[0]
    if not _is_constant(graph):
        return False
    numbers = _Numbers(equal)
    values, _ = numbers.of_graph(*attributes)
    for x, value in zip(left, graph.outputs, strict=True):
        numbers.keep(x, values[value])
    meanings = []
    for graph, constants in (first, later):
        values, effects = numbers.of_graph(graph, constants)
        meanings.append((values[graph.loss], [values[v] for v in graph.outputs], effects))
    return meanings[0] == meanings[1]


def _is_constant(graph: Graph) -> bool:
    """Whether its outputs depend on nothing that may be another in the next step."""
    start = {v.value for v in (*graph.parameters, *graph.buffers, *graph.inputs)}
    needed = set(graph.outputs)
    for op in reversed(graph.operators):
        if needed.intersection(op.outputs):
            if draws(op):
                return False
            needed.update(op.inputs)
    return not needed & start
