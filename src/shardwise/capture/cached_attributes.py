"""Compare two calls of a model that caches tensors in its attributes, such as a mask or a table made in the first call.

Given are captures of the first call, of the next call (which reads the cached tensors as constants), and of the cached tensors themselves.
The calls are equivalent by value numbering (equal operators on equal values give equal values), if the cached tensors depend on constants
only: not on the batch, parameters, buffers or random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from shardwise.model.graph import Arg, Graph, Ref
from shardwise.ops import is_random, writes_in_place

Equal = Callable[[Tensor, Tensor], bool]


class _ValueNumbering:
    """Value numbering: equal numbers for values that are provably equal."""

    def __init__(self, equal: Equal) -> None:
        self._equal = equal
        self._numbers: dict[object, int] = {}
        self._constants: list[tuple[Tensor, int]] = []

    def number_of(self, key: object) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def add_constant(self, x: Tensor, number: int) -> None:
        """Give a constant the number of a value that it equals."""
        self._constants.append((x, number))

    def number_of_constant(self, x: Tensor) -> int:
        for constant, number in self._constants:
            if x is constant or self._equal(x, constant):
                return number
        self.add_constant(x, self.number_of(("constant", len(self._constants))))
        return self._constants[-1][1]

    def number_graph(self, graph: Graph, constants: Mapping[str, Tensor]) -> tuple[dict[str, int], list[int]]:
        """Return the numbers of a graph's values, and of its random draws and writes in order."""
        numbers = {v.value: self.number_of_constant(constants[v.value]) for v in graph.constants}
        numbers |= {v.value: self.number_of(("given", v.name)) for v in (*graph.parameters, *graph.buffers, *graph.inputs)}
        effects: list[int] = []

        def arg_key(a: Arg) -> object:
            return ("value", numbers[a.value]) if isinstance(a, Ref) else tuple(map(arg_key, a)) if isinstance(a, tuple) else (type(a), a)

        for op in graph.operators:
            kwargs = tuple((key, arg_key(a)) for key, a in op.kwargs)
            key: object = (op.target, arg_key(op.args), kwargs, tuple(graph.tensors[v] for v in op.outputs), op.autocast)
            if is_random(op) or writes_in_place(op):
                key = (key, "effect", len(effects))
                effects.append(self.number_of(key))
            numbers |= {v: self.number_of((key, "result", i)) for i, v in enumerate(op.outputs)}
            if writes_in_place(op):
                numbers[op.inputs[0]] = self.number_of((key, "written"))
        return numbers, effects


GraphWithConstants = tuple[Graph, Mapping[str, Tensor]]  # with the values of its constants


def computes_equally(
    first: GraphWithConstants,
    later: GraphWithConstants,
    attribute_capture: GraphWithConstants,
    cached_tensors: Sequence[Tensor],
    equal: Equal,
) -> bool:
    """Return whether both calls compute the same. `attribute_capture`: a capture of the first call with outputs `cached_tensors`."""
    graph = attribute_capture[0]
    if not _is_constant(graph):
        return False
    numbers = _ValueNumbering(equal)
    values, _ = numbers.number_graph(*attribute_capture)
    for x, value in zip(cached_tensors, graph.outputs, strict=True):
        numbers.add_constant(x, values[value])
    call_numbers = []
    for graph, constants in (first, later):
        values, effects = numbers.number_graph(graph, constants)
        call_numbers.append((values[graph.loss], [values[v] for v in graph.outputs], effects))
    return call_numbers[0] == call_numbers[1]


def _is_constant(graph: Graph) -> bool:
    """Return whether the outputs depend on constants only."""
    start = {v.value for v in (*graph.parameters, *graph.buffers, *graph.inputs)}
    needed = set(graph.outputs)
    for op in reversed(graph.operators):
        if needed.intersection(op.outputs):
            if is_random(op):
                return False
            needed.update(op.inputs)
    return not needed & start
