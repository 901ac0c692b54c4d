"""Awkward models (`awkward_models.py`, `user_models.py`) under every kind of axis, in float64 against plain PyTorch.

Two launches of ranks a model at most.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "ranks")]

import shardwise  # noqa: E402
from shardwise.capture.patching import patched_for_export  # noqa: E402
from shardwise.errors import Infeasible, LayoutError, ModelError  # noqa: E402
from shardwise.model.sharding.propagate import propagate  # noqa: E402
from shardwise.plan.ir.placement import R, Shard  # noqa: E402
from shardwise.plan.layout import Layout  # noqa: E402
from shardwise.plan.plan import Plan  # noqa: E402
from shardwise.run.rank_model.model_source import ModelSource  # noqa: E402
from shardwise.run.verify.verify import Options, verify_on_rank  # noqa: E402
from shardwise.world.launch.launch import launch  # noqa: E402
from shardwise.world.world import World  # noqa: E402
from tests.support.awkward_models import MODELS  # noqa: E402
from tests.support.user_models import MODELS as OF_USERS  # noqa: E402
from tests.support.verified_models import EAGER, Subject  # noqa: E402

TWO = ("data=2", "tensor=2", "tensor=2 sequence_parallel=on", "pipeline=2")
FOUR = ("data=2 tensor=2",)
CROSSED = {"alike", "guests", "together", "norms", "attentions", "coupled", "tables", "writes"}
CUT = {"tied", "norms", "images", "attentions", "losses", "writes", "quiet"}  # also in microbatches, which the others' code does not admit


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check(subject: Subject, layouts: tuple[str, ...]) -> dict[str, str]:
    """What differs under these layouts, all of which have the same number of ranks."""
    plans: list[Plan] = []
    for text in layouts:
        plan = subject.plan(replace(Layout.parse(text), precision="float64"))
        plans.append(replace(plan, shards=(("free links", ()),)) if plan.layout.tensor > 1 else plan)
        subject.source.capture_all(plans[-1], subject.batch, subject.loss)

    def on_rank(world: World) -> list[str]:
        given = (subject.make, subject.batch, subject.loss)
        found = [verify_on_rank(world, plan, *given, subject.source, Options(seed=subject.seed)) for plan in plans]
        return [found.first_difference or "" for found in found if found is not None]

    said = launch(on_rank, plans[0].layout.num_ranks, timeout_s=60.0, show=False)[0]
    return {text: why for text, why in zip(layouts, said, strict=True) if why}


@pytest.mark.parametrize("name", MODELS)
def test_awkward_models_are_what_they_are_in_one_process(name: str) -> None:
    subject = Subject(str(ROOT / f"tests/support/awkward_models.py:{name}"))
    cut = ("data=2 microbatches=2 recompute=full",) if name in CUT else ()
    assert not check(subject, TWO + cut)
    if name in CROSSED:
        assert not check(subject, FOUR)


class Quantile(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.quantile(0.3, 1, True)


def test_quantiles_are_what_they_are_in_one_process() -> None:
    """torch 2.11 cannot export them on processors, where it looks at their level's value; then a model with one runs whole."""
    subject = Subject(str(ROOT / "tests/support/awkward_models.py:quantile"))
    try:
        with patched_for_export():
            torch.export.export(Quantile(), (torch.ones(2, 3),), strict=False)
    except Exception:
        with pytest.raises(Infeasible, match=r"could not be captured .*data-dependent at .*quantile"):
            subject.plan(Layout.parse("tensor=2"))
        assert not check(subject, TWO[:1])
    else:
        assert not check(subject, TWO)


@pytest.mark.parametrize("name", OF_USERS)
def test_models_of_users_are_what_they_are_in_one_process(name: str) -> None:
    subject = Subject(str(ROOT / f"tests/support/user_models.py:{name}"))
    # What `running` writes at its beginning is read at its end, so that it has no stages.
    layouts = (*TWO[:3], "data=2 microbatches=2 zero=3") if name == "running" else (*TWO, "data=2 microbatches=2 zero=3")
    assert not check(subject, layouts)


def test_a_part_that_is_cast_in_vain_keeps_its_weights() -> None:
    """Where the model runs whole, they were copies that the optimizer did not know, in float64."""
    assert not check(Subject(str(ROOT / "tests/support/user_models.py:cast_branch")), TWO[:1])


