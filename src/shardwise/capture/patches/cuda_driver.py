"""The CUDA driver, which torch queries whenever a fake mode is entered.

Torch: a process that queried it cannot be forked into ranks that use a GPU.
Wanted: no query, also by fake modes of torch's own: host tensors need none.
Test: tests/torch/lower/test_gpu_paths.py::test_a_trace_leaves_the_driver_of_cuda_alone
Until: not known
"""

from __future__ import annotations

from shardwise.capture.fakes import DEVICE_INIT, FakeMode, HostFakeMode, patched_attribute
from shardwise.capture.patches.patch import Patch

PATCH = Patch(while_traced=lambda: patched_attribute(FakeMode, DEVICE_INIT, vars(HostFakeMode)[DEVICE_INIT]))
