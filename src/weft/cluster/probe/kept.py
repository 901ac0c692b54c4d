"""The probe's result, kept. In: where. Out: this machine as a `Cluster`, measured where nothing that fits is stored. [torch]"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from weft.cluster.catalogue import dump, loads
from weft.cluster.cluster import Cluster
from weft.cluster.probe.here import BUSY, measure_here
from weft.cluster.probe.machine import fingerprint, num_cores, num_waiting
from weft.cluster.probe.operators import PULSE
from weft.cluster.probe.rank import pace
from weft.errors import ConfigError

VERSION = 20  # of what is measured; a stored result of another version is measured again
BUSY_S = 300.0  # for which a result of a busy machine is used all the same
SETTLED_S = 600.0  # for which a result is used whatever the machine's speed does
DRIFT = 1.15  # times as fast, or as slow, as it was measured: then it is measured again


def probe(quick: bool = True, *, fresh: bool = False, path: Path | None = None) -> Cluster:
    """This machine as a cluster. The first call measures for some seconds; later ones read the stored result.

    What was measured while other programs ran is measured again when they do not, and so is a machine whose cores compute faster or
    slower than they did (virtual ones at their neighbours' pleasure), some minutes later at the earliest. Processes that ask at the same
    time wait for the first of them, and read what it found.

    Args:
        quick: fewer sizes, rounds and ranks. `fresh`: measure even where a stored result fits.
        path: where the result is kept; by default `cache_path()`.

    >>> probe().device.kind  # doctest: +SKIP
    'cpu'
    """
    path = path or cache_path()
    mark = fingerprint(VERSION)
    if not fresh and (stored := _usable(path, mark)) is not None:
        return stored
    with _alone(path):
        if not fresh and (stored := _usable(path, mark)) is not None:
            return stored
        # Read back from its text, so that the first call and the later ones plan with the same digits.
        cluster = loads(dump(measure_here(mark, quick)))
        with contextlib.suppress(OSError):  # a cache that cannot be written costs some seconds next time, and nothing else
            part = path.with_suffix(f".{os.getpid()}")
            part.write_text(dump(cluster))
            part.replace(path)
    return cluster


def cache_path() -> Path:
    """Where the measured cluster is kept: `.cache/weft` in the user's home."""
    return Path.home() / ".cache" / "weft" / "cluster.toml"


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """While no other process is in here for the same file; measurements that run at once would measure one another."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(open(path.with_suffix(".lock"), "a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _usable(path: Path, mark: str) -> Cluster | None:
    """What is stored of this machine, unless it is some minutes old and the machine was busy then and is not now, or has another speed."""
    stored = _stored(path, mark)
    if stored is None:
        return None
    busy = BUSY in stored.device.source
    with contextlib.suppress(OSError):
        if 0 <= time.time() - path.stat().st_mtime < (BUSY_S if busy else SETTLED_S):
            return stored
    if num_waiting() >= num_cores():
        return stored  # what would be measured now is worse
    return None if busy or _drifted(stored) else stored


def _drifted(stored: Cluster) -> bool:
    """Whether a core computes at another speed than when it was measured."""
    then = dict(stored.speed(1, 1).rates).get(PULSE)
    return then is not None and not 1 / DRIFT < pace(then) < DRIFT


def _stored(path: Path, mark: str) -> Cluster | None:
    try:
        cluster = loads(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError, ConfigError):
        return None
    return cluster if cluster.fingerprint == mark else None
