"""Checkpoints in other formats: what other libraries wrote is read, what is written they read, and a way there and back keeps every bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwise.cli import run
from shardwise.run.checkpoint import full_shard, load, save

WEIGHTS: dict[str, Tensor] = {
    "a.weight": torch.arange(12.0).view(3, 4),
    "b.weight": torch.arange(6, dtype=torch.bfloat16),
    "norm.running_mean": torch.ones(3),
    "norm.num_batches_tracked": torch.tensor(7),
}
MOMENT = torch.full((3, 4), 0.25)


def kind(name: str) -> str:
    return "buffer" if name.startswith("norm.") else "parameter"


def convert(source: Path, target: Path, wanted: str, *words: str) -> int:
    return run(["checkpoint", "convert", str(source), str(target), "--to", wanted, *words])


@pytest.fixture
def own(tmp_path: Path) -> Path:
    shards = [full_shard(name, kind(name), tensor) for name, tensor in WEIGHTS.items()]  # type: ignore[arg-type]
    save(tmp_path / "own", 5, [*shards, full_shard("a.weight", "optimizer", MOMENT, "exp_avg")], {"seed": 3})
    return tmp_path / "own"


def loaded(folder: Path, with_optimizer: bool) -> dict[str, Tensor]:
    """What shardwise reads of its own checkpoint."""
    into = {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}
    shards = [full_shard(name, kind(name), tensor) for name, tensor in into.items()]  # type: ignore[arg-type]
    moment = torch.zeros(3, 4)
    load(folder, [*shards, *([full_shard("a.weight", "optimizer", moment, "exp_avg")] if with_optimizer else [])])
    assert torch.equal(moment, MOMENT) or not with_optimizer
    return into


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[n].dtype == other[n].dtype and torch.equal(one[n], other[n]) for n in one)


def test_safetensors_there_and_back(own: Path, tmp_path: Path) -> None:
    assert convert(own, tmp_path / "one", "safetensors") == 0
    assert equal(load_file(tmp_path / "one" / "model.safetensors"), WEIGHTS)
    assert convert(own, tmp_path / "several", "safetensors", "--max-shard-size", "50B") == 0
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in WEIGHTS.values())
    parts = [load_file(file) for file in (tmp_path / "several").glob("*.safetensors")]
    assert equal({name: parts[[name in p for p in parts].index(True)][name] for name in WEIGHTS}, WEIGHTS)
    assert convert(tmp_path / "several", tmp_path / "back", "shardwise") == 0
    assert equal(loaded(tmp_path / "back", False), WEIGHTS)


def test_torch_distributed_checkpoint_there_and_back(own: Path, tmp_path: Path) -> None:
    assert convert(own, tmp_path / "dcp", "dcp") == 0
    state = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}
    dcp.load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert equal({name.removeprefix("model."): tensor for name, tensor in state.items()}, WEIGHTS)
    assert convert(tmp_path / "dcp", tmp_path / "back", "shardwise") == 0
    assert equal(loaded(tmp_path / "back", True), WEIGHTS)
    dcp.save({"model": dict(WEIGHTS), "epoch": 4}, checkpoint_id=str(tmp_path / "theirs"), no_dist=True)
    assert convert(tmp_path / "theirs", tmp_path / "ours", "shardwise") == 0
    assert equal(loaded(tmp_path / "ours", False), WEIGHTS)


def test_a_hugging_face_folder_there_and_back(own: Path, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text('{"model_type": "gpt2"}')
    assert convert(own, tmp_path / "hf", "huggingface", "--config", str(config)) == 0
    assert (tmp_path / "hf" / "config.json").read_text() == '{"model_type": "gpt2"}'
    assert equal(load_file(tmp_path / "hf" / "model.safetensors"), WEIGHTS)
    save_file(WEIGHTS, config / "model.safetensors")  # as save_pretrained writes it
    assert convert(config, tmp_path / "back", "shardwise") == 0
    assert equal(loaded(tmp_path / "back", False), WEIGHTS)


def test_what_cannot_be_is_refused_and_leaves_nothing(own: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        ((own, tmp_path / "x", "safetensor"), "did you mean safetensors?"),
        ((own, own, "dcp"), "is there already"),
        ((own, tmp_path / "x", "huggingface"), "--config FOLDER"),
        ((tmp_path / "nothing", tmp_path / "x", "dcp"), "is not there"),
    ):
        assert convert(*words) == 2
        assert said in capfd.readouterr().err
    (file,) = own.glob("step-*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert convert(own, tmp_path / "x", "safetensors") == 4  # a flipped bit is not converted
    assert "is damaged" in capfd.readouterr().err
    assert not (tmp_path / "x").exists()
