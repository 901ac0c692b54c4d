"""Losses of rows and classes that two equal masks select.

Torch: 2.11 cannot infer that their numbers are equal.
Wanted: the trace assumes it.
Test: tests/ranks/run/test_picked.py
Until: 2.12
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.capture.fakes import told
from weft.capture.patches.patch import Patch


def _as_many(input: Tensor, target: Tensor, *_: Any, **__: Any) -> Any:
    if input.dim() == 2 and target.dim() == 1 and any(isinstance(x.shape[0], torch.SymInt) for x in (input, target)):
        told(input.shape[0] == target.shape[0])
    return NotImplemented


PATCH = Patch(calls={F.cross_entropy: _as_many, F.nll_loss: _as_many})
