"""Many steps of replicas whose updates may come late, with servers that hold the weights or without: who waits for whom.

In: seconds of every replica's every step, what a server's port takes for one worker's gradients and for one worker's weights, the update.
Out: a `Timeline`. Step t begins when its rank has ended step t - 1 and has the weights with the updates of steps 0 to t - 1 - staleness. A
port carries one message at a time in each direction, first come first served; a server updates when it has everyone's gradients of a step,
one step after another (`run/reduce/servers`). Without servers a step's gradients are summed when the last rank has them. Not modelled:
buckets that leave before a backward's end, and what serving takes from the compute of a server's own rank.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import UsageError
from weft.plan.timeline import COMPUTE_LANE, Span, Timeline


@dataclass(frozen=True, slots=True)
class Exchange:
    """`servers`: the ranks that hold the weights. Seconds: `push_s`, `pull_s` of one worker's gradients to one server and of its weights
    to one worker, `update_s` of a server's part. Without servers `push_s` is the whole sum's, and every rank updates all."""

    staleness: int
    push_s: float
    pull_s: float = 0.0
    update_s: float = 0.0
    servers: tuple[int, ...] = ()


def simulate_steps(compute_s: Sequence[Sequence[float]], exchange: Exchange, name: str = "steps") -> Timeline:
    """Time every step: `compute_s[rank][step]`. Lanes: "compute", and of servers "push", "update" and "pull".

    >>> simulate_steps([[1.0, 1.0], [1.0, 1.0]], Exchange(0, push_s=0.25, pull_s=0.5, update_s=0.25, servers=(0,))).total_s
    4.0

    Raises:
        UsageError: ranks with unlike numbers of steps, or a server that is no rank.
    """
    if len({len(row) for row in compute_s}) != 1 or any(not 0 <= rank < len(compute_s) for rank in exchange.servers):
        raise UsageError(f"{len(compute_s)} ranks of {sorted({len(row) for row in compute_s})} steps, servers {exchange.servers}")
    run = _Run(compute_s, exchange)
    run.all()
    return Timeline(name, len(compute_s), tuple(run.spans))


class _Run:
    """Events by time: (when, what, server, rank, step); of those at one time first the ends of what came first."""

    def __init__(self, compute_s: Sequence[Sequence[float]], exchange: Exchange) -> None:
        self.compute_s, self.exchange, self.num = compute_s, exchange, len(compute_s)
        self.parts = exchange.servers or (-1,)  # without servers one that is nobody's rank
        self.events: list[tuple[float, int, str, int, int, int]] = []
        self.spans: list[Span] = []
        self.begun = [0] * self.num
        self.computed = [0] * self.num
        self.free: dict[tuple[int, str], float] = defaultdict(float)
        self.pushed: dict[tuple[int, int], int] = defaultdict(int)
        self.num_updates = dict.fromkeys(self.parts, 0)
        self.has: dict[tuple[int, int], int] = defaultdict(int)  # (rank, version) -> parts of it

    def at(self, when: float, what: str, server: int, rank: int, step: int) -> None:
        heapq.heappush(self.events, (when, len(self.spans), what, server, rank, step))

    def all(self) -> None:
        for rank in range(self.num):
            self.begin(0.0, rank)
        while self.events:
            when, _, what, server, rank, step = heapq.heappop(self.events)
            {"computed": self.after_compute, "pushed": self.after_push, "made": self.after_update, "pulled": self.after_pull}[what](
                when, server, rank, step
            )

    def begin(self, when: float, rank: int) -> None:
        """Begin the rank's next step, if it may."""
        step, row = self.begun[rank], self.compute_s[rank]
        version = step - self.exchange.staleness
        if step == len(row) or self.computed[rank] < step or (version > 0 and self.has[rank, version] < len(self.parts)):
            return
        self.begun[rank] += 1
        self.spans.append(Span(rank, COMPUTE_LANE, f"step {step}", when, when + row[step], "step"))
        self.at(when + row[step], "computed", -1, rank, step)

    def busy(self, when: float, server: int, lane: str, seconds: float, name: str) -> float:
        """Something on a lane of a server, behind what is there; its end."""
        start = max(when, self.free[server, lane])
        self.free[server, lane] = end = start + seconds
        if seconds and server >= 0:
            self.spans.append(Span(server, lane, name, start, end, lane))
        return end

    def after_compute(self, when: float, server: int, rank: int, step: int) -> None:
        self.computed[rank] += 1
        for one in self.parts:
            takes = self.exchange.push_s if one not in (rank, -1) else 0.0
            self.at(self.busy(when, one, "push", takes, f"step {step} from {rank}") if takes else when, "pushed", one, rank, step)
        self.begin(when, rank)

    def after_push(self, when: float, server: int, rank: int, step: int) -> None:
        self.pushed[server, step] += 1
        if self.pushed[server, step] == self.num:
            takes = self.exchange.update_s + (self.exchange.push_s if server < 0 else 0.0)
            self.at(self.busy(when, server, "update", takes, f"step {step}"), "made", server, -1, step + 1)

    def after_update(self, when: float, server: int, rank: int, step: int) -> None:
        for one in range(self.num):
            takes = self.exchange.pull_s if server not in (one, -1) else 0.0
            self.at(self.busy(when, server, "pull", takes, f"version {step} to {one}") if takes else when, "pulled", server, one, step)

    def after_pull(self, when: float, server: int, rank: int, step: int) -> None:
        self.has[rank, step] += 1
        self.begin(when, rank)
