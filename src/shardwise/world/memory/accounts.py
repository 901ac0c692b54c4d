"""Memory accounting of one rank's device: current and peak bytes by part, and a limit.

In: the device, a limit. Out: `Accounts`. On CPUs a small library that wraps torch's allocator counts every allocation of this process
(since its fork) for the part that is set at the time; "host" is memory outside the simulated device: it counts neither towards the peak
nor towards the limit (the batch, offloaded activations, anything outside an engine). On GPUs torch counts itself.

Not modelled: memory that does not come from torch's allocator, such as workspaces inside libraries and Python's objects.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from ctypes import POINTER, c_int, c_int64, c_void_p
from functools import partial
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from shardwise.errors import OutOfMemory, UsageError
from shardwise.plan.plan import MemoryBreakdown
from shardwise.units import format_bytes
from shardwise.world.native_build import build_library, load_library

PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers")
HOST = "host"
_NUMBERS = {part: number for number, part in enumerate((*PARTS, HOST))}
_REMEDY = "use recompute=full, offload=activations, more microbatches, a higher zero or more ranks, or allow more by --device-memory"


_COUNTS_NOTHING = nullcontext()


class _PartCount:
    """Context of allocations for one part. Contexts of a step are classes: a generator takes three times as long."""

    __slots__ = ("_before", "_library", "_number")

    def __init__(self, library: ctypes.CDLL, number: int) -> None:
        self._library, self._number, self._before = library, number, 0

    def __enter__(self) -> None:
        self._before = self._library.shardwise_memory_part(self._number)

    def __exit__(self, *_: object) -> None:
        self._library.shardwise_memory_part(self._before)


class _OutOfMemoryGuard:
    """Context that raises the accounts' own error where an allocation fails."""

    __slots__ = ("_accounts", "_counting", "_rank")

    def __init__(self, accounts: Accounts, rank: int, counting: AbstractContextManager[None]) -> None:
        self._accounts, self._rank, self._counting = accounts, rank, counting

    def __enter__(self) -> None:
        self._counting.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._counting.__exit__(kind, error, traceback)
        if isinstance(error, torch.OutOfMemoryError):
            raise self._accounts.out_of_memory_error(self._rank) from error


class Accounts:
    """Accounts that count nothing, for the reason `reason`: no compiler, or another device."""

    def __init__(self, reason: str = "", limit: float = 0.0) -> None:
        self.reason, self.limit_bytes = reason, limit

    @property
    def is_counting(self) -> bool:
        """True if memory is counted."""
        return False

    def set_part(self, part: str) -> None:
        """Count allocations for this part from now on."""

    def counting(self, part: str) -> AbstractContextManager[None]:
        """Count allocations inside this context for this part."""
        return _COUNTS_NOTHING

    def assign(self, part: str, tensors: Iterable[Tensor]) -> None:
        """Count these tensors' memory for this part from now on, wherever it was allocated."""

    def current(self) -> MemoryBreakdown:
        """Bytes on the device now."""
        return MemoryBreakdown()

    def host_bytes(self) -> float:
        """Bytes on the host, outside the device, now."""
        return 0.0

    def peak(self) -> MemoryBreakdown:
        """Bytes by part at the device's peak."""
        return MemoryBreakdown()

    def reset_peak(self) -> None:
        """Restart the peak from the current bytes."""

    def last_refusal(self) -> tuple[MemoryBreakdown, float]:
        """Return the bytes by part when an allocation last exceeded the limit, and the bytes of that allocation (0: none did)."""
        return self.current(), 0.0

    def out_of_memory_error(self, rank: int) -> OutOfMemory:
        """Return the out-of-memory error of a rank that needs more than its device's limit."""
        held, more = self.last_refusal()
        parts = ", ".join(f"{part} {format_bytes(getattr(held, part))}" for part in PARTS)
        allowed = f"of {format_bytes(self.limit_bytes)} " if self.limit_bytes else ""
        needs = f" and needs {format_bytes(more)} more" if more else ""
        return OutOfMemory(f"rank {rank} holds {format_bytes(held.total)} {allowed}({parts}){needs}; {_REMEDY}")

    def with_out_of_memory_error(self, rank: int, part: str = "buffers") -> AbstractContextManager[None]:
        """Count for `set_part` inside this context. Raises OutOfMemory if an allocation fails."""
        return _OutOfMemoryGuard(self, rank, self.counting(part))

    def check(self, rank: int) -> None:
        """Raise OutOfMemory if the assigned bytes already exceed the limit."""
        if self.limit_bytes and self.current().total > self.limit_bytes:
            raise self.out_of_memory_error(rank)


