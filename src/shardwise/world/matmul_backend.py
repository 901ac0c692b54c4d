"""Choose the float32 matmul library on CPUs: torch's default or oneDNN. In: this machine. Out: `MatmulTimings`, cached.

torch passes float32 matmuls to oneDNN if lower precision is allowed (`torch.set_float32_matmul_precision`). A processor without
low-precision instructions still multiplies in float32 then, on some much faster than torch's default library. So each setting is timed
against the default and used only if it is worth it and as accurate as float32. All ranks use one choice: that of the launcher, or of rank
0 where torchrun, mpirun or srun started ranks on equal processors (`world/launch/rank_settings`). Not modelled: float64 and bfloat16, which
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

from shardwise.errors import UsageError
from shardwise.world.native_build import default_cache, processor_description

PRODUCTS = "SHARDWISE_PRODUCTS"  # the environment variable with the ranks' matmul precision
HIGHEST = "highest"
PRECISIONS = (HIGHEST, "high", "medium")  # torch's names
MIN_SPEEDUP = 1.15  # least speedup over torch's default, geometric mean over shapes; less is within the variation between runs
MAX_ERROR_RATIO = 4.0  # largest ratio to the default's error; a matmul of really lower precision exceeds it by hundreds of times
SHAPES = ((256, 384, 1536), (256, 1536, 384), (256, 384, 4096))  # rows, in, out
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class MatmulTiming:
    """Measurement of one precision setting: speedup over torch's default, and ratio of its largest error to the default's."""

    name: str
    speedup: float
    error: float

    @property
    def is_worth_using(self) -> bool:
        return self.speedup >= MIN_SPEEDUP and self.error <= MAX_ERROR_RATIO


@dataclass(frozen=True, slots=True)
class MatmulTimings:
    """Measurements of this machine."""

    ways: tuple[MatmulTiming, ...] = ()

    @property
    def chosen(self) -> str:
        """The fastest setting that is worth it and accurate; torch's default if there is none.

        >>> MatmulTimings((MatmulTiming("high", 1.6, 1.2), MatmulTiming("medium", 4.0, 900.0))).chosen, MatmulTimings((MatmulTiming("medium", 1.1, 1.0),)).chosen
        ('high', 'highest')
        """  # noqa: E501
        return max((t for t in self.ways if t.is_worth_using), key=lambda t: t.speedup, default=MatmulTiming(HIGHEST, 1.0, 1.0)).name

    def __str__(self) -> str:
        timings = ", ".join(f"{t.name} is {t.speedup:.2f} times as fast with {t.error:.1f} times the error" for t in self.ways)
        return f"{self.chosen}; {timings}" if timings else self.chosen


def load_or_measure_timings(cache: Path | None = None) -> MatmulTimings:
    """Return the timings of this machine: measured on one core once (about a second), then read from the user's cache.

    Without a writable cache nothing is measured, since two runs could then differ.
    """
    with contextlib.suppress(OSError, RuntimeError, ValueError, KeyError, TypeError):
        folder = default_cache() if cache is None else cache
        words = "\0".join((torch.__version__, platform.machine(), processor_description(), repr((PRECISIONS, SHAPES))))
        path = folder / f"products-{hashlib.sha256(words.encode()).hexdigest()[:20]}.json"
        if path.exists():
            return MatmulTimings(tuple(MatmulTiming(**fields) for fields in json.loads(path.read_text())["ways"]))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            try:
                cached = MatmulTimings(tuple(measure(PRECISIONS[1:])))
                if cached.chosen != HIGHEST:  # other load on this machine may have affected it: measure twice, take the slower
                    cached = MatmulTimings(
                        tuple(min(pair, key=lambda t: t.speedup) for pair in zip(cached.ways, measure(PRECISIONS[1:]), strict=True))
                    )
                json.dump(asdict(cached), file)
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
        return cached
    return MatmulTimings()


def measure(precisions: Sequence[str], shapes: Sequence[tuple[int, int, int]] = SHAPES) -> list[MatmulTiming]:
    """Time each of `precisions` against torch's default, alternating: forward, input and weight gradients of every shape, on one core."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)  # a pool of threads would not survive a fork
    generator = torch.Generator().manual_seed(0)
    names = (HIGHEST, *precisions)
    ratios: dict[str, list[float]] = {name: [] for name in precisions}
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
                        set_matmul_precision(name)
                        began = time.thread_time()
                        product = a @ b
                        seconds[name].append(time.thread_time() - began)
                        errors[name] = max(errors[name], _relative_error(product, exact))
                for name in precisions:
                    ratios[name].append(min(seconds[HIGHEST]) / min(seconds[name]))
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)
    return [
        MatmulTiming(name, math.exp(sum(map(math.log, ratios[name])) / len(ratios[name])), errors[name] / errors[HIGHEST])
        for name in precisions
    ]


def set_matmul_precision(name: str) -> None:
    """Set the matmul precision of this process.

    Raises:
        UsageError: an unknown setting.
    """
    if name not in PRECISIONS:
        raise UsageError(f"{PRODUCTS}={name} is not one of {', '.join(PRECISIONS)}")
    torch.set_float32_matmul_precision(name)


def matmul_environment(variables: Mapping[str, str], device: str) -> dict[str, str]:
    """Return the variable to add to `variables` for ranks on `device`: this machine's best precision, unless it is set already.

    Empty on GPUs, where the same setting would switch to TF32.
    """
    if PRODUCTS in variables or device == "cuda" or (device == "auto" and torch.cuda.device_count()):
        return {}
    chosen = load_or_measure_timings().chosen
    return {} if chosen == HIGHEST else {PRODUCTS: chosen}


def _relative_error(product: Tensor, exact: Tensor) -> float:
    return float((product.double() - exact).abs().max() / exact.abs().max())
