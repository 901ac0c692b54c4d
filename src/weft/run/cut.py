"""What a plain loop sees of a parameter that is cut between ranks: a tensor that knows that it is a part.

In: this rank's part, and the ranks that hold the others. Out: a tensor that computes elementwise as any other, so that optimizers
work on it; whose norms, sums and extremes are the whole tensor's, so that clipping clips by the global norm; and that refuses by name
what would take the part for the whole. Gradients and what optimizers make of such tensors are of the same kind; saved, they are plain.

Every rank calls what combines parts. Not modelled: norms of single rows, products, random numbers drawn in place: refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any, Self

import torch
from torch import Tensor, nn

from weft.errors import UsageError
from weft.world import private
from weft.world.world import Group


@dataclass(frozen=True, slots=True)
class Whole:
    """What a part is of. `over`: the ranks that hold its parts, one each; `shape`: of the whole tensor."""

    name: str
    shape: tuple[int, ...]
    over: Group

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


# What gives other views of all elements: their norms and sums are those of the whole, in whatever order.
VIEWS = frozenset(
    """view view_as reshape reshape_as flatten ravel t T mT H transpose swapaxes permute movedim squeeze unsqueeze contiguous unflatten
    """.split()
)
# What mixes elements, or finds them by their place, and may keep the shape; and what draws random numbers, which are to differ by part.
MIXES = frozenset(
    """matmul __matmul__ __rmatmul__ mm bmm addmm addmm_ einsum linear bilinear cumsum cumsum_ cumprod softmax log_softmax sort argsort
    roll flip layer_norm normalize renorm renorm_ __getitem__ __setitem__ index_add_ index_copy_ index_fill_ index_put_ scatter_
    scatter_add_ fill_diagonal_ tril triu tril_ triu_ normal_ uniform_ random_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_
    kaiming_uniform_ dropout rand_like randn_like randint_like
    """.split()
)


class Cut(Tensor):
    """This rank's part of a tensor."""

    whole: Whole

    @classmethod
    def of(cls, part: Tensor, whole: Whole) -> Self:
        """`part`, sharing its memory and its place in autograd's graph."""
        made = part.as_subclass(cls)
        made.whole = whole
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name, combined, mixes = _known(func)
        if combined is not None:
            return combined(name, *args, **kwargs)
        if mixes:
            raise refusal(name, _first((*args, *kwargs.values())))
        with private.as_plain():
            result = func(*args, **kwargs)
        return _marked(name, result, args, kwargs) if isinstance(result, (Tensor, list, tuple)) else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        with private.as_plain():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class CutParameter(Cut, nn.Parameter):
    """This rank's part of a parameter."""

    @classmethod
    def of(cls, part: Tensor, whole: Whole) -> Self:
        """A parameter of its own that shares the memory of `part`, which gives the gradient's need."""
        made = cls(part.detach(), part.requires_grad)
        made.whole = whole
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> CutParameter:
        if id(self) not in memo:
            with private.as_plain():
                memo[id(self)] = type(self).of(self.detach().clone().requires_grad_(self.requires_grad), self.whole)
        found: CutParameter = memo[id(self)]
        return found


def refusal(name: str, part: Cut) -> UsageError:
    """What is said to an operation that would take the part for the whole."""
    whole = part.whole
    return UsageError(
        f"{name} of {whole.name}, of which this rank holds a part, {list(part.shape)} of {list(whole.shape)}, would take that part for the "
        'whole; use weft.full_state_dict(net), or a layout that cuts no weights: auto_parallelize(..., plan="data=N")'
    )


@cache
def _known(func: Any) -> tuple[str, Callable[..., Any] | None, bool]:
    """An operation's name (`sum` for torch.sum and Tensor.sum, of a property its own), how it combines parts, and whether it mixes them."""
    name = str(getattr(func, "__name__", func))
    if name == "__get__":
        name = str(getattr(func.__self__, "__name__", name))
    return name, COMBINED.get(name), name in MIXES


def _cuts(values: Iterable[Any]) -> Iterable[Cut]:
    for value in values:
        if isinstance(value, Cut):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _cuts(value)


def _first(values: Iterable[Any]) -> Cut:
    return next(iter(_cuts(values)))


