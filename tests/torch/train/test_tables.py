"""Tables against the numbers that were written into them: both formats, scaling by hand, errors with file, column and row."""

from __future__ import annotations

import types
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.train.config import TrainingConfig
from shardwise.train.corpus import is_unchanged, open_data
from shardwise.train.data.reading.tables import LibraryTableReader, stack_columns, table_reader_of
from shardwise.train.training_task import TrainingTask, training_task_of

pandas = pytest.importorskip("pandas")
sklearn = pytest.importorskip("sklearn.preprocessing")
MODEL = """
import torch
def make():
    net = torch.nn.Linear(2, 3)
    return net, (torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)), lambda out, batch: torch.nn.functional.cross_entropy(out, batch[1])
"""
ROWS = [(i, 10.0 * i, i % 3) for i in range(20)]


def opened(folder: Path, *changes: str) -> TrainingTask:
    (folder / "model.py").write_text(MODEL)
    text = f'[model]\nname = "{folder / "model.py"}:make"\n[data]\nsource = "table"\nvalidation_fraction = 0.25\n[train]\nbatch = 4'
    config = TrainingConfig.parse(text, changes=changes)
    corpus = open_data(config.data, config.model.name, folder / "run")
    assert is_unchanged(corpus)
    return training_task_of(config, corpus)


def written(folder: Path, ending: str) -> Path:
    frame = pandas.DataFrame(ROWS, columns=["a", "b", "label"])
    file = folder / f"t.{ending}"
    frame.to_csv(file, index=False) if ending == "csv" else frame.to_parquet(file)
    return file


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_every_row_comes_once_and_is_scaled_by_those_that_are_trained_on(ending: str, tmp_path: Path) -> None:
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    path = f"data.path={written(tmp_path, ending)}"
    plain = opened(tmp_path, path, "data.scale=false").source
    assert (plain.num_samples, plain.num_validation) == (15, 5)
    taken = [plain.train(step, range(4)) for step in range(4)]
    features, labels = (torch.cat([batch[i] for batch in taken])[:15] for i in (0, 1))
    held_out = [plain.validation(0, range(4)), plain.validation(1, [0])]
    firsts = torch.cat([features[:, 0], *(batch[0][:, 0] for batch in held_out)])
    assert sorted(firsts.tolist()) == [*map(float, range(20))]
    assert torch.equal(features[:, 1], 10 * features[:, 0])
    assert torch.equal(labels, features[:, 0].long() % 3)
    scaled = torch.cat([opened(tmp_path, path).source.train(step, range(4))[0] for step in range(4)])[:15]
    wanted = (features - features.mean(0)) / features.std(0, correction=0)
    torch.testing.assert_close(scaled, wanted, rtol=1e-5, atol=1e-5)


def test_columns_are_chosen(tmp_path: Path) -> None:
    path = f"data.path={written(tmp_path, 'csv')}"
    with pytest.raises(ConfigError, match=r"takes 2 features, and the table has 1: b; choose them with data.features"):
        opened(tmp_path, path, 'data.features=["b"]')
    with pytest.raises(ConfigError, match=r't.csv has no column "c", which data.features or data.label_column names; it has a, b, label'):
        opened(tmp_path, path, 'data.features=["a", "c"]')
    (tmp_path / "t.csv").write_text("a,b,label\n1,x,0\n")
    with pytest.raises(ConfigError, match='column "b" is no column of numbers'):
        opened(tmp_path, path, 'data.features=["a", "b"]')
    (tmp_path / "t.csv").write_text("a,b,label\n1,1,0\n2,,0\n")
    with pytest.raises(ConfigError, match='column "b" has no number in row 2; fill the gap'):
        opened(tmp_path, path)
    (tmp_path / "t.csv").write_text("a,b,label\n1,1,0.5\n2,3,0\n")
    with pytest.raises(ConfigError, match="labels are no numbers of its classes"):
        opened(tmp_path, path)
    (tmp_path / "t.csv").write_text("a,b,label\nx,y,0\n")
    with pytest.raises(ConfigError, match=r"no rows or no columns of numbers in .*t.csv"):
        opened(tmp_path, path)
    (tmp_path / "t.csv").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"t.csv is no table that can be read"):
        opened(tmp_path, path)


def test_a_library_that_is_not_installed_is_named_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r'"device" for tables needs the package cudf.*or use data.preprocess = "cpu"'):
        table_reader_of("device")


def test_what_has_the_same_names_makes_the_same(tmp_path: Path) -> None:
    """cuDF and cuML have the names of pandas and scikit-learn: what stands in for them here is called as they would be."""
    calls: list[str] = []

    def read_csv(file: Path) -> object:
        calls.append("read_csv")
        return pandas.read_csv(file)

    frames, models = types.SimpleNamespace(read_csv=read_csv), types.SimpleNamespace(StandardScaler=sklearn.StandardScaler)
    ours, theirs = table_reader_of("cpu"), LibraryTableReader(frames, models)
    file = written(tmp_path, "csv")
    a, b = (stack_columns(tables.read(file), ["a", "b"], file) for tables in (ours, theirs))
    assert np.array_equal(a, b)
    assert np.array_equal(ours.standardize(a[:9], a), theirs.standardize(b[:9], b))
    assert calls == ["read_csv"]
