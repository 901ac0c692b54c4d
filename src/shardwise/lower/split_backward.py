"""Split backward, as zero-bubble schedules need: input gradients first, weight gradients later (Qi et al. 2023).

In a lowered stage every operator that is linear in a trainable weight (a product, a convolution, a look-up) treats that weight as a
constant and notes its input and output gradient. `DelayedWeightGradients.deliver` computes the weight gradients from such notes.

Autograd's graph is not modified, so views, shared parameters, several outputs and recompute need no care: a weight that is read through a
view gets its gradient through that view, one that is read twice gets the sum, and all else (biases, norms, weights that are redistributed
first) is differentiated with the activations. Not modeled: second derivatives.

In the field's terms: zero-bubble split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx

from shardwise.lower.local import LocalStage
from shardwise.ops import Op, record_of_target
from shardwise.ops.vocabulary import CostKind, ViewKind

aten = torch.ops.aten


class WeightGradientNote(NamedTuple):
    """The input and output gradient of one operator of one microbatch, for its weight gradient."""

    site: int
    x: Tensor
    grad: Tensor


class GradientSink(Protocol):
    """Destination of weight gradients."""

    def add(self, name: str, grad: Tensor) -> None:
        """Add a gradient to a parameter's."""

    def add_product(self, name: str, a: Tensor, b: Tensor) -> None:
        """Add the product of two matrices to a parameter's gradient."""


# Arguments: the operator's input, its output gradient, the weight (for its shape) and the operator's arguments.
Formula = Callable[[Tensor, Tensor, Tensor, "list[Any]"], Tensor]


def as_rows(x: Tensor) -> Tensor:
    """Return a tensor as a matrix: its last dimension, and all others as rows."""
    return x.reshape(-1, x.shape[-1])


def _linear_gradient(x: Tensor, grad: Tensor, weight: Tensor, args: list[Any]) -> Tensor:
    return as_rows(grad).t() @ as_rows(x)


def _matmul_gradient(x: Tensor, grad: Tensor, weight: Tensor, args: list[Any]) -> Tensor:
    return as_rows(x).t() @ as_rows(grad)


def _bmm_gradient(x: Tensor, grad: Tensor, weight: Tensor, args: list[Any]) -> Tensor:
    return x.transpose(1, 2) @ grad


def _convolution_gradient(x: Tensor, grad: Tensor, weight: Tensor, args: list[Any]) -> Tensor:
    dims = weight.dim() - 2
    stride, padding, dilation, groups = _with_defaults(args[3:], [1, 0, 1, 1])
    return _convolution_backward(
        x, grad, weight, (_per_dim(stride, dims), _per_dim(padding, dims), _per_dim(dilation, dims), False, [0] * dims, groups)
    )


