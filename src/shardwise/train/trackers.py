"""Experiment trackers in addition to `metrics.jsonl`: TensorBoard, Weights & Biases, MLflow.

Rank 0 logs every row's numbers by step to each tracker in `run.trackers`; a resumed run is the same run there. Their own settings say
where they write (`WANDB_MODE=offline`, `MLFLOW_TRACKING_URI`); TensorBoard's files are in the run folder. A tracker that fails after its
start is reported once, and training continues without it.

Not supported: artifacts and pictures; rows that are computed again after a power failure appear twice in Weights & Biases and MLflow.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from shardwise.errors import UsageError, format_error
from shardwise.plan.ir.metric_lines import Row
from shardwise.train.config import TrainingConfig

Log = Callable[[int, Mapping[str, float]], None]
Settings = Mapping[str, Any]


@contextmanager
def open_trackers(config: TrainingConfig, folder: Path, start: int, warn: Callable[[str], None]) -> Iterator[Callable[[Row], None]]:
    """Open the configured trackers and yield a function that logs a row to each. `start`: number of steps done.

    Raises:
        UsageError: a library is not installed, or does not start.
    """
    with ExitStack() as stack:
        logs: dict[str, Log] = {}
        settings = {f"{section}.{key}": value for section, keys in config.model_dump().items() for key, value in keys.items()}
        for name in config.run.trackers:
            tracker: AbstractContextManager[Log]
            try:
                tracker = TRACKERS[name](folder, settings, start)
                logs[name] = tracker.__enter__()
            except ImportError as error:
                raise UsageError(
                    f'run.trackers has {name}, which could not be imported ({error}): pip install "shardwise[trackers]"'
                ) from error
            except Exception as error:  # any error of a server or a file system
                raise UsageError(f"run.trackers has {name}, which did not start: {format_error(error)}") from error
            stack.callback(_close_tracker, name, tracker, warn)

        def write(row: Row) -> None:
            numbers = {key: float(value) for key, value in row.items() if key != "step" and value is not None}
            for name, log in list(logs.items()):
                try:
                    log(int(row["step"] or 0), numbers)
                except Exception as error:  # as above; training does not depend on it
                    del logs[name]
                    warn(f"{name} is disabled: {format_error(error)}")

        yield write


def _close_tracker(name: str, tracker: AbstractContextManager[Log], warn: Callable[[str], None]) -> None:
    """Close a tracker; an error, as of an unreachable server, is only reported."""
    try:
        tracker.__exit__(None, None, None)
    except Exception as error:
        warn(f"{name} did not close: {format_error(error)}")


@contextmanager
def _open_tensorboard(folder: Path, settings: Settings, start: int) -> Iterator[Log]:
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)
    writer.add_text("configuration", "\n".join(f"    {key} = {value}" for key, value in settings.items()))

    def log(step: int, numbers: Mapping[str, float]) -> None:
        for key, value in numbers.items():
            writer.add_scalar(key, value, step)

    try:
        yield log
    finally:
        writer.close()


@contextmanager
def _open_wandb(folder: Path, settings: Settings, start: int) -> Iterator[Log]:
    wandb = importlib.import_module("wandb")
    run = wandb.init(dir=str(folder), name=folder.name, id=_stored_run_id(folder, "wandb"), resume="allow", config=dict(settings))
    _store_run_id(folder, "wandb", run.id)
    try:
        yield lambda step, numbers: run.log(dict(numbers), step=step)
    finally:
        run.finish()


@contextmanager
def _open_mlflow(folder: Path, settings: Settings, start: int) -> Iterator[Log]:
    mlflow = importlib.import_module("mlflow")
    stored = _stored_run_id(folder, "mlflow")
    run = mlflow.start_run(run_id=stored, run_name=None if stored else folder.name)
    _store_run_id(folder, "mlflow", run.info.run_id)
    if not stored:
        mlflow.log_params(dict(settings))
    try:
        yield lambda step, numbers: mlflow.log_metrics(dict(numbers), step=step)
    finally:
        mlflow.end_run()


def _stored_run_id(folder: Path, name: str) -> str | None:
    """Return the tracker's id of this run, if it was stored before."""
    path = folder / f"{name}.run"
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _store_run_id(folder: Path, name: str, run: str) -> None:
    (folder / f"{name}.run").write_text(run, encoding="utf-8")


TRACKERS: dict[str, Callable[[Path, Settings, int], Any]] = {"tensorboard": _open_tensorboard, "wandb": _open_wandb, "mlflow": _open_mlflow}
