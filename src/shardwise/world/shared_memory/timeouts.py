"""Time-out messages. In: the member that was waited for, and the members' processes. Out: text.

The awaited member may itself wait for another; all processes of the host can see one that is stopped (SIGSTOP, a debugger).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def timeout_message(timeout_s: float, ranks: Sequence[int], pids: Sequence[int], index: int, awaited: int) -> str:
    """Return why member `index` timed out; `awaited`: the member that it waited for, -1 if unknown, or `index` itself if all others
    waited for it.

    >>> import os
    >>> timeout_message(2, [4, 5], [os.getpid(), os.getpid()], 1, 1)
    'Timed out after 2 s: the other ranks waited for this one, and gave up'
    """
    if awaited == index:
        return f"Timed out after {timeout_s:g} s: the other ranks waited for this one, and gave up"
    who = format_member(ranks, pids, awaited) if awaited >= 0 else "another rank"
    stopped = [format_member(ranks, pids, i) for i, pid in enumerate(pids) if i != index and _is_stopped(pid)]
    return f"Timed out after {timeout_s:g} s waiting for {who}" + (f"; stopped: {', '.join(stopped)}" if stopped else "")


def format_member(ranks: Sequence[int], pids: Sequence[int], index: int) -> str:
    """Return the name of a member in messages."""
    return f"rank {ranks[index]} (process {pids[index]})"


def _is_stopped(pid: int) -> bool:
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False
