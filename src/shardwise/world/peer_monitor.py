"""Heartbeats between ranks of several hosts. In: a world with an external launcher. Out: the world is abandoned, with a reason.

Each rank increments a heartbeat counter in the rendezvous store, over a connection of its own, and reads those of the others. A host
without any heartbeat has failed: it ended, is stopped or unreachable, which a connection alone does not reveal for minutes. So has a rank
without heartbeats on a living host, after three times the time; and the store's host, if it does not answer.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

from shardwise.world.world import World

BEAT_S = 0.25
RANK_LIMIT_FACTOR = 3.0  # limit of a rank over that of a host
LEAVE_S = 30.0  # for the threads of a rank to abort their waits
STARTED_S = 600.0  # until all ranks have sent a heartbeat
LEFT = "left"  # heartbeat of a rank that leaves its step
EXIT_CODE = 4  # exit code


def failed_ranks(silent_s: Sequence[float], boxes: Sequence[Sequence[int]], limit_s: float) -> list[int]:
    """Return the failed ranks, given each one's time since its last heartbeat.

    >>> failed_ranks([0, 9, 6, 6], [(0, 1), (2, 3)], 5)
    [2, 3]
    >>> failed_ranks([0, 16, 1, 6], [(0, 1), (2, 3)], 5)
    [1]
    """
    hosts = [rank for box in boxes if all(silent_s[rank] > limit_s for rank in box) for rank in box]
    return sorted({*hosts, *(rank for rank, s in enumerate(silent_s) if s > RANK_LIMIT_FACTOR * limit_s)})


class PeerMonitor:
    """Context of one attempt of `world`; `worlds` are abandoned together. `limit_s`: longest time without a heartbeat of a host."""

    def __init__(self, world: World, boxes: Sequence[Sequence[int]], limit_s: float, worlds: list[World]) -> None:
        assert world.rendezvous is not None
        self._world, self._boxes, self._limit_s, self._worlds = world, boxes, limit_s, worlds
        self._connect = world.rendezvous.reconnect
        self._done = threading.Event()
        self._count = 0
        self._leaving = False
        self._has_left = threading.Event()
        self._last_heartbeats: dict[int, tuple[bytes, float]] = {}
        self._last_answer_s = 0.0  # time of the store's last answer
        self._store_error = ""
        self._threads = [
            threading.Thread(target=work, daemon=True, name="shardwise-peers") for work in (self._send_heartbeats, self._watch_heartbeats)
        ]

    def __enter__(self) -> PeerMonitor:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()
        self._has_left.set()
        for thread in () if self._leaving else self._threads:  # one inside a store operation would abort the process at its end
            thread.join(self._limit_s)

    def leave(self, why: str) -> None:
        """Abandon the worlds since this rank has left its step, and announce it to the other ranks."""
        self._leaving = True
        self._has_left.set()
        for world in self._worlds:
            if not world.failure_reason:
                world.abandon(why)

    def _keys(self) -> list[str]:
        return [f"beat/{rank}" for rank in range(self._world.num_ranks)]

    def _send_heartbeats(self) -> None:
        """Send and read heartbeats; this thread may wait for ever in a connection to a failed host."""
        try:
            store = self._connect()
            store.set(self._keys()[self._world.rank], "0")
            store.wait(self._keys(), timedelta(seconds=STARTED_S))
            while not self._done.wait(BEAT_S):
                self._exchange_heartbeats(store)
        except RuntimeError as error:
            self._store_error = str(error).split("\n")[0]

    def _exchange_heartbeats(self, store: Any) -> None:
        self._count += 1
        heartbeat = LEFT if self._leaving else str(self._count)
        store.set(self._keys()[self._world.rank], heartbeat)
        now = time.monotonic()
        for rank, value in enumerate(store.multi_get(self._keys())):
            if self._last_heartbeats.get(rank, (b"",))[0] != value:
                self._last_heartbeats[rank] = bytes(value), now
        self._last_answer_s = time.monotonic()

    def _watch_heartbeats(self) -> None:
        while not self._done.wait(BEAT_S):
            why = self._failure_reason()
            if why:
                break
        else:
            return
        for world in self._worlds:
            world.abandon(why)
        self._leaving = True
        if not (self._done.is_set() or self._has_left.wait(LEAVE_S)):
            print(f"shardwise: rank {self._world.rank}: {why}; its waits cannot be aborted, so it ends", file=sys.stderr, flush=True)
            os._exit(EXIT_CODE)

    def _failure_reason(self) -> str:
        """Return why this world has failed; empty: it has not."""
        if reason := next((world.failure_reason for world in self._worlds if world.failure_reason), ""):
            return reason
        if self._store_error:
            time.sleep(2 * BEAT_S)  # the store's rank may have ended because all are done
            return "" if self._done.is_set() else f"the store on the host of rank 0 has failed: {self._store_error}"
        if not self._last_answer_s:
            return ""
        now = time.monotonic()
        if now - self._last_answer_s > self._limit_s:
            return f"the host of the store has not answered for {now - self._last_answer_s:.1f} s"
        silent_s = [now - self._last_heartbeats[rank][1] for rank in range(self._world.num_ranks)]
        if failed := failed_ranks(silent_s, self._boxes, self._limit_s):
            return f"rank {', '.join(map(str, failed))} has sent no heartbeat for {max(silent_s[rank] for rank in failed):.1f} s"
        if leavers := [rank for rank, (value, _) in self._last_heartbeats.items() if value == LEFT.encode() and rank != self._world.rank]:
            return f"rank {leavers[0]} has left the step, since another rank has failed"
        return ""
