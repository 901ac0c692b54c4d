"""How processors multiply float32 matrices: as torch does by itself, or through oneDNN. In: this machine. Out: `Products`, kept.

torch hands float32 products to oneDNN where narrower ones are allowed (`torch.set_float32_matmul_precision`). A processor that has no
such instructions still multiplies in float32 then, on some much faster than the library that torch takes otherwise. So each way is
timed beside torch's own and taken only where it is worth it and as exact as float32 is. Ranks that `weft.launch` starts all do what was
found once; under torchrun ranks may stand on hosts that differ, so only `WEFT_PRODUCTS` decides there. Not modelled: float64 and bfloat16,
which the setting does not touch, and shapes other than a transformer's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from weft.errors import UsageError
from weft.world.native_build import default_cache, processor

PRODUCTS = "WEFT_PRODUCTS"  # the environment variable with the way that ranks multiply
HIGHEST = "highest"
WAYS = (HIGHEST, "high", "medium")  # torch's names
WORTH = 1.15  # times as fast as torch's own, by the geometric mean over shapes; less is within what one run differs from the next
EXACT = 4.0  # times torch's own error at most; a product that is really narrow is off by hundreds of times that
SHAPES = ((256, 384, 1536), (256, 1536, 384), (256, 384, 4096))  # rows, in, out
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Way:
    """One way to multiply: how many times as fast as torch's own, and its largest error over that of torch's own."""

    name: str
    speedup: float
    error: float

    @property
    def taken(self) -> bool:
        return self.speedup >= WORTH and self.error <= EXACT


@dataclass(frozen=True, slots=True)
class Products:
    """What was found on this machine."""

    ways: tuple[Way, ...] = ()

    @property
    def chosen(self) -> str:
        """The fastest way that is worth it and exact; torch's own where there is none.

        >>> Products((Way("high", 1.6, 1.2), Way("medium", 4.0, 900.0))).chosen, Products((Way("medium", 1.1, 1.0),)).chosen
        ('high', 'highest')
        """
        return max((way for way in self.ways if way.taken), key=lambda way: way.speedup, default=Way(HIGHEST, 1.0, 1.0)).name

    def __str__(self) -> str:
        told = ", ".join(f"{way.name} is {way.speedup:.2f} times as fast with {way.error:.1f} times the error" for way in self.ways)
        return f"{self.chosen}; {told}" if told else self.chosen


def products(cache: Path | None = None) -> Products:
    """What this machine multiplies best by: measured on one core once (about a second), then read from the user's cache.

    Where nothing can be kept nothing is measured either, since two runs could then differ.
    """
    with contextlib.suppress(OSError, RuntimeError, ValueError, KeyError, TypeError):
        folder = default_cache() if cache is None else cache
        words = "\0".join((torch.__version__, platform.machine(), processor(), repr((WAYS, SHAPES))))
        path = folder / f"products-{hashlib.sha256(words.encode()).hexdigest()[:20]}.json"
        if path.exists():
            return Products(tuple(Way(**way) for way in json.loads(path.read_text())["ways"]))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            try:
                cached = Products(tuple(measure(WAYS[1:])))
                if cached.chosen != HIGHEST:  # whatever else ran here may have had a part in it
                    cached = Products(
                        tuple(min(pair, key=lambda way: way.speedup) for pair in zip(cached.ways, measure(WAYS[1:]), strict=True))
                    )
                json.dump(asdict(cached), file)
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
        return cached
    return Products()


def measure(ways: Sequence[str], shapes: Sequence[tuple[int, int, int]] = SHAPES) -> list[Way]:
    """Each of `ways` beside torch's own, in turn: forward, input's and weight's gradients of every shape, on one core."""
    threads, before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)  # a pool of threads would not survive a fork
    generator = torch.Generator().manual_seed(0)
    names = (HIGHEST, *ways)
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    errors: dict[str, float] = dict.fromkeys(names, 0.0)
    try:
        for rows, inner, outer in shapes:
            x, w = torch.randn(rows, inner, generator=generator), torch.randn(outer, inner, generator=generator)
            g = torch.randn(rows, outer, generator=generator)
            for a, b in ((x, w.t()), (g, w), (g.t(), x)):
                seconds: dict[str, list[float]] = {name: [] for name in names}
                exact = a.double() @ b.double()
                for _ in range(ROUNDS):
                    for name in names:
                        apply(name)
                        began = time.thread_time()
                        product = a @ b
                        seconds[name].append(time.thread_time() - began)
                        errors[name] = max(errors[name], _error(product, exact))
                for name in ways:
                    ratios[name].append(min(seconds[HIGHEST]) / min(seconds[name]))
    finally:
        torch.set_float32_matmul_precision(before)
        torch.set_num_threads(threads)
    return [Way(name, math.exp(sum(map(math.log, ratios[name])) / len(ratios[name])), errors[name] / errors[HIGHEST]) for name in ways]


def apply(name: str) -> None:
    """Multiply so in this process from now on.

    Raises:
        UsageError: a way that is not known.
    """
    if name not in WAYS:
        raise UsageError(f"{PRODUCTS}={name} is not one of {', '.join(WAYS)}")
    torch.set_float32_matmul_precision(name)


def environment(variables: Mapping[str, str], device: str) -> dict[str, str]:
    """What ranks on `device` are told besides `variables`: nothing where that says it, otherwise what this machine multiplies best by.

    Nothing on GPUs, which would multiply in TF32 where processors go through oneDNN: the setting is one for both.
    """
    if PRODUCTS in variables or device == "cuda" or (device == "auto" and torch.cuda.device_count()):
        return {}
    chosen = products().chosen
    return {} if chosen == HIGHEST else {PRODUCTS: chosen}


def _error(product: Tensor, exact: Tensor) -> float:
    return float((product.double() - exact).abs().max() / exact.abs().max())
