"""Check that the samples of a batch are in dimension 0; else say where they seem to be instead, and the remedy.

A dimension is followed from the batch through the factor rules. Samples pass through a model independently, up to the sums of the loss;
dimensions that a recurrent layer steps along, or that attention mixes, are positions. Batches of (time, samples, ...) are recognized by
that: dimension 0 is mixed, and dimension 1 is not, or a recurrent layer or the shapes of the batch decide.

Not modeled: operators without a rule, after which nothing is known; samples mixed on purpose, in both dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from shardwise.errors import Infeasible
from shardwise.model.graph import Graph, Operator
from shardwise.ops import Op, Rule, record_of
from shardwise.ops.vocabulary import Linearity, Reduction, ViewKind
from shardwise.plan.layout import Layout


class SampleDimension(NamedTuple):
    """A dimension of the batch inside a tensor: in dimension `dim`, with `inner` entries per element of its own, of `size` elements."""

    dim: int
    inner: int
    size: int


@dataclass
class _SampleTrace:
    """The trace of a batch dimension: where it was first mixed, which recurrent layer steps along it, whether it was summed."""

    mixed_at: Operator | None = None
    stepped_at: Operator | None = None
    is_summed: bool = False
    is_certain: bool = True
    dimensions: dict[str, SampleDimension] = field(default_factory=dict)


def check_samples(graph: Graph, layout: Layout) -> None:
    """Raise Infeasible where a layout divides dimension 0 of a batch whose samples are elsewhere."""
    if layout.data > 1 or layout.microbatches > 1:
        reason = misplaced_samples_reason(graph)
        if reason is not None:
            raise Infeasible(f"{layout} divides the batch along dimension 0, but {reason}")


def misplaced_samples_reason(graph: Graph) -> str | None:
    """Return why dimension 0 of the batch holds no samples, and the remedy; None where nothing indicates it."""
    multi_dim_inputs = [v for v in graph.inputs if v.batched and len(v.tensor.shape) > 1]
    seconds = {v.tensor.shape[1] for v in multi_dim_inputs}
    if graph.batch_size < 2 or not multi_dim_inputs or len(seconds) > 1 or min(seconds) < 2:
        return None
    (second,) = seconds
    lengths = {v.tensor.shape[0] for v in graph.inputs if len(v.tensor.shape) == 1}
    first = _trace_dimension(graph, {v.value: 0 for v in graph.inputs if v.batched})
    if first.mixed_at is None:
        return None
    rows = f"dimension 0 of {multi_dim_inputs[0].name} {list(multi_dim_inputs[0].tensor.shape)}"
    remedy = "give it as (samples, time, ...) and let forward transpose it (x.transpose(0, 1)), or use data=1 microbatches=1"
    if first.stepped_at is not None:
        return f"{first.stepped_at.site} goes along {rows} step by step, so that it holds no samples; {remedy}"
    if graph.batch_size in lengths:
        return None  # as many labels as there are rows
    other = _trace_dimension(
        graph, {v.value: 1 for v in multi_dim_inputs} | {v.value: 0 for v in graph.inputs if v.tensor.shape == (second,)}
    )
    if other.mixed_at is None and other.is_certain and other.is_summed:
        why = f"each of the {second} in dimension 1 goes through by itself"
    elif second in lengths:
        why = f"the batch has {second} of what is one for each sample"
    else:
        return None
    return f"{first.mixed_at.site} mixes {rows}, and {why}, so that samples lie in dimension 1; {remedy}"


def sample_dimensions(graph: Graph) -> dict[str, SampleDimension]:
    """Return the location of the batch's samples in the values that they are known to reach."""
    return _trace_dimension(graph, {v.value: 0 for v in graph.inputs if v.batched}).dimensions


def _trace_dimension(graph: Graph, start: dict[str, int]) -> _SampleTrace:
    shapes = {value: tensor.shape for value, tensor in graph.tensors.items()}
    followed = _SampleTrace(dimensions={value: SampleDimension(dim, 1, shapes[value][dim]) for value, dim in start.items()})
    for op in graph.operators:
        traced_inputs = [(i, followed.dimensions[value]) for i, value in enumerate(op.inputs) if value in followed.dimensions]
        if not traced_inputs:
            continue
        rule, record = graph.rules[op.name], record_of(op)
        if record.view.kind == ViewKind.RESHAPE:
            for value in op.outputs:
                place = _dimension_after_reshape(traced_inputs[0][1], shapes[op.inputs[0]], shapes[value])
                if place is None:
                    followed.mixed_at = followed.mixed_at or op
                else:
                    followed.dimensions[value] = place
        elif rule is None:
            followed.is_certain = False
        else:
            _trace_operator(followed, op, record, rule, traced_inputs, shapes)
    return followed


def _trace_operator(
    followed: _SampleTrace,
    op: Operator,
    record: Op,
    rule: Rule,
    here: list[tuple[int, SampleDimension]],
    shapes: dict[str, tuple[int, ...]],
) -> None:
    """Follow the dimension through one operator, by its labels."""
    rows = [(i, place, rule.inputs[i]) for i, place in here]
    labels = {row[place.dim] for _, place, row in rows if row is not None}
    if not labels:  # its values are not read
        return
    sums = record.reduction.is_loss or (record.reduction.is_sum and record.linear == Linearity.JOINT) or op.function is not None
    if sums and all(prod(shapes[value]) == 1 for value in op.outputs):
        followed.is_summed = True
        if record.reduction == Reduction.CLASS_LOSS and any(
            i == 0 and place.dim == min(1, len(shapes[op.inputs[0]]) - 1) for i, place in here
        ):
            followed.mixed_at = followed.mixed_at or op
        return
    label = next(iter(labels))
    place = next(place for _, place, row in rows if row is not None)
    if record.over_steps and here[0][0] == 0 and not label:
        time = 1 if bool(op.args[-1]) else 0
        followed.stepped_at = followed.stepped_at or (op if here[0][1].dim == time and len(shapes[op.inputs[0]]) == 3 else None)
    if not label or len(labels) > 1 or rule.kernels.get(label) in ("statistics", "vocabulary", "running"):
        followed.mixed_at = followed.mixed_at or op
        if record.view.mixes_positions:
            for value in op.outputs:
                if len(shapes[value]) == len(shapes[op.inputs[here[0][0]]]):
                    followed.dimensions[value] = place
        return
    is_kept = False
    for value, row in zip(op.outputs, rule.outputs, strict=True):
        if label in row:
            is_kept = True
            followed.dimensions[value] = place._replace(dim=row.index(label))
    if not is_kept:
        followed.mixed_at = followed.mixed_at or op


def _dimension_after_reshape(place: SampleDimension, before: tuple[int, ...], after: tuple[int, ...]) -> SampleDimension | None:
    """Return the location of a dimension after a reshape; None where it is split.

    >>> _dimension_after_reshape(SampleDimension(1, 1, 8), (6, 8, 5), (48, 5)), _dimension_after_reshape(SampleDimension(1, 2, 8), (6, 16, 3), (48, 6))
    (SampleDimension(dim=0, inner=1, size=8), SampleDimension(dim=0, inner=1, size=8))
    """  # noqa: E501
    if not prod(after):
        return None  # an empty tensor
    inner = place.inner * prod(before[place.dim + 1 :])
    for dim in range(len(after)):
        below = prod(after[dim + 1 :])
        if below <= inner and inner * place.size <= below * after[dim] and inner % below == 0:
            within = inner // below
            return SampleDimension(dim, within, place.size) if after[dim] % (within * place.size) == 0 else None
    return None
