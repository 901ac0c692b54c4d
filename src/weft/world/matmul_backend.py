"""Choose the float32 matmul library on CPUs: torch's default or oneDNN. In: this machine. Out: `MatmulTimings`, cached.

torch passes float32 matmuls to oneDNN if lower precision is allowed (`torch.set_float32_matmul_precision`). A processor without
low-precision instructions still multiplies in float32 then, on some much faster than torch's default library. So each setting is timed
against the default and used only if it is worth it and as accurate as float32. Ranks that `weft.launch` starts all use the one measured
choice; under torchrun ranks may run on different hosts, so only `WEFT_PRODUCTS` decides there. Not modelled: float64 and bfloat16, which
the setting does not affect, and shapes other than a transformer's.
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

PRODUCTS = "WEFT_PRODUCTS"  # the environment variable with the ranks' matmul precision
HIGHEST = "highest"
WAYS = (HIGHEST, "high", "medium")  # torch's names
WORTH = 1.15  # least speedup over torch's default, geometric mean over shapes; less is within the variation between runs
EXACT = 4.0  # largest ratio to the default's error; a matmul of really lower precision exceeds it by hundreds of times
SHAPES = ((256, 384, 1536), (256, 1536, 384), (256, 384, 4096))  # rows, in, out
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Way:
    """Measurement of one precision setting: speedup over torch's default, and ratio of its largest error to the default's."""

    name: str
    speedup: float
    error: float

    @property
    def taken(self) -> bool:
        return self.speedup >= WORTH and self.error <= EXACT


@dataclass(frozen=True, slots=True)
class Products:
    """Measurements of this machine."""

    ways: tuple[Way, ...] = ()

    @property
    def chosen(self) -> str:
        """The fastest setting that is worth it and accurate; torch's default if there is none.

        >>> Products((Way("high", 1.6, 1.2), Way("medium", 4.0, 900.0))).chosen, Products((Way("medium", 1.1, 1.0),)).chosen
        ('high', 'highest')
        """
        return max((t for t in self.ways if t.taken), key=lambda t: t.speedup, default=Way(HIGHEST, 1.0, 1.0)).name

    def __str__(self) -> str:
        timings = ", ".join(f"{t.name} is {t.speedup:.2f} times as fast with {t.error:.1f} times the error" for t in self.ways)
        return f"{self.chosen}; {timings}" if timings else self.chosen


def products(cache: Path | None = None) -> Products:
    """Return the timings of this machine: measured on one core once (about a second), then read from the user's cache.

    Without a writable cache nothing is measured, since two runs could then differ.
    """
    with contextlib.suppress(OSError, RuntimeError, ValueError, KeyError, TypeError):
        folder = default_cache() if cache is None else cache
        words = "\0".join((torch.__version__, platform.machine(), processor(), repr((WAYS, SHAPES))))
        path = folder / f"products-{hashlib.sha256(words.encode()).hexdigest()[:20]}.json"
        if path.exists():
            return Products(tuple(Way(**fields) for fields in json.loads(path.read_text())["ways"]))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            try:
                cached = Products(tuple(measure(WAYS[1:])))
                if cached.chosen != HIGHEST:  # other load on this machine may have affected it: measure twice, take the slower
                    cached = Products(
                        tuple(min(pair, key=lambda t: t.speedup) for pair in zip(cached.ways, measure(WAYS[1:]), strict=True))
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
    """Time each of `precisions` against torch's default, alternating: forward, input and weight gradients of every shape, on one core."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
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
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)
    return [Way(name, math.exp(sum(map(math.log, ratios[name])) / len(ratios[name])), errors[name] / errors[HIGHEST]) for name in ways]


def apply(name: str) -> None:
    """Set the matmul precision of this process.

    Raises:
        UsageError: an unknown setting.
    """
    if name not in WAYS:
        raise UsageError(f"{PRODUCTS}={name} is not one of {', '.join(WAYS)}")
    torch.set_float32_matmul_precision(name)


def environment(variables: Mapping[str, str], device: str) -> dict[str, str]:
    """Return the variable to add to `variables` for ranks on `device`: this machine's best precision, unless it is set already.

    Empty on GPUs, where the same setting would switch to TF32.
    """
    if PRODUCTS in variables or device == "cuda" or (device == "auto" and torch.cuda.device_count()):
        return {}
    chosen = products().chosen
    return {} if chosen == HIGHEST else {PRODUCTS: chosen}


def _error(product: Tensor, exact: Tensor) -> float:
    return float((product.double() - exact).abs().max() / exact.abs().max())
