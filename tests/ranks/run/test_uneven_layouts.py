"""Pieces that differ: equal to the serial model with every other choice, bytes by count, checkpoints between layouts, broken twins."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from shardwise.lower.call import OperatorCall
from shardwise.model.gradients import values_needing_gradient
from shardwise.model.sharding.sharding import FREE_LINKS
from shardwise.plan.ir.placement import dual_of
from shardwise.plan.ir.transition import sent_fraction, transition_between
from shardwise.plan.layout import Layout
from shardwise.run.engine import Engine
from shardwise.train.data.loader import rows_of_partial_batch
from shardwise.train.data.sources import take_rows
from shardwise.world.comm.group import Group
from shardwise.world.launch.launch import launch
from shardwise.world.world import World
from tests.support.traced import of, weights_after
from tests.support.verified_models import Subject

GPT = "gpt:layers=2,hidden=40,heads=5,sequence=7,vocabulary=53"  # heads of 8
LLAMA = "llama:layers=2,hidden=60,heads=10,kv_heads=5,inner=83,sequence=9,vocabulary=47"


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (GPT, "tensor=3"),
        (GPT, "tensor=3 data=2 zero=3"),
        (GPT, "tensor=2 sequence_parallel=on recompute=full zero=1"),
        (GPT, "tensor=3 sequence_parallel=on pipeline=2 microbatches=2"),
        (GPT, "tensor=2 data=2 zero=2 microbatches=3 offload=all"),
        (GPT, "tensor=2x3"),
        (LLAMA, "tensor=2 data=3 zero=1 recompute=selective"),
        (LLAMA, "tensor=4"),
    ],
)
def test_pieces_that_differ_equal_serial(name: str, layout: str) -> None:
    found = of(name, 6).check(
        replace(Layout.parse(layout), precision="float64"), eager="free links", optimizer={"name": "adamw", "clip": 0.05}
    )
    assert found.ok, found
    assert found.tolerance == 1e-9
    assert found.divided["tensor"]["flops"] > 0.6, found.divided


def test_gradients_that_leave_out_the_longer_piece_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken twin: a gather that takes every piece for as long as the shortest."""
    right = Group.all_gather

    def shorter(self: Group, x: Tensor, dim: int = 0, length: Any = None) -> Tensor:
        found = right(self, x, dim, length)
        return found if length is None else found.roll(1, dim)

    monkeypatch.setattr(Group, "all_gather", shorter)
    assert not Subject(GPT, 6).check(Layout.parse("tensor=3 sequence_parallel=on precision=float64"), eager="free links").ok


def sent_bytes(world: World, layout: str) -> tuple[dict[str, int], dict[str, float]]:
    """Bytes that this rank sends to gather, scatter and exchange pieces in a step, and those of the table of transitions for one with
    pieces as long as its own."""
    subject, found = of(GPT, 6), Counter[str]()
    plan = replace(subject.plan(Layout.parse(f"{layout} precision=float64")), shards=())
    engine = Engine(plan, replace(subject.source, prices=FREE_LINKS), subject.batch, subject.loss, world, seed=0)
    rights = {name: getattr(Group, name) for name in ("all_gather", "reduce_scatter")}

    def gathering(self: Group, x: Tensor, dim: int = 0, length: Any = None) -> Tensor:
        found["all_gather"] += x.numel() * x.element_size() * (self.size - 1)
        return rights["all_gather"](self, x, dim, length)

    def scattering(self: Group, x: Tensor, dim: int = 0, lengths: Any = ()) -> Tensor:
        made: Tensor = rights["reduce_scatter"](self, x, dim, lengths)
        found["reduce_scatter"] += made.numel() * made.element_size() * (self.size - 1)  # what all others send here
        return made

    Group.all_gather, Group.reduce_scatter = gathering, scattering  # type: ignore[method-assign]
    try:
        engine.forward_backward(subject.batch)
    finally:
        for name, right in rights.items():
            setattr(Group, name, right)
    want: Counter[str] = Counter()
    sharding, tensors, grads = engine.rank_model.sharding, engine.rank_model.graph.tensors, values_needing_gradient(engine.rank_model.graph)
    for move in sharding.redistributions:
        ways = [(move.source, move.target), *([(dual_of(move.target), dual_of(move.source))] if move.value in grads else [])]
        for source, target in ways:
            if (name := transition_between(source, target).collective) in rights:
                want[name] += round(sent_fraction(source, target, 3) * tensors[move.value].size * 8)
    return dict(found), dict(want)


def test_the_busiest_rank_sends_the_bytes_of_the_table() -> None:
    every = launch(sent_bytes, 3, "tensor=3 sequence_parallel=on", timeout_s=120, show=False)
    found = {name: max(rank[0][name] for rank in every) for name in every[0][0]}
    assert found == every[0][1]
    assert min(rank[0]["all_gather"] for rank in every) < found["all_gather"]


