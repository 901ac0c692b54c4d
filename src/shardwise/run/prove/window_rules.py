"""Rules of torch's operators on windows of `FieldTensor`s: pooling, upsampling, padding; and of masks and dropless experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.experts import combine_rows, dispatch_rows, multiply_by_experts
from shardwise.run.prove import finite_field as field
from shardwise.run.prove.field_tensor import FieldTensor, NotProvable, aten, lift_constants, register_for, signed_order


def apply_whole_linear(f: Callable[[Tensor], Tensor], x: Any) -> FieldTensor:
    """Return a linear function with whole coefficients."""
    return FieldTensor(field.apply_linear(f, lift_constants(x).a))


_SELECTIONS = (
    aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d,
    aten.upsample_nearest1d_backward, aten.upsample_nearest2d_backward, aten.upsample_nearest3d_backward,
    *(getattr(aten, f"_upsample_nearest_exact{n}d{kind}") for n in (1, 2, 3) for kind in ("", "_backward")),
    aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d,
    aten.replication_pad1d, aten.replication_pad2d, aten.replication_pad3d,
)  # fmt: skip


@register_for(*_SELECTIONS)
def _apply_selection(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    return apply_whole_linear(lambda part: func(part, *args, **kwargs), x)


_RESIZES = (aten.upsample_linear1d, aten.upsample_bilinear2d, aten.upsample_bicubic2d, aten.upsample_trilinear3d)


@register_for(*_RESIZES)
def _apply_resize(func: Any, x: Any, size: Sequence[int] | None, aligned: bool, *factors: Any) -> Any:
    if func._overloadname == "vec":  # one list of factors, which may stand for the size
        (scales,) = factors or (None,)
        size, factors = size or [int(n * scale) for n, scale in zip(x.shape[2:], scales, strict=True)], tuple(scales or ())
    assert size is not None
    x = lift_constants(x)
    for axis, matrix in enumerate(_resize_matrices(func.overloadpacket, x.shape[2:], size, aligned, factors)):
        x = (x.transpose(2 + axis, -1) @ matrix).transpose(2 + axis, -1)
    return x


@register_for(*(getattr(aten, f"{resize.__name__}_backward") for resize in _RESIZES))
def _resize_backward(func: Any, gradient: Any, size: Sequence[int], sizes: Sequence[int], aligned: bool, *factors: Any) -> Any:
    forward = getattr(aten, func.overloadpacket.__name__.removesuffix("_backward"))
    x: Any = lift_constants(gradient)
    for axis, matrix in enumerate(_resize_matrices(forward, sizes[2:], size, aligned, factors)):
        x = (x.transpose(2 + axis, -1) @ matrix.t()).transpose(2 + axis, -1)
    return x


def _resize_matrices(resize: Any, sizes: Sequence[int], size: Sequence[int], aligned: bool, factors: Sequence[Any]) -> list[FieldTensor]:
    """Return the weights [size, resized size] of each dimension: what torch makes of unit vectors along it."""
    matrices, num = [], len(sizes)
    for axis, (before, after) in enumerate(zip(sizes, size, strict=True)):
        along = [axis == other for other in range(num)]
        units = torch.eye(before, dtype=torch.float64).reshape(1, before, *(before if own else 1 for own in along))
        own_factors = [factor if own else None for own, factor in zip(along, factors or [None] * num, strict=True)]
        resized = resize(units, [after if own else 1 for own in along], aligned, *own_factors)
        matrices.append(lift_constants(resized.reshape(before, after)))
    return matrices


@register_for(aten.as_strided_)
def _apply_strides(func: Any, x: FieldTensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> FieldTensor:
    """Only where each element stays what it is, as in pools to one element, which write strides of another memory format."""
    moved = [n for n, old, new in zip(size, x.a.stride(), stride, strict=True) if n > 1 and old != new]
    if tuple(size) != tuple(x.shape) or moved or offset not in (None, x.a.storage_offset()):
        raise NotProvable("a tensor's elements are put into another order in place")
    return x


_PADDING_BACKWARD = tuple(getattr(aten, f"{kind}_pad{n}d_backward") for kind in ("reflection", "replication") for n in (1, 2, 3))


@register_for(*_PADDING_BACKWARD)
def _pad_backward(func: Any, gradient: Any, x: Tensor, sizes: Any) -> Any:
    like = torch.zeros(x.shape, dtype=torch.float64)
    return apply_whole_linear(lambda part: func(part, like, sizes), gradient)


def _shares_of_windows(forward: Any, x: Tensor, settings: Sequence[Any]) -> tuple[FieldTensor, list[Any]]:
    """Return one over the number of elements that each average divides by, and the settings of a sum in its place."""
    filled: list[Any] = [*settings, *([], 0, False, True, None)[len(settings) - 1 :]]
    kernel, stride, padding, ceil, includes_padding, divisor = filled
    summing = [kernel, stride, padding, ceil, includes_padding, 1]
    ones = torch.ones(x.shape, dtype=torch.float64)
    return lift_constants(
        forward(ones, kernel, stride, padding, ceil, includes_padding, divisor) / forward(ones, *summing).clamp(min=1)
    ), summing


@register_for(aten.avg_pool2d, aten.avg_pool3d)
def _pool_average(func: Any, x: Any, *settings: Any) -> Any:
    shares, summing = _shares_of_windows(func, x, settings)
    return apply_whole_linear(lambda part: func(part, *summing), x) * shares


@register_for(aten.avg_pool2d_backward, aten.avg_pool3d_backward)
def _pool_average_backward(func: Any, gradient: Any, x: Tensor, *settings: Any) -> Any:
    forward = aten.avg_pool2d.default if func.overloadpacket is aten.avg_pool2d_backward else aten.avg_pool3d.default
    shares, summing = _shares_of_windows(forward, x, settings)
    like = torch.zeros(x.shape, dtype=torch.float64)
    return apply_whole_linear(lambda part: func(part, like, *summing), lift_constants(gradient) * shares)


_LARGEST = {  # of windows, and in how many dimensions they are
    aten.max_pool2d_with_indices: 2, aten.adaptive_max_pool2d: 2, aten.fractional_max_pool2d: 2,
    aten.max_pool3d_with_indices: 3, aten.adaptive_max_pool3d: 3, aten.fractional_max_pool3d: 3,
}  # fmt: skip


@register_for(*_LARGEST)
def _pool_largest(func: Any, x: FieldTensor, *settings: Any) -> Any:
    _, index = func(signed_order(x).double(), *settings)
    dims = _LARGEST[func.overloadpacket]
    return x.flatten(-dims).gather(-1, index.flatten(-dims)).reshape(index.shape), index


@register_for(*(getattr(aten, f"{pool.__name__}_backward") for pool in _LARGEST))
def _pool_largest_backward(func: Any, gradient: Any, x: Tensor, *settings: Any) -> Any:
    like = torch.zeros(x.shape, dtype=torch.float64)
    return apply_whole_linear(lambda part: func(part, like, *settings), gradient)


_EXPERTS: dict[Any, Callable[..., Any]] = {
    torch.ops.shardwise.to_experts: dispatch_rows,
    torch.ops.shardwise.of_experts: multiply_by_experts,
    torch.ops.shardwise.from_experts: combine_rows,
}


@register_for(*_EXPERTS)
def _apply_experts(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel itself, on numbers of the field."""
    lifted = [lift_constants(x) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
    return _EXPERTS[func.overloadpacket](*lifted, **kwargs)


def _count_windows(shape: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return of how many elements each average of adaptive pooling is."""
    counts = torch.ones((), dtype=torch.float64)
    for whole, size in zip(shape[len(shape) - len(sizes) :], sizes, strict=True):
        at = torch.arange(size)
        counts = counts.unsqueeze(-1) * (-(-(at + 1) * whole // size) - at * whole // size)
    return counts


@register_for(aten._adaptive_avg_pool2d, aten._adaptive_avg_pool3d)
def _pool_adaptively(func: Any, x: Any, sizes: Sequence[int]) -> Any:
    counts = _count_windows(x.shape, sizes)
    return apply_whole_linear(lambda part: (func(part, sizes) * counts).round(), x) / counts


@register_for(aten._adaptive_avg_pool2d_backward, aten._adaptive_avg_pool3d_backward)
def _pool_adaptively_backward(func: Any, gradient: Any, x: Tensor) -> Any:
    dims = 2 if func.overloadpacket is aten._adaptive_avg_pool2d_backward else 3
    counts, like = _count_windows(x.shape, gradient.shape[-dims:]), torch.zeros(x.shape, dtype=torch.float64)
    return apply_whole_linear(lambda part: func(part * counts, like), lift_constants(gradient) / counts)


@register_for(aten.masked_scatter)
def _scatter_masked(func: Any, x: Any, mask: Tensor, source: Any) -> Any:
    x, source = lift_constants(x), lift_constants(source)
    place = (mask.expand(x.shape).reshape(-1).cumsum(0) - 1).clamp(min=0).reshape(x.shape)
    return torch.where(mask, source.reshape(-1)[place], x)


@register_for(aten.masked_scatter_backward)
def _scatter_masked_backward(func: Any, gradient: Any, mask: Tensor, sizes: Sequence[int]) -> Any:
    taken, count = lift_constants(gradient)[mask.expand(gradient.shape)], prod(sizes)
    return aten.constant_pad_nd(taken[:count], (0, max(0, count - taken.numel()))).reshape(sizes)
