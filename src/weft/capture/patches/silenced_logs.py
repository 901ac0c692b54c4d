"""What torch says while it traces.

Torch: warnings, log entries and lines on the standard error, of what then stands in its exception too.
Wanted: what stands in the way of a capture is said once, in the error.
Test: tests/torch/test_patches.py::silenced_logs
Until: not known
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

from weft.capture.patches.patch import Patch


@contextlib.contextmanager
def _unsaid() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(io.StringIO()):
                yield
    finally:
        logging.disable(before)


PATCH = Patch(while_traced=_unsaid)