@pytest.mark.parametrize(("first", "second"), [("tensor=3", "data=2 zero=2"), ("tensor=2 zero=1 data=3", "tensor=3 pipeline=2")])
def test_training_goes_on_with_other_pieces(tmp_path: Path, first: str, second: str) -> None:
    """A step, a checkpoint, and a step under the other layout, against two steps under the first: weights by name."""
    subject = of(GPT, 6)
    cuts = replace(subject.source, prices=FREE_LINKS)

    def run(world: World, layout: str, steps: int, loads: bool) -> dict[str, list[float]]:
        plan = replace(subject.plan(Layout.parse(f"{layout} precision=float64")), shards=())
        engine = Engine(plan, cuts, subject.batch, subject.loss, world, seed=1 if loads else 0)
        weights = weights_after(steps, engine, subject.batch, tmp_path, loads)
        return weights | {"": [engine.evaluate(subject.batch)]}

    want = launch(lambda world: run(world, first, 2, False), Layout.parse(first).num_ranks, show=False)[0]
    got = launch(lambda world: run(world, second, 1, True), Layout.parse(second).num_ranks, show=False)[0]
    assert got.keys() == want.keys()
    for name, values in want.items():
        assert torch.allclose(torch.tensor(got[name]).double(), torch.tensor(values).double(), rtol=1e-9, atol=1e-9), name


def in_a_loop(world: World) -> list[float]:
    """A loop of one's own: norms, a penalty, clipping and an optimizer on parts that differ."""
    batch, losses = subject_batch(), []
    with shardwise.auto_parallelize(batch=(batch["input_ids"],), plan=f"tensor={world.num_ranks} precision=float64", world=world):
        net = small()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(batch["input_ids"]), batch["labels"]) + sum(1e-2 * p.square().mean() for p in net.parameters())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(23, 31), nn.Linear(31, 1001), nn.GELU(), nn.Linear(1001, 17)).double()


def subject_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randint(17, (64,), generator=generator) for name in ("input_ids", "labels")}


def test_a_loop_of_ones_own_on_pieces_that_differ_equals_serial() -> None:
    one, three = (launch(in_a_loop, n, timeout_s=120, show=False)[0] for n in (1, 3))
    assert three == pytest.approx(one, rel=1e-12)


BATCHES = [
    (GPT, 7, "data=2"),
    (GPT, 11, "data=3 microbatches=3 zero=2"),
    (GPT, 7, "pipeline=2 inner=3x1/1x3 microbatches=2"),
    (GPT, 9, "data=2 tensor=3 pipeline=2 microbatches=4 schedule=zb-h1"),
    (f"{GPT},dropout=0.2", 8, "data=4 shares=3/2/2/1 zero=1"),
    (f"{GPT},dropout=0.2", 7, "data=2 shares=5/2 tensor=2 microbatches=2 zero=3 recompute=full"),
    (GPT, 13, "data=3 shares=3/2/1 pipeline=2 microbatches=2 offload=activations"),
    ("resnet-tiny", 5, "data=3 shares=2/2/1 zero=1"),  # statistics over all samples
]


@pytest.mark.parametrize(("name", "size", "layout"), BATCHES)
def test_replicas_with_unequal_parts_of_a_batch_equal_serial(name: str, size: int, layout: str) -> None:
    found = of(name, size).check(replace(Layout.parse(layout), precision="float64"), optimizer={"name": "adamw", "clip": 0.05})
    assert found.ok, found
    assert found.tolerance == 1e-9
    assert found.divided["data"]["flops"] > 0


def own_rows(world: World, name: str, layout: str, size: int) -> list[float]:
    """Losses of steps in which every rank is given its own rows, as loaders give them, and of one on a shorter batch given whole."""
    subject = of(name, size)
    engine = Engine(subject.plan(Layout.parse(f"{layout} precision=float64")), subject.source, subject.batch, subject.loss, world, seed=0)
    rows = rows_of_partial_batch(size, engine)
    assert len(rows) == sum(engine.rows_of(n)[1] for n in engine.plan.microbatch_sizes)
    losses = [float(engine.step(take_rows(subject.batch, rows)).loss) for _ in range(2)]
    return [*losses, float(engine.step(take_rows(subject.batch, list(range(size - 2)))).loss)]


def test_ranks_are_given_their_own_rows() -> None:
    runs = ((1, "data=1"), (4, "data=4 shares=3/2/2/1"))
    one, four = (launch(own_rows, n, GPT, layout, 8, timeout_s=120, show=False) for n, layout in runs)
    assert four[0] == pytest.approx(one[0], rel=1e-12)


def test_a_mean_of_means_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken twin: every replica counts as much, however many samples it has."""
    monkeypatch.setattr(OperatorCall, "sample_share", lambda self, axis: 1 / self.lowering.groups[axis].size)
    subject = Subject(str(Path(__file__).parents[2].joinpath("support", "odd_models.py")) + ":losses", 8)
    assert not subject.check(Layout.parse("data=2 shares=5/3 precision=float64")).ok
