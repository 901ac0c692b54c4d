"""Reproducible random draws of an eagerly run module, equal to those of every layout (`lower/kernels/random_operators`).

A dispatch mode, active in backward too, in which random operators draw from the stream of (seed, step, number of the draw) for the given
samples of the batch. A forward that is recomputed in backward (`torch.utils.checkpoint`) resets torch's generator, by whose state its draws
are recognised and repeated. Unsupported random operators run unchanged and are noted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.lower.kernels.random_operators import DROPOUT_VARIANTS, SUPPORTED, apply_dropout_variant, draw_name, draw_values
from shardwise.lower.kernels.random_stream import DropoutDraw
from shardwise.lower.kernels.randomness import DrawState
from shardwise.lower.kernels.sample_positions import DrawnShard, MicrobatchSamples
from shardwise.model.batch.random_draws import SampleFold
from shardwise.world import private

_COMPOSED = {"dropout", "scaled_dot_product_attention"} | DROPOUT_VARIANTS - {"native_dropout"}  # dispatched as their component operators
_DRAWS = SUPPORTED - _COMPOSED
_FACTORIES = {"rand": 0, "randn": 0, "randint": -1, "randperm": 0}  # position of the size argument
_INTEGERS = ("randint", "randperm", "multinomial")


class ReproducibleDraws(private.DispatchMode):  # type: ignore[no-untyped-call]
    """`is_float64`: float32 draws become float64. torch's generator advances with every draw. `sample_folds`: of each draw."""

    def __init__(self, seed: int, is_float64: bool, sample_folds: Sequence[SampleFold | None] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draw, self._is_float64, self._sample_folds = DrawState(seed), is_float64, sample_folds
        self._draw_numbers: dict[bytes, int] = {}  # number of the draw by the state of torch's generator
        self._has_unsupported_draws = False

    def start_call(self, step: int, samples: MicrobatchSamples | None = None) -> None:
        """Begin a call of step `step` on some samples of the batch; None: all of it."""
        self._draw.step, self._draw.samples, self._draw_numbers = step, (samples,), {}

    def drew_exactly(self, count: int) -> bool:
        """Return whether the call drew exactly `count` times, by supported operators only."""
        return len(self._draw_numbers) == count and not self._has_unsupported_draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.__name__.partition(".")[0]
        writes, name = name.endswith("_"), name.removesuffix("_")
        if name not in _DRAWS:
            if torch.Tag.nondeterministic_seeded not in func.tags:
                return func(*args, **kwargs)
            # Some random operators do not draw in every call: attention kernels without dropout.
            states = _generator_states(args)
            result = func(*args, **kwargs)
            self._has_unsupported_draws |= any(not torch.equal(a, b) for a, b in zip(states, _generator_states(args), strict=True))
            return result
        number = self._draw_numbers.setdefault(torch.random.get_rng_state().numpy().tobytes(), len(self._draw_numbers))
        torch.rand(())
        shape, dtype, device = self._drawn_spec(name, writes, args, kwargs)
        fold = self._sample_folds[number] if number < len(self._sample_folds) else None
        key, box = self._draw.key(number), self._draw.box(DrawnShard(shape, fold=fold))
        if name == "native_dropout":
            return apply_dropout_variant(name, args[0], DropoutDraw(key, box, args[1]))
        result = draw_values(draw_name(func.__name__), key, box, dtype, device, args, kwargs)
        if writes:
            args[0].copy_(result)
            return args[0]
        return result

    def _drawn_spec(self, name: str, writes: bool, args: Any, kwargs: Any) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
        """Return shape (of the numbers drawn), dtype and device of a random operator's result."""
        like = next((x for x in args if isinstance(x, Tensor)), None)
        integer_dtype = torch.int64 if name in _INTEGERS else None
        if like is None:
            size = args[_FACTORIES.get(name, -1)]
            shape = tuple(size) if isinstance(size, tuple | list) else (size,)
            dtype = kwargs.get("dtype") or integer_dtype or torch.get_default_dtype()
            device = torch.device(kwargs.get("device") or "cpu")
        else:
            shape, dtype, device = tuple(like.shape), kwargs.get("dtype") or integer_dtype or like.dtype, like.device
            if name == "normal" and not writes:
                shape = tuple((args[0] + args[1]).shape)  # one of the two may be a number
            if name == "multinomial" and (args[2] if len(args) > 2 else kwargs.get("replacement", False)):
                shape = (*shape[:-1], args[1])
        return shape, torch.float64 if self._is_float64 and dtype is torch.float32 else dtype, device


def _generator_states(args: Any) -> list[Tensor]:
    """Return the states of the generators that an operator on these tensors may draw from."""
    devices = {x.device for x in args if isinstance(x, Tensor) and x.device.type == "cuda"}
    return [torch.random.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in sorted(devices, key=str))]
