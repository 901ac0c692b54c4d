"""Weights that make several things at once, cut in pieces of each: equal to the serial model in every composition, nothing gathered."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise.capture.capture import capture
from shardwise.model.sharding.propagate import propagate
from shardwise.model.sharding.sharding import FREE_LINKS, Prices
from shardwise.plan.ir.placement import Shard
from shardwise.plan.ir.transition import sent_fraction
from shardwise.plan.layout import Layout
from shardwise.run.engine import Engine
from shardwise.run.parts import local_blocks
from shardwise.run.state.block_ranges import shard_block
from shardwise.run.verify.verify import Verification
from shardwise.world.launch.launch import launch
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve
from tests.support.traced import of, weights_after

MODELS = "tests/support/fused_models.py"
PATH = Path(__file__).parents[2].joinpath("support", "fused_models.py")
# Links that are worth as much as in a node, and no latency: what small models would not be cut for.
NODE = Prices(flops_per_s=5e13, memory_bytes_per_s=1.5e12, link_bytes_per_s=1e11, latency_s=0.0)


def verified(name: str, layout: str, **options: Any) -> Verification:
    model = resolve(f"{PATH}:{name}")
    return shardwise.verify(model.make, layout, model.batch(model.default_batch), loss=model.loss, cut_everything=True, **options)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("chunked", "tensor=2"),
        ("chunked", "data=2 tensor=2 zero=3"),
        ("chunked", "tensor=4 microbatches=2"),
        ("chunked", "tensor=2 pipeline=2 microbatches=2 zero=1"),
        ("chunked", "tensor=2x2"),
        ("split", "data=2 tensor=2 zero=2"),
        ("split", "tensor=4"),
        ("in_two", "tensor=2 recompute=full"),
        ("sliced", "tensor=3"),
        ("viewed", "tensor=2 sequence_parallel=on"),
        ("unflattened", "tensor=2 context=2"),
        ("by_heads", "tensor=3 zero=1"),
    ],
)
def test_a_layout_that_cuts_fused_weights_equals_serial(name: str, layout: str) -> None:
    found = verified(name, layout)
    assert found.ok, found
    assert found.divided["tensor"]["parameters"] > (0.98 if "x" not in layout else 0.7)


def moves_of(name: str, n: int) -> tuple[Counter[tuple[str, str]], float]:
    """Collectives of a step, and the bytes that a rank sends."""
    model = resolve(f"{PATH}:{name}")
    graph = capture(model.make(), model.batch(model.default_batch), model.loss).graph
    moves = propagate(graph, {"tensor": n}, prices=NODE).redistributions
    size = sum(sent_fraction(m.source, m.target, n) * graph.tensors[m.value].size_bytes for m in moves)
    return Counter((m.forward, m.backward) for m in moves), size


@pytest.mark.parametrize("name", ["chunked", "viewed", "unflattened"])
@pytest.mark.parametrize("n", [2, 3, 6])
def test_one_product_moves_no_more_than_three(name: str, n: int) -> None:
    """The same model with a weight for each of queries, keys, values, gate and what is gated."""
    assert moves_of(name, n) == moves_of("apart", n)


def contiguous(spans: Any, form: Shard, n: int, index: int) -> Any:
    return shard_block(spans, Shard(form.dim, form.lengths), n, index)


def test_pieces_of_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: each rank takes its part of the whole weight in one place."""
    monkeypatch.setattr(local_blocks, "shard_block", contiguous)
    assert not verified("chunked", "tensor=2").ok


@pytest.mark.parametrize(("first", "second"), [("tensor=2", "data=2 zero=3"), ("data=2 tensor=2 zero=3", "tensor=3")])
@pytest.mark.parametrize("name", ["split", "by_inputs"])
def test_training_goes_on_from_a_checkpoint_of_other_pieces(tmp_path: Path, first: str, second: str, name: str) -> None:
    """A step, a checkpoint, and a step under the other layout, against two steps under the first: weights by name."""
    subject = of(f"{MODELS}:{name}", 4)
    cuts = replace(subject.source, prices=FREE_LINKS)

    def run(world: World, layout: str, steps: int, loads: bool) -> dict[str, list[float]]:
        plan = replace(subject.plan(Layout.parse(f"{layout} precision=float64")), shards=())
        engine = Engine(plan, cuts, subject.batch, subject.loss, world, seed=1 if loads else 0)
        return weights_after(steps, engine, subject.batch, tmp_path, loads)

    want = launch(lambda world: run(world, first, 2, False), Layout.parse(first).num_ranks, show=False)[0]
    got = launch(lambda world: run(world, second, 1, True), Layout.parse(second).num_ranks, show=False)[0]
    assert got.keys() == want.keys()
    for key, values in want.items():
        assert torch.allclose(torch.tensor(got[key]), torch.tensor(values), rtol=1e-9, atol=1e-9), key


def in_a_loop(world: World, folder: str) -> list[float]:
    """A loop of one's own: a penalty, clipping, an optimizer on pieces; a checkpoint between, of weights and of the optimizer."""
    model = resolve(f"{PATH}:split")
    batch, losses = model.batch(model.default_batch), []

    def begun(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        with shardwise.auto_parallelize(batch=batch, plan=f"tensor={world.num_ranks} precision=float64", world=world):
            net = model.make()
        return net, torch.optim.AdamW(net.parameters(), lr=0.01)

    net, optimizer = begun(0)
    for step in range(3):
        if step == 2:
            shardwise.save(folder, net, optimizer, step=step)
            net, optimizer = begun(1)
            shardwise.load(folder, net, optimizer)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(**batch).flatten(0, 1), batch["ids"].flatten()) + sum(p.square().mean() for p in net.parameters())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        optimizer.step()
        losses.append(float(loss.detach()))
    state = shardwise.full_state_dict(net) or {}
    return losses + [float((x * torch.arange(x.numel(), dtype=x.dtype).view(x.shape)).sum()) for x in state.values()]


def test_a_loop_of_ones_own_has_pieces_too(tmp_path: Path) -> None:
    one, two = (launch(in_a_loop, n, str(tmp_path / str(n)), show=False)[0] for n in (1, 2))
    assert two == pytest.approx(one, rel=1e-9)
