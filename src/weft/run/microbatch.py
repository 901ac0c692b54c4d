"""A microbatch of a batch: its graph, so that the losses of all microbatches add up to the whole batch's.

In: what was captured of a microbatch, of the plan's whole batch, and of the batch of a step (the last of an epoch may be smaller). Out:
`Part`. Where the model computes something else on the whole batch than on a microbatch, losses count by samples, and it is told.
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
    """`normal`: what a microbatch computes, `captured`: as it was captured. `coupled`: where microbatches differ from the whole batch."""

    normal: Normalised
    constants: Mapping[str, Tensor]
    captured: Graph
    coupled: tuple[Coupling, ...] = ()
    structure: Any = None


def part_of(part: Captured, full: Captured, step: Captured, alone: bool) -> Part:
    """A part of a batch like `step`; `full` has at least two samples. `alone`: there are no other microbatches.

    Where samples are coupled, microbatches are what they are, and their losses count by their samples.
    """
    first = _first_difference(part.graph, full.graph) or _first_difference(part.graph, step.graph)
    if first is not None:
        coupled = (Coupling(first, "computes something else on the whole batch than on a microbatch"),)
        return Part(Normalised(part.graph), part.constants, part.graph, coupled, part.structure)
    additive_values = additive(counted(full.graph), counted(part.graph))
    if additive_values.coupled and not alone:
        return Part(Normalised(part.graph), part.constants, part.graph, additive_values.coupled, part.structure)
    constants = {v: _of_batch(x, step.constants[v]) for v, x in part.constants.items()}
    normal = normalised(counted(part.graph), counted(step.graph), additive_values)
    return Part(normal, constants, part.graph, additive_values.coupled, part.structure)


def takes_no_numbers(part: Captured, full: Captured) -> bool:
    """Whether nothing in a graph but sizes follows the number of samples, so that the graph of any other number has the same numbers."""
    if part.graph.batch_size == full.graph.batch_size or _first_difference(part.graph, full.graph) is not None:
        return False
    constants = [(x, full.constants[v]) for v, x in part.constants.items()]
    pairs = zip(part.graph.operators, full.graph.operators, strict=True)
    return all(x.shape != y.shape or x.equal(y) for x, y in constants) and all(has_numbers_of(mine, its) for mine, its in pairs)


def _of_batch(mine: Tensor, its: Tensor) -> Tensor:
    """A constant of the whole batch, unless it has a size that follows the samples."""
    return its if mine.shape == its.shape else mine


def _first_difference(one: Graph, other: Graph) -> str | None:
    """The site of the first operator that the other graph has not; None where they are alike but for sizes."""
    for mine, its in zip_longest(one.operators, other.operators):
        if mine is None or its is None or _essence(mine) != _essence(its):
            return (mine or its).site
        if any(len(one.tensors[v].shape) != len(other.tensors[v].shape) for v in mine.outputs):
            return mine.site
    return None


def _essence(op: Operator) -> tuple[object, ...]:
    return op.name, op.target, op.inputs, op.outputs
