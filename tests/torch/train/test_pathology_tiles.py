"""The example that trains on large tiles of a pyramidal TIFF of real tissue: it reads what it needs, runs, keeps to its limit, says what it
needs, and is planned as the documents say."""

from __future__ import annotations

import builtins
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from shardwise.errors import Infeasible
from shardwise.world.memory import accounts_of

PATH = Path(__file__).resolve().parents[3] / "examples" / "pathology_tiles.py"


@pytest.fixture
def example() -> ModuleType:
    pytest.importorskip("skimage")
    pytest.importorskip("tifffile")
    spec = importlib.util.spec_from_file_location("pathology_tiles", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pathology_tiles"] = module  # its dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_the_slide_is_real_tissue_in_sizes_that_agree(example: ModuleType, tmp_path: Path) -> None:
    """Every square is one of the image, mirrored; tifffile reads what the example reads; a smaller size is a mean of a larger."""
    import tifffile

    path = tmp_path / "slide.tif"
    example.write(path, 1100, 600)
    slide, whole = example.Slide(path), tifffile.imread(path)
    assert [page.shape[:2] for page in slide.pages] == [(600, 1100), (300, 550), (150, 275), (75, 138), (38, 69)]
    part = slide.read(100, 300, 200, 280)
    assert (part == whole[100:300, 300:580]).all()
    assert slide.squares_read == 2 * 2
    half = whole[:512, :1024].reshape(256, 2, 512, 2, 3).mean((1, 3))
    assert abs(slide.read(0, 0, 256, 512, level=1) - half).max() < 1
    image = example.package("skimage.data").immunohistochemistry()
    known = {image[i : i + 256, j : j + 256].tobytes() for i in range(0, 257, 64) for j in range(0, 257, 64)}
    for top, left in ((0, 0), (256, 512)):
        square = whole[top : top + 256, left : left + 256]
        assert any(square[::i, ::j].tobytes() in known for i in (1, -1) for j in (1, -1))


def test_the_classes_are_of_the_stain(example: ModuleType, tmp_path: Path) -> None:
    """Brown tissue absorbs blue light: tiles of class 1 are the browner ones, and both classes come."""
    example.write(tmp_path / "slide.tif", 4096, 1024)
    tiles = example.Tiles(example.Slide(tmp_path / "slide.tif"), 256)
    batches = [tiles.training(step, 8) for step in range(4)]
    labels = torch.cat([b["labels"] for b in batches])
    pixels = torch.cat([b["pixels"] for b in batches])
    assert 4 <= int(labels.sum()) <= 28
    blue = pixels[:, 2].mean((1, 2)) - pixels[:, 0].mean((1, 2))
    assert blue[labels == 1].mean() < blue[labels == 0].mean()
    assert torch.equal(tiles.training(0, 8)["pixels"], batches[0]["pixels"])


def test_it_trains_by_pieces_of_tiles_where_nothing_else_fits(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Within the limit, and it learns."""
    monkeypatch.chdir(tmp_path)
    limited = accounts_of(torch.device("cpu")).is_counting
    words = ["--model", "resnet-tiny:base=8", "--tile", "1024", "--batch", "1", "--steps", "6", "--ranks", "2"]
    words += ["--cluster", "1xcpu-2", "--constrain", "tensor=1"]
    found = example.main([*words, "--learning-rate", "0.003", "--device-memory", "30MiB"])
    assert found["alone"].startswith("nothing fits (")
    assert "spatial=2" in found["layout"]
    assert found["held_out"] < 0.693  # of tiles that it has not seen, and more than a guess
    assert "by samples, layers and recomputation alone: nothing fits" in capfd.readouterr().out
    if limited:
        assert 0 < found["memory"]["total"] <= 30 << 20


def test_the_plan_of_large_tiles_is_to_share_them(example: ModuleType) -> None:
    """By the planner's own choice, with every other way open."""
    options = example.Options(cluster="1xcpu-2")
    batch = {"pixels": torch.zeros(2, 3, options.tile, options.tile), "labels": torch.zeros(2, dtype=torch.int64)}
    assert example.plan_of(options, batch).layout.spatial != "1"
    with pytest.raises(Infeasible, match=r"the leanest, data=. tensor=1 pipeline=. "):
        example.plan_of(options, batch, example.ALONE)


@pytest.mark.parametrize("name", ["skimage", "tifffile"])
def test_without_a_package_it_says_what_to_install(example: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(wanted: str, *args: Any, **kwargs: Any) -> Any:
        if wanted.startswith(name):
            raise ImportError(wanted)
        return real(wanted, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(SystemExit, match=rf"needs {name}: pip install 'shardwise\[pathology\]'"):
        example.write(tmp_path / "slide.tif", 1024, 1024)
    monkeypatch.undo()
    example.write(tmp_path / "slide.tif", 1024, 1024)
    with pytest.raises(SystemExit, match="larger slide"):
        example.Tiles(example.Slide(tmp_path / "slide.tif"), 512)
