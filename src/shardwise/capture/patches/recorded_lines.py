"""Stack traces of the operators.

Torch: it records them, which takes an eighth of the time, and they are unused; since 2.12 there is a switch for it.
Wanted: none if torch has the switch.
Test: tests/torch/house/test_private.py::test_a_trace_records_lines_of_code_only_where_torch_cannot_leave_them_out
Until: not known
"""

from __future__ import annotations

from contextlib import nullcontext

from shardwise.capture.fakes import NO_STACK_TRACES, fx_config, patched_attribute
from shardwise.capture.patches.patch import Patch

PATCH = Patch(
    while_traced=lambda: patched_attribute(fx_config, NO_STACK_TRACES, True) if hasattr(fx_config, NO_STACK_TRACES) else nullcontext()
)