def _marked(name: str, result: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A result of an operation on parts: a part as well, where it has each element's own result."""
    if isinstance(result, Tensor):
        if isinstance(result, Cut):
            return result  # what was changed in place
        part = _first((*args, *kwargs.values()))
        if result.shape == part.shape or (name in VIEWS and result.numel() == part.numel()):
            return Cut.of(result, part.whole)
        raise refusal(name, part)
    if isinstance(result, (list, tuple)) and any(isinstance(one, Tensor) for one in result):
        given = [list(a) for a in args if isinstance(a, (list, tuple)) and len(a) == len(result)]
        if not given:  # pieces of one tensor
            raise refusal(name, _first((*args, *kwargs.values())))
        rows = zip(*given, strict=True)
        return [_marked(name, one, row, {}) if any(True for _ in _cuts(row)) else one for one, row in zip(result, rows, strict=True)]
    return result


class _Combined(torch.autograd.Function):
    """A number of every part as that of the whole: its sum, maximum, minimum, or p-norm."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, whole: Whole, kind: str, p: float) -> Tensor:
        exact = part.detach().to(torch.float64 if part.is_floating_point() else torch.int64)
        if kind == "norm":
            kind = {inf: "max", -inf: "min"}.get(p, "norm")
        powered = exact.pow(p) if kind == "norm" and p else exact.clone()
        whole.over.all_reduce(powered, op="max" if kind == "max" else "min" if kind == "min" else "sum")
        total = powered.pow(1 / p) if kind == "norm" and p else powered
        ctx.kind, ctx.p = kind, p
        ctx.save_for_backward(exact, total)
        return total.to(part.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        part, total = ctx.saved_tensors
        if ctx.kind in ("max", "min"):
            grad = grad * (part == total)
        elif ctx.kind == "norm":
            grad = (grad * (part / total).pow(ctx.p - 1)).to(grad.dtype) if total else torch.zeros_like(grad)
        return grad, None, None, None


def _combine(part: Tensor, whole: Whole, kind: str, p: float = 2.0) -> Tensor:
    combined: Tensor = _Combined.apply(part, whole, kind, p)  # type: ignore[no-untyped-call]
    return combined


def _norm(name: str, x: Any, p: Any = None, dim: Any = None, keepdim: bool = False, *, ord: Any = None, dtype: Any = None) -> Tensor:
    """The p-norm of all elements, as torch.norm, Tensor.norm, torch.linalg.norm and torch.linalg.vector_norm give it."""
    p = ord if p is None else p
    if dim is not None or keepdim or p == "nuc" or (name == "linalg_norm" and p is not None and x.dim() > 1):  # the last is a matrix's
        raise refusal(name, x)
    p = 2.0 if p is None or p == "fro" else float(p)
    with private.as_plain():
        own = torch.linalg.vector_norm(x.as_subclass(Tensor), p, dtype=dtype)
        return _combine(own, x.whole, "norm", p)


def _norms(name: str, xs: Sequence[Tensor], ord: Any = 2, **kwargs: Any) -> tuple[Tensor, ...]:
    """The norm of each, whole or part."""
    return tuple(_norm(name, x, ord, **kwargs) if isinstance(x, Cut) else torch.linalg.vector_norm(x, float(ord), **kwargs) for x in xs)


def _unscaled(name: str, gradients: list[Tensor], found: Tensor, *scale: Tensor) -> None:
    """Unscales gradients of float16, for all ranks to skip the step together where one has found what is not finite."""
    with private.as_plain():
        private.unscale(gradients, found, *scale)
        _first((gradients,)).whole.over.all_reduce(found, op="max")


def _reduced(local: Callable[..., Tensor], kind: str) -> Callable[..., Tensor]:
    def combined(name: str, x: Any, *args: Any, **kwargs: Any) -> Tensor:
        if args or set(kwargs) - {"dtype"} or not isinstance(x, Cut):  # over some dimensions, or with another tensor
            raise refusal(name, _first((x, *args, *kwargs.values())))
        with private.as_plain():
            own = local(x.as_subclass(Tensor), **kwargs)
            found = _combine(own.to(torch.int64) if own.dtype is torch.bool else own, x.whole, kind)
            return found / x.whole.numel if name == "mean" else found.to(own.dtype)

    return combined


COMBINED: dict[str, Callable[..., Any]] = {
    "norm": _norm,
    "linalg_norm": _norm,
    "linalg_vector_norm": _norm,
    "frobenius_norm": _norm,
    private.FOREACH_NORM: _norms,
    private.unscale.__name__: _unscaled,
    "sum": _reduced(torch.sum, "sum"),
    "mean": _reduced(torch.sum, "sum"),
    "max": _reduced(torch.max, "max"),
    "min": _reduced(torch.min, "min"),
    "amax": _reduced(torch.amax, "max"),
    "amin": _reduced(torch.amin, "min"),
    "any": _reduced(torch.any, "max"),
    "all": _reduced(torch.all, "min"),
}
