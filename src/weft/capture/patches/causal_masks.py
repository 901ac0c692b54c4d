"""`nn.Transformer` checks whether its mask argument is causal.

Torch: `torch.nn.Transformer` reads the values of a mask, to choose the faster of two equivalent kernels.
Wanted: the general kernel for a mask without values.
Test: tests/torch/capture/test_patches.py::causal_masks
Until: not known
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.capture.fakes import CAUSAL, DATA_DEPENDENT, put, transformer
from weft.capture.patches.patch import Patch, Trace

_ASKS: Any = getattr(transformer, CAUSAL)


def _asked_in(trace: Trace) -> Callable[..., bool]:
    def is_causal(*args: Any, **kwargs: Any) -> bool:
        try:
            with trace.answers.withheld():
                return bool(_ASKS(*args, **kwargs))
        except DATA_DEPENDENT:
            return False

    return is_causal


PATCH = Patch(while_called=lambda trace: put(transformer, CAUSAL, _asked_in(trace)))