class HostAccounts(Accounts):
    """Accounts that the library counts. All of a process share one state."""

    def __init__(self, library: ctypes.CDLL, limit: float = 0.0) -> None:
        super().__init__("", limit)
        self._library = library
        self._numbers = (ctypes.c_int64 * 19)()
        library.shardwise_memory_limit(int(limit))
        library.shardwise_memory_forget_peak()

    @property
    def is_counting(self) -> bool:
        return True

    def set_part(self, part: str) -> None:
        self._library.shardwise_memory_part(_NUMBERS[part])

    def counting(self, part: str) -> AbstractContextManager[None]:
        return _PartCount(self._library, _NUMBERS[part])

    def assign(self, part: str, tensors: Iterable[Tensor]) -> None:
        number = _NUMBERS[part]
        for storage in {s.data_ptr(): s for s in (x.untyped_storage() for x in tensors)}.values():
            if storage.nbytes() and not self._library.shardwise_memory_assign(storage.data_ptr(), number):
                # Memory shared between ranks, or allocated before counting began.
                self._library.shardwise_memory_add(number, storage.nbytes())
                weakref.finalize(storage, _subtract_bytes, self._library, number, storage.nbytes(), os.getpid())

    def _read(self) -> list[int]:
        self._library.shardwise_memory_read(self._numbers)
        return list(self._numbers)

    def current(self) -> MemoryBreakdown:
        return MemoryBreakdown(*map(float, self._read()[:5]))

    def host_bytes(self) -> float:
        return float(self._read()[5])

    def peak(self) -> MemoryBreakdown:
        return MemoryBreakdown(*map(float, self._read()[6:11]))

    def reset_peak(self) -> None:
        self._library.shardwise_memory_forget_peak()

    def last_refusal(self) -> tuple[MemoryBreakdown, float]:
        numbers = self._read()
        return (MemoryBreakdown(*map(float, numbers[12:17])), float(numbers[18])) if numbers[18] else (self.current(), 0.0)


def _subtract_bytes(library: ctypes.CDLL, number: int, size: int, process: int) -> None:
    if os.getpid() == process:  # a process that was forked meanwhile never counted it
        library.shardwise_memory_add(number, -size)


class CudaAccounts(Accounts):
    """Accounts that torch's device allocator counts; unassigned memory counts as activations."""

    def __init__(self, device: torch.device, limit: float = 0.0) -> None:
        super().__init__("", limit)
        self._device = device
        self._assigned: dict[int, tuple[str, int]] = {}
        torch.cuda.init()  # type: ignore[no-untyped-call]  # before it the allocator has no device and cannot reset its peak
        if limit:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
        torch.cuda.reset_peak_memory_stats(device)

    @property
    def is_counting(self) -> bool:
        return True

    def assign(self, part: str, tensors: Iterable[Tensor]) -> None:
        for x in tensors:
            if x.device.type == "cuda":
                self._assigned[x.untyped_storage().data_ptr()] = part, x.untyped_storage().nbytes()

    def _split(self, total: float) -> MemoryBreakdown:
        sums = dict.fromkeys(PARTS, 0.0)
        for part, size in self._assigned.values():
            sums[part] += size
        return MemoryBreakdown(**{**sums, "activations": max(0.0, total - sum(sums.values()) + sums["activations"])})

    def current(self) -> MemoryBreakdown:
        return self._split(float(torch.cuda.memory_allocated(self._device)))

    def peak(self) -> MemoryBreakdown:
        return self._split(float(torch.cuda.max_memory_allocated(self._device)))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


def accounts_of(device: torch.device, limit: float = 0.0) -> Accounts:
    """Return the accounts of a device, with a limit of `limit` bytes (0: the device's own).

    Raises:
        UsageError: a limit on CPUs where nothing can be counted.
    """
    if device.type == "cuda":
        return CudaAccounts(device, limit)
    library = load_memory_library() if device.type == "cpu" else f"{device.type} is not counted"
    if not isinstance(library, str):
        return HostAccounts(library, limit)
    if limit:
        raise UsageError(f"a limit of {format_bytes(limit)} for the device needs a C++ compiler to count by ({library}); leave it out")
    return Accounts(library)


SOURCE = Path(__file__).with_name("count.cpp")

_SIGNATURES = {
    "shardwise_memory_install": (c_int, []),
    "shardwise_memory_part": (c_int, [c_int]),
    "shardwise_memory_assign": (c_int, [c_void_p, c_int]),
    "shardwise_memory_add": (None, [c_int, c_int64]),
    "shardwise_memory_limit": (None, [c_int64]),
    "shardwise_memory_forget_peak": (None, []),
    "shardwise_memory_read": (None, [POINTER(c_int64)]),
}


def load_memory_library(cache: Path | None = None, compiler: str = "c++") -> ctypes.CDLL | str:
    """Return the library, installed in this process, or the reason why there is none."""
    home = Path(torch.__file__).parent
    links = [f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}", "-lc10"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    flags = ("-O2", "-std=c++20", "-fPIC", "-shared", abi, f"-I{home / 'include'}")
    build = partial(build_library, "memory", [SOURCE], SOURCE, flags, compiler, cache, linker_arguments=links, key=torch.__version__)
    library = load_library(build, _SIGNATURES)
    if isinstance(library, str) or library.shardwise_memory_install():
        return library
    return "torch's allocator of the host cannot be wrapped"
