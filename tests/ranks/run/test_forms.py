"""Batches of many forms through the engine: lengths that change, short batches, other tensors, rows of unlike lengths; each step is the
serial model's on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from shardwise.errors import Infeasible, ModelError
from shardwise.run.parts.lru_cache import MAX_CAPTURES
from shardwise.run.parts.rows import BatchRows
from shardwise.world.world import World

Batch = dict[str, Tensor]
VOCABULARY, WIDTH, MOST = 24, 16, 10
SGD = {"name": "sgd", "lr": 0.3}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Language(nn.Module):
    """Tokens of any length, masked or not, with a penalty on weights beside the mean over targets that count, and a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(MOST, WIDTH)
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        length = ids.shape[1]
        x = self.tokens(ids) + self.places(torch.arange(length, device=ids.device))
        seen = None
        if mask is not None:
            causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
            seen = causal & mask[:, None, None, :].bool()
        for block in self.blocks:
            x = block(x, seen)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)
        return loss + 0.01 * self.head.weight.square().sum() + 0.1 * x[:, 0].square().mean()


def some(samples: int, length: int, seed: int, padded: bool = False) -> Batch:
    """Tokens, and targets that partly do not count; `padded`: to lengths of their own, with a mask."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (samples, length), generator=g)
    labels = ids.masked_fill(torch.rand(samples, length, generator=g) < 0.3, -100)
    if not padded:
        return {"ids": ids, "labels": labels}
    ends = torch.randint(2, length + 1, (samples, 1), generator=g)
    ends[0] = length
    mask = torch.arange(length) < ends
    return {"ids": ids * mask, "labels": labels.masked_fill(~mask, -100), "mask": mask}


BATCHES = (some(8, 8, 0), some(8, 5, 1), some(5, 8, 2), some(7, 6, 3, padded=True), some(1, 5, 4), some(8, 8, 5))
EVALUATED = (some(8, 8, 11), some(3, 5, 12, padded=True))


def serial() -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model, losses = Language().double(), []
    opt = torch.optim.SGD(model.parameters(), lr=SGD["lr"])
    for batch in BATCHES:
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(float(loss.detach()))
    model.eval()
    with torch.no_grad():
        losses += [float(model(**batch)) for batch in EVALUATED]
    return losses, model.state_dict()


def trained(world: World, layout: str, shared: bool) -> tuple[list[float], dict[str, Tensor] | None]:
    """`shared`: as `shardwise.shard` gives every rank its rows."""
    engine = shardwise.parallelize(Language, BATCHES[0], optimizer=SGD, plan=f"{layout} precision=float64", seed=0, world=world)
    if shared:
        losses = [engine.step(mine, is_global_batch=False).loss for mine in shardwise.shard(BATCHES, engine)]
        return losses + [
            engine.evaluate(mine, is_global_batch=False) for mine in shardwise.shard(EVALUATED, engine)
        ], engine.full_state_dict()
    losses = [engine.step(batch, is_global_batch=True).loss for batch in BATCHES]
    return losses + [engine.evaluate(batch, is_global_batch=True) for batch in EVALUATED], engine.full_state_dict()


def check(found: tuple[list[float], dict[str, Tensor] | None], said: str) -> None:
    losses, weights = serial()
    assert found[0] == pytest.approx(losses, rel=1e-9), said
    assert found[1] is not None
    for name, x in weights.items():
        assert float((found[1][name] - x).abs().max()) < 1e-9 * float(x.abs().max()), (said, name)


@pytest.mark.parametrize(
    ("layout", "shared"),
    [
        ("data=2", True), ("data=2 microbatches=2", False), ("tensor=2", False), ("pipeline=2 microbatches=2", False),
        ("data=2 microbatches=2 zero=3 recompute=full", True), ("pipeline=2 microbatches=4 schedule=zb-h1", False),
    ],
)  # fmt: skip
def test_every_form_is_the_serial_step(ranks: Callable[..., list[Any]], layout: str, shared: bool) -> None:
    check(ranks(trained, 2, layout, shared)[0], layout)


@pytest.mark.parametrize("layout", ["data=2 tensor=2 zero=1", "data=4", "data=2 pipeline=2 microbatches=2 schedule=chimera"])
def test_every_form_on_four_ranks(ranks: Callable[..., list[Any]], layout: str) -> None:
    """With fewer samples than ranks, and of three."""
    check(ranks(trained, 4, layout, True)[0], layout)


def cut(batch: Batch, rows: slice) -> Batch:
    """These rows, no longer than the longest of them."""
    length = int(batch["mask"][rows].sum(1).max())
    return {name: x[rows, :length] for name, x in batch.items()}


def of_lengths(world: World, first: int) -> list[float]:
    """Every rank has rows of its own, of their own lengths, and ranks tell each other how many; `first`: of rank 0."""
    padded = some(8, 8, 20, padded=True)
    engine = shardwise.parallelize(Language, padded, optimizer=SGD, plan="data=2 precision=float64", seed=0, world=world)
    mine = cut(padded, slice(first, 8) if world.rank else slice(0, first))
    return [
        engine.step(mine, is_global_batch=False).loss,
        engine.evaluate(mine, is_global_batch=False),
        engine.step(padded, is_global_batch=True).loss,
    ]


def test_ranks_may_have_rows_of_other_lengths(ranks: Callable[..., list[Any]]) -> None:
    torch.manual_seed(0)
    model, padded = Language().double(), some(8, 8, 20, padded=True)
    opt, losses = torch.optim.SGD(model.parameters(), lr=SGD["lr"]), []
    for train in (True, False, True):
        loss = model(**padded)
        losses.append(float(loss.detach()))
        if train:
            loss.backward()
            opt.step()
            opt.zero_grad()
    for first in (4, 1):
        assert ranks(of_lengths, 2, first) == [pytest.approx(losses, rel=1e-9)] * 2


def of_one_rank(world: World) -> list[float]:
    """Rank 1 has all rows of the first batch, rank 0 none."""
    engine = shardwise.parallelize(Language, BATCHES[0], optimizer=SGD, plan="data=2 precision=float64", seed=0, world=world)
    mine = {name: x if world.rank else x[:0] for name, x in BATCHES[0].items()}
    return [engine.step(mine, is_global_batch=False).loss, engine.step(BATCHES[1], is_global_batch=True).loss]


def test_one_rank_may_have_all_rows(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(of_one_rank, 2) == [pytest.approx(serial()[0][:2], rel=1e-9)] * 2


def counted_alike(world: World) -> list[float]:
    engine = shardwise.parallelize(Language, BATCHES[0], optimizer=SGD, plan="data=2 precision=float64", seed=0, world=world)
    single = some(1, 5, 4)
    right = engine.evaluate(single, is_global_batch=True)
    BatchRows.share = lambda self, m: sum(self.table[m]) / self.num_samples  # type: ignore[method-assign]
    return [right, engine.evaluate(single, is_global_batch=True)]


def test_a_share_that_is_the_same_on_all_ranks_is_found(ranks: Callable[..., list[Any]]) -> None:
    """A broken twin: a mean over the samples of a rank that has more of them counts as any other's."""
    torch.manual_seed(0)
    want = float(Language().double()(**some(1, 5, 4)).detach())
    right, wrong = ranks(counted_alike, 2)[0]
    assert right == pytest.approx(want, rel=1e-9)
    assert abs(wrong - want) > 1e-4


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.frozen = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        y = self.norm(self.up(x))
        return y.square().mean() if more is None else (y * self.frozen(more)).mean()


