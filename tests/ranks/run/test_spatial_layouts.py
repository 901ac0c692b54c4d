"""Spatial parallelism on whole networks: equal to the serial model in every composition, bytes by count, broken twins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise.errors import LayoutError
from shardwise.lower.redistribute import redistribute
from shardwise.model.sharding.sharding import redistribution_collectives
from shardwise.plan.ir.placement import D, Halo, P, R, Shard, even_shard_ranges, halo_placement, shard
from shardwise.plan.ir.transition import sent_fraction
from shardwise.plan.layout import Layout
from shardwise.run.verify.verify import Verification
from shardwise.world.comm.group import Group
from shardwise.world.launch.launch import launch
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve
from tests.support.twins import not_summed_over

MODELS = Path(__file__).parents[2].joinpath("support", "spatial_models.py")


def verified(name: str, layout: str, batch: int = 0, **options: Any) -> Verification:
    model = resolve(name if ":" in name or name.startswith(("resnet", "unet-")) else f"{MODELS}:{name}")
    return shardwise.verify(model.make, layout, model.batch(batch or model.default_batch), loss=model.loss, **options)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("unet", "spatial=2"),
        ("unet", "spatial=2x2"),
        ("unet", "data=2 spatial=2 zero=1"),
        ("unet", "spatial=3 microbatches=2 recompute=full"),
        ("unet_volume", "spatial=2"),
        ("unet_volume", "spatial=1x2x2"),
        ("unet_volume", "spatial=2x2x2"),
        ("unet_line", "spatial=3"),
        ("unet_line", "data=2 spatial=4 zero=3"),
        ("cells", "spatial=2"),
        ("cells", "data=2 spatial=1x2 microbatches=2"),
        ("cells", "spatial=3x1 tensor=2"),
        ("conv_lstm", "spatial=2x1"),
        ("conv_lstm", "spatial=2 offload=activations"),
        ("flat", "spatial=2"),
        ("flat", "spatial=3 pipeline=2 microbatches=2"),
        ("resnet:blocks=2,base=4,image=30,classes=4", "spatial=2 pipeline=2 microbatches=4 schedule=gems-master"),
        ("resnet:blocks=2,base=4,image=30,classes=4", "data=2 spatial=2 pipeline=2 microbatches=2"),
        ("unet-tiny", "data=2 spatial=2x2"),
    ],
)
def test_a_layout_that_cuts_images_equals_serial(name: str, layout: str) -> None:
    found = verified(name, layout, 8 if name.startswith("resnet") else 0)
    assert found.ok, found
    assert found.tolerance == 1e-9
    for axis, share in found.divided.items():
        if axis in ("spatial", "planes", "height", "width"):
            assert share["parameters"] == 0.0
            assert share["flops"] > (0.8 if name == "flat" else 0.98), (axis, share)  # all but the classifier


def test_broken_twin_gradients_that_are_not_summed_over_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    not_summed_over(monkeypatch, "spatial")
    found = verified("cells", "spatial=2")
    assert not found.ok
    assert found.worst["gradients"] > 1e-3


def _loop(net: torch.nn.Module, batch: dict[str, torch.Tensor]) -> list[float]:
    """Losses of the user's own loop, whose loss and penalty are none of the model's."""
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(batch["x"]), batch["y"]) + 1e-3 * sum(p.square().sum() for p in net.parameters())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _segments() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 3, 3, padding=1)]
    return nn.Sequential(*layers).double()


def _in_a_loop(world: World, layout: str, batch: dict[str, torch.Tensor]) -> list[float]:
    with shardwise.auto_parallelize(batch=(batch["x"],), plan=f"{layout} precision=float64", world=world):
        net = _segments()
    return _loop(net, batch)


def test_a_loop_of_ones_own_on_pieces_equals_serial() -> None:
    """The model hands out whole images; what the loop makes of them and of weights is right on every rank."""
    generator = torch.Generator().manual_seed(1)
    batch = {"x": torch.randn(3, 2, 13, 9, generator=generator).double(), "y": torch.randint(3, (3, 13, 9), generator=generator)}
    want = _loop(_segments(), batch)
    for layout, ranks in (("spatial=2", 2), ("spatial=1x3", 3)):
        assert launch(_in_a_loop, ranks, layout, batch, show=False) == [pytest.approx(want, rel=1e-12)] * ranks


SIZE = 23
WINDOWS = {"wide": [(0, 9), (7, 17), (15, 23)], "far": [(0, 20), (0, 23), (14, 23)], "apart": [(0, 5), (9, 12), (20, 23)]}


def _exchanged(world: World, name: str) -> list[Any]:
    """(equal forward, equal backward, elements sent forward, elements sent backward)."""
    counts: list[int] = []
    right = Group.exchange

    def counting(self: Group, sent: Any, shapes: Any) -> Any:
        counts.append(sum(x.numel() for i, x in enumerate(sent) if i != self.index))
        return right(self, sent, shapes)

    Group.exchange = counting  # type: ignore[method-assign]
    try:
        x = torch.randn(2, SIZE, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        placed, group = halo_placement(1, SIZE, WINDOWS[name]), world.world_group
        start, stop = even_shard_ranges(SIZE, world.num_ranks)[world.rank]
        mine = x[:, start:stop].clone().requires_grad_()
        out = redistribute(mine, shard(1, SIZE, world.num_ranks), placed, group)
        first, last = WINDOWS[name][world.rank]
        seeds = [torch.randn(2, b - a, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(b)) for a, b in WINDOWS[name]]
        out.backward(seeds[world.rank])
        whole = torch.zeros_like(x)
        for (a, b), seed in zip(WINDOWS[name], seeds, strict=True):
            whole[:, a:b] += seed
        return [torch.equal(out, x[:, first:last]), torch.allclose(mine.grad, whole[:, start:stop]), *counts]
    finally:
        Group.exchange = right  # type: ignore[method-assign]


@pytest.mark.parametrize("name", WINDOWS)
def test_a_halo_sends_what_its_row_says(name: str) -> None:
    """Wider than a neighbour's piece, over gaps: exact both ways; the busiest rank sends the part that the table of transitions names."""
    found = launch(_exchanged, 3, name)
    assert all(row[0] and row[1] for row in found)
    placed = halo_placement(1, SIZE, WINDOWS[name])
    elements = 2 * SIZE * 3
    assert max(row[2] for row in found) == pytest.approx(sent_fraction(Shard(1), placed, 3) * elements)
    assert isinstance(placed, Halo)
    held, wanted = even_shard_ranges(SIZE, 3), WINDOWS[name]
    back = [sum(max(0, min(b, d) - max(a, c)) for j, (c, d) in enumerate(held) if j != i) for i, (a, b) in enumerate(wanted)]
    assert max(row[3] for row in found) == 6 * max(back)


