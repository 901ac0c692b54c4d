"""`nn.Transformer` checks whether its mask argument is causal.

Torch: `torch.nn.Transformer` reads the values of a mask, to choose the faster of two equivalent kernels.
Wanted: the general kernel for a mask without values.
Test: tests/torch/capture/test_patches.py::causal_masks
Until: not known
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.capture.fakes import DATA_DEPENDENT_ERRORS, DETECT_CAUSAL_MASK, patched_attribute, transformer
from shardwise.capture.patches.patch import Patch, Trace

_DETECT: Any = getattr(transformer, DETECT_CAUSAL_MASK)


def _detect_in_trace(trace: Trace) -> Callable[..., bool]:
    def is_causal(*args: Any, **kwargs: Any) -> bool:
        try:
            with trace.answers.without_answers():
                return bool(_DETECT(*args, **kwargs))
        except DATA_DEPENDENT_ERRORS:
            return False

    return is_causal


PATCH = Patch(while_called=lambda trace: patched_attribute(transformer, DETECT_CAUSAL_MASK, _detect_in_trace(trace)))
