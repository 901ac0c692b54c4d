"""Properties and load of this machine as the system reports them: numbers and names; nothing is timed. [torch]"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

NUM_LOAD_SAMPLES = 10


def machine_fingerprint(version: int, *settings: str) -> str:
    """Return a hash of the machine and software (processor, cores, memory, GPUs, torch), of the benchmark's version and of `settings`."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    parts = (version, cpu_model(), num_cores(), memory_bytes() >> 28, gpus, torch.__version__, *settings)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def num_waiting_processes() -> float:
    """Return the number of other runnable processes; 0 if the system does not report it.

    The load average covers the last minute, so it includes this process's own work; it only bounds the count.
    """
    if not hasattr(os, "getloadavg"):
        return 0.0
    try:
        counts = []
        for _ in range(NUM_LOAD_SAMPLES):
            time.sleep(0.01)
            counts.append(int(Path("/proc/loadavg").read_text().split()[3].split("/")[0]) - 1)
    except (OSError, ValueError, IndexError):
        return os.getloadavg()[0]
    return min(sum(counts) / NUM_LOAD_SAMPLES, os.getloadavg()[0])


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """Return the processor's name, as far as the system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Return the memory of the machine, or of the container if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit).read_text()))
        except (OSError, ValueError):
            continue
    return total


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 300 << 20
    return pages * os.sysconf("SC_PAGE_SIZE")


def has_bfloat16() -> bool:
    """Return whether this machine multiplies bfloat16 in hardware."""
    if torch.cuda.device_count():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine() == "arm64"
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", " bf16"))


def torch_capabilities() -> dict[str, Any]:
    """Return the capabilities of this torch: `gloo`, `nccl` (bool), `gpus` (count), `gpu` (name of the first)."""
    has_distributed = torch.distributed.is_available()
    gpus = torch.cuda.device_count()
    return {
        "gloo": has_distributed and torch.distributed.is_gloo_available(),
        "nccl": has_distributed and torch.distributed.is_nccl_available(),
        "gpus": gpus,
        "gpu": torch.cuda.get_device_name(0) if gpus else "",
    }
