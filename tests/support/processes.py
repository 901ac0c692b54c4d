"""Which processes live, as the system tells. In: a parent's id. Out: ids."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def children_of(pid: int) -> set[int]:
    """Processes whose parent is `pid`, apart from those that have ended."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (OSError, ValueError):
                continue
            if int(parent) == pid and state != "Z":
                found.add(int(entry.name))
    return found


def gone(find: Callable[[], set[int]], wait_s: float = 5.0) -> set[int]:
    """What `find` still finds after up to `wait_s`."""
    until = time.monotonic() + wait_s
    while (left := find()) and time.monotonic() < until:
        time.sleep(0.02)
    return left
