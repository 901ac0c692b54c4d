"""`torch.distributions` with arguments that a model computes.

Torch: it looks at the values of the arguments, which only tells whether they are valid.
Wanted: no look while a model is traced; as a check like others it would pass, after a trace more for each.
Test: tests/torch/test_patches.py::distributions
Until: not known
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributions import Distribution

from weft.capture.fakes import put
from weft.capture.patches.patch import Patch, Trace


@contextmanager
def _unchecked(trace: Trace) -> Iterator[None]:
    with put(Distribution, "_validate_args", False):
        yield


PATCH = Patch(while_called=_unchecked)
