"""Losses whose logits may be computed in chunks of rows: a linear layer, what only rearranges or scales its output, and a cross-entropy.

`loss_chunks=N` runs them chunk by chunk, so that the logits of one chunk exist at a time. That is right where nothing else reads logits,
and where what lies in between acts on each row, or on each number. In the field's terms: fused linear cross entropy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from shardwise.errors import LayoutError
from shardwise.model.dataflow import cached_on_graph
from shardwise.model.gradients import differentiable_inputs
from shardwise.model.graph import Graph, Operator
from shardwise.model.sharding.sharding import Sharding
from shardwise.ops import is_elementwise, is_identity, is_random, record_of
from shardwise.ops.vocabulary import LoweringKind, MatmulKind, Reduction, ViewKind
from shardwise.plan.ir.placement import P, Placement, Shard, is_fully_replicated

ROW_VIEWS = (ViewKind.RESHAPE, ViewKind.ALIAS, ViewKind.CONTIGUOUS, ViewKind.SLICE)


@dataclass(frozen=True)
class ChunkableLoss:
    """A loss and the linear layer that computes its logits; `between`: operators from one to the other, in order. `class_dims`: dimension
    of classes of each value from the layer's output to the loss's operand."""

    linear: Operator
    between: tuple[Operator, ...]
    loss: Operator
    class_dims: Mapping[str, int]

    @property
    def operators(self) -> tuple[Operator, ...]:
        """The layer, what lies between, and the loss, in order."""
        return (self.linear, *self.between, self.loss)


@cached_on_graph
def find_chunkable_losses(graph: Graph) -> tuple[ChunkableLoss, ...]:
    """Return the losses that `loss_chunks` computes in chunks.

    Raises:
        LayoutError: there are none, or the one with the most logits is none of them; says why, and what to do.
    """
    if graph.outputs:
        raise LayoutError(
            "loss_chunks: a plain loop gets the model's outputs, and its own loss reads all logits; leave loss_chunks out, or use "
            "shardwise.parallelize"
        )
    losses = [op for op in graph.operators if record_of(op).lowering == LoweringKind.CROSS_ENTROPY]
    if not losses:
        raise LayoutError(
            "loss_chunks computes a cross-entropy and the linear layer before it in chunks, and this model's loss has no "
            "torch.nn.functional.cross_entropy; leave loss_chunks out"
        )
    found, refused = [], {}
    for op in losses:
        try:
            found.append(_match_loss(graph, op))
        except LayoutError as error:
            refused[op.name] = error
    largest = max(losses, key=lambda op: graph.tensors[op.inputs[0]].size)
    if largest.name in refused:
        raise refused[largest.name]
    return tuple(found)


def has_chunkable_loss(graph: Graph) -> bool:
    """Return whether `loss_chunks` has an effect on this model."""
    try:
        return bool(find_chunkable_losses(graph))
    except LayoutError:
        return False


def _match_loss(graph: Graph, loss: Operator) -> ChunkableLoss:
    """Return the loss with its linear layer. Raises LayoutError where it cannot be computed in chunks."""
    tensors, readers = graph.tensors, _count_readers(graph)
    if loss.autocast or tensors[loss.inputs[0]].shape == tensors[loss.inputs[1]].shape or _reduction_of(loss) == 0:
        what = "under torch.autocast" if loss.autocast else "with one number a row" if _reduction_of(loss) == 0 else "of probabilities"
        raise LayoutError(f"loss_chunks: {loss.site} is a cross-entropy {what}, which is not computed in chunks; leave loss_chunks out")
    between: list[Operator] = []
    value = loss.inputs[0]
    while True:
        op = graph.producers.get(value)
        if readers.get(value, 0) > 1 or value in graph.outputs:
            other = next(
                (o.site for o in graph.operators if value in o.inputs and o is not (between[0] if between else loss)), "the caller"
            )
            raise LayoutError(
                f"loss_chunks: {other} reads the logits of {loss.site} too, so that all of them must exist; leave loss_chunks out, or let "
                "the loss alone read them"
            )
        if op is None or len(op.inputs) != 1:
            break
        if not _acts_by_row(op):
            raise LayoutError(_describe_obstacle(loss, op.site))
        between.insert(0, op)
        value = op.inputs[0]
    if (
        op is None
        or record_of(op).product.kind != MatmulKind.LINEAR
        or op.autocast
        or value not in op.outputs
        or len(tensors[op.inputs[1]].shape) != 2
    ):
        raise LayoutError(_describe_obstacle(loss, op.site if op is not None else value))
    return ChunkableLoss(op, tuple(between), loss, _class_dims(graph, op, between, loss))


def _describe_obstacle(loss: Operator, site: str) -> str:
    return (
        f"loss_chunks: {loss.site} reads what {site} computes, and no linear layer (torch.nn.functional.linear) whose output is only "
        "reshaped, sliced, cast or scaled; leave loss_chunks out, or compute logits by torch.nn.Linear"
    )


def _count_readers(graph: Graph) -> dict[str, int]:
    counts: dict[str, int] = {}
    for op in graph.operators:
        for value in op.inputs:
            counts[value] = counts.get(value, 0) + 1
    return counts


def _reduction_of(loss: Operator) -> object:
    return loss.args[3] if len(loss.args) > 3 else dict(loss.kwargs).get("reduction", 1)


def _acts_by_row(op: Operator) -> bool:
    """Return whether an operator of one tensor rearranges rows, or acts on each number."""
    record = record_of(op)
    is_plain = op.function is None and not op.returns_sequence and not op.autocast and record.reduction == Reduction.NONE
    if not is_plain or not differentiable_inputs(op):
        return False
    if is_identity(op) or record.view.kind in ROW_VIEWS or record.view.permutation is not None:
        return True
    return is_elementwise(op) and not is_random(op)


def _class_dims(graph: Graph, linear: Operator, between: list[Operator], loss: Operator) -> dict[str, int]:
    """Return the dimension of classes of every value between the layer and the loss. Raises LayoutError where it does not stay whole."""
    value = linear.outputs[0]
    shape = graph.tensors[value].shape
    dims = {value: len(shape) - 1}
    for op in between:
        at, shape, after = dims[value], graph.tensors[value].shape, graph.tensors[op.outputs[0]].shape
        value = op.outputs[0]
        found = _moved_dim(op, at, shape, after)
        if found is None:
            raise LayoutError(_describe_obstacle(loss, op.site))
        dims[value] = found
    if dims[value] != min(1, len(graph.tensors[value].shape) - 1):
        raise LayoutError(_describe_obstacle(loss, linear.site))
    return dims


def _moved_dim(op: Operator, at: int, before: tuple[int, ...], after: tuple[int, ...]) -> int | None:
    """Return the dimension of the output that dimension `at` of the input is; None if it is joined, split or sliced.

    A reshape keeps it where as many rows come before and after it.
    """
    view = record_of(op).view
    if view.permutation is not None:
        return view.permutation(op, len(before)).index(at)
    if before == after:
        return at
    if view.kind == ViewKind.RESHAPE:
        behind = prod(before[at + 1 :])
        fits = (i for i, size in enumerate(after) if size == before[at] and prod(after[i + 1 :]) == behind)
        return next(fits, None)
    if view.kind == ViewKind.SLICE and len(before) == len(after):
        return at if before[at] == after[at] else None
    return None


def keeps_rows(form: Placement, class_dim: int) -> bool:
    """Return whether each rank has all rows of logits that are placed so: whole, or shards of classes, or partial sums."""
    return form is P or is_fully_replicated(form) or (isinstance(form, Shard) and form.dim == class_dim and not form.runs)


def refuse_sharded_rows(chunkable: ChunkableLoss, sharding: Sharding | None) -> str:
    """Return why a loss cannot be computed in chunks under a sharding; "" if it can: between the layer and the loss, ranks may exchange
    shards of classes and partial sums, and no rows."""
    if sharding is None:
        return ""
    for op in (*chunkable.between, chunkable.loss):
        value, needed = op.inputs[0], sharding.input_placements[op.name][0]
        for axis, source in sharding.placements[value].items():
            target = needed.get(axis) or source
            for form in (source, target) if target != source else ():
                if not keeps_rows(form, chunkable.class_dims[value]):
                    return (
                        f"loss_chunks: ranks along {axis} exchange rows of the logits between {chunkable.linear.site} and {op.site}, so "
                        f"that all of them must exist; leave loss_chunks out, or use {axis}=1"
                    )
    return ""
