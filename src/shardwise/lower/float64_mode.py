"""float64 mode: run code in float64 where it names float32 or a narrower type, or creates tensors without a dtype, for exact comparisons.

`torch.finfo` of a tensor's dtype remains float32's, which a graph holds as a number. Not modeled: code that otherwise asks for a tensor's
dtype, and models of which some parts are float64 as written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.capture.fakes import tree_flatten, tree_map, written_arguments
from shardwise.capture.patches.casts import without_casts
from shardwise.capture.patches.float64_numbers import exact_float64
from shardwise.model.graph import NARROW
from shardwise.world import private

_FINFO = torch.finfo
_NARROW = {getattr(torch, name) for name in NARROW}


class Float64Casts(private.DispatchMode):  # type: ignore[no-untyped-call]
    """Replaces casts to narrower dtypes with casts to float64, and constants created by the model's code or the loss (weights) likewise."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not hasattr(func, "_schema"):  # a higher-order operator, as torch.cond
            return func(*args, **kwargs)
        if kwargs.get("dtype") in _NARROW:
            kwargs["dtype"] = torch.float64
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        narrow_ids = {id(x) for x in tensors if x.dtype in _NARROW}
        if narrow_ids and not written_arguments(func) and any(x.dtype is torch.float64 for x in tensors):
            args, kwargs = tree_map(lambda x: x.double() if id(x) in narrow_ids else x, (args, kwargs))
        try:
            result = func(*args, **kwargs)
        except RuntimeError:
            if func.__name__ not in ("full.default", "scalar_tensor.default") or "dtype" in kwargs:
                raise
            # The minimum of float64, used by a mask, in a tensor of float32.
            return func(*args, **{**kwargs, "dtype": torch.float64})
        if isinstance(result, Tensor) and result.dtype in _NARROW:
            if not tensors:
                return func(*args, **{**kwargs, "dtype": torch.float64})
            of_integers = not any(x.is_floating_point() or x.is_complex() for x in tensors) and kwargs.get("dtype") is None
            if func is torch.ops.aten.lift_fresh.default or of_integers:
                return result.double()
        return result


class ExactConstants(TorchFunctionMode):
    """Creates tensors from Python numbers in float64, without rounding."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        exact = exact_float64(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if exact is None else exact


def cast_to_float64(model: nn.Module) -> nn.Module:
    """Cast the model, in place, to float64; complex parameters to complex128, which torch leaves out."""
    model = model.double()
    for p in model.parameters():
        if p.is_complex():
            p.data = p.data.to(torch.complex128)
    return model


def is_float64(model: nn.Module) -> bool:
    """Return whether a model is in float64 as written."""
    return any(p.dtype is torch.float64 for p in model.parameters())


@contextmanager
def compute_in_float64(enabled: bool, is_native: bool = False) -> Iterator[None]:
    """Run this block in float64, if `wanted`. `is_float64`: the model is in float64 as written."""
    if not enabled:
        yield
        return
    original_finfo: Any = torch.finfo
    if not is_native:
        setattr(torch, "finfo", _finfo_as_float32)  # noqa: B010  # a class to type checkers
    try:
        with Float64Casts(), ExactConstants(), without_casts():  # type: ignore[no-untyped-call]  # torch's own constructors have no types
            yield
    finally:
        setattr(torch, "finfo", original_finfo)  # noqa: B010


def _finfo_as_float32(dtype: torch.dtype | None = None) -> Any:
    """Return `torch.finfo` of a tensor's dtype outside of float64 mode."""
    return _FINFO(torch.float32 if dtype is torch.float64 else torch.get_default_dtype() if dtype is None else dtype)
