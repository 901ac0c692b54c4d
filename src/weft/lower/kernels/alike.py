"""Random draws that a serial run and every layout make alike, so that models that draw can be verified too.

In: a generator that belongs to (seed, step, microbatch, how many draws come before it in the model), what is drawn, its whole shape and
the piece of it that a rank has. Out: that piece of what the serial run draws. Everything is drawn whole, which training never does.

Not modelled: what draws in the midst of an operator of its own (dropout between the layers of an LSTM, multinomial).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Operators of which this module knows what they draw, without overload; in place they have a `_` behind.
SUPPORTED = frozenset(
    """
    dropout native_dropout feature_dropout alpha_dropout rand_like randn_like rand randn uniform normal normal_functional bernoulli
    exponential randint randint_like randperm scaled_dot_product_attention
    """.split()
)
DROPS = frozenset("native_dropout feature_dropout alpha_dropout".split())
_SELU = 1.7580993408473766  # scale times alpha of Klambauer et al. 2017, as torch has it


@dataclass(frozen=True, slots=True)
class Place:
    """`shape` of a whole tensor, and of each cut: which dimension, this rank's part, the number of parts."""

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, int, int], ...] = ()

    def piece(self, whole: Tensor) -> Tensor:
        """This rank's piece."""
        for dim, part, parts in self.cuts:
            whole = whole.chunk(parts, dim)[part]
        return whole

    def over(self, shape: Sequence[int]) -> Place:
        """The same cuts of a tensor of another shape, of which dimensions of size 1 are on every rank."""
        return Place(tuple(shape), tuple(cut for cut in self.cuts if cut[0] < len(shape) and shape[cut[0]] > 1))


def named(operator: str) -> str:
    """How `drawn` calls an operator, which has an overload behind it.

    >>> named("rand_like.default"), named("bernoulli_.float"), named("bernoulli.p"), named("bernoulli.default"), named("normal_.default")
    ('rand_like', 'over bernoulli', 'over bernoulli', 'bernoulli', 'over normal')
    """
    name, _, overload = operator.partition(".")
    plain = name.removesuffix("_").removesuffix("_functional")
    over = plain in ("bernoulli", "normal") and (plain != name or overload == "p" or (plain == "bernoulli" and overload == "Tensor"))
    return f"over {plain}" if over else plain


def drawn(
    name: str, generator: torch.Generator, place: Place, dtype: torch.dtype, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    """What an operator of SUPPORTED draws, by its name of `named`, for the piece at `place`. Tensors in `args` are pieces already."""

    def even() -> Tensor:
        return place.piece(torch.rand(place.shape, generator=generator, dtype=torch.float64))

    def normal() -> Tensor:
        return place.piece(torch.randn(place.shape, generator=generator, dtype=torch.float64))

    def given(position: int, key: str, default: Any) -> Any:
        return args[position] if len(args) > position else kwargs.get(key, default)

    match name:
        case "rand" | "rand_like":
            found = even()
        case "randn" | "randn_like":
            found = normal()
        case "uniform":
            low, high = given(1, "from", 0.0), given(2, "to", 1.0)
            found = low + (high - low) * even()
        case "over normal":  # of a tensor that is overwritten
            found = normal() * given(2, "std", 1.0) + given(1, "mean", 0.0)
        case "normal":  # of two tensors, of which one may be a number
            found = normal() * given(1, "std", 1.0) + given(0, "mean", 0.0)
        case "over bernoulli":
            found = (even() < given(1, "p", 0.5)).to(torch.float64)
        case "bernoulli":
            found = (even() < args[0]).to(torch.float64)
        case "exponential":
            found = -torch.log1p(-even()) / given(1, "lambd", 1.0)
        case "randint" | "randint_like":
            numbers = [x for x in args if isinstance(x, int) and not isinstance(x, bool)]
            low, high = (0, numbers[0]) if len(numbers) == 1 else numbers[:2]
            found = low + torch.floor((high - low) * even())
        case "randperm":
            found = even().argsort()
        case _:
            raise AssertionError(name)
    return found.to(dtype)


def kept(generator: torch.Generator, place: Place, p: float, like: Tensor) -> Tensor:
    """1 / (1 - p) where dropout keeps an element, 0 elsewhere."""
    mask = drawn("over bernoulli", generator, place, torch.float64, (like, 1.0 - p), {})
    return (mask / (1.0 - p)).to(like)


def dropped(name: str, generator: torch.Generator, place: Place, x: Tensor, p: float) -> Any:
    """What torch's dropout called `name` makes of x: elements; channels ([N, C, ...]); elements set to SELU's least; a mask too."""
    if name == "feature_dropout":
        return x * kept(generator, place.over((*place.shape[:2], *(1,) * (x.dim() - 2))), p, x)
    mask = kept(generator, place, p, x)
    if name == "native_dropout":
        return x * mask, mask != 0
    scale = ((_SELU**2 * p + 1) * (1 - p)) ** -0.5
    return scale * torch.where(mask != 0, x, -_SELU) + scale * _SELU * p


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, draw_kept: Callable[[Tensor], Tensor]
) -> Tensor:
    """softmax(q k^T scale + mask) v of queries [..., heads, S, d], the weights times `draw_kept(weights)`. Keys may have fewer heads."""
    if k.dim() > 3 and k.shape[-3] != q.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    weights = scores.softmax(-1)
    return weights * draw_kept(weights) @ v
