"""`tensor.data`, read and assigned.

Torch: a trace loses that `.data` passes no gradient, and that an assignment to it writes a shared tensor.
Wanted: a detached view; an assignment is an in-place write of the values, and refused if it is none (another shape, shared memory).
Test: tests/torch/capture/test_untraceable.py::test_what_can_be_held_is_what_eager_computes
Until: not known
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.capture.patches.patch import CallHooks, Patch, Trace
from shardwise.errors import ModelError

READS, ASSIGNS = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]


def _read_data(tensor: Tensor, *_: type) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _watch_data(trace: Trace) -> CallHooks:
    def assign(into: Tensor, value: Tensor) -> None:
        storages = {x.untyped_storage()._cdata for x in (*trace.model.parameters(), *trace.model.buffers()) if x is not into}
        if value.shape != into.shape or value.dtype != into.dtype or value.untyped_storage()._cdata in storages:
            raise ModelError(
                "the model assigns to the .data of a tensor while it runs what has another shape or dtype, or is the memory of another "
                "parameter or buffer; write with .data.copy_ instead"
            )
        with torch.no_grad():
            into.detach().copy_(value)

    return CallHooks(replacements={READS: _read_data, ASSIGNS: assign})


PATCH = Patch(make_call_hooks=_watch_data)
