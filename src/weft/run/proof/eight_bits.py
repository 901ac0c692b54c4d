"""Verification of 8-bit (FP8) linear layers against the error bound of their number formats.

Each lowered layer is called with this rank's shapes and random operands, and its result and gradients are compared with float64 products of
the same operands; reported is the largest error over its bound. (Gradients of a whole run cannot be compared with a serial run's: they
differ by up to their size, since rounding to 3 bits goes up or down by chance.) The bound: with u half a unit in the last place, s half of
the smallest number and t the scale of a row, an operand a becomes a + d, |d| <= u |a| + s t, so the error of a product is at most the sum
of |d||b| + |a||e| + |d||e|, the accumulation error in float32 (or less), and the rounding of its result.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isnan

import torch
from torch import Tensor

from weft.lower.call import Call
from weft.lower.kernels.scaled import DTYPE, OF_GRADIENTS, WIDE
from weft.lower.lowering import Lowering, Nodes
from weft.ops import record_of
from weft.run.training_parts import Parts
from weft.world.world import Group, World

ROWS = 32
WAYS = ("result", "gradient", "weight gradient")
ADDING = 2.0**-13  # relative, inside of a product: tensor cores accumulate in as little as 14 bits (DeepSeek-V3, section 3.5.2)


def wrong_product(parts: Parts, world: World) -> str:
    """Describe the worst layer of any rank if its error exceeds the bound; empty if none does. Every rank calls it."""
    of_ranks = world.everyone.all_gather(torch.tensor([_farthest(parts)], dtype=torch.float64, device=world.device))
    error, number, kind = max(of_ranks.tolist())
    if error <= 1.0:
        return ""
    return f"the {WAYS[int(kind)]} of {parts.graph.operators[int(number)].site} is off by {error:.3g} times what operands of 8 bits allow"


def _farthest(parts: Parts) -> tuple[float, int, int]:
    """Return the largest (error over its bound, number of the operator, index in `PRODUCTS`); 0 if no layer has 8 bits."""
    worst = 0.0, 0, 0
    low = parts.lowering
    for number in sorted(parts.lowered) if low is not None and low.precision.linears else ():
        for op in parts.stages[number].operators:
            assert low is not None
            if record_of(op).product != "linear":
                continue
            call = Call(low, Nodes(), op, {axis: label for axis, label in low.sharding.ops[op.name].items() if label}, [], {})
            if (layer := call.scaled()) is None:
                continue
            input_groups, output_groups = call.scaled_over()
            errors = _errors(layer, _shape(low, call), input_groups, output_groups, low.device)
            errors_of = ((inf if isnan(error) else error, low.ordinal[op.name], way) for way, error in enumerate(errors))
            worst = max(worst, *errors_of)
    return worst


def _shape(low: Lowering, call: Call) -> tuple[int, ...]:
    """Return the shape of this rank's shard of the weight."""
    needs = {axis: form for axis, form in low.sharding.needs[call.op.name][1].items() if form is not None}
    return low.sharding.shape(call.op.inputs[1], call.read(1).shape, needs, low.at)


def _errors(
    layer: Callable[..., Tensor], shape: tuple[int, ...], of_inputs: tuple[Group, ...], of_outputs: tuple[Group, ...], device: torch.device
) -> tuple[float, float, float]:
    """Return the error over its bound of each of the `PRODUCTS`."""
    generator = torch.Generator().manual_seed(shape[0])
    x, weight, grad = (
        torch.randn(size, generator=generator).mul(torch.rand(size[0], 1, generator=generator).mul(8).exp2()).to(WIDE).to(device)
        for size in ((ROWS, shape[1]), shape, (ROWS, shape[0]))
    )
    leaves = x.clone().requires_grad_(), weight.float().requires_grad_()
    out = layer(*leaves)
    of_x, of_weight = torch.autograd.grad(out, leaves, grad)
    return (
        _over(out.detach(), x, weight, _off(x, DTYPE, of_inputs), _off(weight, DTYPE, of_inputs)),
        _over(of_x, grad, weight.T, _off(grad, OF_GRADIENTS, of_outputs), _off(weight.T, DTYPE, of_outputs)),
        _over(of_weight, grad.T, x.T, torch.zeros_like(grad.T), torch.zeros_like(x.T)),
    )


def _off(x: Tensor, dtype: torch.dtype, over: tuple[Group, ...]) -> Tensor:
    """Return the bound of the rounding errors of an operand in 8 bits; `groups`: over which its rows are sharded."""
    info, largest = torch.finfo(dtype), x.abs().amax(1, keepdim=True).float()
    for group in over:
        group.all_reduce(largest, op="max")
    scale = torch.exp2(torch.ceil(torch.log2(largest / info.max)))
    return (x.abs().double() * info.eps / 2).add_(scale.double() * info.smallest_normal * info.eps / 2)


def _over(gradient: Tensor, a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor) -> float:
    """Return the largest error of a product a @ b.T over its bound, given the operands' rounding errors."""
    a, b, of_a, of_b = (x.double() for x in (a, b, of_a, of_b))
    expected, size = a @ b.T, a.abs() @ b.abs().T
    bound = of_a @ b.abs().T + a.abs() @ of_b.T + of_a @ of_b.T + ADDING * size
    bound += torch.finfo(WIDE).eps / 2 * (expected.abs() + bound)
    return float(((gradient.double() - expected).abs() / bound.clamp(min=1e-300)).max())
