"""Lowering of `loss_chunks`: one call in place of a linear layer, what lies behind it, and a cross-entropy, in a lowered stage.

The nodes are found from the loss to the layer. What rearranges rows is applied to the layer's input instead, at this rank's shapes; what
acts on numbers, and exchanges of classes between ranks, are applied to the logits of each chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from shardwise.errors import LayoutError
from shardwise.lower.kernels.chunked_loss import ChunkedLossCall, Step, compute_chunked_loss
from shardwise.lower.kernels.vocabulary import cross_entropy
from shardwise.lower.lowering import bind_named
from shardwise.lower.redistribute import redistribute
from shardwise.lower.torch_calls import called_function
from shardwise.model.chunked_loss import ROW_VIEWS, ChunkableLoss, keeps_rows
from shardwise.model.graph import Operator
from shardwise.ops import record_of_target
from shardwise.ops.vocabulary import LoweringKind, MatmulKind, ViewKind
from shardwise.plan.ir.placement import Placement, Shard
from shardwise.world.world import Group


def chunk_losses(graph: fx.Graph, losses: Sequence[ChunkableLoss], operators: Sequence[Operator], num_chunks: int) -> None:
    """Replace the nodes of every loss among `operators` by one call. Nodes know their values (`meta["value"]`).

    Raises:
        LayoutError: a pipeline stage begins between the layer and the loss, or ranks exchange rows of the logits there.
    """
    names = {op.name for op in operators}
    for chunkable in losses:
        here = [op.name in names for op in chunkable.operators]
        if any(here) and not all(here):
            raise LayoutError(
                f"loss_chunks: a pipeline stage begins between {chunkable.linear.site} and {chunkable.loss.site}, which are computed "
                f"together; let it begin before {chunkable.linear.site} or behind the loss"
            )
        if all(here):
            _replace_nodes(graph, chunkable, num_chunks)


def _replace_nodes(graph: fx.Graph, chunkable: ChunkableLoss, num_chunks: int) -> None:
    (out,) = chunkable.loss.outputs
    loss = next(node for node in graph.nodes if node.meta.get("value", ("",))[0] == out and not node.meta.get("redistribution"))
    path: list[fx.Node] = []
    node = loss.args[0]
    while isinstance(node, fx.Node) and record_of_target(str(node.target)).product.kind != MatmulKind.LINEAR:
        path.insert(0, node)
        node = node.args[0] if node.args else None
    if not isinstance(node, fx.Node) or node.kwargs:
        raise LayoutError(f"loss_chunks: {chunkable.linear.site} is not computed as one product here; leave loss_chunks out")
    linear, steps = node, _Steps(chunkable, chunkable.class_dims[chunkable.linear.outputs[0]])
    for node in path:
        steps.add(node)
    arguments = _loss_arguments(loss)
    call = ChunkedLossCall(
        num_chunks, tuple(steps.row_steps), steps.class_dim, tuple(steps.logit_steps), arguments.ignore, arguments.rows,
        arguments.class_shard, arguments.smoothing, arguments.mean,
    )  # fmt: skip
    x, weight, bias = (*linear.args, None)[:3]
    with graph.inserting_before(loss):
        added = graph.call_function(bind_named(compute_chunked_loss, call), (x, weight, bias, loss.args[1], arguments.weight))
    added.meta.update(loss.meta)
    loss.replace_all_uses_with(added)
    for node in (loss, *reversed(path), linear):
        graph.erase_node(node)


@dataclass
class _Steps:
    """Steps from the layer to the loss. `class_dim`: where classes are after those so far."""

    chunkable: ChunkableLoss
    class_dim: int
    row_steps: list[Step] = field(default_factory=list)
    logit_steps: list[Step] = field(default_factory=list)

    def add(self, node: fx.Node) -> None:
        """Add a node."""
        target: Any = node.target
        value = node.meta.get("value", ("",))[0]
        record, rest, kwargs = record_of_target(str(target)), node.args[1:], dict(node.kwargs)
        moved = node.meta.get("redistribution")
        if value not in self.chunkable.class_dims or any(isinstance(a, fx.Node) for a in rest) or not (record.names or moved):
            name = self.chunkable.linear.site
            raise LayoutError(f"loss_chunks: ranks compute the logits of {name} by parts that are put together; leave loss_chunks out")
        before, self.class_dim = self.class_dim, self.chunkable.class_dims[value]
        if moved is not None:
            self.logit_steps.append(self._exchange_classes(*moved))
        elif record.view.kind == ViewKind.RESHAPE:
            self.row_steps.append(_reshape_rows(rest[0], before, self.class_dim))
        elif record.view.permutation is not None or record.view.kind in ROW_VIEWS:
            if record.lowering != LoweringKind.SLICE or self._slices_rows(rest, before):
                self.row_steps.append(lambda x: target(x, *rest, **kwargs))
        else:
            self.logit_steps.append(lambda logits: target(logits, *rest, **kwargs))

    def _exchange_classes(self, source: Placement, target: Placement, group: Group) -> Step:
        """Return a redistribution of the logits of some rows, [rows, classes]."""
        forms = []
        for form in (source, target):
            if not keeps_rows(form, self.class_dim):
                raise LayoutError(
                    f"loss_chunks: ranks exchange rows of the logits behind {self.chunkable.linear.site}, so that all of them must exist; "
                    "leave loss_chunks out"
                )
            forms.append(Shard(1, form.lengths) if isinstance(form, Shard) else form)
        return bind_named(redistribute, source=forms[0], target=forms[1], group=group)

    def _slices_rows(self, rest: Sequence[Any], class_dim: int) -> bool:
        """Return whether a slice is one of rows; that of all classes has no effect."""
        num_dims = 1 + max(self.chunkable.class_dims.values())
        dim = rest[0] if rest else 0
        return bool((dim if dim >= 0 else num_dims + dim) != class_dim)


def _reshape_rows(shape: Any, before: int, after: int) -> Step:
    """Return the reshape of the layer's input, where a reshape of its output has the classes of dimension `before` in `after`."""

    def reshape(x: Tensor) -> Tensor:
        return x.reshape([*shape[:after], x.shape[before], *shape[after + 1 :]])

    return reshape


@dataclass(frozen=True)
class _LossArguments:
    ignore: int
    rows: tuple[Group, ...]
    class_shard: tuple[int, Group] | None
    smoothing: float
    mean: bool
    weight: fx.Node | None


def _loss_arguments(loss: fx.Node) -> _LossArguments:
    """Return the arguments of a node that calls torch's cross-entropy, or the kernel of sharded classes and rows."""
    target: Any = loss.target
    if called_function(target) is cross_entropy:
        bound = target.bound
        weight = loss.kwargs.get("weight")
        return _LossArguments(loss.args[2], bound["rows"], bound["class_shard"], bound["smoothing"], bound["mean"], weight)  # type: ignore[arg-type]
    defaults = {"weight": None, "reduction": 1, "ignore_index": -100, "label_smoothing": 0.0}
    given: dict[str, Any] = {**defaults, **dict(zip(defaults, loss.args[2:], strict=False)), **loss.kwargs}
    return _LossArguments(given["ignore_index"], (), None, given["label_smoothing"], given["reduction"] == 1, given["weight"])
