"""Backward in two parts: gradients of activations first, gradients of weights later, when there is time (Qi et al. 2023).

In: a lowered stage and its trainable parameters. Out: the same stage, in which every operator that is linear in a weight (a product, a
convolution, a look-up) treats that weight as a constant and notes what its gradient needs: the operator's input and the gradient
of its output. `DelayedWeightGradients.deliver` makes the weight gradients from such notes.

Nothing is cut out of autograd's graph, so views, shared parameters, several outputs and recomputation need no care: a weight that is read
through a view gets its gradient through that view, one that is read twice gets the sum, and whatever is not noted (biases, norms, weights
that are moved between ranks first) is differentiated with the activations. Not modelled: second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx

from weft.lower.local import LocalStage
from weft.ops import Op, record_of_target

aten = torch.ops.aten


class Note(NamedTuple):
    """What one operator of one microbatch leaves for its weight gradient."""

    site: int
    x: Tensor
    grad: Tensor


class Into(Protocol):
    """Where weight gradients go."""

    def add(self, name: str, grad: Tensor) -> None:
        """Add a gradient to a parameter's."""

    def add_product(self, name: str, a: Tensor, b: Tensor) -> None:
        """Add the product of two matrices to a parameter's gradient."""


# Of the operator's input, the gradient of its output, the weight (for its shape) and the operator's arguments.
Formula = Callable[[Tensor, Tensor, Tensor, "list[Any]"], Tensor]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _linear(x: Tensor, grad: Tensor, weight: Tensor, args: list[Any]) -> Tensor:
    return _rows(grad).t() @ _rows(x)


def _matmul(x: Tensor, grad: Tensor, weight: Tensor, args: list[Any]) -> Tensor:
    return _rows(x).t() @ _rows(grad)


def _bmm(x: Tensor, grad: Tensor, weight: Tensor, args: list[Any]) -> Tensor:
    return x.transpose(1, 2) @ grad


def _convolution(x: Tensor, grad: Tensor, weight: Tensor, args: list[Any]) -> Tensor:
    dims = weight.dim() - 2
    stride, padding, dilation, groups = _with_defaults(args[3:], [1, 0, 1, 1])
    return _of_convolution(x, grad, weight, (_each(stride, dims), _each(padding, dims), _each(dilation, dims), False, [0] * dims, groups))


