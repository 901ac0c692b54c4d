"""Proofs of plans: layouts of a small model are equal, and what is off once, by any factor, by one element or one rank, is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise
from shardwise.errors import RunError, VerifyError
from shardwise.lower import redistribute
from shardwise.lower.kernels import random_stream
from shardwise.run.gradients.gradient_reducer import GradientReducer
from shardwise.run.prove import prove as prove_file
from shardwise.run.prove import rank_threads
from shardwise.run.prove.proof import Proof
from shardwise.run.prove.rank_threads import Exchange, RankScheduler, thread_world
from shardwise.run.rank_model.runnable_capture import RunnableCapture


class Transformer(nn.Module):
    """One layer of a GPT with its loss."""

    def __init__(self, hidden: int = 8, heads: int = 4, vocabulary: int = 12, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, hidden), nn.Linear(hidden, vocabulary)
        self.qkv, self.out, self.norm = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden), nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.heads, self.dropout = heads, dropout

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        samples, length, hidden = x.shape
        q, k, v = (t.view(samples, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).split(hidden, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + functional.dropout(self.out(attended), self.dropout, self.training)
        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


random_stream_bound = random_stream.word_bound
BATCH = tuple(torch.randint(0, 12, (4, 4), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))


def prove_layout(layout: str, **options: Any) -> Proof:
    """Prove a layout of the transformer at one point."""
    proof = shardwise.prove(Transformer, layout, BATCH, max_error_probability=0.1, **options)
    assert isinstance(proof, Proof)
    return proof


def prove_all(make: Callable[[], nn.Module], layouts: Sequence[str], batch: Any = BATCH, **options: Any) -> None:
    """Prove layouts of a model, which is captured once."""
    proofs = shardwise.prove(make, layouts, batch, max_error_probability=0.1, **options)
    assert isinstance(proofs, tuple)
    for proof in proofs:
        assert proof.ok, proof
        assert proof.error_probability <= 1e-2


def test_layouts_are_equal() -> None:
    prove_all(
        Transformer,
        [
            "tensor=2 sequence_parallel=on",
            "data=2 zero=3",
            "data=2 shares=3/1",
            "context=2 attention=ring",
            "data=2 offload=activations",
            "pipeline=2 microbatches=4 schedule=zb-h1",
            "pipeline=2 inner=2x1/1x2 microbatches=2",
            "data=2 tensor=2 pipeline=2 microbatches=2 zero=1",
            "data=2 staleness=1",
        ],
    )


def test_momentum_and_microbatches_of_several_sizes_are_equal() -> None:
    six = tuple(torch.randint(0, 12, (6, 4), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    prove_all(Transformer, ["data=2 zero=1 pipeline=2 microbatches=2", "microbatches=4"], six)
    momentum = {"name": "sgd", "momentum": 0.9, "weight_decay": 0.1}
    prove_all(Transformer, ["data=2 zero=1"], optimizer=momentum, steps=2)


def test_clipped_gradients_are_equal() -> None:
    prove_all(Transformer, ["data=2 zero=1", "tensor=2 pipeline=2 microbatches=2"], optimizer={"name": "adamw", "clip": 0.5})


def test_frozen_and_tied_parameters_are_equal() -> None:
    def make() -> nn.Module:
        model = Transformer()
        model.head.weight = model.embedding.weight
        model.up.weight.requires_grad_(False)
        return model

    prove_all(make, ["data=2 tensor=2 zero=2", "pipeline=2 microbatches=2"])


def test_draws_are_equal() -> None:
    prove_all(
        lambda: Transformer(dropout=0.25),
        ["tensor=2 sequence_parallel=on", "data=2 pipeline=2 microbatches=2 recompute=full"],
        steps=2,
    )


def test_another_draw_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_stream, "word_bound", lambda chance: random_stream_bound(chance) - (1 << 50))
    proof = shardwise.prove(lambda: Transformer(dropout=0.25), "data=2", BATCH, max_error_probability=0.1)
    assert isinstance(proof, Proof)
    assert not proof.ok


@pytest.mark.parametrize("layout", ["data=2 compress=topk:0.3", "data=2 servers=1"])
def test_a_layout_that_trains_something_else_is_refused(layout: str) -> None:
    with pytest.raises(shardwise.errors.ModelError, match="verify"):
        prove_layout(layout)


def test_the_wanted_probability_is_met() -> None:
    once, twice = (shardwise.prove(Transformer, "data=1", BATCH, max_error_probability=p) for p in (1e-12, 1e-20))
    assert isinstance(once, Proof)
    assert isinstance(twice, Proof)
    assert once.ok
    assert twice.ok
    assert once.error_probability <= 1e-12
    assert twice.error_probability <= 1e-20 < once.error_probability
    assert (once.points, twice.points) == (1, 2)


Mutation = Callable[[pytest.MonkeyPatch], None]


def scale_sums(factor: float) -> Mutation:
    """Scale every sum over ranks."""
    add_up = rank_threads.add_up

    def scaled(parts: Sequence[Tensor]) -> Tensor:
        return add_up(parts) * factor if parts[0].is_floating_point() else add_up(parts)

    return lambda patch: patch.setattr(rank_threads, "add_up", scaled)


def leave_out_a_rank(patch: pytest.MonkeyPatch) -> None:
    add_up = rank_threads.add_up
    patch.setattr(rank_threads, "add_up", lambda parts: add_up(parts[:-1] if parts[0].is_floating_point() else parts))


def rotate_members(patch: pytest.MonkeyPatch) -> None:
    join_flat = rank_threads.join_flat
    patch.setattr(rank_threads, "join_flat", lambda parts: join_flat([*parts[1:], parts[0]] if parts[0].is_floating_point() else parts))


def scale_joined(patch: pytest.MonkeyPatch) -> None:
    join_flat = rank_threads.join_flat
    patch.setattr(
        rank_threads, "join_flat", lambda parts: join_flat(parts) * (1 - 1e-15) if parts[0].is_floating_point() else join_flat(parts)
    )


def shift_one_slice(patch: pytest.MonkeyPatch) -> None:
    """Take a shard one element too late, once."""
    original, fired = redistribute._redistribute_in_rank_order, []

    def shifted(x: Tensor, source: Any, target: Any, group: Any) -> Tensor:
        out = original(x, source, target, group)
        if not fired and out.is_floating_point() and out.dim() and out.shape[-1] > 1:
            fired.append(True)
            return out.roll(1, -1)
        return out

    patch.setattr(redistribute, "_redistribute_in_rank_order", shifted)


def weigh_gradients(patch: pytest.MonkeyPatch) -> None:
    """Weigh one gradient by n / (n - 1), on one rank."""
    original, fired = GradientReducer.add, []

    def weighed(self: GradientReducer, name: str, grad: Tensor) -> None:
        original(self, name, grad if fired else grad * (4 / 3))
        fired.append(True)

    patch.setattr(GradientReducer, "add", weighed)


@pytest.mark.parametrize(
    ("layout", "mutation"),
    [
        ("tensor=2", scale_sums(2.0)),
        ("tensor=2", scale_sums(1 + 1e-13)),
        ("data=2", scale_sums(1 + 1e-15)),
        ("data=2", leave_out_a_rank),
        ("data=2 zero=1", rotate_members),
        ("data=2 zero=3", scale_joined),
        ("tensor=2 sequence_parallel=on", rotate_members),
        ("tensor=2", shift_one_slice),
        ("data=2 zero=2", weigh_gradients),
    ],
)
def test_a_mutation_is_found(layout: str, mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    proof = prove_layout(layout)
    assert not proof.ok
    assert proof.error_probability == 1.0


@pytest.mark.parametrize("layout", ["data=2 microbatches=2", "pipeline=2 microbatches=2"])
def test_a_wrong_weight_of_the_loss_is_found(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    summand = RunnableCapture.loss_summand
    monkeypatch.setattr(RunnableCapture, "loss_summand", lambda self, result: summand(self, result) * (1 + 1e-15))
    proof = prove_layout(layout)
    assert {difference.kind for difference in proof.differences} == {"loss"}
    assert "the loss of the batch" in proof.outcome


def test_the_first_wrong_operator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rotate_members(monkeypatch)
    proof = prove_layout("tensor=2 sequence_parallel=on")
    assert proof.wrong_value is not None
    assert set(proof.wrong_value.placement) == {"tensor"}
    assert proof.wrong_value.site in proof.outcome
    backward = GradientReducer.add
    monkeypatch.undo()
    monkeypatch.setattr(GradientReducer, "add", lambda self, name, grad: backward(self, name, grad * 2))
    proof = prove_layout("data=2 zero=2")
    assert not proof.ok
    assert proof.wrong_value is None
    assert "gradient of" in proof.outcome


class Routed(nn.Module):
    """Four experts, of which each sample takes two."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.router = nn.Linear(6, 6), nn.Linear(6, 4)
        self.experts = nn.Parameter(torch.randn(4, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        shares, chosen = self.router(h).sigmoid().topk(2)
        rows, ids, order = torch.ops.shardwise.to_experts(h, chosen, 4)
        rows = torch.ops.shardwise.of_experts(rows, ids, self.experts, None, False).tanh()
        combined: Tensor = torch.ops.shardwise.from_experts(rows, order, shares, 4)
        return combined.square().mean()


def test_rows_in_the_order_of_their_experts_are_no_parts_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of gradients alone has no first operator, though each rank's rows differ from the serial run's."""
    batch = (torch.randn(8, 6, generator=torch.Generator().manual_seed(0)),)
    prove_all(Routed, ["data=2", "data=2 expert=2"], batch)
    backward = GradientReducer.add
    monkeypatch.setattr(GradientReducer, "add", lambda self, name, grad: backward(self, name, grad * 2))
    proof = shardwise.prove(Routed, "data=2 zero=2", batch, max_error_probability=0.1)
    assert isinstance(proof, Proof)
    assert not proof.ok
    assert proof.wrong_value is None
    monkeypatch.setattr(prove_file, "list_comparable_values", lambda graph: [(op.site, v) for op in graph.operators for v in op.outputs])
    proof = shardwise.prove(Routed, "data=2 zero=2", batch, max_error_probability=0.1)
    assert isinstance(proof, Proof)
    assert "to_experts" in proof.outcome


def test_points_whose_divisors_are_zero_show_nothing() -> None:
    """A divisor that is zero at every point spoils each of them: neither equal nor different is said."""

    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return (y / (y - y)).sum()

    with pytest.raises(shardwise.errors.ModelError, match="a divisor was zero"):
        shardwise.prove(Nothing, "data=2", (torch.randn(4, 4),), max_error_probability=0.1)


def test_a_model_without_an_exact_form_is_refused_by_name() -> None:
    class Factors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.lu_factor(self.linear(x))[0].sum()

    with pytest.raises(shardwise.errors.ModelError, match="linalg_lu_factor"):
        shardwise.prove(Factors, "data=1", (torch.randn(4, 4),))


def test_the_verb_ends_as_verify_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.cli import run

    arguments = ["prove", "dlrm-tiny", "--layout", "data=2", "--batch", "4", "--probability", "0.1", "--json"]
    assert run(arguments) == 0
    leave_out_a_rank(monkeypatch)
    assert run(arguments) == VerifyError.exit_code
    assert run(["prove", "plan.toml", "--layout", "data=2"]) == 2


def test_ranks_that_wait_for_one_another_are_named() -> None:
    room = Exchange(2)

    def receive(rank: int) -> None:
        thread_world(room, rank, 2).world_group.irecv(torch.empty(1), 1 - rank).wait()

    with pytest.raises(RunError, match="wait for one another: rank 0 for a message"):
        room.scheduler.run(receive)


def test_ranks_in_different_collectives_are_named() -> None:
    room = Exchange(2)

    def reduce(rank: int) -> None:
        thread_world(room, rank, 2).world_group.all_reduce(torch.ones(2 + rank))

    with pytest.raises(RunError, match="meet in different collectives"):
        room.scheduler.run(reduce)


def test_an_error_of_a_rank_ends_all() -> None:
    scheduler = RankScheduler(3)

    def fail_on_one(rank: int) -> None:
        if rank == 1:
            raise ValueError("one")
        scheduler.wait_until(rank, lambda: False, "nothing")

    with pytest.raises(ValueError, match="one"):
        scheduler.run(fail_on_one)


def test_a_mask_that_a_stage_receives_hides_what_it_hid() -> None:
    """T5's decoder adds one bias, with minus infinity for later positions, in every layer: the second stage receives it."""
    sizes = "t5:layers=2,hidden=8,heads=2,inner=8,vocabulary=16,sequence=4"
    assert shardwise.prove(sizes, "pipeline=2", 2, whole=True).ok


class Masks(nn.Module):
    """Attention whose mask adds, or fills in, the least number of its scores' type."""

    def __init__(self, fills: bool = False, least: float | None = None) -> None:
        super().__init__()
        self.qkv, self.head, self.fills, self.least = nn.Linear(8, 24), nn.Linear(8, 8), fills, least

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2)
        later = torch.ones(scores.shape[1:], dtype=torch.bool, device=x.device).triu(1)
        least = torch.finfo(scores.dtype).min if self.least is None else self.least
        scores = scores.masked_fill(later, least) if self.fills else scores + torch.zeros_like(scores).masked_fill(later, least)
        return self.head(scores.softmax(-1) @ v).square().mean()


@pytest.mark.parametrize("fills", [False, True])
def test_the_least_number_of_a_type_hides_as_minus_infinity_does(fills: bool) -> None:
    """A capture has float32's, the serial model in float64 its own: both hide."""
    batch = (torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0)),)
    for layout in ("data=2", "tensor=2"):
        assert shardwise.prove(lambda: Masks(fills), layout, batch, loss=lambda output, _: output).ok


class MaskedBySmallest(nn.Module):
    """Scores of later positions are the smallest number of their dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        keep = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = torch.where(keep, x @ x.mT, torch.finfo(x.dtype).min).softmax(-1)
        return functional.cross_entropy(self.head(scores @ x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("is_float64", [False, True])
def test_the_smallest_number_of_a_mask_is_that_of_the_dtype_as_written(is_float64: bool) -> None:
    """The serial run on numbers of the field is in float64, and a model that is not has float32's smallest number in its graph."""
    prove_all(lambda: MaskedBySmallest().double() if is_float64 else MaskedBySmallest(), ["data=2", "tensor=2"])


def test_a_buffer_that_no_checkpoint_stores_is_refused_by_name() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("turns", torch.ones(4, dtype=torch.complex128))

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * self.turns).real.square().mean()

    with pytest.raises(shardwise.errors.ModelError, match="turns is complex128"):
        shardwise.prove(Turned, "data=2", (torch.randn(4, 4),))
