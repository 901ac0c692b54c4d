"""What is said of a member that did not come in time. In: who was waited for, and the members' processes. Out: words.

Who is waited for may itself wait for somebody else; a process that is stopped (SIGSTOP, a debugger) is seen by all of its host.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def timeout_message(timeout_s: float, ranks: Sequence[int], pids: Sequence[int], index: int, awaited: int) -> str:
    """Why member `index` gave up; `awaited`: the member that it waited for, -1 where that is not known, or `index` itself where all
    others waited for it.

    >>> import os
    >>> timeout_message(2, [4, 5], [os.getpid(), os.getpid()], 1, 1)
    'Timed out after 2 s: the other ranks waited for this one, and gave up'
    """
    if awaited == index:
        return f"Timed out after {timeout_s:g} s: the other ranks waited for this one, and gave up"
    who = named(ranks, pids, awaited) if awaited >= 0 else "another rank"
    still = [named(ranks, pids, i) for i, pid in enumerate(pids) if i != index and _stopped(pid)]
    return f"Timed out after {timeout_s:g} s waiting for {who}" + (f"; stopped: {', '.join(still)}" if still else "")


def named(ranks: Sequence[int], pids: Sequence[int], index: int) -> str:
    """A member, for people."""
    return f"rank {ranks[index]} (process {pids[index]})"


def _stopped(pid: int) -> bool:
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False
