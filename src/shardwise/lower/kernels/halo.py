"""Sliding-window operators on a rank's shard of an image, after the halo exchange: pad what a window reads beyond the image.

From this rank's `WindowShard` of each sharded dimension and the operator's arguments, whose first is the range that this rank reads, to its
shard of the output, equal to that of the unsharded operator. Exact for any kernel, stride, dilation, padding and unequal shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.ops.record import Windows
from shardwise.ops.sliding_window import Range, ResamplingWindow, SlidingWindow, TransposedWindow, Window


@dataclass(frozen=True, slots=True)
class WindowShard:
    """In dimension `dim` of `size` entries: the `input_range` that this rank holds, and the `output_range` that it computes."""

    dim: int
    size: int
    window: Window
    input_range: Range
    output_range: Range


def apply_windows(target: Callable[..., Tensor], windows: Windows, parts: Sequence[WindowShard], x: Tensor, *args: Any) -> Tensor:
    """Return `target(x, *args)` on this rank's shards of the sharded dimensions, and of all resampled ones."""
    window_types = {type(part.window) for part in parts}
    if window_types == {TransposedWindow}:
        return _apply_transposed(target, parts, x, *args)
    if window_types == {ResamplingWindow}:
        return _apply_resampling(parts, x)
    if windows.padding is None:
        sizes = {part.dim: part.output_range[1] - part.output_range[0] for part in parts}
        return target(x, [sizes.get(i + x.dim() - len(args[0]), n) for i, n in enumerate(args[0])])
    return _apply_sliding(target, windows, parts, x, list(args))


def _halo_pads(parts: Sequence[WindowShard], x: Tensor) -> list[int]:
    """Return how far windows extend beyond what is read, in the order that `F.pad` takes."""
    pads = [0] * (2 * x.dim())
    for part in parts:
        low, high = part.window.input_range(*part.output_range, part.size)
        pads[2 * (x.dim() - 1 - part.dim)] = part.input_range[0] - low
        pads[2 * (x.dim() - 1 - part.dim) + 1] = high - part.input_range[1]
    return pads


def _apply_sliding(target: Callable[..., Tensor], windows: Windows, parts: Sequence[WindowShard], x: Tensor, args: list[Any]) -> Tensor:
    at = windows.padding
    assert at is not None
    fill, dims, pads = windows.fill, {part.dim for part in parts}, _halo_pads(parts, x)
    if at == 1:  # constant padding: of the other dimensions, plus what is missing here
        options, rank = list(args[0]), x.dim()
        other_pads = [0 if rank - 1 - i // 2 in dims else p for i, p in enumerate(options)]
        number = args[windows.fill_at - 1] if windows.fill_at is not None and len(args) >= windows.fill_at else None
        return F.pad(x, [a + b for a, b in zip((*other_pads, *[0] * (2 * rank - len(other_pads))), pads, strict=True)], value=number or 0.0)
    spatial = x.dim() - 2
    padding = args[at - 1] if len(args) >= at else 0
    if isinstance(padding, str):  # "same": by the kernel of each dimension; the larger half is at the end
        totals = [
            d * (k - 1) if padding == "same" else 0 for k, d in zip(args[0].shape[2:], _per_dim_argument(args, 5, spatial, 1), strict=True)
        ]
        for i, total in enumerate(totals):
            if i + 2 not in dims:
                pads[2 * (spatial - 1 - i) : 2 * (spatial - 1 - i) + 2] = [total // 2, total - total // 2]
        target, padding = getattr(torch.ops.aten, f"conv{spatial}d").default, 0
    other_padding = [0 if i + 2 in dims else p for i, p in enumerate(_as_list(padding, spatial))]
    args = [*args, *_default_arguments(windows, spatial)[len(args) : at]]
    args[at - 1] = other_padding
    out = target(F.pad(x, pads, value=fill) if any(pads) else x, *args)
    counts_padding = (
        windows.counts_padding_at is None
        or len(args) < windows.counts_padding_at
        or args[windows.counts_padding_at - 1]
        or any(args[windows.counts_padding_at :])
    )
    if not counts_padding:
        for part in parts:  # without padding, the divisor at the border of the image is smaller
            out = out * out.new_tensor(_padding_correction(part)).view([-1 if i == part.dim else 1 for i in range(out.dim())])
    return out


@cache
def _padding_correction(part: WindowShard) -> tuple[float, ...]:
    """Return the factor of each output mean if padding does not count. Cached: equal in each step."""
    assert isinstance(part.window, SlidingWindow)
    return tuple(part.window.kernel / part.window.num_taps_inside(entry, part.size) for entry in range(*part.output_range))


def _default_arguments(windows: Windows, dims: int) -> list[Any]:
    """Return default arguments after the tensor, up to the padding: of a convolution (weight, bias, stride, padding), of a pool (kernel,
    stride, padding)."""
    return [None, None, [1] * dims, 0] if windows.padding == 4 else [None, [], 0]


def _as_list(value: Any, count: int) -> list[int]:
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * (count if len(values) == 1 else 1)


def _per_dim_argument(args: Sequence[Any], position: int, count: int, default: int) -> list[int]:
    return _as_list(args[position - 1] if len(args) >= position else default, count)


def _apply_transposed(target: Callable[..., Tensor], parts: Sequence[WindowShard], x: Tensor, *options: Any) -> Tensor:
    weight, bias, spatial = options[0], options[1] if len(options) > 1 else None, x.dim() - 2
    shard_of_dim = {part.dim: part for part in parts}
    padding = [0 if i + 2 in shard_of_dim else p for i, p in enumerate(_per_dim_argument(options, 4, spatial, 0))]
    output_padding = [0 if i + 2 in shard_of_dim else p for i, p in enumerate(_per_dim_argument(options, 5, spatial, 0))]
    groups = options[5] if len(options) > 5 else 1
    out = target(
        x,
        weight,
        None,
        _per_dim_argument(options, 3, spatial, 1),
        padding,
        output_padding,
        groups,
        _per_dim_argument(options, 7, spatial, 1),
    )
    pads = [0] * (2 * out.dim())
    for part in parts:  # drop contributions to other ranks' entries; entries without any are zero
        assert isinstance(part.window, TransposedWindow)
        first = part.window.first_output(part.input_range[0])
        pads[2 * (out.dim() - 1 - part.dim)] = first - part.output_range[0]
        pads[2 * (out.dim() - 1 - part.dim) + 1] = part.output_range[1] - first - out.shape[part.dim]
    out = F.pad(out, pads) if any(pads) else out
    return out if bias is None else out + bias.to(out.dtype).view([-1] + [1] * spatial)


def _apply_resampling(parts: Sequence[WindowShard], x: Tensor) -> Tensor:
    """Interpolate each dimension with its own two taps."""
    for part in parts:
        low, high, weights = _local_taps(part)
        first = x.index_select(part.dim, torch.tensor(low, device=x.device))
        if not any(weights):  # nearest neighbor
            x = first
            continue
        weight = x.new_tensor(weights).view([-1 if i == part.dim else 1 for i in range(x.dim())])
        x = first * (1 - weight) + x.index_select(part.dim, torch.tensor(high, device=x.device)) * weight
    return x


@cache
def _local_taps(part: WindowShard) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    """Return both neighbors of each output entry among those read, and the weight of the second. Cached: equal in each step."""
    assert isinstance(part.window, ResamplingWindow)
    low, high, weights = zip(*(part.window.taps(entry, part.size) for entry in range(*part.output_range)), strict=True)
    return tuple(i - part.input_range[0] for i in low), tuple(i - part.input_range[0] for i in high), weights
