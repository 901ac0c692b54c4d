"""Which way of splitting does the planner choose by itself, where the literature says that it should? One model for each, planned twice: as
it likes, and without that way.

    python examples/chosen_kinds.py                    # all of them, some seconds each
    python examples/chosen_kinds.py branch spatial

Nothing is trained or allocated: the machines are those of the catalogue. What changes the result (batch norm of each replica's own
statistics, compressed or late gradients) is in none of these plans, since nobody asked for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise.plan.plan import Plan
from shardwise.units import format_seconds
from shardwise.zoo.resolve import resolve


class Towers(nn.Module):
    """Four towers over the same tokens, whose results are added: what a tower learns concerns no other."""

    def __init__(self, width: int = 512, layers: int = 6, vocabulary: int = 1024) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.towers = nn.ModuleList(nn.Sequential(*(self._layer(width) for _ in range(layers))) for _ in range(4))

    @staticmethod
    def _layer(width: int) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        summed = sum((tower(x) for tower in self.towers), torch.zeros_like(x))
        return F.cross_entropy(self.head(summed).flatten(0, 1), labels.flatten())


class Square(nn.Module):
    """Wide square layers one after another, which rows and columns of ranks divide with less to send than a line of them."""

    def __init__(self, width: int = 16384, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x.mean()


def _towers(batch: int) -> tuple[Callable[[], nn.Module], Any, Any]:
    with torch.device("meta"):
        return Towers, {name: torch.zeros(batch, 32, dtype=torch.long) for name in ("ids", "labels")}, None


def _square(batch: int) -> tuple[Callable[[], nn.Module], Any, Any]:
    return Square, {"x": torch.zeros(batch, 16384, device="meta")}, None


def _named(name: str) -> Callable[[int], tuple[Callable[[], nn.Module], Any, Any]]:
    def made(batch: int) -> tuple[Callable[[], nn.Module], Any, Any]:
        model = resolve(name)
        with torch.device("meta"):
            return model.make, model.batch(batch), model.loss

    return made


@dataclass(frozen=True)
class Case:
    """A way of splitting (`key` of the layout), a model for which it wins, the machines, the batch, and whose figure says so. `without`:
    the constraint that leaves it out."""

    key: str
    model: Callable[[int], tuple[Callable[[], nn.Module], Any, Any]]
    cluster: str
    batch: int
    without: str
    source: str


LONG = "llama:layers=4,hidden=2048,heads=16,kv_heads=4,sequence=65536"
CASES = {
    "spatial": Case("spatial", _named("unet:image=1024,depth=4,base=32"), "1xp3.16xlarge", 2, "spatial=1", "Dryden et al. 2019"),
    "context": Case("context", _named(LONG), "1xdgx-h100", 1, "context=1", "Liu et al. 2023"),
    "branch": Case("branch", _towers, "4xcpu-8", 64, "branch=1", "Jain et al., SUPER"),
    "expert": Case("expert", _named("moe-2.4b:layers=4"), "1xp3.16xlarge", 256, "expert=1", "Lepikhin et al. 2020, GShard"),
    "grid": Case("grid", _square, "1xdgx-a100-40", 256, "tensor=8x1", "Agarwal et al. 1995; Singh et al. 2024, AxoNN"),
    "float16": Case("precision", _named("gpt-350m:layers=4"), "1xp3.16xlarge", 64, "precision=float32", "Micikevicius et al. 2018"),
}


def planned(case: Case, constraints: str = "") -> Plan:
    """The plan of a case, under constraints."""
    make, batch, loss = case.model(case.batch)
    return shardwise.plan(make, batch, loss=loss, cluster=case.cluster, constraints=constraints)


def main(names: Sequence[str]) -> int:
    """Plan the cases by name, or all."""
    for name in names or CASES:
        case = CASES[name]
        mine, other = planned(case), planned(case, case.without)
        assert mine.prediction is not None
        assert other.prediction is not None
        print(f"{name} ({case.source}), {case.batch} samples on {case.cluster}")
        print(f"  chosen:           {format_seconds(mine.prediction.step_time_s)}  {mine.layout}")
        print(f"  {case.without:16}  {format_seconds(other.prediction.step_time_s)}  {other.layout}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
