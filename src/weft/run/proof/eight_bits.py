"""Whether linear layers of 8 bits compute what their operands say, operator by operator and way by way.

In: a rank's stages as they are lowered. Out: the largest error of a layer's result and gradients over the largest that the number formats
allow. Each is called on this rank's shapes and random operands, and held against products of the same operands in float64. A run's own
gradients differ from a serial run's by up to their size, since what rounds to 3 bits turns up or down by chance; this bound does not:
with u half a unit in the last place, s half of the least number and t the scale of a row, an operand a becomes a + d, |d| <= u |a| + s t,
so a product errs by no more than the sum of |d||b| + |a||e| + |d||e|, what adding up in float32 (or less) loses, and the rounding of its
result.
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
ADDING = 2.0**-13  # of sums inside of a product: units add up in as little as 14 bits (DeepSeek-V3, section 3.5.2)


def wrong_product(parts: Parts, world: World) -> str:
    """The worst layer of any rank, where it errs by more than the formats allow; empty where none does. Every rank calls it."""
    of_ranks = world.everyone.all_gather(torch.tensor([_farthest(parts)], dtype=torch.float64, device=world.device))
    error, number, way = max(of_ranks.tolist())
    if error <= 1.0:
        return ""
    return f"the {WAYS[int(way)]} of {parts.graph.operators[int(number)].site} is off by {error:.3g} times what operands of 8 bits allow"


def _farthest(parts: Parts) -> tuple[float, int, int]:
    """(error over its bound, number of the operator, number of the way) where that is largest; 0 where nothing has 8 bits."""
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
            of_inputs, of_outputs = call.scaled_over()
            errors = _errors(layer, _shape(low, call), of_inputs, of_outputs, low.device)
            errors_of = ((inf if isnan(error) else error, low.ordinal[op.name], way) for way, error in enumerate(errors))
            worst = max(worst, *errors_of)
    return worst


def _shape(low: Lowering, call: Call) -> tuple[int, ...]:
    """Of this rank's piece of the weight."""
    needs = {axis: form for axis, form in low.sharding.needs[call.op.name][1].items() if form is not None}
    return low.sharding.shape(call.op.inputs[1], call.read(1).shape, needs, low.at)


def _errors(
    layer: Callable[..., Tensor], shape: tuple[int, ...], of_inputs: tuple[Group, ...], of_outputs: tuple[Group, ...], device: torch.device
) -> tuple[float, float, float]:
    """Of each of the `WAYS`, see `_over`."""
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
    """By how much an operand's elements may be off in 8 bits; `over`: groups whose ranks have pieces of its rows."""
    info, largest = torch.finfo(dtype), x.abs().amax(1, keepdim=True).float()
    for group in over:
        group.all_reduce(largest, op="max")
    scale = torch.exp2(torch.ceil(torch.log2(largest / info.max)))
    return (x.abs().double() * info.eps / 2).add_(scale.double() * info.smallest_normal * info.eps / 2)


def _over(gradient: Tensor, a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor) -> float:
    """The largest error of a @ b.T, where its operands may be off by so much, over its bound."""
    a, b, of_a, of_b = (x.double() for x in (a, b, of_a, of_b))
    want, size = a @ b.T, a.abs() @ b.abs().T
    bound = of_a @ b.abs().T + a.abs() @ of_b.T + of_a @ of_b.T + ADDING * size
    bound += torch.finfo(WIDE).eps / 2 * (want.abs() + bound)
    return float(((gradient.double() - want).abs() / bound.clamp(min=1e-300)).max())
