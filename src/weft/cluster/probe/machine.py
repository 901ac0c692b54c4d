"""What this machine has and whether it is busy, as the system tells. In: nothing. Out: numbers and names; nothing is timed. [torch]"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

LOOKS = 10


def fingerprint(version: int) -> str:
    """Of the machine and the software whose speed it is: processor, cores, memory, GPUs, torch; and of what is measured."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    parts = (version, cpu_model(), num_cores(), memory_bytes() >> 28, gpus, torch.__version__)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def num_waiting() -> float:
    """Other processes that want a core now; 0 where the system does not tell.

    The load average looks a minute back, so an idle machine would seem busy after work of its own; it only bounds the count.
    """
    if not hasattr(os, "getloadavg"):
        return 0.0
    try:
        counts = []
        for _ in range(LOOKS):
            time.sleep(0.01)
            counts.append(int(Path("/proc/loadavg").read_text().split()[3].split("/")[0]) - 1)
    except (OSError, ValueError, IndexError):
        return os.getloadavg()[0]
    return min(sum(counts) / LOOKS, os.getloadavg()[0])


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """The processor's name, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Memory of the machine, or of the container where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit).read_text()))
        except (OSError, ValueError):
            continue
    return total


def resident_bytes() -> int:
    """What this process holds in memory now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 300 << 20
    return pages * os.sysconf("SC_PAGE_SIZE")


def has_bfloat16() -> bool:
    """Whether this machine multiplies bfloat16 in hardware."""
    if torch.cuda.device_count():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine() == "arm64"
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", " bf16"))


def capabilities() -> dict[str, Any]:
    """What this torch can do here: `gloo`, `nccl` (bool), `gpus` (count), `gpu` (name of the first)."""
    here = torch.distributed.is_available()
    gpus = torch.cuda.device_count()
    return {
        "gloo": here and torch.distributed.is_gloo_available(),
        "nccl": here and torch.distributed.is_nccl_available(),
        "gpus": gpus,
        "gpu": torch.cuda.get_device_name(0) if gpus else "",
    }
