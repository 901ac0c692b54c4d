"""Weights of a divided model as safetensors files that no rank holds together: the serial state, tensor by tensor, and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shardwise
from shardwise.errors import CheckpointError
from shardwise.run.loop.weight_files import FILE, INDEX, read_weights, write_weights
from shardwise.world.world import World

LONG = pytest.mark.long


class Tied(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.norm = nn.Embedding(12, 8), nn.BatchNorm1d(8)
        self.up, self.head = nn.Linear(8, 16), nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(16, 8).to(torch.bfloat16).float()
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.down(torch.relu(self.up(self.embed(x))))))


def tokens() -> torch.Tensor:
    return torch.arange(8) % 12


def written(world: World, folder: str, layout: str) -> None:
    """Writes the model of seed 0, reads it into that of seed 1."""
    model = shardwise.auto_parallelize(Tied(0), (tokens(),), plan=layout, world=world)
    names = write_weights(model, Path(folder, "many"), 400)
    assert "embed.weight" in names
    assert "head.weight" not in names
    if world.rank == 0:
        Path(folder, "one").mkdir()
        for name in ("model-00001-of-00002.safetensors", "model-best.safetensors"):
            Path(folder, "one", name).touch()
    write_weights(model, Path(folder, "one"), 1e9)
    # Parts of what lay there before go, other files of the user's stay.
    assert sorted(path.name for path in Path(folder, "one").iterdir()) == ["model-best.safetensors", FILE]
    other = shardwise.auto_parallelize(Tied(1), (tokens(),), plan=layout, world=world)
    for place in ("one", "many"):
        read_weights(other, Path(folder, place))
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p.detach(), q.detach())
    with pytest.raises(CheckpointError, match="is not there"):
        read_weights(other, Path(folder))


@pytest.mark.parametrize("layout", ["tensor=2", pytest.param("data=2", marks=LONG), pytest.param("data=2 zero=3", marks=LONG)])
def test_files_hold_the_serial_state(ranks: Callable[..., list[Any]], tmp_path: Path, layout: str) -> None:
    ranks(written, 2, str(tmp_path), layout)
    wanted = Tied(0).state_dict()
    table = json.loads((tmp_path / "many" / INDEX).read_text())["weight_map"]
    found = {name: x for file in sorted(set(table.values())) for name, x in load_file(tmp_path / "many" / file).items()}
    assert len(set(table.values())) == len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    for state in (found, load_file(tmp_path / "one" / FILE)):
        assert state.keys() == wanted.keys() - {"head.weight"}
        for name, x in state.items():
            assert x.dtype == wanted[name].dtype
            assert torch.equal(x, wanted[name])
    for file in set(table.values()):
        tensors = load_file(tmp_path / "many" / file)
        assert len(tensors) == 1 or sum(x.numel() * x.element_size() for x in tensors.values()) <= 400
