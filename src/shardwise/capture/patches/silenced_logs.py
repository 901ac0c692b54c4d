"""Output of torch while it traces.

Torch: warnings, log entries and lines on the standard error repeat the message of its exception.
Wanted: the reason of a failed capture is reported once, in the error.
Test: tests/torch/capture/test_patches.py::silenced_logs
Until: not known
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

from shardwise.capture.patches.patch import Patch


@contextlib.contextmanager
def _silence_torch() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(io.StringIO()):
                yield
    finally:
        logging.disable(before)


PATCH = Patch(while_traced=_silence_torch)
