"""`nn.Transformer` asks whether the mask that it is given is a causal one.

Torch: `torch.nn.Transformer` looks at the values of a mask, to choose the faster of two ways to the same result.
Wanted: of a mask whose values are not known, the other way.
Test: tests/torch/test_patches.py::causal_masks
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
