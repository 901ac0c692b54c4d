"""Context parallelism on whole models: equal to the serial model in every composition, pieces that differ by one, broken twins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise.errors import LayoutError
from shardwise.lower import operator_lowering
from shardwise.lower.redistribute import redistribute
from shardwise.plan.ir.placement import D, P, Placement, R, Shard, Strided, position_ranges, zigzag_ranges
from shardwise.plan.layout import Layout
from shardwise.run.rank_model.model_source import ModelSource
from shardwise.run.verify.verify import Verification
from shardwise.world.comm.group import Group
from shardwise.world.launch.launch import launch
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve
from tests.support.twins import not_summed_over

MODELS = Path(__file__).parents[2].joinpath("support", "context_models.py")


def verified(name: str, layout: str, **options: Any) -> Verification:
    model = resolve(f"{MODELS}:{name}" if "-" not in name else name)
    return shardwise.verify(model.make, layout, model.batch(4), loss=model.loss, **options)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt-tiny", "data=2 context=2"),
        ("llama", "context=2 tensor=2 sequence_parallel=on"),  # tensor ranks divide the positions of a context rank
        ("llama_padded", "context=2 pipeline=2 microbatches=2"),
        ("llama_eager", "data=2 context=2 zero=3"),
        ("mistral", "context=4"),
        ("gpt2", "context=3 microbatches=2 recompute=full"),
        ("bert", "data=2 context=2 zero=1 microbatches=2"),
        ("t5", "context=2 pipeline=2 microbatches=2"),
        ("vit", "context=2"),
        ("shifted", "context=4 offload=activations"),
        ("recurrent", "context=2 data=2 microbatches=2"),
        ("gpt-tiny", "context=2 tensor=2 attention=ulysses"),
        ("llama", "context=3 data=2 attention=ulysses"),  # 4 heads: 2, 1 and 1
        ("gpt2", "context=4 attention=ulysses microbatches=2"),
        ("gpt2", "context=2 tensor=2 attention=ulysses"),  # dropout of heads that both axes cut
        ("t5", "context=2 attention=ulysses"),
        ("placed", "context=2"),
        ("running", "context=3"),
        ("banded", "context=2 tensor=2 attention=ring"),
        ("banded", "context=3"),
        ("running", "data=2 context=2"),
        ("positions_first", "context=2"),
        ("gpt-tiny", "context=2 tensor=2 attention=ring sequence_parallel=on"),
        ("gpt-tiny:heads=1", "context=3"),
        ("llama", "context=3 attention=ring"),
        ("llama_padded", "context=2 pipeline=2 microbatches=2 recompute=full attention=ring"),
        ("mistral", "context=4 attention=ring"),
        ("gpt2", "context=2 data=2 zero=2 microbatches=2 recompute=selective attention=ring"),
        ("t5", "context=2 data=2 zero=3 attention=ring"),
    ],
)
def test_a_layout_that_cuts_positions_equals_serial(name: str, layout: str) -> None:
    found = verified(name, layout, cut_everything="tensor" in layout)
    assert found.ok, found
    assert found.tolerance == 1e-9
    share = found.divided["context"]
    assert share["parameters"] == 0.0
    # All but patches of images, which are no positions before they are put together, and steps of recurrences.
    assert share["flops"] > {"vit": 0.9, "recurrent": 0.2, "placed": 0.5}.get(name, 0.999)
    if "tensor" in layout:
        assert found.divided["tensor"]["flops"] > 0.999


def test_broken_twin_gradients_that_are_not_summed_over_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    not_summed_over(monkeypatch, "context")
    found = verified("shifted", "context=2")
    assert not found.ok
    assert found.worst["gradients"] > 1e-3


def test_broken_twin_running_sums_that_begin_anew_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_lowering, "running_sum", lambda group, *args, **given: torch.cumsum(*args, **given))
    found = verified("running", "context=2")
    assert not found.ok
    assert found.worst["loss"] > 1e-5


SIZE, OTHER = 7, 6
STRIDED = (Strided(1, SIZE, 1, False), Strided(1, SIZE, 1, True), Strided(1, SIZE, 2, True))


def _part(x: torch.Tensor, placement: Placement, world: World) -> torch.Tensor:
    """What a rank has of a whole tensor of two runs, by hand: positions by number."""
    n, rank = world.num_ranks, world.rank
    if isinstance(placement, Shard):
        return x[rank * OTHER // n : (rank + 1) * OTHER // n]
    if not isinstance(placement, Strided):
        return x / n if placement is P else x
    mine = [i for a, b in position_ranges(placement, SIZE, n, rank) for i in range(a, b)]
    return x.unflatten(1, (2, SIZE, placement.inner))[:, :, mine].flatten(1, 3)


def _moved(world: World, source: Placement, target: Placement) -> tuple[bool, bool]:
    """Whether a rank's part of the source becomes that of the target, and its gradient what it must be."""
    inner = max(form.inner for form in (source, target) if isinstance(form, Strided))
    generator = torch.Generator().manual_seed(0)
    x, seed = (torch.randn(OTHER, 2 * SIZE * inner, 2, dtype=torch.float64, generator=generator) for _ in range(2))
    mine = _part(x, source, world).clone().requires_grad_()
    out = redistribute(mine, source, target, world.world_group)
    # The whole gradient is `seed`: of a summand each rank has it whole, of a value in full that is deferred each a summand.
    out.backward(seed / world.num_ranks if target is D else seed if target is P else _part(seed, target, world))
    assert mine.grad is not None
    if source is D:
        world.world_group.all_reduce(mine.grad)
    return torch.allclose(out, _part(x, target, world)), torch.allclose(mine.grad, seed if source is P else _part(seed, source, world))


