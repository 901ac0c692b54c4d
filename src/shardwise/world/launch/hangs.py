"""Detect hangs. In: each rank's last collective, heartbeat and process state. Out: the rank that hangs, and why; or None.

A rank announces the time limit of its current work (`world/recorder`): a step, an evaluation or a save a multiple of the previous ones,
other work none. One collective, one gap between heartbeats and one such piece of work may last as long as the largest limit of a living
rank. A stopped process needs no limit: the kernel reports it. Not modelled: a rank that computes for ever without an announced limit and
that nobody waits for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from shardwise.world.launch.stuck import find_culprit
from shardwise.world.recorder import RankStatus, process_state

STOPPED_S = 0.7  # a process is reported after being stopped for so long; a shell's Ctrl-Z and fg stop launcher and ranks at once
AWAKE_S = 1.0  # a launcher that has not checked for so long was stopped itself
MAX_RANKS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits. `unannounced_limit_s`: of work without an announced limit; `hang_s`: least limit of announced work, 0 for the former.

    >>> Limits(900.0, 5.0).limit_for(0.2), Limits(900.0, 5.0).limit_for(30.0), Limits(900.0, 5.0).limit_for(float("inf"))
    (5.0, 30.0, 900.0)
    """

    unannounced_limit_s: float
    hang_s: float = 0.0

    def limit_for(self, patience_s: float) -> float:
        """Return the limit of ranks that announced at most `announced_limit_s`."""
        return min(self.unannounced_limit_s, max(self.hang_s, patience_s)) if self.hang_s else self.unannounced_limit_s


@dataclass(frozen=True, slots=True)
class Hang:
    """The `rank` that blocks the run (-1: process `pid`, which ranks need), and `reason`, in one line."""

    rank: int
    reason: str
    pid: int = 0


class HangWatch:
    """Repeated hang detection over the ranks of one launch. `support_processes`: other processes that the ranks need, id -> description."""

    def __init__(self, limits: Limits, support_processes: Mapping[int, str], now: float) -> None:
        self._limits, self._support_processes = limits, support_processes
        self._last_look_s = self.awake_s = now
        self._stopped_since: dict[int, float] = {}  # process -> since when

    def find_hang(self, statuses: Sequence[RankStatus], ended: Mapping[int, int], pids: Sequence[int], now: float) -> Hang | None:
        """Return the first rank that hangs. If this process itself was stopped, all times count from now on."""
        if now - self._last_look_s > AWAKE_S:
            self.awake_s = now
            self._stopped_since.clear()
        self._last_look_s = now
        living = [s for s in statuses if s.rank not in ended and s.phase != "absent"]
        return self._find_stopped(living, pids, now) or self._find_straggler(statuses, living, now)

    def _find_stopped(self, living: Sequence[RankStatus], pids: Sequence[int], now: float) -> Hang | None:
        rank_of = {**{pids[s.rank]: s.rank for s in living}, **dict.fromkeys(self._support_processes, -1)}
        for pid, rank in rank_of.items():
            if process_state(pid) != "T":
                self._stopped_since.pop(pid, None)
            elif now - self._stopped_since.setdefault(pid, now) > STOPPED_S:
                what = f"rank {rank}: its process is stopped" if rank >= 0 else f"{self._support_processes[pid]} (process {pid}) is stopped"
                return Hang(rank, f"{what} (SIGSTOP, Ctrl-Z, a container that was paused); continue it with `kill -CONT {pid}`", pid)
        return None

    def _find_straggler(self, statuses: Sequence[RankStatus], living: Sequence[RankStatus], now: float) -> Hang | None:
        limit_s = self._limits.limit_for(max((s.announced_limit_s for s in living), default=0.0))
        since = self.awake_s

        def lasts(start_s: float) -> bool:
            return now - max(start_s, since) > limit_s

        if silent := next((s for s in living if lasts(s.heartbeat_s)), None):
            return Hang(
                silent.rank,
                f"rank {silent.rank} gave no sign for {limit_s:g} s; native code holds its interpreter, or the machine starves it: "
                "see where with py-spy, or raise the time-out",
            )
        if stuck := next((s for s in living if s.last is not None and s.last.is_running and lasts(s.last.start_s)), None):
            first, what = find_culprit(statuses, stuck.rank)
            remedy = "all members must call the same collectives in the same order; raise the time-out if this step may take so long"
            return Hang(first, f"{stuck.last} on rank {stuck.rank} lasts longer than {limit_s:g} s: {what}; {remedy}")
        working = [
            s for s in living if isfinite(s.announced_limit_s) and s.phase == "running" and not (s.last is not None and s.last.is_running)
        ]
        if busy := next((s for s in working if lasts(s.announced_at_s)), None):
            return Hang(
                busy.rank,
                f"rank {busy.rank} computes for longer than {limit_s:g} s at what it expected to take {busy.announced_limit_s:.1f} s at "
                f"most; "
                "see where with py-spy, or raise the time-out",
            )
        return None


def describe_ranks(statuses: Sequence[RankStatus], ended: Mapping[int, int]) -> list[str]:
    """Return a line for each rank with its last collective."""
    lines = []
    for status in statuses[:MAX_RANKS_SHOWN]:
        state = "ended" if status.rank in ended and status.phase == "running" else status.phase
        if status.last is None:
            what = "no collective yet"
        elif status.last.is_running:
            what = f"in {status.last} for {time.monotonic() - status.last.start_s:.1f} s"
        else:
            what = f"last did {status.last}"
        lines.append(f"  rank {status.rank} ({state}): {what}")
    return lines + ([f"  and {len(statuses) - MAX_RANKS_SHOWN} more ranks"] if len(statuses) > MAX_RANKS_SHOWN else [])
