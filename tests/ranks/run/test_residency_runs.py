"""Plans that move some layers, repeat some and keep some: chosen under a limit, run under it, equal to the serial model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.errors import RankError
from shardwise.run.residency.host_store import HostStore

pytestmark = pytest.mark.usefixtures("counting")
PLAIN = "ranks=1 microbatches=1 precision=float64 offload!=optimizer offload!=all threads=0"


class Waves(nn.Module):
    """Cheap to compute for what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(torch.tanh(torch.sin(x + self.phase))) + x


class Unlike(nn.Module):
    """Three layers whose products are dear beside what they keep, then three that are cheap."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(3)] + [Waves() for _ in range(3)])
        self.head = nn.Linear(256, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


BATCH = (torch.randn(1024, 256, generator=torch.Generator().manual_seed(0)),)


def _loss(output: Tensor, batch: object) -> Tensor:
    return output


def _predicted(layout: str) -> tuple[float, float]:
    """Bytes without margin, and seconds."""
    found = shardwise.plan(Unlike, BATCH, loss=_loss, cluster="1xcpu-2", layout=f"{layout} precision=float64").prediction
    assert found is not None
    return found.memory.total - found.memory.margin, found.step_time_s


def test_the_planner_mixes_under_a_limit_and_the_plan_runs_under_it() -> None:
    """Nothing kept whole fits, and repeating or moving alone is slower or does not fit: the plan does some of each."""
    most, least = _predicted("data=1")[0], _predicted("offload=activations")[0]
    limit = 1.06 * (least + 0.3 * (most - least))
    plan = shardwise.plan(Unlike, BATCH, loss=_loss, cluster="1xcpu-2", constraints=PLAIN, device_memory=limit)
    which = plan.layout.residency
    assert which.recompute.is_partial
    assert which.offload.is_partial
    assert plan.prediction is not None
    for other in ("recompute=full", "offload=activations"):
        assert plan.prediction.step_time_s < _predicted(other)[1]
    assert "offloaded to the host" in dict(plan.reasons)["layers"]
    with pytest.raises(RankError, match="activations"):
        shardwise.verify(Unlike, "data=1", BATCH, loss=_loss, device_memory=limit)
    found = shardwise.verify(Unlike, str(plan.layout), BATCH, loss=_loss, device_memory=limit)
    assert found.ok, found
    held = found.memory["total"]
    assert held <= limit
    assert plan.prediction.memory.total - plan.prediction.memory.margin == pytest.approx(held, rel=0.1)


GPT = "gpt:layers=4,hidden=128,heads=4,sequence=128,vocabulary=256"


@pytest.mark.parametrize(
    "layout",
    [
        "pipeline=2 microbatches=4 schedule=zb-h1 offload=activations:1/0 recompute=full:0/1",
        "pipeline=2 microbatches=4 schedule=interleaved chunks=2 offload=activations:1/0/1/0 recompute=full:0/1/0/0",
        "data=2 zero=3 microbatches=2 offload=activations:2 recompute=full:1",
        "tensor=2 offload=all:layers.1+layers.2 recompute=full:layers.0",
        "pipeline=2 microbatches=3 schedule=gpipe offload=activations:1 recompute=full",
        "pipeline=2 microbatches=4 schedule=gems-master offload=activations:1 recompute=full",
        "inner=2x1/1x2 pipeline=2 microbatches=2 offload=activations:1 recompute=full",
        "data=2 staleness=1 recompute=selective offload=activations:2",
        "pipeline=2 microbatches=4 schedule=zb-h1 recompute=cheap",
        "tensor=2 sequence_parallel=on offload=activations:1 recompute=cheap",
        "data=2 zero=3 microbatches=2 recompute=cheap:3",
    ],
)
def test_mixtures_on_ranks_equal_serial(layout: str) -> None:
    found = shardwise.verify(GPT, layout, 8)
    assert found.ok, (layout, found)


def test_layers_that_are_not_there_are_refused_before_anything_runs() -> None:
    for words, said in (
        ("offload=activations:layers.9", r"offload=activations:layers\.9: the model has no such layer; it has layers\.0"),
        ("offload=activations:3 recompute=full:3", "3 offloaded and 3 others recomputed are 6 layers of stage 0, which has 4"),
    ):
        with pytest.raises((shardwise.errors.LayoutError, RankError), match=said):
            shardwise.verify(GPT, f"data=1 {words}", 8)


def test_a_layer_that_comes_back_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: what is copied to the host loses its first value."""
    copy_out = HostStore._copy_to_host

    def spoiled(self: HostStore, block: object) -> None:
        copy_out(self, block)  # type: ignore[arg-type]
        block.host_copy[:8] = 0  # type: ignore[attr-defined]

    monkeypatch.setattr(HostStore, "_copy_to_host", spoiled)
    assert not shardwise.verify(GPT, "data=1 offload=activations:1 recompute=full:1", 8, steps=1).ok
