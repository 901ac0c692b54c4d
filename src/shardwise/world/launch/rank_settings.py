"""Give ranks that torchrun, mpirun or srun started what `shardwise.launch` gives its ranks. In: a world. Out: settings of this process.

Matrix products (`world/matmul_backend`), threads and the C library's allocator, the same on all ranks; a cluster that is measured here is
measured with them, and a plan priced so. What the user has set by environment variables stays. Not modelled: OpenMP's waiting policy, which
is read when torch is imported.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress

import torch

from shardwise.world import matmul_backend
from shardwise.world.launch.join import EnvironmentRendezvous, agent_of
from shardwise.world.launch.launch import ALLOCATOR, num_cores
from shardwise.world.launch.started import has_variable, launcher_of
from shardwise.world.native_build import processor_description
from shardwise.world.world import World

_THREADS = "OMP_NUM_THREADS"
# Options of mallopt (glibc's malloc.h) by the environment variables of `ALLOCATOR`; their values are C ints.
_MALLOC_OPTIONS = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_TOP_PAD_": -2}
_LARGEST_INT = (1 << 31) - 1


def apply_launch_settings(world: World) -> None:
    """Set products, threads and allocator of this rank, as all ranks agree. Every rank calls it; a world is set once.

    Ranks of `shardwise.launch`, and a process without other ranks, stay as they are.
    """
    rendezvous = world.rendezvous
    if not isinstance(rendezvous, EnvironmentRendezvous) or world.has_launch_settings or world.device.type != "cpu":
        return
    environment = rendezvous.env
    world.has_launch_settings = True
    _set_allocator(environment)
    own_threads = wanted_threads(environment, num_cores(), torch.get_num_threads(), _is_set_by_agent())
    local = f"{own_threads} {environment.get(matmul_backend.PRODUCTS, '')} {processor_description()}"
    ranks = [text.split(" ", 2) for text in world.all_gather_text(local)]
    threads = min(int(count) for count, _, _ in ranks)
    torch.set_num_threads(threads)
    world.threads = threads
    if any(products for _, products, _ in ranks):
        return  # the user's own, which `join` has set
    chosen = world.broadcast_text(lambda: matmul_backend.load_or_measure_timings().chosen)
    if len({processor for _, _, processor in ranks}) == 1:  # else it may be slower, or less accurate, on another host
        matmul_backend.set_matmul_precision(chosen)


def wanted_threads(environment: Mapping[str, str], cores: int, current: int, is_set_by_agent: bool) -> int:
    """Return the number of a rank's threads: the user's, else an equal share of the host's `cores`.

    >>> wanted_threads({"RANK": "0", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}, 8, 1, is_set_by_agent=True)
    4
    >>> wanted_threads({"RANK": "0", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "3"}, 8, 3, is_set_by_agent=False)
    3
    """
    launcher = launcher_of(environment)
    local_size = environment.get(launcher.local_size, "") if launcher is not None and launcher.local_size else ""
    if (_THREADS in environment and not is_set_by_agent) or not local_size.isdecimal():
        return current
    return max(1, cores // max(1, int(local_size)))


def _is_set_by_agent() -> bool:
    """Return whether torchrun's agent chose the number of threads (one): it does where its own environment has none."""
    agent = agent_of(os.getpid())
    with suppress(OSError):
        return bool(agent) and not has_variable(agent, _THREADS)
    return False


def _set_allocator(environment: Mapping[str, str]) -> None:
    """Set the C library's options that `shardwise.launch` sets by the environment; another library's are left alone."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for name, value in ALLOCATOR.items():
            if name not in environment:
                mallopt(_MALLOC_OPTIONS[name], min(int(value), _LARGEST_INT))


__all__ = ["apply_launch_settings", "wanted_threads"]
