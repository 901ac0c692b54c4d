"""ZeRO-3 gathers a layer's weights as one message, ahead of its use in forward and backward, in a plain loop and in an engine.

The order of events of a run is that of the program `gather_layers`, which the checker proves; values are those of a serial run, and the
same bits with and without gathers ahead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import shardwise
from shardwise.plan.ir.program import Compute, ComputeOp, Manage, ManageOp
from shardwise.run.loop.bucket_gathers import GatherBucket, _PendingBucket
from shardwise.run.loop.module import sharded_module_of
from shardwise.run.residency.weight_gatherer import WeightGatherer
from shardwise.schedules.lower import gather_layers
from shardwise.world.comm.group import Group
from shardwise.world.world import World

WIDTH, LAYERS = 8, 4
PLAN = "data=2 precision=float64"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def build_model() -> Blocks:
    torch.manual_seed(5)
    return Blocks().double()


def build_batch() -> dict[str, Tensor]:
    return {"x": torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)}


def expected_events(num_layers: int) -> list[str]:
    """Starts, waits and releases of gathers in the program's order; of forward without releases, which end with the last reader."""
    events: list[str] = []
    in_backward = False
    for action in gather_layers(num_layers).actions[0]:
        if isinstance(action, Compute):
            in_backward = in_backward or action.op is ComputeOp.B
            events += [f"wait {action.stage}"] if action.stage < num_layers else []
        elif isinstance(action, Manage) and (action.op is ManageOp.UNSHARD or in_backward):
            events.append(f"{'start' if action.op is ManageOp.UNSHARD else 'free'} {action.stage}")
    return events


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def run_loop(world: World, zero: int, prefetches: bool = True) -> dict[str, Any]:
    """Train one step; return its events, the most buckets that were whole at a time, collectives and gradients."""
    whole, events, alive, most, calls = build_batch(), list[str](), dict[int, list[Any]](), [0], list[str]()
    model = shardwise.auto_parallelize(build_model(), whole, plan=f"{PLAN} zero={zero}", world=world)
    own = next(iter(shardwise.shard([whole])))
    model(**own).backward()
    model.zero_grad()
    sharded: Any = sharded_module_of(model)
    saver = next(iter(sharded.replica.forwards.entries.values()))._prepared_module[0]
    saver.observe = lambda kind, number: events.append(f"{'start' if kind == 'UNSHARD' else 'free'} {number}")
    if not prefetches:
        saver.buckets[:] = [GatherBucket(b.number, b.positions, b.shards, False) for b in saver.buckets]

    def note_finish(finish: Any) -> Any:
        def finish_and_note(self: _PendingBucket) -> Any:
            events.append(f"wait {self.bucket.number}")
            weights = finish(self)
            alive[len(alive)] = [self.bucket.number, [weakref.ref(x) for x in weights]]
            most[0] = max(most[0], len({number for number, refs in alive.values() if any(ref() is not None for ref in refs)}))
            return weights

        return finish_and_note

    def note_call(name: str) -> Callable[[Any], Any]:
        return lambda call: lambda self, *args, **named: (calls.append(name), call(self, *args, **named))[1]

    with (
        replaced(_PendingBucket, "finish", note_finish),
        replaced(Group, "all_gather_into", note_call("gather")),
        replaced(Group, "reduce_scatter", note_call("scatter")),
    ):
        model(**own).backward()
    gradients = [p.grad.detach().as_subclass(Tensor).clone() for p in model.parameters() if p.grad is not None]
    return {"events": events, "most": most[0], "calls": calls, "gradients": gradients}


def run_engine(world: World) -> list[str]:
    engine: Any = shardwise.parallelize(build_model(), build_batch(), plan=f"{PLAN} zero=3", world=world, optimizer={"name": "sgd"})
    engine.step(build_batch())
    events: list[str] = []
    gatherer: WeightGatherer = engine._weight_gatherer
    numbers = {layer: i for i, layer in enumerate(sorted(gatherer.buckets_by_layer))}
    in_backward = [False]

    def note_start(start: Any) -> Any:
        def start_and_note(self: WeightGatherer, layer: Any, user: object) -> None:
            if not any(weights.users for weights in self.buckets_by_layer[layer]):
                events.append(f"start {numbers[layer]}")
            start(self, layer, user)

        return start_and_note

    def note_enter(enter: Any) -> Any:
        def enter_and_note(self: WeightGatherer, layer: Any, step: int) -> None:
            in_backward[0] = step < 0
            enter(self, layer, step)
            events.append(f"wait {numbers[layer]}")

        return enter_and_note

    def note_leave(leave: Any) -> Any:
        def leave_and_note(self: WeightGatherer, layer: Any, user: object = None) -> None:
            leave(self, layer, user)
            if in_backward[0] and not any(weights.users for weights in self.buckets_by_layer[layer]):
                events.append(f"free {numbers[layer]}")

        return leave_and_note

    with (
        replaced(WeightGatherer, "_start_gather", note_start),
        replaced(WeightGatherer, "enter_layer", note_enter),
        replaced(WeightGatherer, "leave_layer", note_leave),
    ):
        engine.step(build_batch())
    return events


def run_all(world: World) -> dict[str, Any]:
    return {
        "loop": run_loop(world, 3),
        "on demand": run_loop(world, 3, prefetches=False),
        "zero 1": run_loop(world, 1),
        "engine": run_engine(world),
    }


def test_order_values_and_memory(ranks: Callable[..., list[Any]]) -> None:
    model = build_model()
    model(**build_batch()).backward()
    found = ranks(run_all, 2)
    expected = expected_events(LAYERS)
    for of_rank in found:
        loop, on_demand = of_rank["loop"], of_rank["on demand"]
        assert loop["events"] == expected
        assert on_demand["events"] != expected  # the twin: a run that gathers too late has another order
        assert of_rank["engine"] == expected
        assert loop["calls"].count("gather") == 2 * LAYERS  # one message a layer, in forward and in backward
        assert loop["calls"].count("scatter") == LAYERS
        assert loop["most"] <= 2
        for other in (on_demand, of_rank["zero 1"]):
            assert all(torch.equal(x, y) for x, y in zip(loop["gradients"], other["gradients"], strict=True))
    for number, p in enumerate(model.parameters()):
        shards = [of_rank["loop"]["gradients"][number] for of_rank in found]
        assert any(_is_equal(x, p.grad) for x in (shards[0], *(torch.cat(shards, dim) for dim in range(p.dim())))), number


def _is_equal(x: Tensor, y: Tensor | None) -> bool:
    return y is not None and x.shape == y.shape and torch.allclose(x, y, rtol=0, atol=1e-12)
