"""Functions of torch whose own code hides what a trace must see, said in operators that show it.

In: the arguments that a model calls the function with. Out: what the function returns, gradients included.
Not modelled: options of which torch's operator alone knows the meaning; for them it is called as it is.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.capture.fakes import ASSERT, tree_flatten
from weft.capture.patches.ctc import ctc_loss


def embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None, norm_type: float = 2,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    """Bags of equal length, one for each sample (`input` [N, L]), by look-ups and a reduction.

    Torch's operator takes all indices in one row with offsets, in which nothing tells what belongs to which sample.
    """
    if input.dim() != 2 or not input.shape[1] or padding_idx is not None or max_norm is not None or scale_grad_by_freq:
        return F.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset,
            padding_idx,
        )  # fmt: skip
    rows = F.embedding(input, weight, sparse=sparse)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[..., None]
    return rows.max(1).values if mode == "max" else rows.mean(1) if mode == "mean" else rows.sum(1)


def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """(log var + (input - target)^2 / var) / 2, which torch computes after a look at the values of `var`: whether one is negative."""
    if not isinstance(var, Tensor):
        return F.gaussian_nll_loss(input, target, var, full=full, eps=eps, reduction=reduction)
    if var.dim() == input.dim() - 1 and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    var = var + (var.clamp(min=eps) - var).detach()  # torch holds it from below without telling the gradient
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def affine_grid(theta: Tensor, size: Any, align_corners: bool | None = None) -> Tensor:
    """Where `theta_N23` (or `_N34`) takes each point of a grid: a product with all points, in which samples are a dimension like others."""
    dims = len(size) - 2
    if theta.dim() != 3 or dims not in (2, 3) or tuple(theta.shape[1:]) != (dims, dims + 1) or theta.shape[0] != size[0]:
        whole: Tensor = F.affine_grid(theta, size, align_corners)
        return whole
    ends = [1.0 if align_corners else (n - 1) / n for n in size[2:]]
    lines = [
        torch.linspace(-end, end, n, dtype=theta.dtype) if n > 1 else torch.zeros(1, dtype=theta.dtype)
        for end, n in zip(ends, size[2:], strict=True)
    ]
    points = torch.stack([*reversed(torch.meshgrid(*lines, indexing="ij")), torch.ones(size[2:], dtype=theta.dtype)], -1)
    return (points.reshape(-1, dims + 1) @ theta.transpose(1, 2)).reshape(-1, *size[2:], dims)


def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Counts of 0 ... `minlength` - 1, which nothing may exceed (a run says so); torch's own are as many as the largest value wants."""
    if not minlength or input.dim() != 1:
        return torch.bincount(input, weights, minlength)
    dtype = torch.int64 if weights is None else weights.dtype if weights.is_floating_point() else torch.float64
    added = torch.ones_like(input, dtype=dtype) if weights is None else weights.to(dtype)
    return torch.zeros(minlength, dtype=dtype).scatter_add(0, input.long(), added)


def cov(input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Tensor:
    """How rows (variables) vary together over columns (observations): torch's own looks at the value of what it divides by."""
    if fweights is not None or aweights is not None or input.dim() not in (1, 2) or not input.is_floating_point():
        return torch.cov(input, correction=correction, fweights=fweights, aweights=aweights)
    rows_VN = input if input.dim() == 2 else input[None]
    centred_VN = rows_VN - rows_VN.mean(1, keepdim=True)
    number = max(rows_VN.shape[1] - correction, 0)
    return (centred_VN @ centred_VN.t() / number).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """`cov` over the deviations of both rows."""
    if input.dim() not in (1, 2) or not input.is_floating_point():
        return torch.corrcoef(input)
    both = cov(input)
    if not both.dim():
        return both / both
    deviation_V = both.diagonal().sqrt()
    return (both / deviation_V[:, None] / deviation_V).clamp(-1, 1)


def checked(condition: Any, message: str) -> None:
    """What torch asserts: of values that a trace does not know it is passed over, as other checks of values."""
    if not isinstance(condition, Tensor | torch.SymBool) and not condition:
        raise AssertionError(message)


def exactly(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The float64 tensor of numbers that `func(*args)` would round to float32 (0.1, not 0.5); None for any other call.

    A run in float64 means the numbers as they are written, whatever type they are given in the trace, where all is float32.
    """
    if func not in _OF_NUMBERS:
        return None
    at = 1 if func is Tensor.new_tensor else 0
    data = args[at] if len(args) > at else kwargs.get("data")
    numbers = tree_flatten(data)[0]
    if any(type(x) not in (int, float, bool) for x in numbers) or all(ctypes.c_float(x).value == x for x in numbers):
        return None
    given = kwargs.get("dtype") or (args[0].dtype if at else torch.get_default_dtype())
    if kwargs.get("requires_grad") or given is not torch.float32:
        return None
    return torch.tensor(data, dtype=torch.float64, device=kwargs.get("device"))


def one_by_one(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """`torch._foreach_mul_(tensors, 0.9)` as a call that does the same to each tensor by itself; None for any other call."""
    name = getattr(func, "__name__", "")
    method = getattr(Tensor, name.removeprefix(_FOREACH), None)
    if not name.startswith(_FOREACH) or method is None or not isinstance(args[0], list | tuple) or kwargs.keys() - _FOR_EACH:
        return None
    tensors, *others = args
    named = dict(kwargs)
    if "addc" in name and len(others) > 2:
        named["value"] = others.pop()

    def made() -> Any:
        each = [method(x, *(o[i] if isinstance(o, list | tuple) else o for o in others), **named) for i, x in enumerate(tensors)]
        return None if name.endswith("_") else tuple(each)

    return None if isinstance(named.get("value"), list | tuple | Tensor) else made


_FOREACH = "_foreach_"
_FOR_EACH = {"alpha", "value", "weight", "ord"}  # arguments by name that are the same for each
_OF_NUMBERS = (torch.tensor, torch.as_tensor, Tensor.new_tensor)
INSTEAD: Mapping[Any, Callable[..., Any]] = {
    ASSERT: checked,
    torch.cov: cov,
    Tensor.cov: cov,
    torch.corrcoef: corrcoef,
    Tensor.corrcoef: corrcoef,
    torch.bincount: bincount,
    Tensor.bincount: bincount,
    F.affine_grid: affine_grid,
    F.embedding_bag: embedding_bag,
    F.ctc_loss: ctc_loss,
    F.gaussian_nll_loss: gaussian_nll_loss,
}
