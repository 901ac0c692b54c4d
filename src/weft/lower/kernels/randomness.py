"""Layout-independent random operators: an element's draw depends only on (seed, step, which draw of the model, the element's number in the
tensor of the whole batch).

So a run has the same loss under every layout and with any number of microbatches; ranks with the same tensor draw the same, and a
recomputed forward draws what the first one did. Draws inside of another operator (dropout between the layers of an LSTM, a user's autograd
function) depend on (seed, step, microbatch, operator, shard).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.lower.kernels import draws
from weft.lower.kernels.random_stream import Key, dropped, key_of
from weft.lower.kernels.sample_positions import Box, Place, Samples
from weft.lower.kernels.statistics import Later


@dataclass
class Draw:
    """State that random draws, and writes to buffers, depend on besides tensors; the executor advances `step` and `microbatch`."""

    seed: int = 0
    step: int = 0
    microbatch: int = 0
    recomputing: bool = False  # then buffers are not written again
    samples: Sequence[Samples | None] = ()  # samples of the batch in each microbatch; empty where there is one
    later: dict[int, Later] = field(default_factory=dict)  # buffers written after the step, by id
    _generators: dict[torch.device, torch.Generator] = field(default_factory=dict)
    _keyed: tuple[int, int] = (-1, -1)  # seed and step of `_keys`
    _keys: dict[int, Key] = field(default_factory=dict)
    _boxes: dict[tuple[Place, Samples | None], Box] = field(default_factory=dict)

    def key(self, number: int) -> Key:
        """Return the key of a draw in this step."""
        if self._keyed != (self.seed, self.step):
            self._keyed, self._keys = (self.seed, self.step), {}
        key = self._keys.get(number)
        if key is None:
            key = self._keys[number] = key_of(self.seed, self.step, number)
        return key

    def box(self, place: Place) -> Box:
        """Return the numbers of a shard's elements in this microbatch."""
        samples = self.samples[self.microbatch] if self.microbatch < len(self.samples) else None
        box = self._boxes.get((place, samples))
        if box is None:
            box = self._boxes[place, samples] = place.box(samples)
        return box

    def generator(self, device: torch.device, operator: int, part: int) -> torch.Generator:
        """Return a generator seeded for this operator, microbatch, step and shard."""
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = torch.Generator(device)
        key = 0
        for number in (self.seed, self.step, self.microbatch, operator, part):
            key = (key * 6364136223846793005 + number + 1442695040888963407) % (1 << 63)
            key ^= key >> 29
        return generator.manual_seed(key)


@dataclass(frozen=True, slots=True)
class Where:
    """Site of a draw: index of the operator and of the rank's shard of it; index among random operators; its shard of the draw."""

    operator: int
    part: int
    number: int
    place: Place
    dtype: torch.dtype


def dropout(x: Tensor, p: float, draw: Draw, where: Where) -> Tensor:
    """Apply dropout: each element is retained with probability 1 - p and scaled by 1 / (1 - p)."""
    return x if p == 0.0 else dropped(x, draw.key(where.number), draw.box(where.place), p)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float | None, drawing: tuple[Draw, Where]
) -> Tensor:
    """Return scaled dot-product attention with dropout of its weights. Keys may have fewer heads."""
    draw, site = drawing
    return draws.attention(q, k, v, mask, causal, scale, draws.Dropping(draw.key(site.number), draw.box(site.place), p))


def drawn(target: Callable[..., Any], draw: Draw, where: Where, *args: Any, **kwargs: Any) -> Any:
    """Run any other random operator."""
    name = target.__name__.partition(".")[0]
    if name.removesuffix("_") not in draws.SUPPORTED:
        return _borrowing(target, draw, where, args, kwargs)
    key, box = draw.key(where.number), draw.box(where.place)
    if name in draws.DROPS:
        return draws.dropped_as(name, key, box, args[0], args[1])
    device = next((x.device for x in args if isinstance(x, Tensor)), None) or torch.device(kwargs.get("device") or "cpu")
    return draws.drawn(draws.named(target.__name__), key, box, where.dtype, device, args, kwargs)


def _borrowing(target: Callable[..., Any], draw: Draw, where: Where, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run `target` with torch's global generators seeded for it, and restored afterwards."""
    device_candidates = [x.device if isinstance(x, Tensor) else x for x in (*args, *kwargs.values())]
    devices = list({d for d in device_candidates if isinstance(d, torch.device) and d.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(draw.generator(torch.device("cpu"), where.operator, where.part).initial_seed())
        return target(*args, **kwargs)
