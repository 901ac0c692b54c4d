"""Trackers are told the rows of metrics.jsonl, as is read back from them; a run that goes on is the same run there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import UsageError
from shardwise.train import trackers
from shardwise.train.config import TrainingConfig

ROWS: list[dict[str, Any]] = [{"step": n, "loss": 4.0 / n, "grad_norm": None if n == 2 else 0.5} for n in (1, 2, 3)]


def config(*names: str) -> TrainingConfig:
    return TrainingConfig.parse(f'[model]\nname = "gpt-tiny"\n[run]\ntrackers = {list(names)}'.replace("'", '"'))


def told(folder: Path, *names: str) -> list[str]:
    """Two rows, then one more of the run as it goes on. Gives the warnings."""
    warnings: list[str] = []
    for start, rows in ((0, ROWS[:2]), (2, ROWS[2:])):
        with trackers.open_trackers(config(*names), folder, start, warnings.append) as write:
            for row in rows:
                write(row)
    return warnings


def in_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    return {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def in_mlflow(folder: Path) -> dict[str, list[tuple[int, float]]]:
    import mlflow

    client = mlflow.MlflowClient()
    (run,) = client.search_runs(["0"])
    assert run.data.params["model.name"] == "gpt-tiny"
    return {key: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)] for key in run.data.metrics}


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("tensorboard", in_tensorboard),
        pytest.param("mlflow", in_mlflow, marks=pytest.mark.long),
    ],
)
def test_what_is_read_back_is_what_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, read: Callable[[Path], dict[str, list[tuple[int, float]]]]
) -> None:
    pytest.importorskip(name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    assert told(tmp_path, name) == []
    found = {key: [(step, pytest.approx(value)) for step, value in rows] for key, rows in read(tmp_path).items()}
    assert found == {"loss": [(1, 4.0), (2, 2.0), (3, 4 / 3)], "grad_norm": [(1, 0.5), (3, 0.5)]}


@pytest.mark.long
def test_weights_and_biases_writes_one_run_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert told(tmp_path, "wandb") == []
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert {path.stem for path in files} == {f"run-{(tmp_path / 'wandb.run').read_text()}"}
    text = b"".join(path.read_bytes() for path in files)
    assert all(word in text for word in (b"loss", b"grad_norm", b"gpt-tiny"))


@contextmanager
def failing(folder: Path, settings: Any, start: int) -> Iterator[Any]:
    def log(step: int, numbers: Any) -> None:
        raise ConnectionError("no such server")

    yield log


def missing(folder: Path, settings: Any, start: int) -> Any:
    raise ModuleNotFoundError("No module named 'mlflow'")


def test_a_tracker_that_fails_is_told_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "wandb", failing)
    warnings: list[str] = []
    with trackers.open_trackers(config("wandb"), tmp_path, 0, warnings.append) as write:
        write(ROWS[0])
        write(ROWS[1])
    assert warnings == ["wandb is disabled: ConnectionError: no such server"]


@contextmanager
def ending_badly(folder: Path, settings: Any, start: int) -> Iterator[Any]:
    yield lambda step, numbers: None
    raise ConnectionError("no such server")


def test_a_tracker_that_fails_at_its_end_fails_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "wandb", ending_badly)
    warnings: list[str] = []
    with trackers.open_trackers(config("wandb"), tmp_path, 0, warnings.append) as write:
        write(ROWS[0])
    assert warnings == ["wandb did not close: ConnectionError: no such server"]


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", missing)
    with pytest.raises(UsageError, match=r"shardwise\[trackers\]"), trackers.open_trackers(config("mlflow"), tmp_path, 0, print):
        pass