def refused(world: World) -> list[str]:
    x, said = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), []
    engine = shardwise.parallelize(Normed, {"x": x}, plan=f"data={world.num_ranks}", seed=0, world=world)
    for batch, error in (({"x": x[:1]}, Infeasible), ({"x": x, "more": x}, ModelError), ({"x": torch.cat((x, x))}, Infeasible)):
        try:
            engine.step(batch, is_global_batch=True)
        except error as found:
            said.append(str(found))
    engine.step({"x": x}, is_global_batch=True)  # and goes on
    return said


def test_what_cannot_be_is_refused_by_name(ranks: Callable[..., list[Any]]) -> None:
    for shares, learns, more in ranks(refused, 2):
        assert "1 samples, which data=2 ranks share as 1, 0, and norm/batch_norm takes statistics over samples" in shares
        assert "frozen.weight learns from a batch of this form, and does not from the one" in learns
        assert "the batch has 8 samples; the plan is for 4" in more


def test_the_oldest_forms_leave() -> None:
    batches = [{"x": torch.randn(2, 4), "y": torch.randn(n)} for n in range(1, MAX_CAPTURES + 6)]
    engine = shardwise.parallelize(Two, batches[0], plan="data=1", seed=0)
    for batch in batches:
        engine.step(batch, is_global_batch=True)
    assert len(engine._captures.variants.entries) == MAX_CAPTURES


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.up(x).mean() + y.sum()
