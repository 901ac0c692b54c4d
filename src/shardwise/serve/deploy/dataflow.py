"""Dataflow of requests through a workflow: which operators process items of a request, batched evaluation, and the choice of a deployment.

An input with more than one request each (`inputs = { detector = 4 }`) is a list or an array, whose items are separate requests;
an input with less than one (`{ tracker = 0.25 }`) collects them again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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


class WeightedRouter:
    """Distribution of requests over an operator's deployments by their shares of the load.

    A plan's traffic is the minimum that its shares allow, so among deployments below their share the cheapest to reach is chosen.
    `weights`: by name, with any sum. A credit is the share of requests due to a deployment minus those it got; credits sum to zero.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        total = sum(weights.values())
        self._weights = {name: weight / total for name, weight in weights.items()}
        self._credits = dict.fromkeys(weights, 0.0)

    def choose(self, price: Mapping[str, float], unavailable: Collection[str] = ()) -> str:
        """Choose the next deployment. `price`: of reaching each, infinite without a link; `unavailable`: down, ignored if all are.

        >>> shares = WeightedRouter({"edge": 3, "gpu": 1})
        >>> "".join(shares.choose({})[0] for _ in range(8))
        'eegeeege'
        """
        up = [name for name in self._weights if name not in unavailable] or list(self._weights)
        total = sum(self._weights[name] for name in up)
        for name in up:
            self._credits[name] += self._weights[name] / total
        reachable = [name for name in up if price.get(name, 0.0) < float("inf")] or up
        below_share = [name for name in reachable if self._credits[name] > 1e-9] or reachable
        chosen = min(below_share, key=lambda name: (price.get(name, 0.0), -self._credits[name]))
        self._credits[chosen] -= 1
        return chosen
