"""One flipped bit in what a run is still to read: an error with file, block and remedy, whatever the data is; its broken twin reads on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shardwise.errors import ConfigError, RunError
from shardwise.train.config import TrainingConfig
from shardwise.train.corpus import Corpus, is_unchanged, open_data
from shardwise.train.data.reading.files import PART_BYTES, CheckedFile, digest_of
from shardwise.train.training_task import TrainingTask, training_task_of

MODEL = '[model]\nname = "gpt:vocabulary=257,sequence=64,hidden=32,layers=1,heads=2"'
TEXT = 'source = "text"\nsequence = 64'
JSONL = 'source = "jsonl"\nsequence = 64'
CASES = {
    "text": (TEXT, ""),
    "tokens": (JSONL, "data/tokens.bin"),
    "packed": (f'{JSONL}\npacking = "documents"', "data/tokens.bin"),
    "learned": (f'{JSONL}\npacking = "none"', "data/learned.bin"),
}


def flip(path: Path, at: int) -> None:
    """With the time of change that it had."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def text_of(folder: Path, kind: str) -> tuple[TrainingTask, Corpus, Path]:
    section, name = CASES[kind]
    draw, file = np.random.default_rng(0), folder / ("text.txt" if kind == "text" else "text.jsonl")
    lines = ["".join(map(chr, draw.integers(97, 123, 100))) for _ in range(3000)]
    if kind == "text":
        file.write_text("\n".join(lines))
    else:
        file.write_text("".join(json.dumps({"prompt": x, "completion": x} if kind == "learned" else {"text": x}) + "\n" for x in lines))
    config = TrainingConfig.parse(f'{MODEL}\n[data]\npath = "{file}"\n{section}\n[train]\nbatch = 4')
    corpus = open_data(config.data, config.model.name, folder / "run")
    return training_task_of(config, corpus), corpus, folder / "run" / name if name else file


def read_all(subject: TrainingTask, held_out: bool = False) -> None:
    for step in range(subject.source.num_samples // 4):
        subject.source.train(step, range(4))
    if held_out:
        subject.source.validation(0, range(4))


@pytest.mark.parametrize("kind", CASES)
def test_a_bit_that_flips_in_a_block_that_is_read_later(tmp_path: Path, kind: str) -> None:
    subject, corpus, file = text_of(tmp_path, kind)
    read_all(subject)
    assert is_unchanged(corpus)
    flip(file, 2 * PART_BYTES + 5)
    with pytest.raises(RunError, match=rf"{file.name} has changed since .* 32,768 to 49,152 \(block 2\) .*; restore it and run"):
        read_all(subject)
    assert not is_unchanged(corpus)


def test_without_sums_it_would_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckedFile, "read", lambda self, start, stop: memoryview(os.pread(self._file, stop - start, start)))
    subject, _, file = text_of(tmp_path, "text")
    flip(file, 2 * PART_BYTES + 5)
    read_all(subject)


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_sums_that_are_not_those_of_the_data_are_refused_and_made_again(tmp_path: Path, kind: str) -> None:
    _, corpus, file = text_of(tmp_path, kind)
    flip(Path(corpus.sums) if kind == "text" else file.with_name("tokens.bin.sums"), 3)
    with pytest.raises(ConfigError, match="run the same command"):
        corpus.tokens()
    assert is_unchanged(corpus)
    assert corpus.tokens()[:10].size == 10


def of_images(folder: Path) -> tuple[TrainingConfig, Path]:
    image = pytest.importorskip("PIL.Image")
    for name, value in (("dark", 20), ("light", 220)):
        (folder / "photos" / name).mkdir(parents=True)
        for i in range(8):
            image.new("RGB", (20, 20), (value, value, i)).save(folder / "photos" / name / f"{i}.png")
    text = f'[model]\nname = "resnet-tiny:image=16,classes=10"\n[data]\nsource = "images"\npath = "{folder}/photos"'
    return TrainingConfig.parse(f"{text}\nvalidation_fraction = 0.25\n[train]\nbatch = 4"), folder / "photos" / "light" / "3.png"


def test_a_bit_of_an_image(tmp_path: Path) -> None:
    config, file = of_images(tmp_path)
    corpus = open_data(config.data, config.model.name, tmp_path / "run")
    subject = training_task_of(config, corpus)
    flip(file, 12)
    with pytest.raises(RunError, match=r"3\.png \(bytes 0 to \d+\) has changed since this run began; restore it"):
        read_all(subject, held_out=True)
    assert not is_unchanged(corpus)


def of_tables(folder: Path) -> tuple[TrainingConfig, Path]:
    pytest.importorskip("pandas")
    pytest.importorskip("sklearn")
    (folder / "t.csv").write_text("a,b,label\n" + "".join(f"{i},{2 * i},{i % 3}\n" for i in range(40)))
    make = "torch.nn.Linear(2, 3), (torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)), lambda out, batch: out.sum()"
    (folder / "model.py").write_text(f"import torch\ndef make():\n    return {make}\n")
    text = f'[model]\nname = "{folder}/model.py:make"\n[data]\nsource = "table"\npath = "{folder}/t.csv"\nvalidation_fraction = 0.25'
    return TrainingConfig.parse(f"{text}\n[train]\nbatch = 4"), folder / "run" / "data" / "features.npy"


@pytest.mark.parametrize("make", [of_images, of_tables])
def test_what_is_read_at_once_is_checked_before(tmp_path: Path, make: Callable[[Path], tuple[TrainingConfig, Path]]) -> None:
    config, file = make(tmp_path)
    corpus = open_data(config.data, config.model.name, tmp_path / "run")
    flip(file if make is of_tables else tmp_path / "run" / "data" / "images.bin", 200)
    with pytest.raises(ConfigError, match="not what this run wrote"):
        training_task_of(config, corpus)
    assert not is_unchanged(corpus)


def test_the_sums_are_those_of_each_part(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(256)) * 1000)
    digest = digest_of(tmp_path / "a", 256_000, tmp_path / "sums")
    assert (tmp_path / "sums").stat().st_size == 8 * 16
    file = CheckedFile(tmp_path / "a", 256_000, tmp_path / "sums")
    assert file.digest == digest
    assert bytes(file.read(65_530, 65_545)) == (bytes(range(256)) * 1000)[65_530:65_545]
    assert bytes(file.read(255_990, 256_000)) == bytes(range(246, 256))
