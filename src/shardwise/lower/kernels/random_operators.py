"""Random operators as functions of one stream of random numbers (`stream`): equal draws in a serial run and under every layout.

From a key of (seed, step, draw of the model) and the numbers of a shard's elements in the tensor of the whole batch to that shard of what
the whole batch draws.

Not modeled: draws inside of another operator (dropout between the layers of an LSTM, users' autograd functions).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.lower.kernels.random_stream import DropoutDraw, Key, apply_dropout, apply_dropout_, normal_numbers, uniform_numbers
from shardwise.lower.kernels.sample_positions import ElementBox

# Operators whose draws this module implements, without overload; in-place variants end in `_`.
SUPPORTED = frozenset(
    """
    dropout native_dropout feature_dropout alpha_dropout rand_like randn_like rand randn uniform normal normal_functional bernoulli
    exponential randint randint_like randperm multinomial scaled_dot_product_attention
    """.split()
)
DROPOUT_VARIANTS = frozenset("native_dropout feature_dropout alpha_dropout".split())
_SELU = 1.7580993408473766  # scale times alpha of Klambauer et al. 2017, as torch has it


def draw_name(operator: str) -> str:
    """Return the name by which `draw_values` knows an operator, from its name with overload.

    >>> draw_name("rand_like.default"), draw_name("bernoulli_.float"), draw_name("bernoulli.p"), draw_name("bernoulli.default"), draw_name("normal_.default")
    ('rand_like', 'over bernoulli', 'over bernoulli', 'bernoulli', 'over normal')
    """  # noqa: E501
    name, _, overload = operator.partition(".")
    base = name.removesuffix("_").removesuffix("_functional")
    over = base in ("bernoulli", "normal") and (base != name or overload == "p" or (base == "bernoulli" and overload == "Tensor"))
    return f"over {base}" if over else base


def draw_values(
    name: str, key: Key, box: ElementBox, dtype: torch.dtype, device: torch.device, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    """Return the draw of an operator of SUPPORTED, by its `draw_name`, at `box`, which is of `random_draws.drawn_shape`.

    Tensors in `args` are shards already.
    """

    def uniform(wanted: torch.dtype = torch.float64) -> Tensor:
        return uniform_numbers(key, box, device, wanted)

    def argument(position: int, key: str, default: Any) -> Any:
        return args[position] if len(args) > position else kwargs.get(key, default)

    match name:
        case "rand" | "rand_like":
            values = uniform(dtype)
        case "randn" | "randn_like":
            values = normal_numbers(key, box, device)
        case "uniform":
            low, high = argument(1, "from", 0.0), argument(2, "to", 1.0)
            values = low + (high - low) * uniform(dtype)
        case "over normal":  # in place
            values = normal_numbers(key, box, device) * argument(2, "std", 1.0) + argument(1, "mean", 0.0)
        case "normal":  # of two tensors, one of which may be a number
            values = normal_numbers(key, box, device) * argument(1, "std", 1.0) + argument(0, "mean", 0.0)
        case "over bernoulli":
            values = uniform() < argument(1, "p", 0.5)
        case "bernoulli":
            values = uniform() < args[0]
        case "exponential":
            values = -torch.log1p(-uniform()) / argument(1, "lambd", 1.0)
        case "randint" | "randint_like":
            numbers = [x for x in args if isinstance(x, int) and not isinstance(x, bool)]
            low, high = (0, numbers[0]) if len(numbers) == 1 else numbers[:2]
            values = low + torch.floor((high - low) * uniform())
        case "randperm":
            values = uniform().argsort()
        case "multinomial":
            values = _draw_indices(args[0], args[1], bool(argument(2, "replacement", False)), uniform())
        case _:
            raise AssertionError(name)
    return values.to(dtype)


def _draw_indices(weights: Tensor, count: int, repeats: bool, uniform: Tensor) -> Tensor:
    """Return `count` indices for every row of weights, by their cumulative sum with replacement, else by exponential races."""
    weights = weights.double()
    if repeats:
        sums = weights.cumsum(-1)
        return torch.searchsorted(sums, uniform * sums[..., -1:], right=True).clamp_(max=weights.shape[-1] - 1)
    return (weights / -torch.log1p(-uniform)).topk(count, -1).indices


def apply_dropout_variant(name: str, x: Tensor, draw: DropoutDraw) -> Any:
    """Apply torch's dropout called `name`: of elements; of channels ([N, C, ...]); alpha dropout (to SELU's minimum); with the mask
    returned.

    `draw.box` is of `random_draws.drawn_shape`.
    """
    p = draw.p
    if name == "dropout":
        return apply_dropout(x, draw)
    if name == "feature_dropout":
        shape = (*x.shape[:2], *(1,) * (x.dim() - 2))
        return x * apply_dropout(torch.ones(shape, dtype=x.dtype, device=x.device), draw)
    mask = uniform_numbers(draw.key, draw.box, x.device) < 1.0 - p
    if name == "native_dropout":
        return apply_dropout(x, draw), mask
    if p == 1.0:  # as torch: no scale would preserve the variance of zeros
        return x * 0.0
    scale = ((_SELU**2 * p + 1) * (1 - p)) ** -0.5
    return scale * torch.where(mask, x, -_SELU) + scale * _SELU * p


def attention_with_dropout(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, dropout: DropoutDraw
) -> Tensor:
    """Return softmax(q k^T scale + mask) v of queries [..., heads, S, d], with dropout of the weights. Keys may have fewer heads."""
    if torch.is_autocast_enabled(q.device.type):
        autocast_dtype = torch.get_autocast_dtype(q.device.type)
        with torch.autocast(q.device.type, enabled=False):
            return attention_with_dropout(q.to(autocast_dtype), k.to(autocast_dtype), v.to(autocast_dtype), mask, causal, scale, dropout)
    if q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16):  # as torch, which composes it too
        wide_mask = None if mask is None or mask.dtype is torch.bool else mask.float()
        return attention_with_dropout(q.float(), k.float(), v.float(), mask if wide_mask is None else wide_mask, causal, scale, dropout).to(
            q.dtype
        )
    if k.dim() > 3 and k.shape[-3] != q.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    root = (q.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    scores = (q * root) @ (k * root).mT
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    if mask is not None:
        scores = scores.masked_fill_(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask.to(scores.dtype)
    scores = scores.softmax(-1)  # frees the scores before softmax
    out: Tensor = _DropoutProduct.apply(scores, v, dropout)  # type: ignore[no-untyped-call]
    return out


class _DropoutProduct(torch.autograd.Function):
    """Dropout of weights, times values. Backward redraws the mask, so that only the weights are saved."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, v: Tensor, dropping: DropoutDraw) -> Tensor:
        ctx.drawn = dropping
        ctx.save_for_backward(weights, v)
        return apply_dropout(weights, dropping) @ v

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weights, v = ctx.saved_tensors
        of_weights = of_v = None
        if ctx.needs_input_grad[1]:
            of_v = (apply_dropout(weights, ctx.drawn).mT @ gradient).sum_to_size(v.shape)
        if ctx.needs_input_grad[0]:
            of_weights = gradient @ v.mT
            of_weights = apply_dropout(of_weights, ctx.drawn) if torch.is_grad_enabled() else apply_dropout_(of_weights, ctx.drawn)
        return of_weights, of_v, None
