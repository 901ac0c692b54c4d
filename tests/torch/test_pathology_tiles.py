"""The example that trains on a real histology image under a limit: it runs, keeps to the limit, and says what it needs."""

from __future__ import annotations

import builtins
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from weft.world.memory import accounts_of

PATH = Path(__file__).resolve().parents[2] / "examples" / "pathology_tiles.py"
SMALL = ["--model", "resnet-tiny:base=8", "--tile", "64", "--zoom", "1", "--batch", "4", "--steps", "2", "--cluster", "1xcpu-2"]


@pytest.fixture
def example() -> ModuleType:
    pytest.importorskip("skimage")
    spec = importlib.util.spec_from_file_location("pathology_tiles", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pathology_tiles"] = module  # its dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_the_classes_are_of_the_stain(example: ModuleType) -> None:
    """Brown tissue absorbs blue light: tiles of class 1 are the browner ones, and both classes come."""
    tiles = example.Tiles(example.load(1), 64)
    batches = [tiles.training(step, 8) for step in range(4)]
    labels = torch.cat([b["labels"] for b in batches])
    pixels = torch.cat([b["pixels"] for b in batches])
    assert 4 <= int(labels.sum()) <= 28
    blue = pixels[:, 2].mean((1, 2)) - pixels[:, 0].mean((1, 2))
    assert blue[labels == 1].mean() < blue[labels == 0].mean()
    assert torch.equal(tiles.training(0, 8)["pixels"], batches[0]["pixels"])


def test_it_trains_within_its_limit(example: ModuleType) -> None:
    limited = accounts_of(torch.device("cpu")).counts
    found = example.main([*SMALL, "--device-memory", "8MiB" if limited else "0"])
    assert len(found["losses"]) == 2
    assert all(0 < loss < 10 for loss in found["losses"])
    if limited:
        assert 0 < found["memory"]["total"] <= 8 << 20


def test_without_the_package_it_says_what_to_install(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("skimage"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(SystemExit, match=r"pip install 'weft\[pathology\]'"):
        example.load(1)
    monkeypatch.undo()
    slide = example.load(1)
    with pytest.raises(SystemExit, match="--zoom"):
        example.Tiles(slide, 256)
