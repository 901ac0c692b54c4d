"""CUDA's driver, which torch asks for devices whenever a mode of fake tensors is entered.

Torch: a process that has asked cannot be forked into ranks that use a GPU.
Wanted: it is not asked, by the modes that torch makes itself either: neither matters to tensors of the host.
Test: tests/torch/test_gpu_paths.py::test_a_trace_leaves_the_driver_of_cuda_alone
Until: not known
"""

from __future__ import annotations

from weft.capture.fakes import DEVICE_INIT, FakeMode, HostMode, put
from weft.capture.patches.patch import Patch

PATCH = Patch(while_traced=lambda: put(FakeMode, DEVICE_INIT, vars(HostMode)[DEVICE_INIT]))
