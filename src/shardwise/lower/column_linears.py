"""Linear layers that read what tensor ranks gathered: they keep this rank's piece, and communicate in backward beside their products.

Linear layers whose weights are cut by columns read a tensor that is gathered from the ranks' pieces (`sequence_parallel`). Autograd would
keep the gathered tensor, as large as all pieces, and wait for each collective. `fuse_column_linears` makes one call of the gather and the
linear layers behind it, whose backward

- gathers the pieces again, beside the products for the input's gradient;
- reduces and scatters the input's gradient, beside the products for the weights' gradients.

This is what Megatron-LM does (Korthikanti et al. 2022). Where the ranks agreed on symmetric memory (`world/fused_products`), forward's
gather and the scatter of the input's gradient run in torch's fused operators, in pieces behind the products. Which of the two follows from
what is equal on all ranks of the group: the layer, shapes and types.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.lower.local import LocalStage
from shardwise.lower.lowering import bind_named
from shardwise.lower.redistribute import redistribute, redistribute_forward
from shardwise.lower.split_backward import as_rows
from shardwise.ops import record_of_target
from shardwise.ops.vocabulary import MatmulKind
from shardwise.plan.ir.placement import D, R, Shard, dual_of, has_equal_pieces
from shardwise.plan.ir.transition import is_gathered_for_columns
from shardwise.world.comm.pending import CollectiveWork, concatenate_flat
from shardwise.world.world import Group

Linear = Callable[..., Tensor]
Pending = Callable[[], Tensor]


@dataclass(frozen=True)
class ColumnCut:
    """The redistribution that column-cut linear layers read: from `source` to what every rank has whole."""

    source: Shard
    group: Group

    def gather_input(self, piece: Tensor) -> Tensor:
        """Return what the layers read."""
        return redistribute_forward(piece, self.source, D, self.group)

    def is_fused(self, piece: Tensor, linears: Sequence[Linear]) -> bool:
        """Return whether products run in the fused operators: equal pieces of a dim before the last, and layers in 16 bits or more."""
        plain = all(record_of_target(str(linear)).product.kind == MatmulKind.LINEAR for linear in linears)
        return bool(self.group.fused_name) and plain and has_equal_pieces(self.source) and self.source.dim < piece.ndim - 1

    def start_gather(self, piece: Tensor) -> Pending:
        """Start gathering; the result waits."""
        source, group = self.source, self.group
        if not has_equal_pieces(source):
            whole = self.gather_input(piece)
            return lambda: whole
        sent = piece.contiguous()
        arrived = sent.new_empty(group.size * sent.numel())
        work = group.all_gather_into(arrived, sent.view(-1), wait=False)
        return _wait_then(work, lambda: torch.cat(arrived.view(group.size, *sent.shape).unbind(0), source.dim))

    def start_reduction(self, gradient: Tensor) -> Pending:
        """Start the reduction of the ranks' summands of the input's gradient to what `gather_input` was given; the result waits."""
        source, group = self.source, self.group
        if not has_equal_pieces(source):
            reduced = redistribute_forward(gradient, dual_of(D), source, group)
            return lambda: reduced
        pieces = gradient.chunk(group.size, source.dim)
        own = gradient.new_empty(pieces[0].shape)
        return _wait_then(group.reduce_scatter_into(own.view(-1), concatenate_flat(pieces), wait=False), lambda: own)


def _wait_then(work: CollectiveWork, result: Pending) -> Pending:
    def finish() -> Tensor:
        work.wait()
        return result()

    return finish


class _ColumnLinears(torch.autograd.Function):
    """Linear layers of one redistributed tensor. `operands`: weight and bias (or None) of each."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, cut: ColumnCut, linears: tuple[Linear, ...], *operands: Tensor | None) -> tuple[Tensor, ...]:
        ctx.cut = cut
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(piece, *operands[::2])
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in operands[1::2]]
        ctx.is_fused = cut.is_fused(piece, linears)
        if ctx.is_fused:
            return _multiply_gathered(cut, piece, operands)
        whole = cut.gather_input(piece)
        return tuple(linear(whole, *operands[2 * i : 2 * i + 2]) for i, linear in enumerate(linears))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        piece, *weights = ctx.saved_tensors
        cut: ColumnCut = ctx.cut
        needs_input, needs_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[3::2]
        differentiable = torch.is_grad_enabled()  # create_graph=True: gradients of these gradients are asked for
        gathers = any(need and g is not None for need, g in zip(needs_weights, gradients, strict=True))
        whole = _pending_input(cut, piece, differentiable) if gathers else None
        if needs_input and ctx.is_fused and not differentiable and all(g is None or g.dtype is piece.dtype for g in gradients):
            reduced = _multiply_and_reduce(cut, weights, gradients)
        else:
            summand = _sum_input_gradients(piece, weights, gradients) if needs_input else None
            reduced = _pending_reduction(cut, summand, differentiable) if summand is not None else None
        found: list[Tensor | None] = []
        x = whole() if whole is not None else None
        for i, (weight, g) in enumerate(zip(weights, gradients, strict=True)):
            found.append(_weight_gradient(x, weight, g) if x is not None and g is not None and needs_weights[i] else None)
            wants_bias = g is not None and ctx.bias_dtypes[i] is not None and ctx.needs_input_grad[4 + 2 * i]
            found.append(as_rows(g).sum(0).to(ctx.bias_dtypes[i]) if wants_bias and g is not None else None)
        return (reduced() if reduced is not None else None, None, None, *found)


