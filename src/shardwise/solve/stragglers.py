"""Simulate many steps with random stragglers, which the price of one step does not include. Out: a timeline (`simulate/stragglers`).

In every step every rank is delayed by a fraction of a step drawn from an exponential distribution, the same for every layout of as many
ranks. A replica of several ranks, of tensor and pipeline, is delayed as one, and its ranks push and pull their equal shards at once.
"""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

from shardwise.cost.network.collectives import hops_of, push_pull_s
from shardwise.cost.step import Pricer
from shardwise.cost.step_time.timing import PricedLayout
from shardwise.errors import UsageError
from shardwise.plan.ir.axis import DATA
from shardwise.plan.ir.timeline import Timeline
from shardwise.simulate.stragglers import ServerExchange, simulate_steps


def straggler_steps(pricer: Pricer, priced: PricedLayout, steps: int, mean_delay: float, seed: int = 0) -> Timeline:
    """Simulate `steps` steps in which ranks are delayed by `mean_delay` of a step's compute on average.

    Raises:
        UsageError: a layout with other axes, fewer steps than two, or a negative or infinite delay.
    """
    layout = priced.layout
    if layout.num_ranks != layout.data * layout.tensor * layout.pipeline or steps < 2 or not 0 <= mean_delay < inf:
        request = f"{layout}: {steps} steps, late by {mean_delay:g}"
        raise UsageError(f"{request}; it takes replicas (data=N) of tensor and pipeline ranks, two steps or more, and 0 <= late < inf")
    parts = dict(priced.prediction.parts)
    step_s = sum(seconds for name, seconds in parts.items() if name not in ("gradients", "optimizer"))
    draw = random.Random(seed)
    compute = [[step_s * (1 + (draw.expovariate(1 / mean_delay) if mean_delay else 0.0)) for _ in range(steps)] for _ in range(layout.data)]
    return simulate_steps(compute, exchange_of(pricer, priced), f"{layout}, {steps} steps")


def exchange_of(pricer: Pricer, priced: PricedLayout) -> ServerExchange:
    """Return the cost of exchanging a step's gradients and weights, overlapped or not."""
    layout, widths = priced.layout, pricer.devices.widths(priced.layout)
    count = pricer.graph.num_trainable // (layout.tensor * layout.pipeline)
    update_s, group = dict(priced.prediction.parts)["optimizer"], pricer.group(layout, DATA)
    exchange = ServerExchange(layout.staleness, pricer.collective("all_reduce", widths.gradient * count, group), 0.0, update_s)
    if not layout.servers:
        return exchange
    hops, num_others = hops_of(pricer.cluster, group), layout.data - 1
    push_s, _ = push_pull_s(widths.gradient * count, hops, layout.servers)
    _, pull_s = push_pull_s(widths.weight * count, hops, layout.servers)
    return replace(exchange, push_s=push_s / num_others, pull_s=pull_s / num_others, servers=layout.server_ranks)
