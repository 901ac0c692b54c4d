"""Dataflow of requests through a workflow: which operators process items of a request, and batched evaluation of an operator.

An input with more than one request each (`inputs = { detector = 4 }`) is a list or an array, whose items are separate requests;
an input with less than one (`{ tracker = 0.25 }`) collects them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwise.errors import ConfigError
from shardwise.serve.placement.workflow import Workflow, WorkflowOperator

RunBatch = Callable[[Sequence[tuple[Any, ...]]], list[Any]]


def operators_on_items(workflow: Workflow) -> frozenset[str]:
    """Return the operators that process items of a request.

    Raises:
        ConfigError: items of items, or an operator with items of one input and whole requests of another.
    """
    inner: set[str] = set()
    for op in workflow.operators:
        levels = {name: (name in inner) + (ratio > 1) - (ratio < 1) for name, ratio in op.inputs}
        if not all(0 <= level <= 1 for level in levels.values()) or len(set(levels.values())) > 1:
            inputs = ", ".join(f"{name} = {ratio:g}" for name, ratio in op.inputs)
            raise ConfigError(
                f"operator {op.name}: inputs {inputs} cannot be run: a request is divided once ({{ detector = 4 }}), every input of an "
                "operator is divided alike, and { tracker = 0.25 } collects it again"
            )
        if 1 in levels.values():
            inner.add(op.name)
    return frozenset(inner)


def items_of(value: Any) -> list[Any]:
    """Split a value into items: a list, the first dimension of an array, or that of a tuple's arrays together."""
    return list(zip(*value, strict=True)) if isinstance(value, tuple) else list(value)


def requests_of(op: WorkflowOperator, inner: frozenset[str], values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return the operator's inputs for one request: one tuple, or one for each item."""
    if op.name not in inner:
        return [tuple(values[name] for name, _ in op.inputs)]
    columns = [values[name] if name in inner else items_of(values[name]) for name, _ in op.inputs]
    return list(zip(*columns, strict=True))


def compute_operator(workflow: Workflow, op: WorkflowOperator, run: RunBatch, values: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Compute an operator on many requests. `values`: [input][request]."""
    inner = operators_on_items(workflow)
    count = len(values[op.inputs[0][0]])
    each = [requests_of(op, inner, {name: values[name][i] for name, _ in op.inputs}) for i in range(count)]
    answers = iter(run([request for requests in each for request in requests]))
    grouped = [[next(answers) for _ in requests] for requests in each]
    return grouped if op.name in inner else [group[0] for group in grouped]