def _named_padding_gradient(x: Tensor, grad: Tensor, weight: Tensor, args: list[Any]) -> Tensor:
    """Return the gradient with padding "same" or "valid"; an odd remainder of "same" is added at the end, as in torch."""
    dims = weight.dim() - 2
    stride, padding, dilation, groups = _with_defaults(args[3:], [1, "valid", 1, 1])
    totals = [d * (k - 1) if padding == "same" else 0 for d, k in zip(_per_dim(dilation, dims), weight.shape[2:], strict=True)]
    if any(n % 2 for n in totals):
        x = torch.nn.functional.pad(x, [p for n in reversed(totals) for p in (0, n % 2)])
    return _convolution_gradient(x, grad, weight, [None, None, None, stride, [n // 2 for n in totals], dilation, groups])


def _transposed_gradient(x: Tensor, grad: Tensor, weight: Tensor, args: list[Any]) -> Tensor:
    dims = weight.dim() - 2
    stride, padding, output_padding, groups, dilation = _with_defaults(args[3:], [1, 0, 0, 1, 1])
    options = (_per_dim(stride, dims), _per_dim(padding, dims), _per_dim(dilation, dims), True, _per_dim(output_padding, dims), groups)
    return _convolution_backward(x, grad, weight, options)


def _convolution_backward(x: Tensor, grad: Tensor, weight: Tensor, options: tuple[Any, ...]) -> Tensor:
    if x.dim() < weight.dim():  # one image without a batch dimension
        x, grad = x.unsqueeze(0), grad.unsqueeze(0)
    gradient: Tensor = aten.convolution_backward.default(grad, x, weight, None, *options, [False, True, False])[1]
    return gradient


def _embedding_gradient(x: Tensor, grad: Tensor, weight: Tensor, args: list[Any]) -> Tensor:
    padding, by_frequency = _with_defaults(args[2:4], [-1, False])
    gradient: Tensor = aten.embedding_dense_backward.default(grad, x, weight.shape[0], padding, by_frequency)
    return gradient


def _with_defaults(args: list[Any], defaults: list[Any]) -> list[Any]:
    return [*args, *defaults[len(args) :]]


def _per_dim(value: Any, dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


# By the names in records (`shardwise.ops.record.WeightGradient`).
FORMULAS: dict[str, Formula] = {
    "linear": _linear_gradient, "product": _matmul_gradient, "stacked": _bmm_gradient, "convolution": _convolution_gradient,
        "convolution_padded": _named_padding_gradient,
    "transposed": _transposed_gradient, "rows": _embedding_gradient,
}  # fmt: skip


@dataclass(frozen=True)
class _WeightGradientSite:
    """One operator with a delayed weight gradient: formula, constant arguments, and its view of the parameter `name`."""

    name: str
    parameter: Tensor
    views: tuple[Callable[[Tensor], Tensor], ...]
    formula: Formula
    args: list[Any]

    def factors(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return two matrices whose product is the parameter's gradient, where it is one."""
        if self.views or x.dtype is not self.parameter.dtype or grad.dtype is not x.dtype:
            return None
        if self.formula is _linear_gradient:
            return as_rows(grad).t(), as_rows(x)
        return (as_rows(x).t(), as_rows(grad)) if self.formula is _matmul_gradient else None

    def gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return the parameter's gradient."""
        if x.is_floating_point() and x.dtype is not grad.dtype:
            x = x.to(grad.dtype)
        if not self.views:
            gradient = self.formula(x, grad, self._shaped_parameter(), self.args)
            return gradient if gradient.dtype is self.parameter.dtype else gradient.to(self.parameter.dtype)
        with torch.enable_grad():
            read = self._shaped_parameter().requires_grad_()
            viewed = self._through_views(read)
        gradient = self.formula(x, grad, viewed.detach(), self.args)
        return torch.autograd.grad(viewed, read, gradient.to(viewed.dtype))[0]

    @property
    def num_dims(self) -> int:
        """Number of dimensions of the weight as the operator reads it."""
        return self._through_views(self._shaped_parameter()).dim()

    def _shaped_parameter(self) -> Tensor:
        """Return the parameter; if its memory is freed (ZeRO-3), a tensor of its shape: no formula reads its values."""
        if self.parameter.untyped_storage().nbytes():
            return self.parameter.detach()
        return self.parameter.new_empty(1).expand(self.parameter.shape)

    def _through_views(self, x: Tensor) -> Tensor:
        for view in self.views:
            x = view(x)
        return x


@dataclass
class DelayedWeightGradients:
    """The delayed weight gradients of one stage. `notes`: where operators run from now on leave their notes in backward."""

    sites: list[_WeightGradientSite] = field(default_factory=list)
    notes: list[WeightGradientNote] = field(default_factory=list)
    anchor: Tensor = field(default_factory=lambda: torch.zeros(0, requires_grad=True))  # makes outputs require a gradient

    @property
    def names(self) -> frozenset[str]:
        """Parameters with delayed gradients; some may have other, immediate gradients."""
        return frozenset(site.name for site in self.sites)

    @torch.no_grad()
    def deliver(self, notes: list[WeightGradientNote], sink: GradientSink) -> None:
        """Deliver every parameter's gradient from these notes, once, in the order of its last note."""
        num_remaining: dict[str, int] = {}
        for note in notes:
            name = self.sites[note.site].name
            num_remaining[name] = num_remaining.get(name, 0) + 1
        sums: dict[str, Tensor] = {}
        notes.reverse()
        while notes:
            number, x, grad = notes.pop()
            site = self.sites[number]
            num_remaining[site.name] -= 1
            partial_sum, is_last = sums.pop(site.name, None), not num_remaining[site.name]
            factors = site.factors(x, grad) if partial_sum is None and is_last else None
            if factors is not None:
                sink.add_product(site.name, *factors)
                continue
            gradient = site.gradient(x, grad)
            if partial_sum is not None:
                gradient = partial_sum + gradient
            if is_last:
                sink.add(site.name, gradient)
            else:
                sums[site.name] = gradient


class _RecordNote(torch.autograd.Function):
    """Identity forward; backward notes the input `x` and the gradient that passes."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, anchor: Tensor, delayed: DelayedWeightGradients, site: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.notes, ctx.site = delayed.notes, site
        ctx.set_materialize_grads(False)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        if grad is not None:
            ctx.notes.append(WeightGradientNote(ctx.site, ctx.saved_tensors[0].detach(), grad))
        return grad, None, None, None, None


def delay_weight_gradients(
    local: LocalStage, parameters: Mapping[str, tuple[str, Tensor]], uses_hooks: bool = False
) -> tuple[LocalStage, DelayedWeightGradients]:
    """Return the stage with delayed weight gradients, and the object that delivers them.

    `parameters`: graph value -> (name, this rank's shard) of every trainable parameter that the stage reads. `by_hooks`: saved tensors are
    neither recomputed nor offloaded meanwhile; then notes are taken by hooks, at a third of the cost.
    """
    delayed = DelayedWeightGradients()
    if not isinstance(local.module, fx.GraphModule):
        return local, delayed  # not a graph: all gradients come at once
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    placeholders = [node for node in local.module.graph.nodes if node.op == "placeholder"]
    names = [*local.variables, *local.received]
    leaves = {node: parameters[value] for node, value in zip(placeholders, names, strict=True) if value in parameters}
    for node in local.module.graph.nodes:
        copies[node] = copied = graph.node_copy(node, copies.__getitem__)
        site = _site_of(node, leaves)
        if site is not None:
            copied.target = _with_note(node.target, delayed, len(delayed.sites), uses_hooks)
            delayed.sites.append(site)
    graph.lint()
    return replace(local, module=fx.GraphModule(torch.nn.Module(), graph, class_name=type(local.module).__name__)), delayed


def _site_of(node: fx.Node, leaves: Mapping[fx.Node, tuple[str, Tensor]]) -> _WeightGradientSite | None:
    formula_record = _record_of_node(node).product.weight
    formula = None if formula_record is None else formula_record.formulas.get(str(node.target).rpartition(".")[2])
    if formula_record is None or formula is None or node.kwargs:
        return None
    views: list[Callable[[Tensor], Tensor]] = []
    at: Any = node.args[formula_record.weight_at]
    args = node.args
    if not isinstance(at, fx.Node) or not isinstance(args[formula_record.input_at], fx.Node):
        return None
    while _is_view(_record_of_node(at)) and not at.kwargs and not any(isinstance(a, fx.Node) for a in at.args[1:]):
        views.append(_view_call(at))
        at = at.args[0]
    if at not in leaves:
        return None
    name, parameter = leaves[at]
    site = _WeightGradientSite(
        name, parameter, tuple(reversed(views)), FORMULAS[formula], [None if isinstance(a, fx.Node) else a for a in args]
    )
    return site if site.num_dims == formula_record.num_dims else None


def _record_of_node(node: fx.Node) -> Op:
    """Return the record of the operator that a node calls; an empty one where it calls none."""
    return record_of_target(str(node.target))


def _is_view(record: Op) -> bool:
    """Return whether the output is part of a weight, or all of it in another shape."""
    return record.kind == CostKind.VIEW and (record.view.kind in (ViewKind.RESHAPE, ViewKind.SLICE) or record.view.permutation is not None)


def _view_call(node: fx.Node) -> Callable[[Tensor], Tensor]:
    target: Any = node.target
    args = node.args[1:]
    return lambda x: target(x, *args)


def _with_note(target: Callable[..., Tensor], delayed: DelayedWeightGradients, site: int, uses_hooks: bool) -> Callable[..., Tensor]:
    record = record_of_target(str(target)).product.weight
    assert record is not None
    weight, x = record.weight_at, record.input_at

    def noted(*args: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return target(*args)
        operands = [*args]
        operands[weight] = args[weight].detach()
        y = target(*operands)
        if uses_hooks and y.requires_grad:
            source, notes = args[x].detach(), delayed.notes
            y.register_hook(lambda grad: notes.append(WeightGradientNote(site, source, grad)))  # type: ignore[no-untyped-call]
            return y
        out: Tensor = _RecordNote.apply(y, args[x], delayed.anchor, delayed, site)  # type: ignore[no-untyped-call]
        return out

    noted.__name__ = noted.__qualname__ = target.__name__.partition(".")[0]  # recompute matches operators by name
    noted.__module__ = __name__
    return noted
