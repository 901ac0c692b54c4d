"""Microbatches that each have a form and a data x context split of their own: each step is the serial model's on the whole padded batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_forms import SGD, Batch, Language, some
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from shardwise.cluster.cluster import Cluster
from shardwise.errors import Infeasible, LayoutError, UsageError
from shardwise.plan.data_context_splits import Split, SplitPrice, Splits
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.plan.plan_file import format_plan, parse_plan
from shardwise.run.rank_model import build
from shardwise.run.rank_model.capture_cache import Microbatches
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve

MODELS = Path(__file__).parents[2].joinpath("support", "context_models.py")
PADDED = some(8, 10, 20, padded=True)
ENDS = torch.tensor([3, 2, 10, 2, 3, 2, 2, 3])
EVEN = some(8, 8, 21)


def skewed() -> Batch:
    """One long row among short ones."""
    batch = some(8, 10, 22)
    mask = torch.arange(10) < ENDS.unsqueeze(1)
    return {"ids": batch["ids"] * mask, "labels": batch["labels"].masked_fill(~mask, -100), "mask": mask}


def cut(batch: Batch, *rows: slice) -> tuple[Batch, ...]:
    """These rows in microbatches, each no longer than its longest row."""
    cuts = []
    for part in rows:
        length = int(batch["mask"][part].sum(1).max()) if "mask" in batch else batch["ids"].shape[1]
        cuts.append({name: x[part, :length] for name, x in batch.items()})
    return tuple(cuts)


def serial(*batches: Batch) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model, losses = Language().double(), []
    opt = torch.optim.SGD(model.parameters(), lr=SGD["lr"])
    for batch in batches:
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def trained(world: World, layout: str, splits: tuple[Split, ...], zeroed: bool = False) -> tuple[list[float], Any]:
    """Two steps: of padded rows, one microbatch a split, and of rows of one length; then the loss of the first ones."""
    if zeroed:  # a gradient that all ranks of a sequence have counts once for each
        build.gradient_adjustments = lambda *_: {}
    engine = shardwise.parallelize(Language, EVEN, optimizer=SGD, plan=f"{layout} precision=float64", seed=0, world=world)
    rows = [slice(0, 1), slice(1, 4), slice(4, 8)][-len(splits) :]
    rows[0] = slice(0, rows[0].stop)
    losses = [
        engine.step(Microbatches(cut(PADDED, *rows), splits)).loss,
        engine.step(Microbatches(cut(EVEN, *rows), splits)).loss,
        engine.evaluate(Microbatches(cut(PADDED, *rows), splits)),
    ]
    return losses, engine.full_state_dict()


def off(found: tuple[list[float], Any], padded: Batch = PADDED) -> float:
    """How far losses and weights are from the serial run's, the farthest relative to its tensor."""
    losses, _ = serial(padded, EVEN, padded)
    _, after_two = serial(padded, EVEN)
    far = [abs(got - want) / abs(want) for got, want in zip(found[0], losses, strict=True)]
    return max(*far, *(float((found[1][name] - x).abs().max() / x.abs().max()) for name, x in after_two.items()))


@pytest.mark.parametrize(
    ("layout", "splits"),
    [
        ("context=2 split=lengths", ((1, 2), (2, 1))),
        ("data=2 split=lengths zero=1", ((1, 2), (1, 2), (2, 1))),
        ("context=2 attention=ring split=lengths recompute=full", ((2, 1), (1, 2))),
        ("data=2", ((2, 1), (2, 1))),
    ],
)
def test_each_microbatch_may_split_the_ranks_by_itself(ranks: Callable[..., list[Any]], layout: str, splits: tuple[Split, ...]) -> None:
    assert off(ranks(trained, 2, layout, splits)[0]) < 1e-9


