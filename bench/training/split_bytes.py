"""Bytes that a rank sends in one step, counted in a run, and by the formula of its kind of splitting.

In: a model of the zoo, a batch, a layout. Out: bytes of the rank that sends most. Counted is what every collective and message carries:
of a collective on x bytes among n ranks an all-reduce counts as 2 (n-1)/n x, a reduce-scatter as (n-1)/n x, an all-gather of pieces of
x as (n-1) x, whatever transport moves them. Formulas know shapes alone. Not counted: what fewer than 1 KiB carry (losses, clipping).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

import shardwise
from shardwise.plan.plan_file import format_plan, parse_plan
from shardwise.world import recorder
from shardwise.world.comm.group import Group
from shardwise.world.recorder import CollectiveRecorder
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve

LEAST = 1024


def counted(model: str, batch: int, layout: str) -> dict[str, float]:
    """By operation, bytes that the busiest rank sends in the second step."""
    plan = shardwise.plan(model, batch, layout=layout)
    found = shardwise.launch(_sent, plan.layout.num_ranks, model, batch, format_plan(plan), threads=1, show=False)
    return max(found, key=lambda sent: sum(sent.values()))


def _sent(world: World, model: str, batch: int, plan: str) -> dict[str, float]:
    resolved, sent = resolve(model), Counter[str]()
    engine = shardwise.parallelize(model, batch, plan=parse_plan(plan), world=world, seed=0)
    data = resolved.batch(batch)
    engine.step(data)
    start, exchange = CollectiveRecorder.start, Group.exchange

    def starts(self: CollectiveRecorder, op: int, slot: int, dtype: int, shape: Any, size: int, peer: int = -1, tag: int = 0) -> int:
        n = next((len(ranks) for ranks, mine in self._slots.items() if mine == slot), 1)
        parts = {
            recorder.ALL_REDUCE: 2 * (n - 1) / n, recorder.REDUCE_SCATTER: (n - 1) / n, recorder.ALL_GATHER: n - 1.0, recorder.SEND: 1.0,
            recorder.BROADCAST: 1.0,
        }  # fmt: skip
        if size >= LEAST and op in parts:
            sent[recorder.OPS[op]] += parts[op] * size
        return start(self, op, slot, dtype, shape, size, peer, tag)

    def exchanges(self: Group, given: list[Tensor], shapes: Any) -> Any:
        sent["exchange"] += sum(x.nbytes for i, x in enumerate(given) if i != self.index)
        return exchange(self, given, shapes)

    CollectiveRecorder.start, Group.exchange = starts, exchanges  # type: ignore[method-assign]
    try:
        engine.step(data)
    finally:
        CollectiveRecorder.start, Group.exchange = start, exchange  # type: ignore[method-assign]
    return dict(sent)
