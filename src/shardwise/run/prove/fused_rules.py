"""Rules of torch's fused operators on `FieldTensor`s: attention, normalisation, convolution, pooling, and updates of optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.run.prove import finite_field as field
from shardwise.run.prove.degrees import CERTAINTY
from shardwise.run.prove.field_tensor import (
    FieldTensor,
    NotProvable,
    aten,
    degree_of,
    hidden_or_none,
    lift_constants,
    random_numbers,
    register_for,
    write,
)
from shardwise.run.prove.rules import matrix_product
from shardwise.world import private

_MINUS_INFINITY = float("-inf")
_NUM_POWERS = 6  # of a matrix in the function that stands for its exponential


def _repeat_heads(x: Any, q: Any) -> Any:
    """Repeat heads of keys or values to as many as of queries."""
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) if x.shape[-3] != q.shape[-3] else x


def _sum_repeated_heads(gradient: Any, x: Any) -> Any:
    return gradient.reshape(*x.shape[:-2], -1, *x.shape[-2:]).sum(-3) if gradient.shape != x.shape else gradient


def _apply_scores(q: Any, k: Any, causal: bool, mask: Tensor | None, scale: float | None) -> Any:
    """Return the scores of attention, hidden ones minus infinity."""
    scores: Any = matrix_product(q, _repeat_heads(k, q).transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~keep, _MINUS_INFINITY)
    if mask is not None:
        scores = scores.masked_fill(~mask, _MINUS_INFINITY) if mask.dtype is torch.bool else scores + mask
    return scores


@register_for(aten._scaled_dot_product_flash_attention_for_cpu)
def _apply_attend(
    func: Any, q: Any, k: Any, v: Any, dropout_p: float = 0.0, is_causal: bool = False, *, attn_mask: Any = None, scale: Any = None
) -> Any:
    scores = _apply_scores(q, k, is_causal, attn_mask, scale)
    weights = scores.exp()
    total = weights.sum(-1)
    divisor = total if scores.hidden is None else torch.where(scores.hidden.all(-1), 1.0, total)  # a row that sees nothing is zero
    return matrix_product(weights / divisor.unsqueeze(-1), _repeat_heads(v, q)), total.log()


@register_for(aten._scaled_dot_product_flash_attention_for_cpu_backward)
def _attend_backward(func: Any, gradient: Any, q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> Any:
    (out, log_sum, _, causal), scale = rest, options.get("scale")
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    weights = (_apply_scores(q, k, causal, options.get("attn_mask"), scale) - log_sum.unsqueeze(-1)).exp()
    of_weights = matrix_product(gradient, _repeat_heads(v, q).transpose(-1, -2))
    of_scores: Any = weights * (of_weights - (gradient * out).sum(-1, True)) * factor
    of_k, of_v = matrix_product(of_scores.transpose(-1, -2), q), matrix_product(weights.transpose(-1, -2), gradient)
    return matrix_product(of_scores, _repeat_heads(k, q)), _sum_repeated_heads(of_k, k), _sum_repeated_heads(of_v, v)


@register_for(aten.native_layer_norm)
def _layer_norm(func: Any, x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    dims = list(range(x.dim() - len(shape), x.dim()))
    mean = x.mean(dims, True)
    inverse = ((x - mean).square().mean(dims, True) + eps).rsqrt()
    out = (x - mean) * inverse
    out = out if weight is None else out * weight
    return out if bias is None else out + bias, mean, inverse


@register_for(aten.var, aten.var_mean, torch.ops.prims.var)
def _apply_variance(func: Any, x: Any, dim: Any = None, correction: float | None = 1, keepdim: bool = False, **options: Any) -> Any:
    dims = list(range(x.dim())) if dim is None or dim == [] else dim
    mean = x.mean(dims, True)
    squares: Any = (x - mean).square().sum(dims, keepdim)
    count = x.numel() // max(1, squares.numel())
    variance = squares / (count - (1 if correction is None else correction))
    return (variance, mean if keepdim else x.mean(dims)) if func.overloadpacket is aten.var_mean else variance


@register_for(aten.square)
def _apply_square(func: Any, x: Any) -> Any:
    return x**2


def _num_window_terms(weight: Tensor) -> int:
    """Return how many products an element of a convolution, or of its input's gradient, is at most a sum of."""
    return weight.numel() // min(weight.shape[:2])


@register_for(aten.convolution)
def _apply_convolve(func: Any, x: Any, weight: Any, bias: Any, *settings: Any) -> Any:
    x, weight = lift_constants(x), lift_constants(weight)
    products = field.apply_bilinear(
        lambda a, b: func(a, b, None, *settings), x.a, weight.a, num_terms=_num_window_terms(weight), by_sample=True
    )
    out: Any = FieldTensor(products, degree=[degree_of(x) + degree_of(weight)])
    return out if bias is None else out + lift_constants(bias).reshape(-1, *[1] * (out.dim() - 2))


