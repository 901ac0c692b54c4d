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

from shardwise.lower.kernels import random_operators
from shardwise.lower.kernels.random_stream import DropoutDraw, Key, apply_dropout, key_of
from shardwise.lower.kernels.sample_positions import DrawnShard, ElementBox, MicrobatchSamples


@dataclass(slots=True)
class DeferredBufferWrites:
    """Updates of one buffer by the microbatches of a step, written after the step.

    `statistics`: by microbatch, (momentum, value) of each update of a moving average. `writes`: by microbatch, writes independent of the
    batch (counts), the same in each microbatch.
    """

    statistics: dict[int, list[tuple[float, Tensor]]] = field(default_factory=dict)
    writes: dict[int, list[Callable[[], object]]] = field(default_factory=dict)

    def clear(self) -> None:
        """Discard a step's updates."""
        self.statistics.clear()
        self.writes.clear()


@dataclass
class DrawState:
    """State that random draws, and writes to buffers, depend on besides tensors; the executor advances `step` and `microbatch`."""

    seed: int = 0
    step: int = 0
    microbatch: int = 0
    is_recomputing: bool = False  # then buffers are not written again
    samples: Sequence[MicrobatchSamples | None] = ()  # samples of the batch in each microbatch; empty where there is one
    deferred_writes: dict[int, DeferredBufferWrites] = field(default_factory=dict)  # buffers written after the step, by id
    _generators: dict[torch.device, torch.Generator] = field(default_factory=dict)
    _keyed: tuple[int, int] = (-1, -1)  # seed and step of `_keys`
    _keys: dict[int, Key] = field(default_factory=dict)
    _boxes: dict[tuple[DrawnShard, MicrobatchSamples | None], ElementBox] = field(default_factory=dict)

    def key(self, number: int) -> Key:
        """Return the key of a draw in this step."""
        if self._keyed != (self.seed, self.step):
            self._keyed, self._keys = (self.seed, self.step), {}
        key = self._keys.get(number)
        if key is None:
            key = self._keys[number] = key_of(self.seed, self.step, number)
        return key

    def box(self, place: DrawnShard) -> ElementBox:
        """Return the numbers of a shard's elements in this microbatch."""
        samples = self.samples[self.microbatch] if self.microbatch < len(self.samples) else None
        box = self._boxes.get((place, samples))
        if box is None:
            box = self._boxes[place, samples] = place.box(samples)
        return box

    def dropout(self, site: DrawSite, p: float) -> DropoutDraw:
        """Return the dropout at a site, with probability `p`."""
        return DropoutDraw(self.key(site.draw_index), self.box(site.shard), p)

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
class DrawSite:
    """Site of a draw: index of the operator and of the rank's shard of it; index among random operators; its shard of the draw."""

    operator_index: int
    shard_index: int
    draw_index: int
    shard: DrawnShard
    dtype: torch.dtype


def dropout(x: Tensor, p: float, draw: DrawState, where: DrawSite) -> Tensor:
    """Apply dropout: each element is retained with probability 1 - p and scaled by 1 / (1 - p)."""
    return x if p == 0.0 else apply_dropout(x, draw.dropout(where, p))


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float | None, drawing: tuple[DrawState, DrawSite]
) -> Tensor:
    """Return scaled dot-product attention with dropout of its weights. Keys may have fewer heads."""
    draw, site = drawing
    return random_operators.attention_with_dropout(q, k, v, mask, causal, scale, draw.dropout(site, p))


def draw_random(target: Callable[..., Any], draw: DrawState, where: DrawSite, *args: Any, **kwargs: Any) -> Any:
    """Run any other random operator."""
    name = target.__name__.partition(".")[0]
    if name.removesuffix("_") not in random_operators.SUPPORTED:
        return _with_borrowed_generator(target, draw, where, args, kwargs)
    if name in random_operators.DROPOUT_VARIANTS:
        return random_operators.apply_dropout_variant(name, args[0], draw.dropout(where, args[1]))
    key, box = draw.key(where.draw_index), draw.box(where.shard)
    device = next((x.device for x in args if isinstance(x, Tensor)), None) or torch.device(kwargs.get("device") or "cpu")
    return random_operators.draw_values(random_operators.draw_name(target.__name__), key, box, where.dtype, device, args, kwargs)


def _with_borrowed_generator(
    target: Callable[..., Any], draw: DrawState, where: DrawSite, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Run `target` with torch's global generators seeded for it, and restored afterwards."""
    device_candidates = [x.device if isinstance(x, Tensor) else x for x in (*args, *kwargs.values())]
    devices = list({d for d in device_candidates if isinstance(d, torch.device) and d.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(draw.generator(torch.device("cpu"), where.operator_index, where.shard_index).initial_seed())
        return target(*args, **kwargs)