def _padded_by_name(x: Tensor, grad: Tensor, weight: Tensor, args: list[Any]) -> Tensor:
    """Padding "same" or "valid": what is odd of "same" is added after the last element, as torch does."""
    dims = weight.dim() - 2
    stride, padding, dilation, groups = _with_defaults(args[3:], [1, "valid", 1, 1])
    wide = [d * (k - 1) if padding == "same" else 0 for d, k in zip(_each(dilation, dims), weight.shape[2:], strict=True)]
    if any(n % 2 for n in wide):
        x = torch.nn.functional.pad(x, [p for n in reversed(wide) for p in (0, n % 2)])
    return _convolution(x, grad, weight, [None, None, None, stride, [n // 2 for n in wide], dilation, groups])


def _transposed(x: Tensor, grad: Tensor, weight: Tensor, args: list[Any]) -> Tensor:
    dims = weight.dim() - 2
    stride, padding, output_padding, groups, dilation = _with_defaults(args[3:], [1, 0, 0, 1, 1])
    options = (_each(stride, dims), _each(padding, dims), _each(dilation, dims), True, _each(output_padding, dims), groups)
    return _of_convolution(x, grad, weight, options)


def _of_convolution(x: Tensor, grad: Tensor, weight: Tensor, options: tuple[Any, ...]) -> Tensor:
    if x.dim() < weight.dim():  # one image, without a batch
        x, grad = x.unsqueeze(0), grad.unsqueeze(0)
    gradient: Tensor = aten.convolution_backward.default(grad, x, weight, None, *options, [False, True, False])[1]
    return gradient


def _embedding(x: Tensor, grad: Tensor, weight: Tensor, args: list[Any]) -> Tensor:
    padding, by_frequency = _with_defaults(args[2:4], [-1, False])
    gradient: Tensor = aten.embedding_dense_backward.default(grad, x, weight.shape[0], padding, by_frequency)
    return gradient


def _with_defaults(args: list[Any], defaults: list[Any]) -> list[Any]:
    return [*args, *defaults[len(args) :]]


def _each(value: Any, dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


# The names that records (`weft.ops.record.WeightGradient`) call them by.
FORMULAS: dict[str, Formula] = {
    "linear": _linear, "product": _matmul, "stacked": _bmm, "convolution": _convolution, "convolution_padded": _padded_by_name,
    "transposed": _transposed, "rows": _embedding,
}  # fmt: skip


@dataclass(frozen=True)
class _Site:
    """One operator whose weight gradient is late: its formula, its constant arguments, and how it sees the parameter `name`."""

    name: str
    parameter: Tensor
    views: tuple[Callable[[Tensor], Tensor], ...]
    formula: Formula
    args: list[Any]

    def factors(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor] | None:
        """Two matrices whose product is the gradient of the parameter, where it is one."""
        if self.views or x.dtype is not self.parameter.dtype or grad.dtype is not x.dtype:
            return None
        if self.formula is _linear:
            return _rows(grad).t(), _rows(x)
        return (_rows(x).t(), _rows(grad)) if self.formula is _matmul else None

    def gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        """The gradient of the parameter."""
        if x.is_floating_point() and x.dtype is not grad.dtype:
            x = x.to(grad.dtype)
        if not self.views:
            gradient = self.formula(x, grad, self._in_shape(), self.args)
            return gradient if gradient.dtype is self.parameter.dtype else gradient.to(self.parameter.dtype)
        with torch.enable_grad():
            read = self._in_shape().requires_grad_()
            seen = self._through_views(read)
        gradient = self.formula(x, grad, seen.detach(), self.args)
        return torch.autograd.grad(seen, read, gradient.to(seen.dtype))[0]

    @property
    def dims(self) -> int:
        """Dimensions of the weight as the operator reads it."""
        return self._through_views(self._in_shape()).dim()

    def _in_shape(self) -> Tensor:
        """The parameter; where its memory has been given back (ZeRO-3), a tensor of its shape: no formula reads values of it."""
        if self.parameter.untyped_storage().nbytes():
            return self.parameter.detach()
        return self.parameter.new_empty(1).expand(self.parameter.shape)

    def _through_views(self, x: Tensor) -> Tensor:
        for view in self.views:
            x = view(x)
        return x


@dataclass
class DelayedWeightGradients:
    """The late weight gradients of one stage. `notes`: where operators that run now will leave their notes in backward."""

    sites: list[_Site] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    anchor: Tensor = field(default_factory=lambda: torch.zeros(0, requires_grad=True))  # what makes an output differentiable for its note

    @property
    def names(self) -> frozenset[str]:
        """Parameters with late gradients; some may have other gradients that are not."""
        return frozenset(site.name for site in self.sites)

    @torch.no_grad()
    def deliver(self, notes: list[Note], into: Into) -> None:
        """Hand every parameter's gradient from these notes on, once, in the order in which the last of its notes was left."""
        left: dict[str, int] = {}
        for note in notes:
            name = self.sites[note.site].name
            left[name] = left.get(name, 0) + 1
        sums: dict[str, Tensor] = {}
        notes.reverse()
        while notes:
            number, x, grad = notes.pop()
            site = self.sites[number]
            left[site.name] -= 1
            seen, is_last = sums.pop(site.name, None), not left[site.name]
            factors = site.factors(x, grad) if seen is None and is_last else None
            if factors is not None:
                into.add_product(site.name, *factors)
                continue
            gradient = site.gradient(x, grad)
            if seen is not None:
                gradient = seen + gradient
            if is_last:
                into.add(site.name, gradient)
            else:
                sums[site.name] = gradient


class _Noted(torch.autograd.Function):
    """Nothing forward; backward leaves a note of the input `x` and of the gradient that passes."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, anchor: Tensor, delayed: DelayedWeightGradients, site: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.notes, ctx.site = delayed.notes, site
        ctx.set_materialize_grads(False)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        if grad is not None:
            ctx.notes.append(Note(ctx.site, ctx.saved_tensors[0].detach(), grad))
        return grad, None, None, None, None


def delay_weight_gradients(
    local: LocalStage, parameters: Mapping[str, tuple[str, Tensor]], by_hooks: bool = False
) -> tuple[LocalStage, DelayedWeightGradients]:
    """The stage with late weight gradients, and what delivers them.

    `parameters`: graph value -> (name, this rank's block) of every trainable parameter that the stage reads. `by_hooks`: what is kept for
    backward is neither computed again nor moved meanwhile; then notes are taken by hooks, at a third of the cost.
    """
    delayed = DelayedWeightGradients()
    if not isinstance(local.module, fx.GraphModule):
        return local, delayed  # a module that runs whole: all gradients come at once
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    placeholders = [node for node in local.module.graph.nodes if node.op == "placeholder"]
    names = [*local.variables, *local.received]
    leaves = {node: parameters[value] for node, value in zip(placeholders, names, strict=True) if value in parameters}
    for node in local.module.graph.nodes:
        copies[node] = copied = graph.node_copy(node, copies.__getitem__)
        site = _site_of(node, leaves)
        if site is not None:
            how = _record(node).weight
            assert how is not None
            copied.target = _noting(node.target, how.weight, how.x, delayed, len(delayed.sites), by_hooks)
            delayed.sites.append(site)
    graph.lint()
    return replace(local, module=fx.GraphModule(torch.nn.Module(), graph, class_name=type(local.module).__name__)), delayed


def _site_of(node: fx.Node, leaves: Mapping[fx.Node, tuple[str, Tensor]]) -> _Site | None:
    how = _record(node).weight
    formula = None if how is None else how.formulas.get(str(node.target).rpartition(".")[2])
    if how is None or formula is None or node.kwargs:
        return None
    views: list[Callable[[Tensor], Tensor]] = []
    at: Any = node.args[how.weight]
    args = node.args
    if not isinstance(at, fx.Node) or not isinstance(args[how.x], fx.Node):
        return None
    while _is_view(_record(at)) and not at.kwargs and not any(isinstance(a, fx.Node) for a in at.args[1:]):
        views.append(_view(at))
        at = at.args[0]
    if at not in leaves:
        return None
    name, parameter = leaves[at]
    site = _Site(name, parameter, tuple(reversed(views)), FORMULAS[formula], [None if isinstance(a, fx.Node) else a for a in args])
    return site if site.dims == how.dims else None


def _record(node: fx.Node) -> Op:
    """What is known of the operator that a node calls; nothing where it calls none."""
    return record_of_target(str(node.target))


def _is_view(record: Op) -> bool:
    """Whether what is made is part of a weight, or all of it in another shape."""
    return record.kind == "view" and (record.moves in ("reshape", "part") or record.turn is not None)


def _view(node: fx.Node) -> Callable[[Tensor], Tensor]:
    target: Any = node.target
    args = node.args[1:]
    return lambda x: target(x, *args)


def _noting(
    target: Callable[..., Tensor], weight: int, x: int, delayed: DelayedWeightGradients, site: int, by_hooks: bool
) -> Callable[..., Tensor]:
    def noted(*args: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return target(*args)
        operands = [*args]
        operands[weight] = args[weight].detach()
        y = target(*operands)
        if by_hooks and y.requires_grad:
            source, notes = args[x].detach(), delayed.notes
            y.register_hook(lambda grad: notes.append(Note(site, source, grad)))  # type: ignore[no-untyped-call]
            return y
        out: Tensor = _Noted.apply(y, args[x], delayed.anchor, delayed, site)  # type: ignore[no-untyped-call]
        return out

    noted.__name__ = noted.__qualname__ = target.__name__.partition(".")[0]  # recomputation knows operators by their names
    noted.__module__ = __name__
    return noted
