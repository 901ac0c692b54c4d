"""`batch_norm=local`: equal to the serial model whose batch norms see the replicas' samples apart, and to its pieces one after another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from shardwise.errors import LayoutError, ShardwiseError
from shardwise.lower.call import OperatorCall
from shardwise.plan.layout import Layout
from shardwise.run.gradients.deferred_buffers import DeferredBufferUpdates
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve

Ranks = Callable[..., list[Any]]
MODELS = Path(__file__).parents[2].joinpath("support", "spatial_models.py")


class Net(nn.Module):
    """Two batch norms, one of which is called twice in a step, and none with running statistics besides."""

    def __init__(self, twice: bool = True) -> None:
        super().__init__()
        self.twice = twice
        self.first, self.second, self.out = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1), nn.Linear(6, 3)
        self.norm, self.plain = nn.BatchNorm2d(6, momentum=0.3), nn.BatchNorm1d(6, track_running_stats=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        x = self.norm(self.second(x)).relu() if self.twice else x
        return F.cross_entropy(self.out(self.plain(x.mean((2, 3)))), y)


def data(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 2, 5, 4, generator=generator), torch.randint(3, (samples,), generator=generator)


@pytest.mark.parametrize(
    ("layout", "samples"),
    [
        ("data=2", 8),
        ("data=4", 12),
        ("data=2 microbatches=2 recompute=full", 8),
        ("data=2 zero=3", 8),
        ("data=2 spatial=2", 8),
        ("data=2 tensor=2", 8),
        ("data=2 pipeline=2 microbatches=2 schedule=zb-h1", 8),
        ("data=2 pipeline=2 microbatches=4 schedule=gems-master", 16),
    ],
)
def test_replicas_with_statistics_of_their_own_equal_a_serial_run_that_sees_them_apart(layout: str, samples: int) -> None:
    found = shardwise.verify(Net, f"{layout} batch_norm=local", data(samples), steps=2)
    assert found.ok, found
    assert found.tolerance == 1e-9
    assert found.whole_batch["gradients"] > 1e-3  # another thing than exact statistics
    assert any("batch_norm=local changes what is trained" in line for line in found.warnings)


@pytest.mark.parametrize("name", ["resnet-tiny", f"{MODELS}:unet"])
def test_whole_networks_equal_serial(name: str) -> None:
    model = resolve(name)
    found = shardwise.verify(model.make, "data=2 batch_norm=local", model.batch(4), loss=model.loss, steps=2)
    assert found.ok, found


def by_shardwise(world: World, layout: str) -> dict[str, Tensor] | None:
    engine = shardwise.parallelize(
        partial(Net, twice=False), data(8), plan=layout, optimizer={"name": "sgd", "lr": 0.1}, seed=0, world=world
    )
    for _ in range(3):
        engine.step(data(8))
    return engine.full_state_dict()


def test_it_is_what_a_serial_run_makes_of_the_pieces_with_gradients_accumulated(ranks: Ranks) -> None:
    """No code of shardwise's on the other side: a replica's samples after the other's, in plain PyTorch."""
    torch.manual_seed(0)
    net = Net(twice=False).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = data(8)
    for _ in range(3):
        optimizer.zero_grad()
        for half in (slice(0, 4), slice(4, 8)):
            (net(x.double()[half], y[half]) / 2).backward()
        optimizer.step()
    state = ranks(by_shardwise, 2, "data=2 precision=float64 batch_norm=local")[0]
    for name, want in net.state_dict().items():
        if "num_batches" not in name:
            assert torch.allclose(state[name].double(), want, rtol=1e-10, atol=1e-12), name


def test_broken_twins_statistics_of_all_and_running_ones_of_one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(OperatorCall, "_axes_for", lambda self, kernel: [])  # with exact statistics asked for, each replica's own
        assert not shardwise.verify(Net, "data=2", data(8), steps=1).ok
    monkeypatch.setattr(DeferredBufferUpdates, "finish", lambda self, microbatches: None)
    found = shardwise.verify(Net, "data=2 batch_norm=local", data(8), steps=1)
    assert not found.ok
    assert "norm.running" in str(found.first_difference)


def test_it_is_priced_without_collectives_inside_of_layers_and_never_chosen_unasked() -> None:
    model, batch = resolve("resnet-tiny"), 16
    given = {"loss": model.loss, "cluster": "1xp3.16xlarge"}

    def step(layout: str) -> Any:
        return shardwise.plan(model.make, model.batch(batch), layout=layout, **given).prediction

    exact, local = step("data=8 precision=float16"), step("data=8 precision=float16 batch_norm=local")
    assert local.step_time_s < exact.step_time_s
    assert dict(local.parts)["tensor"] == 0 < dict(exact.parts)["tensor"]
    few = "data=8 offload=none recompute=none"
    assert shardwise.plan(model.make, model.batch(batch), constraints=few, **given).layout.batch_norm == "exact"
    asked = shardwise.plan(model.make, model.batch(batch), constraints=f"{few} batch_norm=local", **given)
    assert asked.layout.batch_norm == "local"
    assert asked.prediction.step_time_s <= local.step_time_s * 1.01  # of plans within one per cent the simplest


def test_one_replica_has_nothing_of_its_own() -> None:
    assert Layout.parse("data=1 pipeline=2 batch_norm=local").local_statistics_axes == ()
    assert Layout.parse("data=4 expert=2 batch_norm=local").local_statistics_axes == ("data", "expert")
    with pytest.raises(LayoutError, match="batch_norm=lokal is unknown"):
        Layout.parse("data=2 batch_norm=lokal")
    with pytest.raises(LayoutError, match="batch_norm=local with staleness=1 is not supported; use batch_norm=exact"):
        Layout.parse("data=2 staleness=1 batch_norm=local")


def loops(world: World) -> None:
    net, batch = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), (torch.ones(4, 3),)
    shardwise.auto_parallelize(net, batch, plan="data=2 batch_norm=local", world=world)


def test_a_plain_loop_refuses_it_by_name(ranks: Ranks) -> None:
    with pytest.raises(ShardwiseError, match="statistics of each replica would be kept apart in a plain loop"):
        ranks(loops, 2)
