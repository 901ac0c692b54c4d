"""Parameters, buffers and submodules that a model makes or replaces in forward.

Torch: a trace refuses a new tensor in a buffer's place, or has it as a constant; submodules of a first call stay, with fake tensors.
Wanted: a replacement tensor is written into the original, a new buffer is recorded with its value, and the rest is refused by name; after
    the call the model has its original submodules.
Test: tests/torch/capture/test_untraceable.py::test_what_can_be_held_is_what_eager_computes
Until: not known
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.capture.autograd_functions import TraceRecord
from shardwise.capture.patches.foreign_parameters import CREATES_PARAMETER
from shardwise.capture.patches.patch import Patch, Trace
from shardwise.errors import ModelError

_TensorsByPlace = dict[tuple[str, str, str], Any]  # (path of a module, attribute, parameter or buffer)


@contextmanager
def _writing_back(trace: Trace) -> Iterator[None]:
    model, record = trace.model, trace.record
    originals: _TensorsByPlace = {
        (path, key, kind): x for path, m in model.named_modules() for kind, table in _registered_tables(m) for key, x in table.items()
    }
    submodules = {path: (m, dict(m._modules)) for path, m in model.named_modules()}
    copies: dict[str, Tensor] = {}
    try:
        yield
    finally:
        # First, so that nothing made by the call counts as a part of the constructed model.
        for path, (module, modules_before) in submodules.items():
            module._modules.clear()
            module._modules.update(modules_before)
            for kind, table in _registered_tables(module):
                for key in [key for key in table if (path, key, kind) not in originals]:
                    copies[f"{path}.{key}".removeprefix(".")] = table.pop(key)
                    module._non_persistent_buffers_set.discard(key)
    for name, x in copies.items():
        if isinstance(x, nn.Parameter):
            raise ModelError(CREATES_PARAMETER.format(f"its parameter {name}"))
        if x is not None:
            record.buffers[name] = x
    _write_back(model, originals, record)


def _write_back(model: nn.Module, originals: _TensorsByPlace, record: TraceRecord) -> None:
    modules = {path: dict(_registered_tables(m)) for path, m in model.named_modules()}
    for (path, key, kind), old in originals.items():
        new = modules[path][kind].get(key)
        if new is not old:
            name = f"{path}.{key}".removeprefix(".")
            if old is None or new is None or new.shape != old.shape or new.dtype != old.dtype:
                raise ModelError(f"the model replaces its {kind} {name} by another kind of tensor while it runs; write into it instead")
            with torch.no_grad():
                old.copy_(new)
            modules[path][kind][key] = old
            if kind == "parameter":
                record.replaced_parameters.append(name)


def _registered_tables(module: nn.Module) -> tuple[tuple[str, dict[str, Any]], ...]:
    return ("parameter", module._parameters), ("buffer", module._buffers)


PATCH = Patch(while_called=_writing_back)
