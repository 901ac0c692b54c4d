"""Operators that draw random numbers: what they draw depends on (seed, step, microbatch, operator) and on the piece that the rank has,
and on nothing else.

So ranks that hold the same tensor draw the same mask, ranks that hold different pieces draw different ones, and a recomputed
forward draws what the first one drew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.lower.kernels import alike
from weft.lower.kernels.alike import Place
from weft.lower.kernels.statistics import Later


@dataclass
class Draw:
    """What random draws, and writes to buffers, depend on besides tensors; the executor moves `step` and `microbatch` on."""

    seed: int = 0
    step: int = 0
    microbatch: int = 0
    recomputing: bool = False  # buffers are not written a second time
    alike: bool = False  # draws are pieces of what a serial run draws whole, for verification
    later: dict[int, Later] = field(default_factory=dict)  # buffers that are written after the step, by id
    _generators: dict[torch.device, torch.Generator] = field(default_factory=dict)

    def generator(self, device: torch.device, operator: int, part: int) -> torch.Generator:
        """A generator in the state that belongs to this operator, microbatch, step and piece."""
        made = self._generators.get(device)
        if made is None:
            made = self._generators[device] = torch.Generator(device)
        key = 0
        for number in (self.seed, self.step, self.microbatch, operator, part):
            key = (key * 6364136223846793005 + number + 1442695040888963407) % (1 << 63)
            key ^= key >> 29
        return made.manual_seed(key)


@dataclass(frozen=True, slots=True)
class Where:
    """Which draw it is: the operator's place in the graph and the rank's part of it; among those that draw, its number; its piece."""

    operator: int
    part: int
    number: int
    place: Place
    dtype: torch.dtype

    def alike(self, draw: Draw) -> torch.Generator:
        """The generator that serial runs and all layouts have for this draw."""
        return draw.generator(torch.device("cpu"), self.number, 0)


def dropout(x: Tensor, p: float, draw: Draw, where: Where) -> Tensor:
    """Each element kept with probability 1 - p and scaled by 1 / (1 - p)."""
    if p == 0.0:
        return x
    if draw.alike:
        return x * alike.kept(where.alike(draw), where.place, p, x)
    if p == 1.0:
        return x * 0.0
    mask = torch.empty_like(x).bernoulli_(1.0 - p, generator=draw.generator(x.device, where.operator, where.part))
    return x * mask.div_(1.0 - p)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
    enable_gqa: bool,
    draw: Draw,
    where: Where,
) -> Tensor:
    """Scaled dot-product attention with dropout on its weights: torch's global generator is borrowed and put back."""
    if draw.alike:
        place = Place((*where.place.shape[:-1], k.shape[-2]), where.place.cuts)
        return alike.attention(q, k, v, mask, causal, scale, lambda weights: alike.kept(where.alike(draw), place, p, weights))
    device = q.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(draw.generator(torch.device("cpu"), where.operator, where.part).initial_seed())
        return F.scaled_dot_product_attention(q, k, v, mask, p, causal, scale=scale, enable_gqa=enable_gqa)


def drawn(target: Callable[..., Any], draw: Draw, where: Where, *args: Any, **kwargs: Any) -> Any:
    """Any other operator that draws: `target` with torch's global generators borrowed and put back."""
    if draw.alike:
        name = target.__name__.partition(".")[0]
        if name in alike.DROPS:
            return alike.dropped(name, where.alike(draw), where.place, args[0], args[1])
        device = next((x.device for x in args if isinstance(x, Tensor)), kwargs.get("device"))
        return alike.drawn(alike.named(target.__name__), where.alike(draw), where.place, where.dtype, args, kwargs).to(device)
    lie = [x.device if isinstance(x, Tensor) else x for x in (*args, *kwargs.values())]
    devices = list({d for d in lie if isinstance(d, torch.device) and d.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(draw.generator(torch.device("cpu"), where.operator, where.part).initial_seed())
        return target(*args, **kwargs)
