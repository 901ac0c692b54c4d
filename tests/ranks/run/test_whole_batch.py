"""A step means the step on the whole batch: losses that count their targets, in microbatches and over ranks, against plain PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise.errors import RankError
from shardwise.plan.layout import Layout
from shardwise.run.engine import Engine
from shardwise.run.rank_model.model_source import CachedModelSource
from shardwise.world.comm.group import Group
from shardwise.world.launch.launch import launch
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve

CLASSES, WIDTH, SAMPLES, POSITIONS = 16, 8, 8, 5
TOLERANCE = 1e-12
CUT = ("tensor", (("table.weight", 0), ("up.weight", 0), ("up.bias", 0), ("down.weight", 1), ("head.weight", 0), ("head.bias", 0)))


class Language(nn.Module):
    """A small language model with a loss of one of several kinds; labels below zero do not count."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table, self.up, self.down = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("rarity", torch.linspace(0.5, 2.0, CLASSES))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.table(ids)
        logits = self.head(self.norm(hidden + self.down(torch.tanh(self.up(hidden)))))
        rows, targets = logits.view(-1, CLASSES), labels.view(-1)
        each = F.cross_entropy(rows, targets, reduction="none")
        counts = (labels >= 0).to(logits.dtype)
        match self.kind:
            case "mean":
                return F.cross_entropy(rows, targets)
            case "classes weighed":
                return F.cross_entropy(rows, targets, weight=self.rarity, label_smoothing=0.1)
            case "masked by hand":
                return (each * counts.view(-1)).sum() / counts.sum()
            case "never by zero":
                return (each * counts.view(-1)).sum() / counts.sum().clamp(min=1) + 0.1 * (counts.sum() + 1e-3).log() * each.mean()
            case "log-probabilities":
                return F.nll_loss(F.log_softmax(logits, -1).transpose(1, 2), labels)
            case "weighed by position":
                weights = counts * torch.arange(1, POSITIONS + 1).to(logits.dtype)
                return (each.view(labels.shape) * weights).sum() / weights.sum()
            case "several":
                penalty = 1e-2 * self.up.weight.square().sum() + 1.0 - F.cosine_similarity(logits, logits.roll(1, -1), -1).mean()
                return F.cross_entropy(rows, targets) + 0.1 * logits.square().mean() + penalty
            case "by the number of samples":
                return F.cross_entropy(rows, targets, reduction="sum") / len(ids)
            case "mean of samples":
                return logits.logsumexp(-1).mean()
        raise AssertionError(self.kind)


KINDS = (
    "mean", "classes weighed", "masked by hand", "never by zero", "log-probabilities", "weighed by position", "several",
    "by the number of samples", "mean of samples",
)  # fmt: skip


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Samples of which the first has nearly all labels and the last nearly none."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, CLASSES, (SAMPLES, POSITIONS), generator=generator) for _ in range(2))
    labels[torch.rand(labels.shape, generator=generator) < torch.linspace(0.05, 0.95, SAMPLES)[:, None]] = -100
    return ids, labels