@pytest.mark.parametrize(
    ("layout", "splits"),
    [
        ("data=2 context=2 split=lengths zero=1", ((1, 4), (2, 2), (4, 1))),
        ("context=2 tensor=2 split=lengths", ((1, 2), (2, 1))),
    ],
)
def test_four_ranks(ranks: Callable[..., list[Any]], layout: str, splits: tuple[Split, ...]) -> None:
    assert off(ranks(trained, 4, layout, splits)[0]) < 1e-9


def test_broken_twin_gradients_that_all_ranks_have_count_twice(ranks: Callable[..., list[Any]]) -> None:
    assert off(ranks(trained, 2, "context=2 split=lengths", ((1, 2), (2, 1)), True)[0]) > 1e-5


# Two ranks halve a row of 10 positions, which costs its square, and need a fifth of that besides; rows of 5 cost less than that.
QUADRATIC = Splits(
    (("ids", 1), ("labels", 1), ("mask", 1)), (2, 5, 10), (SplitPrice(2, 1, (0.0,) * 3, (4.0, 25.0, 100.0)),
     SplitPrice(1, 2, (20.0,) * 3, (2.0, 12.5, 50.0))), 20,
)  # fmt: skip


def test_rows_run_together_such_that_all_take_least_time() -> None:
    """Against all ways to group a few sorted rows, in which numbers are powers of two."""
    assert (QUADRATIC.choose_split(1, 10), QUADRATIC.choose_split(2, 10), QUADRATIC.choose_split(2, 5)) == ((1, 2), (2, 1), (2, 1))
    lengths = [10, 2, 2, 9, 2, 2, 5]
    groups = QUADRATIC.group_rows(lengths, 1)
    assert sorted(row for rows, _, _ in groups for row in rows) == list(range(7))
    assert all(length == max(lengths[row] for row in rows) for rows, length, _ in groups)
    taken = sum(QUADRATIC.cheapest_split(len(rows), length)[0] for rows, length, _ in groups)  # type: ignore[index]

    def least(rows: list[int]) -> float:
        if not rows:
            return 0.0
        tried = [(count, QUADRATIC.cheapest_split(count, rows[0])) for count in (1, 2, 4) if count <= len(rows)]
        return min(one[0] + least(rows[count:]) for count, one in tried if one is not None)

    assert taken == pytest.approx(least(sorted(lengths, reverse=True)))
    with pytest.raises(Infeasible, match="1 rows of 80 positions do not fit: the plan's memory is predicted for 20 positions on a rank"):
        QUADRATIC.group_rows([80])


def planned(layout: str, splits: Splits = QUADRATIC) -> Plan:
    return Plan(Layout.parse(f"{layout} precision=float64"), "language", "1xcpu-2", 8, splits=splits)


def chosen_by_price(world: World) -> Any:
    """The rows of a padded batch by the lengths that its mask tells, and a batch whose rows have one length."""
    engine = shardwise.parallelize(Language, EVEN, optimizer=SGD, plan=planned("context=2 split=lengths"), seed=0, world=world)
    grouped = engine.by_length(skewed(), "mask", multiple=1)
    losses = [engine.step(grouped).loss, engine.step(EVEN, is_global_batch=True).loss, engine.evaluate(engine.by_length(skewed(), ENDS))]
    return losses, engine.full_state_dict(), [(len(b["ids"]), b["ids"].shape[1], s) for b, s in grouped.each()]


def test_context_for_the_long_and_data_for_the_short_by_price(ranks: Callable[..., list[Any]]) -> None:
    first, second = ranks(chosen_by_price, 2)
    assert off(first[:2], skewed()) < 1e-9
    assert first[2] == second[2]  # alike on all ranks
    assert first[2][0] == (1, 10, (1, 2))
    assert {split for _, length, split in first[2] if length < 4} >= {(2, 1)}