class Accidents(nn.Module):
    """8 samples, 8 classes, sequences of 8: class weights and positions come with the batch, and are no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor, positions: Tensor, weights: Tensor, y: Tensor) -> Tensor:
        return self.head(self.words(ids) + positions) * weights


def class_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["y"].flatten(), weight=batch["weights"])


def positions() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids, y = (torch.randint(8, (8, 8), generator=generator) for _ in range(2))
    table, weights = torch.randn(8, 8, generator=generator), torch.rand(8, generator=generator) + 0.5
    return {"ids": ids, "positions": table, "weights": weights, "y": y}


def test_what_is_as_long_as_the_batch_by_accident_is_not_cut_into_microbatches() -> None:
    captured = ModelSource.from_model(Accidents).capture(positions(), class_loss, 4)
    assert {v.name for v in captured.graph.inputs if not v.batched} == {"positions", "weights"}
    for layout in ("data=2 microbatches=2", "pipeline=2 microbatches=4"):
        found = shardwise.verify(Accidents, layout, positions(), loss=class_loss)
        assert found.ok, found


class Branching(nn.Module):
    """Cannot be captured; its loss is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.layer(x).square()
        return y.sum() if x.sum() > -1e9 else y.mean()


def test_a_loss_that_does_not_divide_is_refused_where_the_model_cannot_be_captured() -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    with pytest.raises(Infeasible, match=r"its loss over 8 samples is .* where the mean over data=2 parts of them is"):
        shardwise.verify(Branching, "data=2", (x,))
    assert shardwise.plan(Branching, (x,), cluster="1xcpu-2").layout.data == 1  # tried before it is proposed
    assert shardwise.verify(Branching, "data=1 microbatches=2", (x,)).ok


class Picked(nn.Module):
    """Cannot be captured: the mean over those samples that a mask picks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, picked: Tensor) -> Tensor:
        mean = self.layer(x)[picked].square().mean()
        return mean if x.sum() > -1e9 else 2 * mean


@pytest.mark.parametrize("counts", [(2, 2, 3, 1), (2, 2, 4, 0), (2, 2, 2, 2)], ids=["unequal", "none at all", "equal by accident"])
def test_a_mean_over_what_parts_differ_in_is_refused_though_parts_are_alike(counts: tuple[int, ...]) -> None:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    picked = torch.cat([torch.arange(4) < n for n in counts])
    with pytest.raises(Infeasible, match=r"its loss over 8 samples is .* where the mean over data=2 parts of them is"):
        shardwise.plan(Picked, (x, picked), cluster="1xcpu-2", layout="data=2")


class Nearly(nn.Module):
    """Cannot be captured; the largest value of the batch changes the loss by less than float32 shows, or its gradient alone."""

    def __init__(self, part: float) -> None:
        super().__init__()
        self.part, self.layer = part, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        largest = y.abs().max()
        term = self.part * (y / largest).square().mean() if self.part else 1e-3 * (largest - largest.detach())
        return y.square().mean() + (term if x.sum() > -1e9 else 2 * term)


@pytest.mark.parametrize(
    ("part", "said"), [(1e-6, "its loss over 8 samples is"), (0.0, "its gradient of layer.* is not the mean of those")]
)
def test_what_couples_samples_less_than_float32_shows_is_not_divided_where_the_model_cannot_be_captured(part: float, said: str) -> None:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    model = Nearly(part)
    before = {name: (p, p.data_ptr(), p.dtype) for name, p in model.named_parameters()}
    with pytest.raises(Infeasible, match=said):
        shardwise.plan(model, (x,), cluster="1xcpu-2", layout="data=2")
    assert before == {name: (p, p.data_ptr(), p.dtype) for name, p in model.named_parameters()}


class Seen(nn.Module):
    """Cannot be captured, and keeps what it sees: a mean in a buffer, or rows of a table cut to a length."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(4, 2)
        self.table = nn.Embedding(20, 4, max_norm=0.5 if kind == "table" else None)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(4))
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.calls += 1
        if self.kind == "mean":
            self.mean.lerp_(x.detach().mean(0), 0.5)
        scale = 2.0 if self.calls > 1_000_000 else 1.0
        return F.soft_margin_loss(self.layer(x + self.table(ids)), x[:, :2].sign()) * scale  # whose targets can have no gradient


def test_what_is_written_by_the_samples_seen_is_not_divided_where_the_model_cannot_be_captured() -> None:
    batch = (torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8))
    for kind, written in (("mean", "mean"), ("table", "table.weight")):
        with pytest.raises(Infeasible, match=rf"it writes {written} while it runs, by the samples that it sees"):
            shardwise.verify(lambda kind=kind: Seen(kind), "data=2", batch)
    assert shardwise.verify(lambda: Seen("calls"), "data=2", batch).ok


