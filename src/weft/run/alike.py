"""The serial reference's random draws, made as every layout makes them for verification (`lower/kernels/alike`).

In: operators that the user's own module runs, as torch dispatches them, backward included. Out: the same, those that draw from a generator
that belongs to (seed, step, microbatch, how many draws came before). A forward that is run again in backward (`torch.utils.checkpoint`)
puts torch's own generator back to where it was, and by that its draws are known again. What is not known is left alone, and noted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.lower.kernels.alike import DROPS, SUPPORTED, Place, drawn, named
from weft.lower.kernels.randomness import Draw
from weft.world import private

_COMPOSED = {"dropout", "scaled_dot_product_attention"} | DROPS  # dispatched as what they are made of
_DRAWS = SUPPORTED - _COMPOSED
_FACTORIES = {"rand": 0, "randn": 0, "randint": -1, "randperm": 0}  # where the size stands


class Alike(private.DispatchMode):  # type: ignore[no-untyped-call]
    """Draws of one microbatch. `double`: numbers of float32 are of float64. torch's own generator moves on with every draw."""

    def __init__(self, seed: int, double: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draw, self._double = Draw(seed), double
        self._numbers: dict[bytes, int] = {}  # by the state of torch's generator
        self._unknown = False

    def start(self, step: int, microbatch: int) -> None:
        """Begin with another microbatch."""
        self._draw.step, self._draw.microbatch, self._numbers = step, microbatch, {}

    def made(self, count: int) -> bool:
        """Whether the microbatch drew `count` times, and never in a way that is not known."""
        return len(self._numbers) == count and not self._unknown

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.__name__.partition(".")[0]
        writes, name = name.endswith("_"), name.removesuffix("_")
        if name not in _DRAWS:
            if torch.Tag.nondeterministic_seeded not in func.tags:
                return func(*args, **kwargs)
            # Some that may draw do not, as they are called: attention's kernels without dropout.
            before = _states(args)
            found = func(*args, **kwargs)
            self._unknown |= any(not torch.equal(a, b) for a, b in zip(before, _states(args), strict=True))
            return found
        like = next((x for x in args if isinstance(x, Tensor)), None)
        if like is not None:
            shape, dtype, device = tuple(like.shape), kwargs.get("dtype") or like.dtype, like.device
            if name == "normal" and not writes:
                shape = tuple((args[0] + args[1]).shape)  # of which one may be a number
        else:
            size = args[_FACTORIES.get(name, -1)]
            shape = tuple(size) if isinstance(size, tuple | list) else (size,)
            dtype = kwargs.get("dtype") or (torch.int64 if name in ("randint", "randperm") else torch.get_default_dtype())
            device = torch.device(kwargs.get("device") or "cpu")
        if self._double and dtype is torch.float32:
            dtype = torch.float64
        number = self._numbers.setdefault(torch.random.get_rng_state().numpy().tobytes(), len(self._numbers))
        torch.rand(())
        generator = self._draw.generator(torch.device("cpu"), number, 0)
        found = drawn(named(func.__name__), generator, Place(shape), dtype, args, kwargs).to(device)
        if writes:
            args[0].copy_(found)
            return args[0]
        return found


def _states(args: Any) -> list[Tensor]:
    """Of the generators that an operator on these tensors may draw from."""
    devices = {x.device for x in args if isinstance(x, Tensor) and x.device.type == "cuda"}
    return [torch.random.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in sorted(devices, key=str))]