def plain(kind: str, given: tuple[Tensor, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of plain PyTorch on the whole batch, in float64."""
    torch.manual_seed(0)
    model = Language(kind).double()
    loss = model(*given)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def planned(kind: str, layout: str) -> tuple[Any, CachedModelSource]:
    """A plan that cuts tables, features and classes where there are tensor ranks, and its model, traced."""
    wanted = Layout.parse(layout)
    source = CachedModelSource.from_model(lambda: Language(kind))
    plan = shardwise.plan(lambda: Language(kind), batch(), cluster="1xcpu-2", layout=wanted, source=source)
    plan = replace(plan, layout=replace(wanted, precision="float64"), shards=(CUT,) if wanted.tensor > 1 else ())
    source.capture_all(plan, batch(), None)
    return plan, source


def compared(layout: str, kinds: tuple[str, ...] = KINDS, rows: bool = False, others: bool = False) -> dict[str, float]:
    """Of each loss the largest relative difference of the loss and of gradients over two batches. `rows`: each rank has its own alone.

    `others`: the second batch has fewer samples.
    """
    states = torch.random.get_rng_state()
    torch.manual_seed(0)
    made = {kind: planned(kind, layout) for kind in kinds}
    torch.random.set_rng_state(states)
    batches = [batch(1), tuple(x[:6] for x in batch(2)) if others else batch(2)]

    def on_rank(world: World) -> dict[str, float] | None:
        off: dict[str, float] = {}
        for kind, (plan, source) in made.items():
            engine = Engine(plan, source, batch(), None, world, "sgd", seed=0)
            for given in batches:
                mine = next(iter(shardwise.shard([given], engine))) if rows else given
                result = engine.forward_backward(mine, is_global_batch=not rows)
                loss, gradients, want = engine.loss_of(result), engine.full_gradients(), plain(kind, given)  # type: ignore[arg-type]
                if gradients is not None:
                    errors = [float((gradients[name] - x).abs().max() / x.abs().max().clamp(min=1e-3)) for name, x in want[1].items()]
                    off[kind] = max(off.get(kind, 0.0), abs(loss - want[0]) / abs(want[0]), *errors)
        return off if world.rank == 0 else None

    found: dict[str, float] = launch(on_rank, Layout.parse(layout).num_ranks, threads=1, timeout_s=120, show=False)[0]
    return found


@pytest.mark.parametrize(
    "layout",
    [
        "microbatches=4",
        "data=2 microbatches=2",
        "tensor=2 pipeline=2 microbatches=4 schedule=zb-h1",
        "data=2 pipeline=2 microbatches=2 schedule=1f1b",
        *(
            pytest.param(f"data={data} tensor=2 pipeline=2 microbatches={m} schedule={schedule}", marks=pytest.mark.long)
            for data in (1, 2)
            for m, schedule in ((1, "gpipe"), (2, "gpipe"), (4, "gpipe"), (2, "1f1b"), (4, "1f1b"), (2, "zb-h1"), (4, "zb-h1"))
        ),
    ],
)
def test_a_step_is_the_step_on_the_whole_batch(layout: str) -> None:
    found = compared(layout)
    assert len(found) == len(KINDS)
    assert max(found.values()) < TOLERANCE, found


def test_microbatches_of_unequal_size_and_a_smaller_last_batch() -> None:
    found = compared("data=2 microbatches=3", others=True)
    assert max(found.values()) < TOLERANCE, found


def test_ranks_with_rows_of_their_own_exchange_what_they_count() -> None:
    found = compared("data=2 microbatches=2 zero=1", rows=True)
    assert max(found.values()) < TOLERANCE, found


def _collectives(world: World, kind: str, layout: str, rows: bool) -> tuple[int, int]:
    """Collectives that begin before the first backward, and those of them that begin while the model is called."""
    engine = shardwise.parallelize(lambda: Language(kind), batch(), plan=f"{layout} precision=float64", seed=0, world=world)
    mine = next(iter(shardwise.shard([batch()], engine))) if rows else batch()
    engine.step(mine, is_global_batch=not rows)
    begun: list[str] = []
    real = Group._begin

    def begin(self: Group, *args: Any, **options: Any) -> Any:
        begun.append("called" if calling else "before")
        return real(self, *args, **options)

    Group._begin = begin  # type: ignore[method-assign]
    calling = False
    runner = next(iter(engine._executors.runners_of(SAMPLES, SAMPLES)[0].values()))
    called = runner.forward
    in_forward: list[str] = []

    def forward(*args: Any, **options: Any) -> Any:
        nonlocal calling
        calling = True
        try:
            return called(*args, **options)
        finally:
            calling = False
            in_forward.extend(begun)

    runner.forward = forward  # type: ignore[method-assign]
    engine._executors.executor_cache.entries.clear()
    engine.step(mine, is_global_batch=not rows)
    return len(in_forward), in_forward.count("called")


@pytest.mark.parametrize("kind", ["mean", "several", "masked by hand"])
def test_data_parallelism_sends_nothing_in_its_forward(ranks: Callable[..., list[Any]], kind: str) -> None:
    """Each rank counts the whole batch where it has it; rows of one's own are counted in one message, on its way before the model runs."""
    assert ranks(_collectives, 2, kind, "data=2", False) == [(0, 0)] * 2
    assert ranks(_collectives, 2, kind, "data=2", True) == [(1, 0)] * 2


def _ahead(world: World, folder: str, staleness: int, rows: bool) -> list[int]:
    """Steps that rank 0 had made when rank 1, which waits for that, goes on with its third."""
    made = np.memmap(Path(folder, "made"), dtype=np.int64, shape=(1,), mode="r+")
    model = resolve("gpt-tiny")
    plan = f"data=2 staleness={staleness}"
    engine = shardwise.parallelize(model.make, model.batch(4), loss=model.loss, plan=plan, seed=0, world=world)
    given = model.batch(4)
    mine = next(iter(shardwise.shard([given], engine))) if rows else given
    seen = []
    for step in range(2 + staleness):
        if world.rank == 1 and step == 2:
            deadline = time.monotonic() + 20
            while made[0] < 2 + staleness - 1 and time.monotonic() < deadline:
                time.sleep(0.001)
            seen.append(int(made[0]))
        engine.step(mine, is_global_batch=not rows)
        if world.rank == 0:
            made[0] = step + 1
    engine.drain()
    return seen


def test_with_late_updates_nobody_waits_in_a_loss_that_counts(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """A rank that sleeps before a step until the other has made its next five, which it never would if that one waited for its count."""
    for rows in (False, True):
        (tmp_path / "made").write_bytes(bytes(8))
        (seen,) = ranks(_ahead, 2, str(tmp_path), 6, rows)[1]
        assert seen >= 7


def _late(world: World, kind: str, rows: bool) -> tuple[list[float], dict[str, Tensor] | None]:
    """Losses and last weights with updates two steps late."""
    how = {"name": "sgd", "lr": 0.5, "clip": 0.1}
    layout = "data=2 staleness=2 microbatches=2 precision=float64"
    engine = shardwise.parallelize(lambda: Language(kind), batch(), plan=layout, seed=0, world=world, optimizer=how)
    losses = []
    for step in range(5):
        given = batch(step)
        losses.append(engine.step(next(iter(shardwise.shard([given], engine))) if rows else given, is_global_batch=not rows))
    return [result.loss for result in losses], engine.full_state_dict()


def test_late_updates_of_rows_of_ones_own_are_divided_when_they_are_applied(ranks: Callable[..., list[Any]]) -> None:
    """What ranks counted is summed beside the loss: equal to ranks that count the whole batch; of several counts it is refused by name."""
    (whole, rows), *_ = zip(ranks(_late, 2, "mean", False), ranks(_late, 2, "mean", True), strict=True)
    assert rows[0] == pytest.approx(whole[0], rel=1e-12)
    assert all(torch.allclose(rows[1][name], x, rtol=1e-10, atol=1e-13) for name, x in whole[1].items())
    with pytest.raises(RankError, match="give every rank the whole batch"):
        ranks(_late, 2, "several", True)
