"""Cache of the probe's result. In: a path. Out: this machine as a `Cluster`, measured if no valid result is stored. [torch]"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from shardwise.cluster.catalogue import dump, parse_cluster
from shardwise.cluster.cluster import Cluster
from shardwise.cluster.probe.machine import num_cores, num_waiting_processes
from shardwise.cluster.probe.measure import BUSY_NOTE, fingerprint_rates, measure_here
from shardwise.cluster.probe.operators import PULSE
from shardwise.cluster.probe.rank import measure_pace
from shardwise.errors import ConfigError

VERSION = 20  # of the benchmark; stored results of other versions are invalid
BUSY_S = 300.0  # validity of a result of a busy machine
SETTLED_S = 600.0  # validity of a result whatever the machine's current speed
DRIFT = 1.15  # ratio of speeds, up or down, that invalidates a result


def probe(quick: bool = True, *, fresh: bool = False, path: Path | None = None) -> Cluster:
    """Return this machine as a cluster. The first call measures for some seconds; later ones read the stored result.

    A result measured under other load is measured again on an idle machine, and so is one of a machine whose cores have become faster or
    slower (virtual ones by their neighbours' load), some minutes later at the earliest. Concurrent processes wait for the first of them,
    and read its result.

    Args:
        quick: fewer sizes, rounds and ranks. `fresh`: measure even if a valid result is stored.
        path: file of the result; by default `cache_path()`.

    >>> probe().device.kind  # doctest: +SKIP
    'cpu'
    """
    path = path or cache_path()
    mark = fingerprint_rates(VERSION)
    if not fresh and (stored := _usable_result(path, mark)) is not None:
        return stored
    with _exclusive_lock(path):
        if not fresh and (stored := _usable_result(path, mark)) is not None:
            return stored
        # Read back from its text, so that the first call and the later ones plan with the same digits.
        cluster = parse_cluster(dump(measure_here(mark, quick)))
        with contextlib.suppress(OSError):  # an unwritable cache only costs some seconds next time
            temporary = path.with_suffix(f".{os.getpid()}")
            temporary.write_text(dump(cluster))
            temporary.replace(path)
    return cluster


def cache_path() -> Path:
    """Return the file of the measured cluster: in `.cache/shardwise` in the user's home."""
    return Path.home() / ".cache" / "shardwise" / "cluster.toml"


@contextlib.contextmanager
def _exclusive_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file; concurrent measurements would disturb each other."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(path.with_suffix(".lock"), "a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _usable_result(path: Path, mark: str) -> Cluster | None:
    """Return the stored result of this machine if it is valid; None if it is old and the machine is no longer busy or changed its speed."""
    stored = _load_stored(path, mark)
    if stored is None:
        return None
    busy = BUSY_NOTE in stored.device.source
    with contextlib.suppress(OSError):
        if 0 <= time.time() - path.stat().st_mtime < (BUSY_S if busy else SETTLED_S):
            return stored
    if num_waiting_processes() >= num_cores():
        return stored  # a new measurement would be worse
    return None if busy or _has_drifted(stored) else stored


def _has_drifted(stored: Cluster) -> bool:
    """Return whether a core's speed differs from the measured one."""
    pulses_per_s = dict(stored.speed(1, 1).rates).get(PULSE)
    return pulses_per_s is not None and not 1 / DRIFT < measure_pace(pulses_per_s) < DRIFT


def _load_stored(path: Path, mark: str) -> Cluster | None:
    try:
        cluster = parse_cluster(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError, ConfigError):
        return None
    return cluster if cluster.fingerprint == mark else None
