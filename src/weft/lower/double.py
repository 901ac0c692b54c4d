"""float64 throughout, where code names float32 or a narrower type, or makes tensors without a dtype: for comparisons in float64.

In: a block of the user's own code. Out: the same, with float64 in place of float32, bfloat16 and float16; what `torch.finfo` tells of a
tensor's dtype stays float32's, which a graph holds as a number. Not modelled: code that asks a tensor for its dtype otherwise, and models
of which some parts are float64 as they are written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.capture.fakes import tree_flatten, tree_map
from weft.capture.patches.casts import without_casts
from weft.capture.patches.float64_numbers import exactly
from weft.model.graph import NARROW
from weft.world import private

_FINFO = torch.finfo
_NARROW = {getattr(torch, name) for name in NARROW}


class Double(private.DispatchMode):  # type: ignore[no-untyped-call]
    """Casts to what is narrower become casts to float64, and so do constants that the model's code makes, or the loss brings (weights)."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not hasattr(func, "_schema"):  # an operator of operators, as torch.cond
            return func(*args, **kwargs)
        if kwargs.get("dtype") in _NARROW:
            kwargs["dtype"] = torch.float64
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        narrow = {id(x) for x in tensors if x.dtype in _NARROW}
        if narrow and not _writes(func) and any(x.dtype is torch.float64 for x in tensors):
            args, kwargs = tree_map(lambda x: x.double() if id(x) in narrow else x, (args, kwargs))
        try:
            result = func(*args, **kwargs)
        except RuntimeError:
            if func.__name__ not in ("full.default", "scalar_tensor.default") or "dtype" in kwargs:
                raise
            # A mask's least number, which is float64's, in a tensor of float32.
            return func(*args, **{**kwargs, "dtype": torch.float64})
        if isinstance(result, Tensor) and result.dtype in _NARROW:
            if not tensors:
                return func(*args, **{**kwargs, "dtype": torch.float64})
            of_integers = not any(x.is_floating_point() or x.is_complex() for x in tensors) and kwargs.get("dtype") is None
            if func is torch.ops.aten.lift_fresh.default or of_integers:
                return result.double()
        return result


class Exactly(TorchFunctionMode):
    """Tensors that the model's code makes of numbers hold them in float64, as they are written."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        exact = exactly(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if exact is None else exact


def widened(model: nn.Module) -> nn.Module:
    """The model, in place, with its parameters and buffers in float64; complex parameters of the same precision, which torch leaves."""
    model = model.double()
    for p in model.parameters():
        if p.is_complex():
            p.data = p.data.to(torch.complex128)
    return model


def is_double(model: nn.Module) -> bool:
    """Whether a model computes in float64 as it is written."""
    return any(p.dtype is torch.float64 for p in model.parameters())


@contextmanager
def doubled(wanted: bool, is_double: bool = False) -> Iterator[None]:
    """Whatever is made in this block is of float64, if that is `wanted`. `is_double`: the model is so as it is written."""
    if not wanted:
        yield
        return
    told: Any = torch.finfo
    if not is_double:
        setattr(torch, "finfo", _as_written)  # noqa: B010  # a class to type checkers
    try:
        with Double(), Exactly(), without_casts():  # type: ignore[no-untyped-call]  # torch's own constructors have no types
            yield
    finally:
        setattr(torch, "finfo", told)  # noqa: B010


def _as_written(dtype: torch.dtype | None = None) -> Any:
    """`torch.finfo` of what a tensor is without `doubled`."""
    return _FINFO(torch.float32 if dtype is torch.float64 else torch.get_default_dtype() if dtype is None else dtype)


def _writes(func: Any) -> bool:
    """Whether an operator writes one of its arguments."""
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)  # where torch says it
