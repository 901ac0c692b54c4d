"""The processes of one launch's ranks, as their launcher sees them. In: the process that forked them. Out: exit codes.

Not modelled: what they do, which `world/launch/watch` reads in their record.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shardwise.errors import RunError

PREPARE_S = 900.0  # for the capture that the ranks need
KILL_S = 10.0
LARGEST_MESSAGE = 1 << 16


class LostForkServer(RunError):
    """The fork server of the ranks has failed, and the ranks with it: only checkpoints survive."""


class PreparedRanks:
    """Ranks whose parent is the prepared process, or a fork server that it forked for them.

    Raises TimeoutError if their ids do not arrive within `start_s`, and what `check` raises, which is called while waiting.
    """

    def __init__(self, events: socket.socket, num_ranks: int, parent: int, start_s: float, check: Callable[[], None]) -> None:
        self.support_processes = {parent: "the process that starts ranks"}
        self._events = events
        self._living = set(range(num_ranks))
        events.settimeout(start_s)
        first = self._receive_event()
        if "nest" in first:
            self.support_processes[first["nest"]] = "the process that forks the ranks"
            deadline = time.monotonic() + PREPARE_S
            while not select.select([events], [], [], 0.1)[0]:
                check()
                if time.monotonic() > deadline:
                    raise TimeoutError
            first = self._receive_event()
        self.pids: list[int] = first["pids"]

    def _receive_event(self) -> dict[str, Any]:
        data = self._events.recv(LARGEST_MESSAGE)
        if not data:
            raise LostForkServer("the process that starts ranks has ended, and its ranks with it; was it killed?")
        return json.loads(data)  # type: ignore[no-any-return]

    def events(self, wait_s: float) -> list[tuple[int, int]]:
        events: list[tuple[int, int]] = []
        while select.select([self._events], [], [], 0 if events else wait_s)[0]:
            event = self._receive_event()
            if "forked" in event:
                self.pids[event["forked"]] = event["pid"]
                continue
            self._living.discard(event["rank"])
            events.append((event["rank"], event["code"]))
            if not self._living:
                break
        return events

    def fork(self, rank: int, generation: int) -> None:
        """Start a new process as `rank`, which has ended."""
        self._living.add(rank)
        self._events.send(json.dumps({"fork": rank, "generation": generation}).encode())

    def kill(self) -> None:
        with suppress(OSError, RunError):
            if self._living:
                self._events.send(b"kill")
            deadline = time.monotonic() + KILL_S
            while self._living and time.monotonic() < deadline:
                self.events(0.1)


class ForkedRanks:
    """Ranks whose parent is this process."""

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids
        self.support_processes: dict[int, str] = {}
        self._living = dict(enumerate(pids))

    def fork(self, rank: int, generation: int) -> None:
        raise RunError(f"rank {rank} was forked from this process, which does not fork it again")

    def events(self, wait_s: float) -> list[tuple[int, int]]:
        deadline = time.monotonic() + wait_s
        while True:
            events = []
            for rank, pid in list(self._living.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del self._living[rank]
                    events.append((rank, os.waitstatus_to_exitcode(status)))
            if events or time.monotonic() >= deadline:
                return events
            time.sleep(0.005)

    def kill(self) -> None:
        for pid in self._living.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + KILL_S
        while self._living and time.monotonic() < deadline:
            self.events(0.1)