def test_the_table_pairs_collectives_with_their_duals() -> None:
    window = halo_placement(1, 8, [(0, 5), (3, 8)])
    pairs = {(Shard(1), window): ("halo_exchange", "halo_add"), (R, window): ("slice", "all_reduce"), (D, window): ("slice", "pad")}
    for (source, target), names in pairs.items():
        assert redistribution_collectives(source, target) == names
    with pytest.raises(LayoutError, match="no redistribution from H1 to S1"):
        redistribution_collectives(window, Shard(1))
    with pytest.raises(LayoutError, match="no redistribution from P to H1"):
        redistribution_collectives(P, window)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("spatial=0", "spatial=0: '0' is not the number of ranks along an axis of an image"),
        ("spatial=2x2x2x2", "spatial=2x2x2x2 has 4 axes, and an image has at most 3"),
        ("data=2 spatial=2 staleness=1", "spatial=2 with staleness=1 is not supported"),
    ],
)
def test_wrong_words_are_refused(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout.parse(text)


def test_a_model_without_images_is_refused_by_name() -> None:
    model = resolve("gpt-tiny")
    with pytest.raises(LayoutError, match="spatial=2 shares images, and no window of this model slides along any of its dimensions"):
        shardwise.plan(model.make, model.batch(2), loss=model.loss, cluster="1xcpu-2", layout="spatial=2")
    line = resolve(f"{MODELS}:unet_line")
    with pytest.raises(LayoutError, match="spatial=2x1 shares images, and no window of this model slides along its height"):
        shardwise.plan(line.make, line.batch(4), loss=line.loss, cluster="1xcpu-2", layout="spatial=2x1")


def test_more_ranks_than_an_image_has_entries_are_refused() -> None:
    model = resolve(f"{MODELS}:conv_lstm")  # of 11 x 13
    with pytest.raises(LayoutError, match="spatial=14 shares images, and no window of this model slides along any of its dimensions where"):
        shardwise.plan(model.make, model.batch(4), loss=model.loss, cluster="1xcpu-2", layout="spatial=14")


def test_a_layout_with_pieces_prints_and_parses() -> None:
    layout = Layout.parse("data=2 spatial=2x4 tensor=2")
    assert str(layout) == "data=2 tensor=2 pipeline=1 spatial=2x4"
    assert Layout.parse(str(layout)) == layout
    assert layout.num_ranks == 32
    assert layout.mesh.stage_axes == ("data", "height", "width", "tensor")
