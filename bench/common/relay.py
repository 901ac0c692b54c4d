"""Two hosts and a link that loses, delays and cuts, on one machine: network namespaces whose packets a thread passes on. Needs root.

In: what the link does, which may change at any time. Out: hosts as those of `tests/support/networks`. For kernels without `netem`.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import random
import select
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.common import namespaces
from tests.support.networks import INTERFACE, SUBNET, NoNetworks, check_possible

SEGMENTS = 65536  # a packet with all that a device's offloading may put into it
TICK_S = 0.05


@dataclass
class Line:
    """What happens to packets, one way and the other: of so many a part is lost, each comes so much later; nothing passes what is cut.
    `bits_per_s`: of each way, 0 for as fast as they can be passed on."""

    delay_s: float = 0.0
    lost: float = 0.0
    bits_per_s: float = 0.0
    cut: tuple[bool, bool] = (False, False)  # from host 0, from host 1


class Relayed:
    """Two hosts with a line between them. A context manager; `names`, `address` and `command` as of `networks.Hosts`."""

    def __init__(self, line: Line | None = None) -> None:
        self.line = line or Line()
        self.names = [f"shardwise{os.getpid()}r{i}" for i in range(2)]
        self._done = threading.Event()
        self._ends: list[int] = []
        self._thread = threading.Thread(target=self._pass_on, daemon=True)

    def __enter__(self) -> Relayed:
        check_possible()
        try:
            for i, name in enumerate(self.names):
                namespaces.run("ip", "netns", "add", name)
                namespaces.run("ip", "-n", name, "link", "set", "lo", "up")
                unique = f"w{os.getpid()}n{i}"
                self._ends.append(namespaces.device(unique, name))
                namespaces.run("ip", "-n", name, "link", "set", unique, "name", INTERFACE)
                namespaces.run("ip", "-n", name, "address", "add", self.address(i), "peer", self.address(1 - i), "dev", INTERFACE)
                namespaces.run("ip", "-n", name, "link", "set", INTERFACE, "mtu", str(namespaces.MTU), "up")
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            raise NoNetworks(f"no line between two hosts could be made: {error}") from error
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def address(self, host: int) -> str:
        return f"{SUBNET}.{host + 1}"

    def command(self, host: int, words: Sequence[str]) -> list[str]:
        """What runs `words` on a host."""
        return ["ip", "netns", "exec", self.names[host], *words]

    def close(self) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
        for end in self._ends:
            os.close(end)
        self._ends = []
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def _pass_on(self) -> None:
        draw, free_s, number = random.Random(0), [0.0, 0.0], 0
        waiting: list[tuple[float, int, int, bytes]] = []
        while not self._done.is_set():
            left_s = max(0.0, min(TICK_S, waiting[0][0] - time.monotonic())) if waiting else TICK_S
            for end in select.select(self._ends, [], [], left_s)[0]:
                way = self._ends.index(end)
                with contextlib.suppress(BlockingIOError):
                    packet = os.read(end, SEGMENTS)
                    line, now = self.line, time.monotonic()
                    if line.cut[way] or draw.random() < line.lost:
                        continue
                    free_s[way] = max(free_s[way], now) + (8 * len(packet) / line.bits_per_s if line.bits_per_s else 0.0)
                    number += 1
                    heapq.heappush(waiting, (free_s[way] + line.delay_s, number, way, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, way, packet = heapq.heappop(waiting)
                with contextlib.suppress(BlockingIOError, OSError):
                    os.write(self._ends[1 - way], packet)
