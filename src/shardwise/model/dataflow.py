"""Data flow of a graph: facts propagated forward and backward through its operators, closures, and analyses that are cached per graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from shardwise.model.graph import Graph, Operator

P = ParamSpec("P")
T = TypeVar("T")
Element = TypeVar("Element", bound=Hashable)
ValuesOf = Callable[[Operator], Iterable[str]]  # values of an operator through which a fact passes


def all_inputs(op: Operator) -> Iterable[str]:
    """Return the values that an operator reads."""
    return op.inputs


def all_outputs(op: Operator) -> Iterable[str]:
    """Return the values that an operator computes."""
    return op.outputs


def propagate_forward(
    operators: Iterable[Operator], start: Iterable[str], reads: ValuesOf = all_inputs, writes: ValuesOf = all_outputs
) -> set[str]:
    """Return `start` and all values computed from it: what an operator `writes` if it `reads` one of them."""
    reached = set(start)
    for op in operators:
        if not reached.isdisjoint(reads(op)):
            reached.update(writes(op))
    return reached


def propagate_backward(
    operators: Sequence[Operator], start: Iterable[str], reads: ValuesOf = all_inputs, writes: ValuesOf = all_outputs
) -> set[str]:
    """Return `start` and all values that it is computed from: what an operator `reads` if it `writes` one of them."""
    return propagate_forward(reversed(operators), start, writes, reads)


def required_operators(operators: Sequence[Operator], results: Iterable[str]) -> tuple[Operator, ...]:
    """Return the operators from which `results` are computed, in order."""
    required = propagate_backward(operators, results)
    return tuple(op for op in operators if not required.isdisjoint(op.outputs))


def reachable_elements(start: Iterable[Element], neighbors: Callable[[Element], Iterable[Element]]) -> set[Element]:
    """Return `start` and all elements that lead from one to the next.

    >>> sorted(reachable_elements([6], lambda n: [n // 2] if n else []))
    [0, 1, 3, 6]
    """
    reached = set(start)
    waiting = list(reached)
    while waiting:
        new = set(neighbors(waiting.pop())) - reached
        reached |= new
        waiting += new
    return reached


def cached_on_graph(analyze: Callable[Concatenate[Graph, P], T]) -> Callable[Concatenate[Graph, P], T]:
    """Let a graph keep the results of an analysis, by its other (hashable) arguments."""

    @wraps(analyze)
    def look_up(graph: Graph, /, *args: P.args, **kwargs: P.kwargs) -> T:
        key = (analyze, args, *kwargs.items())
        if key not in graph.analyses:
            graph.analyses[key] = analyze(graph, *args, **kwargs)
        result: T = graph.analyses[key]
        return result

    return look_up