def _all_moved(world: World) -> list[Any]:
    pairs = [(source, target) for one in STRIDED for source, target in ((one, R), (one, D), (R, one), (D, one), (P, one))]
    pairs += [(source, target) for one in STRIDED for source, target in ((one, Shard(0)), (Shard(0), one))]
    return [(str(source), str(target), *_moved(world, source, target)) for source, target in pairs]


def test_pieces_of_runs_move_as_their_rows_say() -> None:
    """Every row of the table that has them, in two runs of a length that does not divide."""
    for found in launch(_all_moved, 3, show=False):
        assert len(found) == 21
        assert [row for row in found if not (row[2] and row[3])] == []


class Attends(nn.Module):
    """Causal attention and nothing else that talks; its loss is a mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(16, 16).double() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (4, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()


def _sent(world: World, attention: str) -> tuple[float, float, float]:
    """The loss, and elements that this rank sends to others in forward and in backward."""
    counts = [0]
    exchange, all_gather, reduce_scatter, isend = Group.exchange, Group.all_gather, Group.reduce_scatter, Group.isend

    def exchanging(self: Group, sent: Any, shapes: Any) -> Any:
        counts[0] += sum(x.numel() for i, x in enumerate(sent) if i != self.index)
        return exchange(self, sent, shapes)

    def gathering(self: Group, x: torch.Tensor, *more: Any) -> torch.Tensor:
        counts[0] += x.numel() * (self.size - 1) if x.is_floating_point() else 0  # not the number by which ranks see that all call alike
        return all_gather(self, x, *more)

    def scattering(self: Group, x: torch.Tensor, *more: Any) -> torch.Tensor:
        made = reduce_scatter(self, x, *more)
        counts[0] += x.numel() - made.numel()
        return made

    def sending(self: Group, x: torch.Tensor, to_index: int, tag: int = 0) -> Any:
        counts[0] += x.numel()
        return isend(self, x, to_index, tag)

    Group.exchange, Group.all_gather, Group.reduce_scatter = exchanging, gathering, scattering  # type: ignore[method-assign]
    Group.isend = sending  # type: ignore[method-assign,assignment]
    try:
        x = torch.randn(2, 24, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        with shardwise.auto_parallelize(batch=(x,), plan=f"context=4 attention={attention} precision=float64", world=world):
            net = Attends()
        loss = net(x)
        forward = counts[0]
        loss.backward()
        return float(loss.detach()), forward, counts[0] - forward
    finally:
        Group.exchange, Group.all_gather, Group.reduce_scatter = exchange, all_gather, reduce_scatter  # type: ignore[method-assign]
        Group.isend = isend  # type: ignore[method-assign]


KEYS = 2 * 24 // 4 * 16  # elements of one rank's keys: 2 samples, 6 of 24 positions, 16 features
SENT = {
    "ulysses": (3 * KEYS, 3 * KEYS),
    "gather": (6 * KEYS, 6 * KEYS),
    "ring": (6 * KEYS, 12 * KEYS),
    "ulysses:2+ring": (4 * KEYS, 6 * KEYS),
}


def _each_sent(world: World) -> dict[str, tuple[float, float, float]]:
    return {attention: _sent(world, attention) for attention in SENT}


def test_attention_sends_what_the_formula_says() -> None:
    """Of causal attention on 4 ranks with p elements of keys each: exchanged for heads q, k, v and the result send 3/4 p each, both ways;
    gathered keys and values send 3 p each, and their gradients as much; passed round they send 3 p each, both ways, and their gradients as
    much. Exchanged by two the four send p/2 each, both ways; keys and values of half of the heads then go on once, as much as p each."""
    want = float(Attends()(torch.randn(2, 24, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).detach())
    for found in launch(_each_sent, 4, show=False):
        for attention, (loss, *sent) in found.items():
            assert loss == pytest.approx(want, rel=1e-12)
            assert tuple(sent) == SENT[attention], attention


@pytest.mark.parametrize("heads", [1, 2])
def test_positions_of_causal_attention_lie_in_zigzag_whatever_its_heads(heads: int) -> None:
    """With one head too: in order, the last of two ranks has three times as many scores as the first."""
    model = resolve(f"gpt-tiny:heads={heads}")
    batch = model.batch(2)
    plan = shardwise.plan(model.make, batch, loss=model.loss, cluster="1xcpu-2", layout="context=2 attention=gather")
    source = ModelSource.from_model(model.make)
    sharding = source.sharding(plan, source.capture(batch, model.loss, 2).graph)
    cut = [p for row in sharding.placements.values() for p in row.values() if isinstance(p, Strided)]
    assert cut
    assert all(p.zigzag for p in cut)


def test_zigzag_gives_all_as_much_to_see() -> None:
    """Of causal attention over 64 positions on 4 ranks 520 scores each; in order 136, 392, 648 and 904 (closed form: sums of 1 to 64)."""

    def scores(ranges: Any) -> int:
        return sum(i + 1 for a, b in ranges for i in range(a, b))

    assert [scores(both) for both in zigzag_ranges(64, 4)] == [520] * 4
    assert [scores(position_ranges(Shard(0), 64, 4, rank)) for rank in range(4)] == [136, 392, 648, 904]
    assert sorted(i for both in zigzag_ranges(13, 5) for a, b in both for i in range(a, b)) == list(range(13))


def test_a_model_without_sequences_is_refused_by_name() -> None:
    model = resolve(f"{(Path(__file__).parents[2] / 'support').joinpath('spatial_models.py')}:unet_line")
    with pytest.raises(LayoutError, match="context=2 shares sequences, and no attention, recurrence or look-up of this model is over 2"):
        shardwise.plan(model.make, model.batch(2), loss=model.loss, cluster="1xcpu-2", layout="context=2")
    short = resolve("gpt-tiny")  # of 32 positions
    with pytest.raises(LayoutError, match=r"context=33 shares sequences, .* over 33 positions or more; leave it out, or use fewer ranks"):
        shardwise.plan(short.make, short.batch(2), loss=short.loss, cluster="1xcpu-2", layout="context=33")


def test_a_ring_without_fused_attention_is_refused_by_name() -> None:
    model = resolve(f"{MODELS}:llama_eager")
    with pytest.raises(LayoutError, match=r"attention=ring passes keys round where attention is one operator .*; use attention=gather, or"):
        shardwise.plan(model.make, model.batch(2), loss=model.loss, cluster="1xcpu-2", layout="context=2 attention=ring")


def test_a_layout_with_context_prints_and_parses() -> None:
    assert str(Layout.parse("context=2 attention=ulysses")) == "data=1 tensor=1 pipeline=1 context=2 attention=ulysses"
    assert Layout.parse("attention=ulysses") == Layout()  # alone
    with pytest.raises(LayoutError, match="attention=heads is unknown"):
        Layout.parse("context=2 attention=heads")
    layout = Layout.parse("data=2 context=4 tensor=2")
    assert str(layout) == "data=2 tensor=2 pipeline=1 context=4"
    assert Layout.parse(str(layout)) == layout
    assert (layout.num_ranks, layout.weight_ranks, layout.mesh.stage_axes) == (16, 8, ("data", "context", "tensor"))