class Attending(nn.Module):
    """Attention of which scores are most, at the lengths of the test."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(16, 64), nn.Linear(64, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        q = x.unflatten(-1, (4, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x + y).flatten(0, 1), ids.flatten())


def test_prices_take_context_for_the_long_and_data_for_the_short() -> None:
    """Of one row of 4,096 positions half the attention is worth the messages; of rows of 512 it is not, and as many rows run apart."""
    batch = {"ids": torch.zeros(4, 4096, dtype=torch.int64)}
    cluster = Cluster.parse("1xcpu-2")
    plan = shardwise.plan(Attending, batch, cluster=cluster, layout="context=2 split=lengths")
    splits = plan.splits
    assert splits.positions == (("ids", 1),)
    assert splits.lengths == (512, 1024, 2048, 4096)
    apart, together = splits.prices
    assert (apart.data, together.context) == (2, 2)
    assert splits.seconds(together, 1, 4096) < splits.seconds(apart, 2, 4096)  # one row is not worth two ranks that do not share it
    assert splits.seconds(apart, 2, 512) < splits.seconds(together, 2, 512)
    lengths = [4096, 512, 512, 512, 512]
    assert [split for _, _, split in splits.group_rows(lengths)] == [(1, 2), (2, 1)]
    assert parse_plan(format_plan(plan)) == plan
    assert "1 x 4096 positions take" in dict(plan.reasons)["split"]
    # Memory is that of the largest microbatch under either split.
    most = [shardwise.plan(Attending, batch, cluster=cluster, layout=one).prediction for one in ("context=2", "data=2 microbatches=1")]
    assert plan.prediction is not None
    assert plan.prediction.memory.total >= max(p.memory.total for p in most if p is not None)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(16, 8), nn.BatchNorm1d(8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        q = x.unsqueeze(1)
        y = F.scaled_dot_product_attention(q, q, q).squeeze(1)
        return self.norm(y.transpose(1, 2)).square().mean()


def refused(world: World) -> list[str]:
    said = []
    engine = shardwise.parallelize(Language, EVEN, optimizer=SGD, plan=planned("context=2 split=lengths"), seed=0, world=world)
    fixed = shardwise.parallelize(Language, EVEN, optimizer=SGD, plan="data=2 zero=3 precision=float64", seed=0, world=world)
    normed = shardwise.parallelize(Normed, {"ids": EVEN["ids"] % 16}, plan="data=2", seed=0, world=world)
    other = {**PADDED, "ids": PADDED["ids"] + 1}
    tried: list[Callable[[], Any]] = [
        lambda: engine.step(Microbatches(cut(EVEN, slice(0, 1)), ((2, 1),))),
        lambda: engine.step(Microbatches(cut(EVEN, slice(0, 4)), ((4, 1),))),
        lambda: engine.by_length(other, [2] * 8),
        lambda: fixed.step(Microbatches((EVEN,))),
        lambda: normed.step(Microbatches(({"ids": EVEN["ids"] % 16},))),
        lambda: fixed.by_length(EVEN, "mask"),
    ]
    for one in tried:
        try:
            one()
        except (Infeasible, LayoutError, UsageError) as error:
            said.append(str(error))
    return said


def test_what_cannot_be_is_refused_by_name(ranks: Callable[..., list[Any]]) -> None:
    few, split, padding, zero, met, unpriced = ranks(refused, 2)[0]
    assert "a microbatch of 1 rows under data=2 leaves ranks without any" in few
    assert "data=4 context=1 is no split of data=1 tensor=1" in split
    assert "ids has other entries than padding" in padding
    assert "zero=3 with microbatches of forms of their own is not supported" in zero
    assert "norm" in met
    assert "train something else" in met
    assert "the batch has no tensor mask" in unpriced
    with pytest.raises(LayoutError, match="pipeline=2 with split=lengths is not supported; use pipeline=1, or split=fixed"):
        Layout.parse("pipeline=2 split=lengths")


@pytest.mark.parametrize("name", ["gpt-tiny", "llama_padded"])
def test_verify_runs_every_split(name: str) -> None:
    """A mask that the model reads by computed indices is of positions too."""
    model = resolve(name if "-" in name else f"{MODELS}:{name}")
    found = shardwise.verify(model.make, "context=2 split=lengths", model.batch(4), loss=model.loss, steps=1)
    assert found.ok, found
