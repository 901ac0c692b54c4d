"""A user's autograd function on one rank's tensors: its own `apply`, so that backward is the user's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.autograd_functions import FUNCTION_BASE, call_of
from shardwise.lower.float64_mode import Float64Casts, compute_in_float64
from shardwise.model.graph import Function


def wrap_user_function(captured: Function, device: torch.device, scale: float = 1.0) -> Callable[..., tuple[Tensor, ...]]:
    """Return a callable of the function's tensors. `device`: replaces device arguments; `scale`: of its output, if that is a mean over a
    sharded label."""
    call = call_of(captured)

    def localized(a: object) -> object:
        return device if isinstance(a, torch.device) else torch.float64 if captured.is_float64 and a is torch.float32 else a

    call = replace(call, arguments=tuple(map(localized, call.arguments)), keywords=tuple((k, localized(a)) for k, a in call.keywords))
    cls = _float64_class(captured.cls) if captured.is_float64 else captured.cls

    def called(*tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = call.arguments_with(tensors)
        out = cls.apply(*args, **kwargs)
        outputs = [y for y in (out if isinstance(out, tuple) else (out,)) if isinstance(y, Tensor)]
        return tuple(y * scale for y in outputs) if scale != 1.0 else tuple(outputs)

    called.__name__ = called.__qualname__ = "function"
    called.__module__ = __name__
    return called


@cache
def _float64_class(cls: Any) -> Any:
    """Return the class with its code in float64."""

    def under(name: str, code: Callable[..., Any]) -> Any:
        def wide(*args: Any, **kwargs: Any) -> Any:
            # As in the serial run, where torch function modes do not apply to code called by autograd.
            with Float64Casts() if name in ("backward", "vjp") else compute_in_float64(True):  # type: ignore[no-untyped-call]  # untyped in torch
                return code(*args, **kwargs)

        return staticmethod(wide)

    methods = {name: getattr(cls, name) for name in ("forward", "backward", "vjp", "setup_context")}
    return type(
        cls.__name__, (cls,), {name: under(name, code) for name, code in methods.items() if code is not getattr(FUNCTION_BASE, name)}
    )
