"""ZeRO in a plain loop: weights, gradients and the optimizer's state lie in pieces, and the script computes what one process does."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.api_loop import _best_without_pipeline
from shardwise.cluster.cluster import Cluster
from shardwise.errors import UsageError
from shardwise.model.graph import Graph
from shardwise.run.loop import zero_gather
from shardwise.run.loop.sharded_tensor import ShardedTensor
from shardwise.run.rank_model.model_source import CachedModelSource
from shardwise.world import private
from shardwise.world.world import World
from tests.support.plain_models import Mixed, batches, loss_of, matches, plan_of, said

BEFORE, STEPS = 3, 6


def data() -> list[tuple[Tensor, Tensor]]:
    """Six batches; the last of each epoch is short, and the very last has one sample."""
    epoch = batches()
    return [*epoch[:2], *[(x[:5], y[:5]) for x, y in epoch[2:]], *epoch[:2], *[(x[:1], y[:1]) for x, y in epoch[2:]]]


class Script:
    """Clipping, a schedule, two backwards a step that are exchanged once, and a loss of evaluation after each."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.opt = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1)
        self.rate = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, STEPS)

    def run(self, loader: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
        norms = []
        for x, y in loader:
            with shardwise.accumulate(self.net):
                (loss_of(self.net, x, y) / 2).backward()
            (loss_of(self.net, x, y) / 2).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)))
            self.opt.step()
            self.rate.step()
            self.opt.zero_grad()
            self.net.eval()
            with torch.no_grad():
                self.net(x)
            self.net.train()
        return norms


def made(world: World, layout: str, seed: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    if not layout:
        return Mixed().double()
    with shardwise.auto_parallelize(batch=batches()[0], plan=plan_of(layout), world=world):
        net = Mixed()
    return net


def undisturbed() -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(7)
    script = Script(Mixed().double())
    return script.run(data()), script.net.state_dict()


def begins(world: World, layout: str, folder: str) -> list[float]:
    script = Script(made(world, layout))
    norms = script.run(shardwise.shard(data()[:BEFORE]) if layout else data()[:BEFORE])
    shardwise.save(folder, script.net, script.opt, step=BEFORE, rate=script.rate.state_dict())
    return norms


def goes_on(world: World, layout: str, folder: str) -> dict[str, Any]:
    script = Script(made(world, layout, seed=8))
    told = shardwise.load(folder, script.net, script.opt)
    script.rate.load_state_dict(told["rate"])
    norms = script.run(shardwise.shard(data()[BEFORE:]) if layout else data()[BEFORE:])
    states = [t.numel() for state in script.opt.state.values() for t in state.values() if t.dim() > 1]
    whole = shardwise.full_state_dict(script.net) if layout else script.net.state_dict()
    twin, (x, _) = copy.deepcopy(script.net).eval(), data()[0]
    with torch.no_grad():  # an average of weights is evaluated so
        alike = torch.equal(twin(x), script.net.eval()(x))
    return {
        "norms": norms,
        "copy": alike,
        "state": None if whole is None else {name: x.clone() for name, x in whole.items()},
        "cut": sorted(name for name, p in script.net.named_parameters() if isinstance(p, ShardedTensor)),
        "held": sum(p.numel() for p in script.net.parameters() if p.dim() > 1),
        "slots": sum(states),
        "gradients": [name for name, p in script.net.named_parameters() if p.grad is not None and p.grad.shape != p.shape],
    }


WRITERS = {("data=2 zero=1", 2): [("data=2 zero=3", 2), ("", 1)], ("", 1): [("data=2 tensor=2 zero=2", 4)]}
MATRICES = 16 * 8 + 2 * 8 * 32 + 4 * 4  # weights of two dimensions


@pytest.mark.parametrize("writer", WRITERS, ids=lambda way: way[0] or "serial")
def test_a_script_with_zero_is_that_of_one_process(ranks: Callable[..., list[Any]], tmp_path: Path, writer: tuple[str, int]) -> None:
    norms, weights = undisturbed()
    for found in ranks(begins, writer[1], writer[0], str(tmp_path)):
        assert found == pytest.approx(norms[:BEFORE], rel=1e-9)
    for layout, num_ranks in WRITERS[writer]:
        results = ranks(goes_on, num_ranks, layout, str(tmp_path))
        for found in results:
            assert found["norms"] == pytest.approx(norms[BEFORE:], rel=1e-9), layout
            if layout:
                assert found["cut"] == ["down.weight", "emb.weight", "never.weight", *["up.bias"] * ("tensor" in layout), "up.weight"]
                assert found["held"] * num_ranks == MATRICES + 16 * ("tensor" in layout), "`never` is whole on tensor ranks"
                assert found["slots"] == 2 * (found["held"] - 16 // 2), "none of `never`, which has no gradient"
            assert found["gradients"] == []
            assert found["copy"]
        for name, x in weights.items():
            assert matches(results[0]["state"][name], x), (layout, name)


def kept(world: World) -> list[int]:
    """With each stage of ZeRO: how many whole weights are kept from forward to backward."""
    found, gather = [], zero_gather.gather_weights
    for zero in (1, 3):
        net, made_whole = made(world, f"data=2 zero={zero}"), []

        def noted(*args: Any) -> tuple[Tensor, ...]:
            whole = gather(*args)
            made_whole.extend(weakref.ref(private.view_base(x)) for x in whole)  # noqa: B023
            return whole

        zero_gather.gather_weights = noted  # type: ignore[assignment]
        loss = loss_of(net, *next(iter(shardwise.shard(batches()))))
        gc.collect()
        found += [len(made_whole), sum(one() is not None for one in made_whole)]
        loss.backward()  # type: ignore[no-untyped-call]
        zero_gather.gather_weights = gather
    return found


def test_zero_3_keeps_no_whole_weight_for_backward(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(kept, 2) == [[3, 3, 3, 0]] * 2


def changed(world: World) -> str:
    net = made(world, "data=2 zero=3")
    loss = loss_of(net, *next(iter(shardwise.shard(batches()))))
    with torch.no_grad():
        net.up.weight.mul_(2.0)  # type: ignore[union-attr, operator]
    return said(loss.backward, UsageError)


def test_weights_that_change_before_backward_are_found(ranks: Callable[..., list[Any]]) -> None:
    """As autograd finds them where it keeps the weights themselves."""
    for found in ranks(changed, 2):
        assert found.startswith("weights were changed after the model computed with ")


def test_zero_is_chosen_where_replicas_do_not_fit_with_the_largest_batch() -> None:
    layers = [layer for _ in range(6) for layer in (nn.Conv2d(256, 256, 3, padding=1), nn.Tanh())]
    net = nn.Sequential(nn.Conv2d(3, 256, 3, padding=1), *layers)

    def graph_of(length: int) -> Graph:
        return CachedModelSource(net, None).capture((torch.zeros(256, 3, 8, length),), None, 256, outputs=True).graph

    graph, machine = graph_of(8), Cluster.parse("1xcpu-2")
    chosen = [_best_without_pipeline(graph, 256, "net", machine.with_memory_limit(limit), 2).layout for limit in (4e8, 1.5e8)]
    assert [(one.data, one.zero) for one in chosen] == [(2, 0), (2, 1)]
    roomy, largest = machine.with_memory_limit(1.85e8), graph_of(12)
    alone, both = (_best_without_pipeline(graph, 256, "net", roomy, 2, most) for most in (None, largest))
    assert alone.layout.zero == 0
    assert both.layout.zero > 0
    assert alone.prediction is not None
    assert both.prediction is not None
    assert both.prediction.memory.activations > 1.4 * alone.prediction.memory.activations
