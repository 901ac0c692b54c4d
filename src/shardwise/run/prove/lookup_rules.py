"""Rules of sums, means and largest values of rows of a table (`EmbeddingBag`), and of products of three tensors (`Bilinear`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.run.prove.field_tensor import NotProvable, aten, lift_constants, register_for, signed_order, zeros_of

_SUM, _MEAN, _MAX = range(3)  # torch's codes
_DEFAULTS = {
    "scale_grad_by_freq": False, "mode": _SUM, "sparse": False, "per_sample_weights": None, "include_last_offset": False, "padding_idx": -1,
}  # fmt: skip


def _bags_of(indices: Tensor, offsets: Tensor, includes_last: bool, padding: int) -> tuple[Tensor, Tensor, int]:
    """Return the bag of each index, whether it is no padding, and how many bags there are."""
    starts = offsets[:-1] if includes_last else offsets
    bags = torch.searchsorted(starts.contiguous(), torch.arange(len(indices), dtype=starts.dtype), right=True) - 1
    return bags, indices != padding, len(starts)


def _shares_of(bags: Tensor, counts: Tensor, num_bags: int, mode: int, weights: Any) -> Any:
    """Return the factor of each row in its bag: its weight, one over the number of rows, or one; zero for padding."""
    factors = counts.double()
    if mode == _MEAN:
        factors = factors / torch.zeros(num_bags, dtype=torch.float64).index_add(0, bags, factors).clamp(min=1)[bags]
    return lift_constants(factors) if weights is None else lift_constants(factors) * lift_constants(weights)


@register_for(aten._embedding_bag, aten._embedding_bag_forward_only)
def _look_up_bags(func: Any, table: Any, indices: Tensor, offsets: Tensor, *settings: Any, **named: Any) -> Any:
    given = {**_DEFAULTS, **dict(zip(_DEFAULTS, settings, strict=False)), **named}
    mode, weights, includes_last, padding = (given[key] for key in ("mode", "per_sample_weights", "include_last_offset", "padding_idx"))
    table = lift_constants(table)
    order = signed_order(table).double()
    of_rows = None if weights is None else torch.ones(indices.shape, dtype=torch.float64)
    _, places, sizes, largest = func(order, indices, offsets, False, mode, False, of_rows, includes_last, padding)
    bags, counts, num_bags = _bags_of(indices, offsets, includes_last, padding)
    if mode == _MAX:
        filled = torch.zeros(num_bags, dtype=torch.int64).index_add(0, bags, counts.to(torch.int64)) > 0
        return torch.where(filled.unsqueeze(-1), table.gather(0, largest.clamp(min=0)), 0.0), places, sizes, largest
    rows: Any = table[indices]
    rows = rows * _shares_of(bags, counts, num_bags, mode, weights).unsqueeze(-1)
    return aten.index_add(zeros_of((num_bags, table.shape[-1])), 0, bags, rows), places, sizes, largest


@register_for(aten._embedding_bag_backward)
def _look_up_backward(func: Any, gradient: Any, indices: Tensor, offsets: Tensor, *rest: Any) -> Any:
    _, _, largest, num, scale, mode, sparse, weights, padding = (*rest, -1)[:9]
    if scale or sparse:
        raise NotProvable("scale_grad_by_freq and sparse gradients of an embedding bag have no exact form yet")
    gradient, total = lift_constants(gradient), zeros_of((num, gradient.shape[-1]))
    bags, counts, _ = _bags_of(indices, offsets, len(offsets) > len(gradient), padding)
    if mode == _MAX:
        filled = torch.zeros(len(gradient), dtype=torch.int64).index_add(0, bags, counts.to(torch.int64)) > 0
        return aten.scatter_add(total, 0, largest.clamp(min=0), torch.where(filled.unsqueeze(-1), gradient, 0.0))
    rows = gradient[bags] * _shares_of(bags, counts, len(gradient), mode, weights).unsqueeze(-1)
    return aten.index_add(total, 0, indices, rows)


@register_for(aten._embedding_bag_per_sample_weights_backward)
def _weights_backward(
    func: Any, gradient: Any, table: Any, indices: Tensor, offsets: Tensor, places: Tensor, mode: int, padding: int = -1
) -> Any:
    gradient = lift_constants(gradient)
    bags, counts, _ = _bags_of(indices, offsets, len(offsets) > len(gradient), padding)
    products: Any = gradient[bags] * lift_constants(table)[indices]
    return torch.where(counts, products.sum(-1), 0.0)


@register_for(aten._trilinear)
def _multiply_three(
    func: Any, x: Any, y: Any, z: Any, new_x: Sequence[int], new_y: Sequence[int], new_z: Sequence[int], summed: Sequence[int], *_: Any
) -> Any:
    product: Any = None
    for operand, dims in ((x, new_x), (y, new_y), (z, new_z)):
        expanded: Any = lift_constants(operand)
        for dim in sorted(dims):
            expanded = expanded.unsqueeze(dim)
        product = expanded if product is None else product * expanded
    return product.sum(list(summed)) if summed else product


@register_for(aten.scatter_reduce)
def _reduce_by_index(func: Any, x: Any, dim: int, index: Tensor, source: Any, reduce: str, *, include_self: bool = True) -> Any:
    x, source = lift_constants(x), lift_constants(source)
    source = source[tuple(slice(n) for n in index.shape)]
    if reduce in ("amax", "amin"):
        return _choose_by_index(func, x, dim, index, source, reduce, include_self)
    is_reached = torch.zeros(x.shape, dtype=torch.bool).scatter(dim, index, True)
    if reduce == "prod":
        out: Any = x if include_self else torch.where(is_reached, 1.0, x)
        for one, factor in zip(torch.split(index, 1, dim), torch.split(source, 1, dim), strict=True):
            out = out.scatter(dim, one, out.gather(dim, one) * factor)
        return out
    total = aten.scatter_add(x if include_self else torch.where(is_reached, 0.0, x), dim, index, source)
    counts = torch.full(x.shape, float(include_self), dtype=torch.float64).scatter_add(dim, index, torch.ones(index.shape).double())
    return total if reduce == "sum" else total / counts.clamp(min=1)


def _choose_by_index(func: Any, x: Any, dim: int, index: Tensor, source: Any, reduce: str, include_self: bool) -> Any:
    """Return the largest or smallest of the numbers of each index: by their ranks among all of them."""
    both: Any = torch.cat([x.reshape(-1), source.reshape(-1)])
    _, ranks = torch.unique(signed_order(both), return_inverse=True)
    first = torch.zeros(both.shape, dtype=torch.int64).scatter_(0, ranks, torch.arange(both.numel()))
    own, others = ranks[: x.numel()].reshape(x.shape), ranks[x.numel() :].reshape(source.shape)
    return both[first[func(own, dim, index, others, reduce, include_self=include_self)]]


_QUANTIZED = tuple(getattr(aten, f"fake_quantize_per_{what}_affine_cachemask") for what in ("tensor", "channel"))


@register_for(*_QUANTIZED)
def _quantize(func: Any, x: Any, scale: Any, zero: Any, *bounds: int) -> Any:
    *axis, low, high = bounds
    shape = [n if i in axis else 1 for i, n in enumerate(x.shape)] if axis else None
    if shape is not None:
        scale, zero = scale.reshape(shape), zero.reshape(shape)
    steps: Any = (lift_constants(x) / scale).round() + zero
    return (steps.clamp(low, high) - zero) * scale, (steps >= low) & (steps <= high)
