"""Gathers of ZeRO-1 and 2 behind the next forward: order of events, by a stand-in whose weights arrive only when they are waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import shardwise
from shardwise.run.residency.deferred_gathers import AwaitingLayer, DeferredGathers
from shardwise.run.verify.verify import verify_on_rank
from shardwise.world.comm.group import Group
from shardwise.world.world import World
from tests.support.equal_layers import DEPTH, LAYER, Deep, deep_batch, deep_loss

GLOO = {"SHARDWISE_TRANSPORT": "gloo"}


def _plan(layout: str) -> Any:
    plan = shardwise.plan(Deep, deep_batch(), loss=deep_loss, cluster="1xcpu-8", layout=f"{layout} precision=float64")
    return replace(plan, bucket_bytes=8 * LAYER)


class _LateWork:
    """The work of a gather whose result lies elsewhere until somebody waits for it."""

    def __init__(self, work: Any, arrived: torch.Tensor, out: torch.Tensor, note: Callable[[], None]) -> None:
        self.work, self.arrived, self.out, self.note = work, arrived, out, note

    def wait(self) -> None:
        self.work.wait()
        self.out.copy_(self.arrived)
        self.note()


def _trained(world: World, layout: str, kind: str) -> dict[str, Any]:
    """Losses of three steps, their events, and how many gathers were under way after each. `kind`: how weights are waited for."""
    events: list[str] = []
    gather = Group.all_gather_into

    def late(self: Group, out: torch.Tensor, x: torch.Tensor, wait: bool = True) -> Any:
        if wait:
            return gather(self, out, x)
        arrived = torch.empty_like(out)
        return _LateWork(gather(self, arrived, x, wait=False), arrived, out, lambda: events.append("arrived"))

    Group.all_gather_into = late  # type: ignore[method-assign, assignment]
    run = AwaitingLayer.forward

    def noted(self: AwaitingLayer, *args: Any) -> Any:
        out = run(self, *args)
        events.append(f"layer {len(self._gathers._by_layer[self._layer])}")
        return out

    AwaitingLayer.forward = noted  # type: ignore[method-assign]
    if kind == "never":
        DeferredGathers.wait_for_layer = lambda self, layer: None  # type: ignore[method-assign]
    engine = shardwise.parallelize(
        Deep, deep_batch(), loss=deep_loss, plan=_plan(layout), seed=0, world=world, optimizer={"clip": 0.1, "lr": 0.1}
    )
    if kind == "at once":
        engine._weight_gatherer.deferred.disable()
    losses, pending = [], []
    for _ in range(3):
        events.clear()
        losses.append(float(engine.step(deep_batch()).loss))
        pending.append(engine._weight_gatherer.deferred.num_pending)
    seen = list(events)
    full = engine.full_state_dict()
    after_reading = engine._weight_gatherer.deferred.num_pending
    _ = engine.parameters
    engine.step(deep_batch())
    Group.all_gather_into, AwaitingLayer.forward = gather, run  # type: ignore[method-assign]
    return {
        "losses": losses, "pending": pending, "events": seen,
        "state": full, "after reading": after_reading, "after parameters": engine._weight_gatherer.deferred.num_pending,
        "program": [str(action) for action in engine.rank_model.program.actions[0]],
    }  # fmt: skip


@pytest.mark.parametrize("zero", [1, 2])
def test_each_layer_waits_for_its_own_weights(ranks: Callable[..., list[Any]], zero: int) -> None:
    late, at_once = (ranks(_trained, 2, f"data=2 zero={zero}", kind, env=GLOO)[0] for kind in ("late", "at once"))
    assert late["program"] == ["0UNSHARD", "0F0", "0B0", "0REDUCE_GRAD"]
    assert late["losses"] == at_once["losses"]
    assert all(torch.equal(x, at_once["state"][name]) for name, x in late["state"].items())
    assert late["pending"] == [DEPTH] * 3
    assert at_once["pending"] == [0] * 3
    assert (late["after reading"], late["after parameters"]) == (0, 0)
    # The second layer had run before the last weights arrived.
    assert late["events"] == ["arrived", "layer 1", "arrived", "layer 1", "arrived", "layer 1", "arrived", "layer 1"]
    never = ranks(_trained, 2, f"data=2 zero={zero}", "never", env=GLOO)[0]  # a broken twin: layers read the weights of the step before
    assert never["events"] == ["layer 1"] * DEPTH + ["arrived"] * DEPTH
    assert never["losses"] != late["losses"]


LAYOUTS = (
    "data=2 pipeline=2 microbatches=2 chunks=2 schedule=interleaved zero=1",
    "data=2 tensor=2 microbatches=2 zero=2",
    "data=4 zero=1 recompute=full",
    "data=2 pipeline=2 microbatches=4 schedule=zb-h1 zero=1",
)


def _verified(world: World) -> list[bool]:
    found = [verify_on_rank(world, _plan(layout), Deep, deep_batch(), deep_loss) for layout in LAYOUTS]
    return [one is None or one.ok for one in found]


def test_layouts_equal_the_serial_model(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(_verified, 4, env=GLOO)[0] == [True] * len(LAYOUTS)
