"""Image data against what was drawn into it: labels, crops by hand, order and bits under any layout, errors with file and remedy."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_reading import tar

from shardwise.errors import ConfigError, RunError
from shardwise.train.config import TrainingConfig
from shardwise.train.corpus import Corpus, is_unchanged, open_data
from shardwise.train.data.reading.pixels import Crop, PixelForm, box_of, prepare_with_pillow, preparer_of
from shardwise.train.training_task import TrainingTask, training_task_of

Image = pytest.importorskip("PIL.Image")
CONFIG = '[model]\nname = "vit-tiny"\n[data]\nsource = "images"\nvalidation_fraction = 0.25\n[train]\nbatch = 4\n[run]\nfolder = "x"'
COLOURS = {"blue": (0, 0, 250), "green": (0, 250, 0), "red": (250, 0, 0)}


def png(colour: tuple[int, int, int], size: tuple[int, int] = (20, 10)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Eight images of one colour each in a folder of that colour's name."""
    for name, colour in COLOURS.items():
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(8):
            (tmp_path / "photos" / name / f"{i}.png").write_bytes(png(colour))
    (tmp_path / "photos" / "red" / "note.txt").write_text("no image")
    return tmp_path / "photos"


def opened(path: Path, *changes: str) -> tuple[TrainingTask, Corpus]:
    config = TrainingConfig.parse(CONFIG, changes=[f"data.path={path}", "model.name=resnet-tiny:image=16,classes=10", *changes])
    corpus = open_data(config.data, config.model.name, path.parent / "run")
    return training_task_of(config, corpus), corpus


def colour_of(image: torch.Tensor) -> int:
    """The label that belongs to the brightest channel."""
    return {2: 0, 1: 1, 0: 2}[int(image.mean((1, 2)).argmax())]


def test_an_image_has_the_class_of_its_folder_and_comes_once_an_epoch(photos: Path) -> None:
    subject, corpus = opened(photos, "data.mean=[0.0, 0.0, 0.0]", "data.std=[1.0, 1.0, 1.0]")
    assert (corpus.image_set.classes, corpus.size) == (("blue", "green", "red"), 24)
    source = subject.source
    assert (source.num_samples, source.num_validation) == (18, 6)
    counts = [0, 0, 0]
    for step in range(9):
        batch = source.train(step, range(4))
        assert batch["pixels"].shape == (4, 3, 16, 16)
        for image, label in zip(batch["pixels"], batch["labels"].tolist(), strict=True):
            assert colour_of(image) == label
            counts[label] += 1
            assert float(image.max()) == pytest.approx(250 / 255)
    for number in range(2):  # what is left of 24 images, 6, four at a time: the last two come again
        for label in source.validation(number, range(4))["labels"].tolist()[: 2 if number else 4]:
            counts[label] += 2  # two epochs of training have each of theirs twice
    assert counts == [16, 16, 16]


def test_the_rows_of_ranks_are_those_of_the_whole_batch(photos: Path) -> None:
    source = opened(photos, "data.augment=crop")[0].source
    whole = source.train(3, range(4))
    again = [source.train(3, rows) for rows in ([0, 1], [2, 3])]
    assert torch.equal(torch.cat([part["pixels"] for part in again]), whole["pixels"])
    assert torch.equal(torch.cat([part["labels"] for part in again]), whole["labels"])


def test_shards_have_the_images_of_folders(photos: Path, tmp_path: Path) -> None:
    entries: dict[str, bytes] = {}
    for label, name in enumerate(COLOURS):
        for file in sorted((photos / name).glob("*.png")):
            entries |= {f"{name}{file.stem}.png": file.read_bytes(), f"{name}{file.stem}.cls": str(label).encode()}
    shard = tar(tmp_path / "a.tar", entries)
    ours, theirs = opened(photos)[0].source.train(0, range(4)), opened(shard)[0].source.train(0, range(4))
    assert torch.equal(ours["pixels"], theirs["pixels"])
    assert torch.equal(ours["labels"], theirs["labels"])


def test_validation_of_its_own(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "held" / "red").mkdir(parents=True)
    (tmp_path / "held" / "red" / "1.png").write_bytes(png(COLOURS["red"]))
    source = opened(photos, f"data.validation={tmp_path / 'held'}")[0].source
    assert (source.num_samples, source.num_validation) == (24, 1)
    assert source.validation(0, [0])["labels"].tolist() == [2]
    (tmp_path / "held" / "black").mkdir()
    with pytest.raises(ConfigError, match=r"data.validation has classes that data.path has not: black"):
        opened(photos, f"data.validation={tmp_path / 'held'}")


