"""float8 linear layers with one scale per row, or per tensor (Micikevicius et al. 2022; torchao's rowwise and tensorwise recipes).

From activations [..., K] and weights [O, K] to [..., O], and gradients. A row of an operand, along the contracted dimension, is divided by
a power of two so that its largest element is just in range: x by rows and the weight by outputs forward; the gradient by rows and the
weight by inputs for the gradient of x. Gradients have more range and less fraction (e5m2), all else e4m3. So no sample's numbers depend on
another's, and microbatches and data ranks change nothing. Ranks with shards of a row agree on its largest element. The weight gradient,
which is summed over samples, is a 16-bit product. Sides are padded to multiples of 16, as tensor cores require.

With one scale per tensor all three products are of 8 bits. A scale is that of the tensor which a rank has of a microbatch, agreed over the
ranks that have shards of its features. Since it is a power of two, samples affect one another's rounding only where an element is too
small for the range below the largest: 2^-15 of it in e4m3 and 2^-30 in e5m2 before fraction bits are lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.lower.kernels.second_derivatives import refuse_second_derivatives
from shardwise.world import private
from shardwise.world.world import Group

DTYPE, OF_GRADIENTS, WIDE = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
SIDE = 16


def supports_scaled_product(shape: Sequence[int]) -> bool:
    """Return whether a weight of this global shape has sides that such products support."""
    return len(shape) == 2 and all(n % SIDE == 0 for n in shape)


def scaled_linear(
    over_inputs: Sequence[Group], over_outputs: Sequence[Group], x: Tensor, weight: Tensor, bias: Tensor | None = None,
    scales_tensors: bool = False,
) -> Tensor:  # fmt: skip
    """Return x @ weight.T + bias. `over_inputs`: groups whose ranks have shards of K; `over_outputs`: of O."""
    function = _TensorScaledLinear if scales_tensors else _ScaledLinear
    with torch.autocast(x.device.type, enabled=False):
        out: Tensor = function.apply(x.to(WIDE), weight, tuple(over_inputs), tuple(over_outputs))  # type: ignore[no-untyped-call]
        return out if bias is None else out + bias.to(WIDE)


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, over_inputs: tuple[Group, ...], over_outputs: tuple[Group, ...]) -> Tensor:
        ctx.over_outputs = over_outputs
        ctx.save_for_backward(x, weight)
        rows = x.reshape(-1, x.shape[-1])
        return scaled_product(rows, weight.to(WIDE), over_inputs).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @refuse_second_derivatives("a product in 8 bits", "precision=float8")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = of_weight = None
        rows = grad.reshape(-1, grad.shape[-1]).to(WIDE)
        with torch.autocast(x.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                of_x = scaled_product(rows, weight.to(WIDE).t(), ctx.over_outputs, OF_GRADIENTS).view(x.shape)
            if ctx.needs_input_grad[1]:
                of_weight = (rows.t() @ x.reshape(-1, x.shape[-1])).to(weight.dtype)
        return of_x, of_weight, None, None


class _TensorScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, over_inputs: tuple[Group, ...], over_outputs: tuple[Group, ...]) -> Tensor:
        ctx.over_inputs, ctx.over_outputs = over_inputs, over_outputs
        ctx.save_for_backward(x, weight)
        rows = narrow_tensor(x.reshape(-1, x.shape[-1]), over_inputs)
        return multiply_narrow(rows, narrow_tensor(weight.to(WIDE), (*over_inputs, *over_outputs))).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @refuse_second_derivatives("a product in 8 bits", "precision=float8")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = of_weight = None
        with torch.autocast(x.device.type, enabled=False):
            g, scale = narrow_tensor(grad.reshape(-1, grad.shape[-1]).to(WIDE), ctx.over_outputs, OF_GRADIENTS)
            if ctx.needs_input_grad[0]:
                w, of_w = narrow_tensor(weight.to(WIDE), (*ctx.over_inputs, *ctx.over_outputs))
                of_x = multiply_narrow((g, scale), (w.t(), of_w)).view(x.shape)
            if ctx.needs_input_grad[1]:
                rows, of_rows = narrow_tensor(x.reshape(-1, x.shape[-1]), ctx.over_inputs)
                of_weight = multiply_narrow((g.t(), scale), (rows.t(), of_rows)).to(weight.dtype)
        return of_x, of_weight, None, None


def narrow_tensor(x: Tensor, over: Sequence[Group], dtype: torch.dtype = DTYPE) -> tuple[Tensor, Tensor]:
    """Return a matrix in 8 bits, and its scale, on which ranks with shards of it agree (groups `over`)."""
    largest = x.abs().amax().float().view(1) if x.numel() else x.new_zeros(1, dtype=torch.float32)
    for group in over:
        group.all_reduce(largest, op="max")
    scale = _power_of_two_scale(largest, dtype)
    return (x / scale.to(x.dtype)).to(dtype), scale.view(())  # a power of two has 16 bits exactly


def multiply_narrow(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """Return a [M, K] @ b.T [K, N] of matrices in 8 bits with their scales."""
    (a_values, a_scale), (b_values, b_scale) = a, b
    product = private.scaled_matmul(_pad_sides(a_values), _pad_sides(b_values), a_scale, b_scale)
    return product[: len(a_values), : len(b_values)].contiguous()


def scaled_product(a: Tensor, b: Tensor, over: Sequence[Group], dtype: torch.dtype = DTYPE) -> Tensor:
    """Return a [M, K] @ b.T [K, N], the local partial sum, where ranks of the groups `over` have shards of K. `dtype`: of a."""
    largest = torch.cat([_row_maximum(x) for x in (a, b)])
    for group in over:
        group.all_reduce(largest, op="max")
    of_a, of_b = (_power_of_two_scale(x, of).unsqueeze(1) for x, of in ((largest[: len(a)], dtype), (largest[len(a) :], DTYPE)))
    operands = [_pad_sides((x / scale).to(of)) for x, scale, of in ((a, of_a, dtype), (b, of_b, DTYPE))]
    scales = [functional.pad(scale, (0, 0, 0, -len(scale) % SIDE), value=1.0) for scale in (of_a, of_b)]
    return private.scaled_matmul(operands[0], operands[1], scales[0], scales[1])[: len(a), : len(b)].contiguous()


def _power_of_two_scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the least powers of two that bring the largest element in range; scaling then rounds nothing."""
    return torch.exp2(torch.ceil(torch.log2(largest / torch.finfo(dtype).max))).clamp_(min=2.0**-126)


def _row_maximum(x: Tensor) -> Tensor:
    return x.abs().amax(1).float() if x.shape[1] else x.new_zeros(len(x), dtype=torch.float32)


def _pad_sides(x: Tensor) -> Tensor:
    """Pad both sides to a multiple of `SIDE` with zeros."""
    rows, columns = (-n % SIDE for n in x.shape)
    if not rows and not columns:
        return x.contiguous()
    buffer = torch.zeros((x.shape[0] + rows, x.shape[1] + columns), dtype=torch.uint8, device=x.device)
    buffer[: x.shape[0], : x.shape[1]].copy_(x.view(torch.uint8))
    return buffer.view(x.dtype)
