"""`torch.distributions` with arguments that a model computes.

Torch: it looks at the values of the arguments, which only tells whether they are valid.
Wanted: no look while a model is traced; as a check like others it would pass, after a trace more for each.
Test: tests/torch/test_patches.py::distributions
Until: not known
"""

from __future__ import annotations

from torch.distributions import Distribution

from weft.capture.fakes import VALIDATES, put
from weft.capture.patches.patch import Patch

PATCH = Patch(while_called=lambda trace: put(Distribution, VALIDATES, False))
