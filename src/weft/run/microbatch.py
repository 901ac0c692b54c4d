"""Normalise the graph of a microbatch for gradient accumulation, so that microbatch losses add up to the loss of the whole batch.

In: captures of a microbatch, of the plan's whole batch, and of a step's batch (the last of an epoch may be smaller). Out:
`CapturedMicrobatch`. If samples interact, microbatch losses are weighted by their samples, and the coupling is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import Tensor

from weft.capture.capture import Captured
from weft.model.batch.additive import Coupling, additive
from weft.model.batch.normalise import Normalised, counted, has_numbers_of, normalised
from weft.model.graph import Graph, Operator


@dataclass(frozen=True)
class Part:
    """`loss_graph`: normalised graph of a microbatch; `captured`: original graph; `couplings`: where it differs from the whole batch."""

    normal: Normalised
    constants: Mapping[str, Tensor]
    captured: Graph
    coupled: tuple[Coupling, ...] = ()
    structure: Any = None


def part_of(part: Captured, full: Captured, step: Captured, alone: bool) -> Part:
    """Normalise a microbatch of a batch like `step`; `full` has at least two samples. `is_only_microbatch`: there are no others.

    If samples interact, the graph stays as captured, and losses are weighted by their samples.
    """
    first_difference = _first_difference(part.graph, full.graph) or _first_difference(part.graph, step.graph)
    if first_difference is not None:
        coupled = (Coupling(first_difference, "computes something else on the whole batch than on a microbatch"),)
        return Part(Normalised(part.graph), part.constants, part.graph, coupled, part.structure)
    additive_values = additive(counted(full.graph), counted(part.graph))
    if additive_values.coupled and not alone:
        return Part(Normalised(part.graph), part.constants, part.graph, additive_values.coupled, part.structure)
    constants = {v: _of_batch(x, step.constants[v]) for v, x in part.constants.items()}
    loss_graph = normalised(counted(part.graph), counted(step.graph), additive_values)
    return Part(loss_graph, constants, part.graph, additive_values.coupled, part.structure)


def takes_no_numbers(part: Captured, full: Captured) -> bool:
    """Return whether only sizes, but no other constants of a graph, depend on the number of samples."""
    if part.graph.batch_size == full.graph.batch_size or _first_difference(part.graph, full.graph) is not None:
        return False
    constants = [(x, full.constants[v]) for v, x in part.constants.items()]
    pairs = zip(part.graph.operators, full.graph.operators, strict=True)
    return all(x.shape != y.shape or x.equal(y) for x, y in constants) and all(has_numbers_of(op, full_op) for op, full_op in pairs)


def _of_batch(mine: Tensor, its: Tensor) -> Tensor:
    """Return the whole batch's constant, unless its shape depends on the number of samples."""
    return its if mine.shape == its.shape else mine


def _first_difference(one: Graph, other: Graph) -> str | None:
    """Return the site of the first operator in which two graphs differ; None if they agree but for sizes."""
    for op, other_op in zip_longest(one.operators, other.operators):
        if op is None or other_op is None or _essence(op) != _essence(other_op):
            return (op or other_op).site
        if any(len(one.tensors[v].shape) != len(other.tensors[v].shape) for v in op.outputs):
            return op.site
    return None


def _essence(op: Operator) -> tuple[object, ...]:
    return op.name, op.target, op.inputs, op.outputs
