"""Dtypes of values under autocast on any device, by torch's own autocast on tensors without data.

In: a graph, the dtypes of its values under autocast on processors, the precision, the device. Out: those on the device, and the
operators that run in their operands' dtype there. Where weights are held in 16 bits, these are all that the device's autocast would
compute in float32 and that of processors does not (norms, softmax): other frameworks do not cast them either, their kernels add up in
float32, and each cast would be a copy that is kept for backward. Operators of one kind on equal operands are tried once.

Not tried: users' autograd functions, and operators with no rule of shapes; these keep their traced dtype, which is the wider one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.capture.fakes import device_fake_mode, silence_fake_tensor_log
from shardwise.lower.torch_calls import (
    call_in_full_precision,
    call_in_operand_dtype,
    describe_constants,
    lower_arguments,
    torch_operator,
)
from shardwise.model.graph import Graph, Operator
from shardwise.plan.ir.precision import Precision

Dtypes = tuple[torch.dtype, ...]


@dataclass(frozen=True, slots=True)
class DeviceDtypes:
    """The dtype of every value, and the names of the operators that run without the device's autocast."""

    dtypes: Mapping[str, torch.dtype]
    kept_operators: frozenset[str]


def find_device_dtypes(
    graph: Graph, processor_dtypes: Mapping[str, torch.dtype], precision: Precision, device: torch.device
) -> DeviceDtypes:
    """Return the dtypes that a graph's values have under autocast to the precision's dtype on a device."""
    dtypes = {value: getattr(torch, t.dtype) for value, t in graph.tensors.items()}
    dtypes.update({v.value: processor_dtypes[v.value] for v in graph.parameters})
    tried: dict[object, tuple[Dtypes, bool]] = {}
    kept: set[str] = set()
    with device_fake_mode(), silence_fake_tensor_log(), autocast_anywhere(device.type, getattr(torch, precision.product_dtype)):
        for op in graph.operators:
            if op.function is not None:
                continue
            shapes, operands = tuple(graph.tensors[v].shape for v in op.inputs), tuple(dtypes[v] for v in op.inputs)
            wanted = tuple(processor_dtypes[v] for v in op.outputs) if precision.held_dtype else ()
            constants = describe_constants(op.args), describe_constants(tuple(value for _, value in op.kwargs))
            key = (op.target, constants, op.autocast, shapes, operands, wanted)
            if key not in tried:
                tried[key] = _try_operator(op, list(zip(shapes, operands, strict=True)), wanted, device)
            found, is_kept = tried[key]
            dtypes.update(zip(op.outputs, found, strict=False))
            if is_kept:
                kept.add(op.name)
    return DeviceDtypes(dtypes, frozenset(kept))


def _try_operator(
    op: Operator, operands: Sequence[tuple[tuple[int, ...], torch.dtype]], wanted: Dtypes, device: torch.device
) -> tuple[Dtypes, bool]:
    """Return the dtypes of an operator's outputs, none if it does not run without data, and whether it runs in its operands' dtype."""
    home, _, own = op.autocast.partition(":")
    if home:
        if not own:
            return _output_dtypes(op, operands, device, call_in_full_precision), False
        with autocast_anywhere(home, getattr(torch, own)):
            return _output_dtypes(op, operands, device), False
    found = _output_dtypes(op, operands, device)
    is_wide = len(found) == len(wanted) and any(a.itemsize > b.itemsize for a, b in zip(found, wanted, strict=True))
    if is_wide and _output_dtypes(op, operands, device, call_in_operand_dtype) == wanted:
        return wanted, True
    return found, False


def _output_dtypes(
    op: Operator,
    operands: Sequence[tuple[tuple[int, ...], torch.dtype]],
    device: torch.device,
    region: Callable[..., Any] | None = None,
) -> Dtypes:
    target = torch_operator(op.target)
    try:
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in operands]
        args, kwargs = lower_arguments(op, tensors, device)
        out = region(target, *args, **kwargs) if region is not None else target(*args, **kwargs)
        return tuple(x.dtype for x in (out if isinstance(out, (list, tuple)) else [out]))
    except Exception:  # of any class: what cannot be tried is not known to be narrow
        return ()


@contextmanager
def autocast_anywhere(device: str, dtype: torch.dtype) -> Iterator[None]:
    """A block of autocast that also works where there is no such device, where `torch.autocast` switches itself off."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
