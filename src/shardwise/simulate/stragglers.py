"""Simulation of data-parallel steps with stragglers and bounded staleness, with parameter servers or all-reduce.

In: seconds of every replica's every step, of one worker's push and pull at a server's port, and of the update.
Out: a `Timeline`. Step t begins when its rank has ended step t - 1 and has the weights with the updates of steps 0 to t - 1 - staleness. A
port carries one message at a time in each direction, first come first served; a server updates when it has all gradients of a step,
step by step (`run/gradients/parameter_servers`). Without servers a step's gradients are reduced when the last rank has them. Not modelled:
buckets sent before a backward's end, and the compute that serving takes from a server's own rank.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.errors import UsageError
from shardwise.plan.ir.timeline import COMPUTE_LANE, Span, Timeline


@dataclass(frozen=True, slots=True)
class ServerExchange:
    """Costs of exchanging gradients and weights. `servers`: the server ranks. `push_s`: one worker's gradients to one server; `pull_s`: its
    weights to one worker; `update_s`: a server's shard. Without servers `push_s` is the all-reduce, and every rank updates all weights."""

    staleness: int
    push_s: float
    pull_s: float = 0.0
    update_s: float = 0.0
    servers: tuple[int, ...] = ()


def simulate_steps(compute_s: Sequence[Sequence[float]], exchange: ServerExchange, name: str = "steps") -> Timeline:
    """Simulate every step and return its timeline. `compute_s[rank][step]`. Lanes: "compute", and of servers "push", "update" and "pull".

    >>> simulate_steps([[1.0, 1.0], [1.0, 1.0]], ServerExchange(0, push_s=0.25, pull_s=0.5, update_s=0.25, servers=(0,))).total_s
    4.0

    Raises:
        UsageError: ranks with unlike numbers of steps, or a server that is no rank.
    """
    if len({len(row) for row in compute_s}) != 1 or any(not 0 <= rank < len(compute_s) for rank in exchange.servers):
        raise UsageError(f"{len(compute_s)} ranks of {sorted({len(row) for row in compute_s})} steps, servers {exchange.servers}")
    run = _StepSimulator(compute_s, exchange)
    run.run()
    return Timeline(name, len(compute_s), tuple(run.spans))


class _StepSimulator:
    """Event queue by time: (when, event, server, rank, step); simultaneous events in the order of creation."""

    def __init__(self, compute_s: Sequence[Sequence[float]], exchange: ServerExchange) -> None:
        self.compute_s, self.exchange, self.num_ranks = compute_s, exchange, len(compute_s)
        self.server_ranks = exchange.servers or (-1,)  # -1 stands for all-reduce
        self.events: list[tuple[float, int, str, int, int, int]] = []
        self.spans: list[Span] = []
        self.begun = [0] * self.num_ranks
        self.computed = [0] * self.num_ranks
        self.free: dict[tuple[int, str], float] = defaultdict(float)
        self.pushed: dict[tuple[int, int], int] = defaultdict(int)
        self.num_updates = dict.fromkeys(self.server_ranks, 0)
        self.num_pulled: dict[tuple[int, int], int] = defaultdict(int)  # (rank, version) -> shards of it

    def add_event(self, when: float, event: str, server: int, rank: int, step: int) -> None:
        heapq.heappush(self.events, (when, len(self.spans), event, server, rank, step))

    def run(self) -> None:
        for rank in range(self.num_ranks):
            self.begin(0.0, rank)
        while self.events:
            when, _, what, server, rank, step = heapq.heappop(self.events)
            {"computed": self.after_compute, "pushed": self.after_push, "made": self.after_update, "pulled": self.after_pull}[what](
                when, server, rank, step
            )

    def begin(self, when: float, rank: int) -> None:
        """Begin the rank's next step if its predecessor and weights are ready."""
        step, row = self.begun[rank], self.compute_s[rank]
        version = step - self.exchange.staleness
        if step == len(row) or self.computed[rank] < step or (version > 0 and self.num_pulled[rank, version] < len(self.server_ranks)):
            return
        self.begun[rank] += 1
        self.spans.append(Span(rank, COMPUTE_LANE, f"step {step}", when, when + row[step], "step"))
        self.add_event(when + row[step], "computed", -1, rank, step)

    def occupy(self, when: float, server: int, lane: str, seconds: float, name: str) -> float:
        """Queue `seconds` of work on a lane of a server and return its end."""
        start = max(when, self.free[server, lane])
        self.free[server, lane] = end = start + seconds
        if seconds and server >= 0:
            self.spans.append(Span(server, lane, name, start, end, lane))
        return end

    def after_compute(self, when: float, server: int, rank: int, step: int) -> None:
        self.computed[rank] += 1
        for server_rank in self.server_ranks:
            push_s = self.exchange.push_s if server_rank not in (rank, -1) else 0.0
            arrival_s = self.occupy(when, server_rank, "push", push_s, f"step {step} from {rank}") if push_s else when
            self.add_event(arrival_s, "pushed", server_rank, rank, step)
        self.begin(when, rank)

    def after_push(self, when: float, server: int, rank: int, step: int) -> None:
        self.pushed[server, step] += 1
        if self.pushed[server, step] == self.num_ranks:
            update_s = self.exchange.update_s + (self.exchange.push_s if server < 0 else 0.0)
            self.add_event(self.occupy(when, server, "update", update_s, f"step {step}"), "made", server, -1, step + 1)

    def after_update(self, when: float, server: int, rank: int, step: int) -> None:
        for target in range(self.num_ranks):
            pull_s = self.exchange.pull_s if server not in (target, -1) else 0.0
            arrival_s = self.occupy(when, server, "pull", pull_s, f"version {step} to {target}") if pull_s else when
            self.add_event(arrival_s, "pulled", server, target, step)

    def after_pull(self, when: float, server: int, rank: int, step: int) -> None:
        self.num_pulled[rank, step] += 1
        self.begin(when, rank)