@register_for(aten.convolution_backward)
def _convolve_backward(func: Any, gradient: Any, x: Any, weight: Any, bias_sizes: Any, *settings: Any) -> Any:
    gradient, x, weight, wanted = lift_constants(gradient), lift_constants(x), lift_constants(weight), settings[-1]
    shapes = torch.zeros(1, *x.shape[1:], dtype=torch.float64), torch.zeros(weight.shape, dtype=torch.float64)
    of_input = of_weight = of_bias = None
    if wanted[0]:
        mask = [True, False, False]
        products = field.apply_bilinear(
            lambda g, w: func(g, shapes[0].expand(len(g), *x.shape[1:]), w, bias_sizes, *settings[:-1], mask)[0],
            gradient.a,
            weight.a,
            num_terms=_num_window_terms(weight),
            by_sample=True,
        )
        of_input = FieldTensor(products, degree=[degree_of(gradient) + degree_of(weight)])
    if wanted[1]:
        mask = [False, True, False]
        num_terms = max(gradient.numel() // gradient.shape[1], x.numel() // x.shape[1])
        products = field.apply_bilinear(
            lambda g, v: func(g, v, shapes[1], bias_sizes, *settings[:-1], mask)[1], gradient.a, x.a, num_terms=num_terms
        )
        of_weight = FieldTensor(products, degree=[degree_of(gradient) + degree_of(x)])
    if wanted[2]:
        of_bias = gradient.sum([0, *range(2, gradient.dim())])
    return of_input, of_weight, of_bias


@register_for(aten._fused_adamw_, aten._fused_adam_)
def _update_adamw(func: Any, parameters: Any, gradients: Any, means: Any, squares: Any, *rest: Any, **options: Any) -> None:
    (_, steps), lr, beta1, beta2 = rest, float(options["lr"]), options["beta1"], options["beta2"]
    if options["amsgrad"] or options["maximize"]:
        raise NotProvable("amsgrad and maximize have no exact form yet")
    for p, g, mean, square, count in zip(parameters, gradients, means, squares, steps, strict=True):
        step = float(count)
        if func.overloadpacket is aten._fused_adam_:
            g = g + p * options["weight_decay"]
        else:
            write(p, p * (1 - lr * options["weight_decay"]))
        write(mean, mean * beta1 + g * (1 - beta1))
        write(square, square * beta2 + g * g * (1 - beta2))
        root = square.sqrt() / (1 - beta2**step) ** 0.5 + options["eps"]
        inverse = 1.0 / root if CERTAINTY.num_steps > 1 else FieldTensor(field.inverse_of(root.a), degree=[CERTAINTY.add_update_divisor()])
        write(p, p - mean * inverse * (lr / (1 - beta1**step)))


@register_for(aten._fused_sgd_)
def _update_sgd(func: Any, parameters: Any, gradients: Any, momenta: Any, **options: Any) -> None:
    momentum = options["momentum"]
    for i, (p, g) in enumerate(zip(parameters, gradients, strict=True)):
        direction = (-g if options["maximize"] else g) + p * options["weight_decay"]
        if momentum:
            damped = direction * (1 - options["dampening"])
            write(momenta[i], direction if options["is_first_step"] else momenta[i] * momentum + damped)
            direction = direction + momenta[i] * momentum if options["nesterov"] else momenta[i]
        write(p, p - direction * float(options["lr"]))


@register_for(getattr(aten, private.unscale.__name__))
def _unscale_each(func: Any, gradients: Sequence[Any], found_inf: Tensor, inverse: Tensor) -> None:
    """Scale gradients in place. Numbers of the field are finite, but for those that stand for minus infinity."""
    for gradient in gradients:
        write(gradient, gradient * inverse)
        if bool(hidden_or_none(gradient).any()):
            found_inf.fill_(1.0)


@register_for(aten._foreach_copy_)
def _copy_each(func: Any, targets: Sequence[Tensor], sources: Sequence[Tensor], *rest: Any) -> None:
    for target, source in zip(targets, sources, strict=True):
        write(target, source)


@register_for(aten._foreach_norm)
def _norm_each(func: Any, tensors: Sequence[Any], ord: float = 2, dtype: Any = None) -> list[Any]:
    return [torch.linalg.vector_norm(x, ord) for x in tensors]


@register_for(aten._foreach_mul_, aten._foreach_mul)
def _multiply_each(func: Any, tensors: Sequence[Any], factor: Any) -> Any:
    factors = factor if isinstance(factor, list | tuple) else [factor] * len(tensors)
    products = [x * f for x, f in zip(tensors, factors, strict=True)]
    if func.overloadpacket is aten._foreach_mul:
        return products
    for x, product in zip(tensors, products, strict=True):
        write(x, product)
    return None


@register_for(aten.linalg_solve_triangular)
def _solve_by_rows(func: Any, a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    """Return x of a x = b (x a = b unless `left`), row by row: each row is what is left of b by the rows before, over the diagonal."""
    if not left:
        solved: Any = _solve_by_rows(func, a.transpose(-1, -2), b.transpose(-1, -2), upper=not upper, unitriangular=unitriangular)
        return solved.transpose(-1, -2)
    size = a.shape[-1]
    rows: dict[int, Any] = {}
    for i in reversed(range(size)) if upper else range(size):
        rest = b[..., i : i + 1, :]
        if rows:
            places = sorted(rows)
            known: Any = torch.cat([rows[j] for j in places], -2)
            rest = rest - matrix_product(a[..., i : i + 1, places[0] : places[-1] + 1], known)
        rows[i] = rest if unitriangular else rest / a[..., i : i + 1, i : i + 1]
    shape = rows[0 if upper else size - 1].shape  # the last row solved has the batches of both
    return torch.cat([rows[i].expand(shape) for i in range(size)], -2)


@register_for(aten.linalg_matrix_exp)
def _take_matrix_function(func: Any, x: FieldTensor) -> Any:
    """Return a polynomial of square matrices with random coefficients, in place of the power series: its derivative along a direction is
    linear in that, as torch has it of the function of a matrix of twice the size."""
    power: Any = lift_constants(torch.eye(x.shape[-1], dtype=torch.float64)).expand(x.shape)
    total: Any = power
    for i in range(1, _NUM_POWERS):
        power = power @ x
        total = total + power * random_numbers((), f"matrix_exp {i}", 0)
    return total
