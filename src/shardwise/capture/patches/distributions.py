"""`torch.distributions` with arguments that a model computes.

Torch: it reads the values of the arguments, only to validate them.
Wanted: no validation while a model is traced; as a value check it would pass, at the cost of another trace for each.
Test: tests/torch/capture/test_patches.py::distributions
Until: not known
"""

from __future__ import annotations

from torch.distributions import Distribution

from shardwise.capture.fakes import VALIDATE_ARGS, patched_attribute
from shardwise.capture.patches.patch import Patch

PATCH = Patch(while_called=lambda trace: patched_attribute(Distribution, VALIDATE_ARGS, False))