class Remembering(nn.Module):
    """Cannot be captured, and reads in a call what it kept of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(4, 2), [0.0]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(float(x.mean()))
        return (self.layer(x) - self.seen[-2]).square().mean()


def test_what_is_kept_in_attributes_by_the_samples_seen_is_not_divided_where_the_model_cannot_be_captured() -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    with pytest.raises(Infeasible, match=r"it reads in the next call what it keeps in its attribute seen, and its loss over 8 samples is"):
        shardwise.verify(Remembering, "data=2", (x,))
    assert shardwise.plan(Remembering, (x,), cluster="1xcpu-2").layout.data == 1


class Noisy(nn.Module):
    """Cannot be captured, and draws in evaluation too, in every way that is known. `whole`: sees all samples."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole, self.layer, self.drop = whole, nn.Linear(4, 2), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * (1 + torch.rand(2)) + torch.randn_like(x[:, :2]) * torch.normal(x[:, :1], 2.0)
        y = self.drop(y) + F.dropout(y, 0.3) * torch.empty_like(y).exponential_(2.0) * torch.empty_like(y).uniform_(-1.0, 3.0)
        y = y * torch.bernoulli(torch.full_like(y, 0.9))
        if self.whole:
            y = y - y.mean(0)
        return y.square().mean() if x.sum() > -1e9 else 2 * y.square().mean()


def test_models_that_draw_are_tried_with_one_number_for_all_samples_where_they_cannot_be_captured() -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    state = torch.random.get_rng_state()
    assert shardwise.plan(lambda: Noisy(False), (x,), cluster="1xcpu-2", layout="data=2").layout.data == 2
    assert torch.equal(torch.random.get_rng_state(), state)
    with pytest.raises(Infeasible, match="its loss over 8 samples is"):
        shardwise.plan(lambda: Noisy(True), (x,), cluster="1xcpu-2", layout="data=2")


class Attending(nn.Module):
    """Cannot be captured; what it attends to comes from a table alone, beside what comes from the batch. Joins tensors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        found = F.scaled_dot_product_attention(x, x, torch.cat([self.table(ids), self.table(ids)], 1)[:, : x.shape[1]])
        return found.square().mean() if x.sum() > -1e9 else found.sum()


def test_a_plan_in_float64_tries_the_model_in_float64_where_it_cannot_be_captured() -> None:
    generator = torch.Generator().manual_seed(1)
    x, ids = torch.randn(8, 4, 4, generator=generator), torch.randint(8, (8, 2), generator=generator)
    layout = Layout.parse("data=2 precision=float64")
    assert shardwise.plan(Attending, (x, ids), cluster="1xcpu-2", layout=layout).layout == layout


class OwnGradient(nn.Module):
    """Asks for a derivative of its own by its input, as physics-informed networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return (slope - x.cos()).square().mean()


class Overwriting(OwnGradient):
    """Writes over what its backward needs, which torch tells in backward only."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).sigmoid_().mul_(2.0).mean()


def test_a_model_that_differentiates_trains_by_data_and_one_that_pytorch_cannot_train_is_told_so() -> None:
    x = torch.randn(8, 1, generator=torch.Generator().manual_seed(1))
    assert shardwise.verify(OwnGradient, "data=2", (x,)).ok
    with pytest.raises(ModelError, match="raises when plain PyTorch trains it in one process: one of the variables"):
        shardwise.verify(Overwriting, "data=1", (x,))


class Spread(nn.Module):
    """Divides by how far samples lie apart, which for one is no number, and draws from what must be positive."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.mean, self.least = nn.Linear(1, 1), least

    def forward(self, x: Tensor) -> Tensor:
        means = self.mean(x)
        likely = torch.distributions.Normal(means, (means * 0.0).exp() + self.least).log_prob(x)
        return -(likely * (x - x.mean()) / x.std()).mean()


def test_a_model_whose_numbers_end_or_that_refuses_them_itself_is_told_so() -> None:
    """Both ended as a failed rank: what is no number in the first step was refused by the model in the second."""
    x = torch.randn(8, 1, generator=torch.Generator().manual_seed(1))
    found = shardwise.verify(lambda: Spread(0.0), "pipeline=2 microbatches=8", (x,))
    assert "the serial run's is nan, so there is nothing to compare" in (found.first_difference or "")
    with pytest.raises(ModelError, match="raises when plain PyTorch trains it in one process: Expected parameter scale"):
        shardwise.verify(lambda: Spread(-2.0), "data=2", (x,))


def test_written_buffers_lie_whole_and_are_cut_anew_where_they_are_read_in_pieces() -> None:
    make = MODELS["overwritten"]
    subject = Subject(str(ROOT / "tests/support/awkward_models.py:overwritten"))
    graph = subject.source.capture(subject.batch, subject.loss, len(make()[1]["x"])).graph
    (table,) = (v.value for v in graph.buffers)
    sharding = propagate(graph, {"tensor": 2}, prices=EAGER["free links"], sequence=True)
    assert sharding.placements[table]["tensor"] is R
    reads = [
        needs["tensor"]
        for op in graph.operators
        for v, needs in zip(op.inputs, sharding.input_placements[op.name], strict=True)
        if v == table
    ]
    assert reads[0] == reads[-1] == Shard(1)  # before it is written and after
    assert R in reads
    with pytest.raises(LayoutError, match="the plan cuts table over tensor, but the model writes all of it in place"):
        propagate(graph, {"tensor": 2}, {"tensor": (("table", 0),)})
