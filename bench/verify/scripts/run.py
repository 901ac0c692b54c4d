"""One process that runs a script as it stands, and writes down every loss that it computes.

In: a folder with the script, its arguments, a rank as torchrun tells it. Out: a file of numbers: of every call of `backward`, and what the
script itself reads of tensors (`loss.item()`, `float(loss)`), training or not, in the order in which they come; then what a trainer of
transformers logged.

Both runs are of float64, so that rounding hides nothing: the default dtype is, and the original's models compute so where libraries name
float32. The original's models draw random numbers from shardwise's stream (`run/uncaptured/eager_draws`): torch's belong to no sample.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.lower.float64_mode import compute_in_float64
from shardwise.run.loop.module import sharded_modules_of
from shardwise.run.uncaptured.eager_draws import ReproducibleDraws

STANDINS = Path(__file__).parent / "standins"
TIMES = ("runtime", "per_second", "flos", "epoch", "step")  # of what trainers log
Numbers = list[float]


def script(folder: Path, name: str, arguments: list[str], original: bool, precision: str, standins: list[str], into: Path) -> int:
    """Run it. Gives its exit code."""
    numbers: Numbers = []
    os.chdir(folder)
    sys.path[:0] = [str(folder), *(str(STANDINS / one) for one in standins)]
    sys.argv = [name, *arguments]
    torch.set_num_threads(1)
    random.seed(0)  # which some scripts draw from without a seed of their own
    np.random.seed(0)
    if precision == "float64":
        torch.set_default_dtype(torch.float64)
    _record(numbers, str(folder))
    if original:
        _draw_alike(precision == "float64")
    elif precision == "float64":
        _compute_alike()
    code = 0
    try:
        runpy.run_path(str(folder / name), run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0) if isinstance(end.code, int | None) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    into.write_text(json.dumps(numbers + _logged(folder)))
    return code


def _record(numbers: Numbers, folder: str) -> None:
    """Let tensors write down what is read of them."""

    def watched(kept: Callable[..., Any], always: bool) -> Callable[..., Any]:
        def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            by = sys._getframe(1).f_code.co_filename
            if (always or by.startswith(folder)) and self.numel() == 1 and self.is_floating_point():
                numbers.append(float(kept_item(self.detach())))
            return kept(self, *args, **kwargs)

        return call

    kept_item = Tensor.item
    for name in ("backward", "item", "__float__"):
        setattr(Tensor, name, watched(getattr(Tensor, name), name == "backward"))


def _draw_alike(double: bool) -> None:
    """Let every model draw from shardwise's stream, and compute in float64 where its own code says float32."""
    inside: list[nn.Module] = []
    known: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()
    kept: Any = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if inside or next(self.parameters(), None) is None:
            return kept(self, *args, **kwargs)
        draws = known.setdefault(self, [ReproducibleDraws(torch.initial_seed(), double), 0])
        draws[1] += _is_counted(args) and _is_counted(kwargs)
        draws[0].start_call(draws[1])
        state = torch.random.get_rng_state()
        inside.append(self)
        try:
            with compute_in_float64(double), draws[0]:
                output = kept(self, *args, **kwargs)
        finally:
            inside.clear()
            torch.random.set_rng_state(state)
        return output

    nn.Module.__call__ = call  # type: ignore[method-assign]
    backward: Any = torch.autograd.backward

    running: list[bool] = []

    def call_backward(*args: Any, **kwargs: Any) -> Any:
        if running:  # the mode calls it again
            return backward(*args, **kwargs)
        running.append(True)
        try:
            with compute_in_float64(double):  # a function's own backward may name float32
                return backward(*args, **kwargs)
        finally:
            running.clear()

    torch.autograd.backward = call_backward


def _compute_alike() -> None:
    """Let models that the script leaves undivided (a reference beside the learner) compute in float64 as those of the original do."""
    inside: list[nn.Module] = []
    kept: Any = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if inside or torch.compiler.is_exporting() or next(self.parameters(), None) is None or sharded_modules_of(self):
            return kept(self, *args, **kwargs)
        inside.append(self)
        try:
            with compute_in_float64(True):
                return kept(self, *args, **kwargs)
        finally:
            inside.clear()

    nn.Module.__call__ = call  # type: ignore[method-assign]


def _is_counted(value: Any) -> bool:
    """Whether shardwise counts a call with it as a step of the model's random numbers: not with a cache that grows, as in generation."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    return all(map(_is_counted, value)) if isinstance(value, tuple | list) else isinstance(value, Tensor | bool | int | float | str | None)


def _logged(folder: Path) -> Numbers:
    state = folder / "out" / "trainer_state.json"
    if not state.exists():
        return []
    rows = json.loads(state.read_text())["log_history"]
    return [float(x) for row in rows for key, x in row.items() if isinstance(x, int | float) and not key.endswith(TIMES)]
