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

from shardwise.capture.fakes import assume_in_trace
from shardwise.capture.patches.patch import Patch


def _assume_equal_lengths(input: Tensor, target: Tensor, *_: Any, **__: Any) -> Any:
    if input.dim() == 2 and target.dim() == 1 and any(isinstance(x.shape[0], torch.SymInt) for x in (input, target)):
        assume_in_trace(input.shape[0] == target.shape[0])
    return NotImplemented


PATCH = Patch(replacements={F.cross_entropy: _assume_equal_lengths, F.nll_loss: _assume_equal_lengths})