def _multiply_gathered(cut: ColumnCut, piece: Tensor, operands: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return the outputs of the layers by one product fused with the gather. `operands`: weight and bias (or None) of each."""
    from shardwise.world import symmetric_memory  # of torch's private names, only where they are used

    device, dtype = piece.device.type, piece.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)  # the operators do not follow autocast
    matrices = [weight.to(dtype).t() for weight in operands[::2] if weight is not None]
    products = symmetric_memory.gather_and_multiply(piece.to(dtype), matrices, cut.source.dim, cut.group.fused_name)
    return tuple(x if bias is None else x + bias.to(dtype) for x, bias in zip(products, operands[1::2], strict=True))


def _multiply_and_reduce(cut: ColumnCut, weights: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Pending | None:
    """Return the reduced gradient of what the layers read, by one product of all layers fused with the scatter; None without gradients."""
    from shardwise.world import symmetric_memory  # as above

    pairs = [(g, weight.to(g.dtype)) for g, weight in zip(gradients, weights, strict=True) if g is not None]
    if not pairs:
        return None
    gradient, matrix = (torch.cat([pair[i] for pair in pairs], dim) if len(pairs) > 1 else pairs[0][i] for i, dim in ((0, -1), (1, 0)))
    reduced = symmetric_memory.multiply_and_scatter(gradient, matrix, cut.source.dim, cut.group.fused_name)
    return lambda: reduced


def _pending_input(cut: ColumnCut, piece: Tensor, differentiable: bool) -> Pending:
    if not differentiable:
        return cut.start_gather(piece)
    whole = redistribute(piece, cut.source, D, cut.group)
    return lambda: whole


def _pending_reduction(cut: ColumnCut, summand: Tensor, differentiable: bool) -> Pending:
    if not differentiable:
        return cut.start_reduction(summand)
    total = redistribute(summand, dual_of(D), dual_of(cut.source), cut.group)
    return lambda: total


def _sum_input_gradients(piece: Tensor, weights: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Return this rank's summand of the gradient of what the layers read, added in the order in which autograd adds them."""
    summand: Tensor | None = None
    for weight, g in reversed([*zip(weights, gradients, strict=True)]):
        if g is not None:
            part = (g @ weight.to(g.dtype)).to(piece.dtype)
            summand = part if summand is None else summand + part
    return summand


def _weight_gradient(x: Tensor, weight: Tensor, g: Tensor) -> Tensor:
    return (as_rows(g).t() @ as_rows(x).to(g.dtype)).to(weight.dtype)


def apply_column_linears(cut: ColumnCut, linears: tuple[Linear, ...], piece: Tensor, *operands: Tensor | None) -> tuple[Tensor, ...]:
    """Return the outputs of linear layers that read `piece`, redistributed."""
    return _ColumnLinears.apply(piece, cut, linears, *operands)  # type: ignore[no-any-return,no-untyped-call]


def keeps_pieces(device: torch.device) -> bool:
    """Return whether linear layers keep pieces. On processors a second gather takes the cores that compute: what is gathered is kept."""
    return device.type != "cpu"


def fuse_column_linears(local: LocalStage) -> LocalStage:
    """Return the stage with one call for each redistribution that linear layers alone read, and these layers."""
    if not isinstance(local.module, fx.GraphModule):
        return local  # a user's module, which was not captured
    found = {node: layers for node in local.module.graph.nodes if (layers := _column_linears(node))}
    if not found:
        return local
    begins, graph, copies = {layers[0]: node for node, layers in found.items()}, fx.Graph(), dict[fx.Node, fx.Node]()
    fused = {layer for layers in found.values() for layer in layers}
    for node in local.module.graph.nodes:
        if node in begins:
            _add_call(graph, copies, begins[node], found[begins[node]])
        elif node not in found and node not in fused:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.lint()
    return replace(local, module=fx.GraphModule(torch.nn.Module(), graph, class_name=type(local.module).__name__))


def _add_call(graph: fx.Graph, copies: dict[fx.Node, fx.Node], gathered: fx.Node, layers: Sequence[fx.Node]) -> None:
    source, _, group = gathered.meta["redistribution"]
    operands = [(layer.args[1], layer.args[2] if len(layer.args) > 2 else None) for layer in layers]
    cut = ColumnCut(source, group)
    call = bind_named(apply_column_linears, cut, tuple(layer.target for layer in layers))
    copied = [copies[x] if isinstance(x, fx.Node) else None for pair in operands for x in pair]
    node = graph.call_function(call, (copies[gathered.args[0]], *copied))  # type: ignore[index]
    node.meta.update({key: layers[0].meta[key] for key in ("part", "layer", "in_region")})
    for i, layer in enumerate(layers):
        copies[layer] = graph.call_function(operator.getitem, (node, i))
        copies[layer].meta.update(layer.meta)


def _column_linears(node: fx.Node) -> list[fx.Node]:
    """Return the linear layers that read a redistribution, if nothing else does and all their weights are there for the first of them.

    Prices find the same on the graph's operators (`cost/operators/column_gathers`).
    """
    source, target, _ = node.meta.get("redistribution", (R, R, None))
    if not is_gathered_for_columns(source, target):
        return []
    order = {each: i for i, each in enumerate(node.graph.nodes)}
    layers = sorted(node.users, key=order.__getitem__)
    for layer in layers:
        operands = [x for x in layer.args[1:] if isinstance(x, fx.Node)]
        in_time = all(order[x] < order[layers[0]] for x in operands)
        together = layer.meta["part"] == layers[0].meta["part"]
        if not _is_linear(layer) or layer.args[0] is not node or node in operands or not in_time or not together:
            return []
    return layers


def _is_linear(node: fx.Node) -> bool:
    return node.op == "call_function" and not node.kwargs and record_of_target(str(node.target)).product.kind == MatmulKind.LINEAR
