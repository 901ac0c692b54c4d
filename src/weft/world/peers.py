"""The watch that ranks of several hosts keep over one another. In: a world that was joined. Out: the world is abandoned, with a reason.

Each rank counts in the store where they met, over a connection of its own, and reads how far the others have counted. A host of which no
rank counts on is lost: it ended, is stopped, or nothing reaches it any more, which a connection alone does not tell for minutes. So is
a rank that does not count while its host does, after thrice the time; and the host of the store where that does not answer.
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

from weft.world.world import World

BEAT_S = 0.25
OF_A_RANK = 3.0  # times what a host may be silent
LEAVE_S = 30.0  # for the threads of a rank to leave what they wait in
STARTED_S = 600.0  # until all ranks count
LEFT = "left"  # what a rank counts that leaves its step
ENDED = 4  # exit code


def lost_ranks(silent_s: Sequence[float], boxes: Sequence[Sequence[int]], limit_s: float) -> list[int]:
    """The ranks that count as lost, given for how long each has been silent.

    >>> lost_ranks([0, 9, 6, 6], [(0, 1), (2, 3)], 5)
    [2, 3]
    >>> lost_ranks([0, 16, 1, 6], [(0, 1), (2, 3)], 5)
    [1]
    """
    hosts = [rank for box in boxes if all(silent_s[rank] > limit_s for rank in box) for rank in box]
    return sorted({*hosts, *(rank for rank, s in enumerate(silent_s) if s > OF_A_RANK * limit_s)})


class Peers:
    """Around one attempt of `world`; `worlds`: what is abandoned with it. `limit_s`: how long a host may be silent."""

    def __init__(self, world: World, boxes: Sequence[Sequence[int]], limit_s: float, worlds: list[World]) -> None:
        assert world.joined is not None
        self._world, self._boxes, self._limit_s, self._worlds = world, boxes, limit_s, worlds
        self._connect = world.joined.again
        self._done = threading.Event()
        self._count = 0
        self._leaving = False
        self._out = threading.Event()
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._answered_s = 0.0  # when the store last did
        self._broken = ""
        self._threads = [threading.Thread(target=work, daemon=True, name="weft-peers") for work in (self._talk, self._look)]

    def __enter__(self) -> Peers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()
        self._out.set()
        for thread in () if self._leaving else self._threads:  # one in the midst of a word to the store would abort the process as it ends
            thread.join(self._limit_s)

    def leave(self, why: str) -> None:
        """This rank has left its step; its other threads do so too, and the other ranks learn of it."""
        self._leaving = True
        self._out.set()
        for world in self._worlds:
            if not world.lost_why:
                world.abandon(why)

    def _keys(self) -> list[str]:
        return [f"beat/{rank}" for rank in range(self._world.num_ranks)]

    def _talk(self) -> None:
        """Count, and read what the others count; this thread may wait for ever in a connection to a host that is lost."""
        try:
            store = self._connect()
            store.set(self._keys()[self._world.rank], "0")
            store.wait(self._keys(), timedelta(seconds=STARTED_S))
            while not self._done.wait(BEAT_S):
                self._exchange(store)
        except RuntimeError as error:
            self._broken = str(error).split("\n")[0]

    def _exchange(self, store: Any) -> None:
        self._count += 1
        mine = LEFT if self._leaving else str(self._count)
        store.set(self._keys()[self._world.rank], mine)
        now = time.monotonic()
        for rank, value in enumerate(store.multi_get(self._keys())):
            if self._heard.get(rank, (b"",))[0] != value:
                self._heard[rank] = bytes(value), now
        self._answered_s = time.monotonic()

    def _look(self) -> None:
        while not self._done.wait(BEAT_S):
            why = self._lost()
            if why:
                break
        else:
            return
        for world in self._worlds:
            world.abandon(why)
        self._leaving = True
        if not (self._done.is_set() or self._out.wait(LEAVE_S)):
            print(f"weft: rank {self._world.rank}: {why}; it does not leave what it waits in, and ends", file=sys.stderr, flush=True)
            os._exit(ENDED)

    def _lost(self) -> str:
        """Why this world is over; empty: it is not."""
        if said := next((world.lost_why for world in self._worlds if world.lost_why), ""):
            return said
        if self._broken:
            time.sleep(2 * BEAT_S)  # the store's rank may have ended because all are done
            return "" if self._done.is_set() else f"the store of the host of rank 0 is gone: {self._broken}"
        if not self._answered_s:
            return ""
        now = time.monotonic()
        if now - self._answered_s > self._limit_s:
            return f"the host where ranks meet has not answered for {now - self._answered_s:.1f} s"
        silent_s = [now - self._heard[rank][1] for rank in range(self._world.num_ranks)]
        if gone := lost_ranks(silent_s, self._boxes, self._limit_s):
            return f"rank {', '.join(map(str, gone))} has not been heard of for {max(silent_s[rank] for rank in gone):.1f} s"
        if left := [rank for rank, (value, _) in self._heard.items() if value == LEFT.encode() and rank != self._world.rank]:
            return f"rank {left[0]} has left the step, since another is lost"
        return ""
