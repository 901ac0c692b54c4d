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

from shardwise.capture.capture import CapturedGraph
from shardwise.model.batch.additive import SampleCoupling, analyze_additivity
from shardwise.model.batch.summable_loss import SummableLossGraph, matches_full_batch, normalize_loss, with_counted_means
from shardwise.model.graph import Graph, Operator


@dataclass(frozen=True)
class CapturedMicrobatch:
    """`loss_graph`: normalised graph of a microbatch; `captured`: original graph; `couplings`: where it differs from the whole batch."""

    loss_graph: SummableLossGraph
    constants: Mapping[str, Tensor]
    captured: Graph
    couplings: tuple[SampleCoupling, ...] = ()
    structure: Any = None


def normalise_microbatch(
    microbatch: CapturedGraph, full: CapturedGraph, step: CapturedGraph, is_only_microbatch: bool
) -> CapturedMicrobatch:
    """Normalise a microbatch of a batch like `step`; `full` has at least two samples. `is_only_microbatch`: there are no others.

    If samples interact, the graph stays as captured, and losses are weighted by their samples.
    """
    first_difference = _first_difference(microbatch.graph, full.graph) or _first_difference(microbatch.graph, step.graph)
    if first_difference is not None:
        coupled = (SampleCoupling(first_difference, "computes something else on the whole batch than on a microbatch"),)
        return CapturedMicrobatch(
            SummableLossGraph(microbatch.graph), microbatch.constants, microbatch.graph, coupled, microbatch.structure
        )
    additive_values = analyze_additivity(with_counted_means(full.graph), with_counted_means(microbatch.graph))
    if additive_values.coupled and not is_only_microbatch:
        return CapturedMicrobatch(
            SummableLossGraph(microbatch.graph), microbatch.constants, microbatch.graph, additive_values.coupled, microbatch.structure
        )
    constants = {v: _constant_of_batch(x, step.constants[v]) for v, x in microbatch.constants.items()}
    loss_graph = normalize_loss(with_counted_means(microbatch.graph), with_counted_means(step.graph), additive_values)
    return CapturedMicrobatch(loss_graph, constants, microbatch.graph, additive_values.coupled, microbatch.structure)


def depends_on_sizes_only(microbatch: CapturedGraph, full: CapturedGraph) -> bool:
    """Return whether only sizes, but no other constants of a graph, depend on the number of samples."""
    if microbatch.graph.batch_size == full.graph.batch_size or _first_difference(microbatch.graph, full.graph) is not None:
        return False
    constants = [(x, full.constants[v]) for v, x in microbatch.constants.items()]
    pairs = zip(microbatch.graph.operators, full.graph.operators, strict=True)
    return all(x.shape != y.shape or x.equal(y) for x, y in constants) and all(matches_full_batch(op, full_op) for op, full_op in pairs)


def _constant_of_batch(of_microbatch: Tensor, of_batch: Tensor) -> Tensor:
    """Return the whole batch's constant, unless its shape depends on the number of samples."""
    return of_batch if of_microbatch.shape == of_batch.shape else of_microbatch


def _first_difference(first: Graph, other: Graph) -> str | None:
    """Return the site of the first operator in which two graphs differ; None if they agree but for sizes."""
    for op, other_op in zip_longest(first.operators, other.operators):
        if op is None or other_op is None or _operator_key(op) != _operator_key(other_op):
            return (op or other_op).site
        if any(len(first.tensors[v].shape) != len(other.tensors[v].shape) for v in op.outputs):
            return op.site
    return None


def _operator_key(op: Operator) -> tuple[object, ...]:
    return op.name, op.target, op.inputs, op.outputs