def test_crops_by_hand() -> None:
    """Left half red, right half blue; a box of the left half is red, and turned over the whole is blue first."""
    pixels = np.zeros((4, 8, 3), np.uint8)
    pixels[:, :4, 0], pixels[:, 4:, 2] = 255, 255
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    form = PixelForm(3, 4, 8, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    crops = [Crop(), Crop(is_mirrored=True), Crop(0, 0, 0.5, 1)]
    plain, turned, left = prepare_with_pillow([out.getvalue()] * 3, ["a"] * 3, crops, form)
    assert torch.equal(plain, torch.from_numpy(pixels).permute(2, 0, 1) / 255)
    assert torch.equal(turned, plain.flip(2))
    assert torch.equal(left[0], torch.ones(4, 8))
    assert box_of(Crop(is_centred=True), 100, 50, PixelForm(3, 10, 20, (), ())) == (0, 0, 100, 50)
    grey = prepare_with_pillow([out.getvalue()], ["a"], [Crop()], PixelForm(1, 4, 8, (0.5,), (0.5,)))
    assert grey.shape == (1, 1, 4, 8)


def test_crops_cover_from_a_twelfth_to_all_and_half_are_turned(photos: Path) -> None:
    source: Any = opened(photos, "data.augment=crop")[0].source
    crops = [source._draw_crop(number) for number in range(400)]
    areas = [(c.right - c.left) * (c.bottom - c.top) for c in crops if not c.is_centred]
    assert 0.08 <= min(areas) < 0.15
    assert 0.9 < max(areas) <= 1
    assert 150 < sum(c.is_mirrored for c in crops) < 250
    assert crops == [source._draw_crop(number) for number in range(400)]


def refused(file: Path) -> None:
    raise PermissionError(13, "Permission denied", str(file))


def test_what_is_wrong_is_named(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "1.png").write_bytes(png((1, 2, 3)))
    with pytest.raises(ConfigError, match=r"no images .* in class folders of .*flat; an image's class is the folder"):
        opened(tmp_path / "flat")
    (tmp_path / "a.png").write_bytes(png((1, 2, 3)))
    with pytest.raises(ConfigError, match=r"no images .* in class folders of .*a.png; an image's class is the folder"):
        opened(tmp_path / "a.png")
    with pytest.raises(ConfigError, match=r"none does not exist; name a folder with a folder of images"):
        opened(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"a.tar, 1: no number of its class beside it \(1.cls\)"):
        opened(tar(tmp_path / "a.tar", {"1.png": png((1, 2, 3))}))
    monkeypatch.setattr("shardwise.train.data.reading.images.list_members", refused)
    with pytest.raises(ConfigError, match=r"data.path: .*a.tar cannot be read: Permission denied"):
        opened(tmp_path / "a.tar")
    with pytest.raises(ConfigError, match=r"tells 2 classes apart, and the images in .* have 3: give it as many"):
        opened(photos, "model.name=resnet-tiny:image=16,classes=2")
    with pytest.raises(ConfigError, match="gpt-tiny does not take batches of images"):
        opened(photos, "model.name=gpt-tiny")
    with pytest.raises(ConfigError, match=r'"device" for images needs the package nvidia.*or use data.preprocess = "cpu"'):
        preparer_of("device")
    with pytest.raises(ConfigError, match='augment is for source = "images"'):
        TrainingConfig.parse('[model]\nname = "gpt-tiny"\n[data]\naugment = "flip"')


def test_an_image_that_changed_or_is_none_is_named(photos: Path) -> None:
    subject, corpus = opened(photos)
    assert is_unchanged(corpus)
    for file in photos.rglob("*.png"):
        file.write_bytes(file.read_bytes()[:-20] + b"x" * 20)
    assert not is_unchanged(corpus)
    for file in photos.rglob("*.png"):
        file.write_bytes(b"shorter")
    with pytest.raises(RunError, match=r"\.png has changed while it was trained on; restore it"):
        subject.source.train(0, range(4))
    with pytest.raises(RunError, match=r"\.png is no image that Pillow can read"):
        opened(photos)
