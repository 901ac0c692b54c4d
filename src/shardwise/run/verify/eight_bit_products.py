"""Verification of 8-bit (FP8) linear layers against the error bound of their number formats.

Each lowered layer is called with this rank's shapes and random operands, and its result and gradients are compared with float64 products of
the same operands; reported is the largest error over its bound. (Gradients of a whole run cannot be compared with a serial run's: they
differ by up to their size, since rounding to 3 bits goes up or down by chance.) The bound: with u half a unit in the last place, s half of
the smallest number and t the scale of a row or tensor, an operand a becomes a + d, |d| <= u |a| + s t, so the error of a product is at most
the sum of |d||b| + |a||e| + |d||e|, the accumulation error in float32 (or less), and the rounding of its result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isnan

import torch
from torch import Tensor

from shardwise.lower.call import OperatorCall
from shardwise.lower.kernels.scaled import DTYPE, OF_GRADIENTS, WIDE
from shardwise.lower.lowering import Lowering, Nodes
from shardwise.ops import record_of
from shardwise.ops.vocabulary import MatmulKind
from shardwise.run.parts.rank_model import RankModel
from shardwise.world.world import Group, World

NUM_ROWS = 32
PRODUCTS = ("result", "gradient", "weight gradient")
ACCUMULATION_ERROR = 2.0**-13  # relative, inside of a product: tensor cores accumulate in as little as 14 bits (DeepSeek-V3, section 3.5.2)


def find_wrong_product(rank_model: RankModel, world: World) -> str:
    """Describe the worst layer of any rank if its error exceeds the bound; empty if none does. Every rank calls it."""
    of_ranks = world.world_group.all_gather(torch.tensor([_worst_error(rank_model)], dtype=torch.float64, device=world.device))
    error, number, kind = max(of_ranks.tolist())
    if error <= 1.0:
        return ""
    return f"the {PRODUCTS[int(kind)]} of {rank_model.graph.operators[int(number)].site} is off by {error:.3g} times what operands of 8 bits allow"  # noqa: E501


def _worst_error(rank_model: RankModel) -> tuple[float, int, int]:
    """Return the largest (error over its bound, number of the operator, index in `PRODUCTS`); 0 if no layer has 8 bits."""
    worst = 0.0, 0, 0
    low = rank_model.lowering
    for number in sorted(rank_model.lowered) if low is not None and low.precision.linear_dtype else ():
        for op in rank_model.stages[number].operators:
            assert low is not None
            if record_of(op).product.kind != MatmulKind.LINEAR:
                continue
            call = OperatorCall(low, Nodes(), op, {axis: label for axis, label in low.sharding.labels[op.name].items() if label}, [], {})
            if (layer := call.scaled_kernel()) is None:
                continue
            input_groups, output_groups = call.scale_groups()
            operands = _random_operands(_local_weight_shape(low, call), low.device)
            bound = _OperandErrors(input_groups, output_groups, low.precision.scales_tensors)
            errors = _errors_over_bounds(layer, operands, bound)
            errors_of = ((inf if isnan(error) else error, low.operator_index[op.name], way) for way, error in enumerate(errors))
            worst = max(worst, *errors_of)
    return worst


def _local_weight_shape(lowering: Lowering, call: OperatorCall) -> tuple[int, ...]:
    """Return the shape of this rank's shard of the weight."""
    needs = {axis: form for axis, form in lowering.sharding.input_placements[call.op.name][1].items() if form is not None}
    return lowering.sharding.local_shape(call.op.inputs[1], call.input_spec(1).shape, needs, lowering.coordinates)


def _random_operands(shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return an input, a weight of this shape and the gradient of a result."""
    generator = torch.Generator().manual_seed(shape[0])
    x, weight, grad = (
        torch.randn(size, generator=generator).mul(torch.rand(size[0], 1, generator=generator).mul(8).exp2()).to(WIDE).to(device)
        for size in ((NUM_ROWS, shape[1]), shape, (NUM_ROWS, shape[0]))
    )
    return x, weight, grad


@dataclass(frozen=True)
class _OperandErrors:
    """Bounds of the rounding errors of a layer's operands in 8 bits. `input_groups`, `output_groups`: over which K and O are sharded."""

    input_groups: tuple[Group, ...]
    output_groups: tuple[Group, ...]
    scales_tensors: bool

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return those of the operands of the result."""
        return self._bound(x, DTYPE, self.input_groups), self._bound_of_weight(weight, self.input_groups)

    def backward(self, grad: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return those of the operands of the input's gradient."""
        return self._bound(grad, OF_GRADIENTS, self.output_groups), self._bound_of_weight(weight.T, self.output_groups)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return those of the operands of the weight's gradient, which are not rounded where scales are of rows."""
        if not self.scales_tensors:
            return torch.zeros_like(grad.T), torch.zeros_like(x.T)
        return self._bound(grad, OF_GRADIENTS, self.output_groups).T, self._bound(x, DTYPE, self.input_groups).T

    def _bound_of_weight(self, weight: Tensor, row_groups: tuple[Group, ...]) -> Tensor:
        return self._bound(weight, DTYPE, (*self.input_groups, *self.output_groups) if self.scales_tensors else row_groups)

    def _bound(self, x: Tensor, dtype: torch.dtype, groups: tuple[Group, ...]) -> Tensor:
        info, largest = torch.finfo(dtype), x.abs().amax(1, keepdim=True).float()
        if self.scales_tensors:
            largest = largest.amax(0, keepdim=True)
        for group in groups:
            group.all_reduce(largest, op="max")
        scale = torch.exp2(torch.ceil(torch.log2(largest / info.max)))
        return (x.abs().double() * info.eps / 2).add_(scale.double() * info.smallest_normal * info.eps / 2)


def _errors_over_bounds(
    layer: Callable[..., Tensor], operands: tuple[Tensor, Tensor, Tensor], errors: _OperandErrors
) -> tuple[float, float, float]:
    """Return the error over its bound of each of the `PRODUCTS`."""
    x, weight, grad = operands
    leaves = x.clone().requires_grad_(), weight.float().requires_grad_()
    out = layer(*leaves)
    of_x, of_weight = torch.autograd.grad(out, leaves, grad)
    forward, backward, of_gradient = errors.forward(x, weight), errors.backward(grad, weight), errors.weight_gradient(grad, x)
    return (
        _error_over_bound(out.detach(), x, weight, forward[0], forward[1]),
        _error_over_bound(of_x, grad, weight.T, backward[0], backward[1]),
        _error_over_bound(of_weight, grad.T, x.T, of_gradient[0], of_gradient[1]),
    )


def _error_over_bound(product: Tensor, a: Tensor, b: Tensor, error_a: Tensor, error_b: Tensor) -> float:
    """Return the largest error of a product a @ b.T over its bound, given the operands' rounding errors."""
    a, b, error_a, error_b = (x.double() for x in (a, b, error_a, error_b))
    expected, size = a @ b.T, a.abs() @ b.abs().T
    bound = error_a @ b.abs().T + a.abs() @ error_b.T + error_a @ error_b.T + ACCUMULATION_ERROR * size
    bound += torch.finfo(WIDE).eps / 2 * (expected.abs() + bound)
    return float(((product.double() - expected).abs() / bound.clamp(min=1e-300)).max())
