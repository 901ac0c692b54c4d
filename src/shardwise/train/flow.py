"""`shardwise train` from the launcher's side: prepare the run folder, get a plan, launch the ranks, return a summary.

The run folder holds `config.toml`, `plan.toml`, `metrics.jsonl`, `checkpoints/`, and at the end `model.safetensors`,
`timeline.json` and `sample.txt`. The ranks read the first two, so nothing but the folder's name is sent to them.
Choosing a plan is left to the planner that the caller passes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError, ConfigError, Infeasible, LayoutError, RunError
from shardwise.plan.plan import Plan
from shardwise.plan.plan_file import read_plan, write_plan
from shardwise.run.checkpoint import broadcast_from_first, committed_checkpoints, read_manifest
from shardwise.train import elastic, loop, trials
from shardwise.train.config import TrainingConfig
from shardwise.train.corpus import (
    DESCRIPTION,
    PREPARED,
    SUMS,
    describes_corpus,
    is_unchanged,
    open_data,
    read_description,
    save_description,
)
from shardwise.train.data.reading.files import replace_file
from shardwise.train.metrics import METRICS_FILE
from shardwise.world.launch.children import LostForkServer
from shardwise.world.launch.launch import engine_modules, launch
from shardwise.world.launch.watch import RecoveryPolicy
from shardwise.world.world import World

CONFIG, PLAN, LOCK = "config.toml", "plan.toml", ".lock"
STOP_GRACE_S = 120.0
MAX_STARTS = 3
TIMEOUT_S = 900.0
# Files that preparation writes before the configuration: a folder with only these is left from a failed preparation and may be reused.
_PREPARED_FILES = (PLAN, DESCRIPTION, PREPARED, "corpus.bin", SUMS, "machine.toml")
# Keys that determine the numbering of samples and the meaning of a checkpoint: they must not change when a run is resumed.
_FIXED_KEYS = ("model.name", "data", "train.batch", "train.optimizer", "train.seed")


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A plan and its devices: FLOP/s of all of them in the plan's precision (0: unknown), and their kind, cpu, cuda or auto."""

    plan: Plan
    peak_flops: float = 0.0
    device: str = "auto"


Planner = Callable[[TrainingConfig, Plan | None], PlannedRun]


def train(config: TrainingConfig, planner: Planner, world: World | None = None) -> dict[str, Any]:
    """Train under `config`, from the last checkpoint if there is one. Return the summary that `shardwise train --json` prints.

    `planner(config, known)` returns a plan, or, if the run folder or `plan.file` has one (`known`), completes it with the machine's
    data. `world`: the ranks if torchrun or srun has started them; otherwise they are launched here.

    Raises:
        ConfigError: a run folder that cannot be used; Infeasible: a plan for another batch; and any error of the ranks.
    """
    folder = Path(config.run.folder or "runs/run")
    if world is not None:
        return _train_in_world(world, config, folder, planner)
    _check_spares(config, protects=False)  # a failed rank that was launched here is replaced
    with lock_run_folder(folder):
        planned = prepare_run_folder(config, folder, planner)
        results = _launch_ranks(config, folder, planned)
    summary: dict[str, Any] = results[0]
    return summary


def _launch_ranks(config: TrainingConfig, folder: Path, planned: PlannedRun) -> list[Any]:
    """Launch the ranks and return their results; relaunch them from the last checkpoint if all of them failed together, up to `MAX_STARTS`
    times without a newer one."""
    layout, recovers = planned.plan.layout, config.run.protect != "none"
    # A module that calls the GPU driver on import would make the GPU unusable in all forks.
    modules = engine_modules(planned.device)
    num_starts, saved_step = 0, -1  # since the newest checkpoint, as long as there is none newer
    while True:
        try:
            return launch(
                rank_main,
                layout.num_ranks,
                str(folder),
                planned.peak_flops,
                threads=layout.threads,
                device=planned.device,
                timeout_s=TIMEOUT_S,
                hang_after_s=config.run.hang_after_s,
                stop_grace_s=STOP_GRACE_S,
                folder=folder / "logs",
                preload=modules,
                recovery=RecoveryPolicy(num_saved_steps=lambda: _saved_step(folder)) if recovers else None,
                prepare=prepare_ranks if recovers and modules else None,
            )
        except LostForkServer as error:
            newest = _saved_step(folder)
            num_starts, saved_step = 1 if newest > saved_step else num_starts + 1, newest
            if num_starts >= (MAX_STARTS if recovers and config.run.resume else 1):
                raise
            print(f"{error}; the ranks are restarted from the last checkpoint", file=sys.stderr)


def _saved_step(folder: Path) -> int:
    return max((saved.step for saved in committed_checkpoints(folder / loop.CHECKPOINTS)), default=-1)


def prepare_ranks(folder: str, peak_flops: float) -> loop.PreparedJob:
    """Prepare the job of the ranks once, before they are forked."""
    return loop.prepare_job(_read_job(Path(folder), peak_flops))


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _record_digests(folder: Path, digests: dict[str, str]) -> None:
    replace_file(folder / loop.DIGESTS, json.dumps(digests).encode())


def _is_intact(folder: Path, name: str) -> bool:
    """Return whether a file of the run folder is what this run wrote: with one flipped bit it may still parse, to something else."""
    digest = _recorded_digests(folder).get(name)
    return digest is None or not (folder / name).exists() or _file_digest(folder / name) == digest


def _check_digest(folder: Path, name: str) -> None:
    """Raise ConfigError if a file of the run folder is corrupted."""
    if not _is_intact(folder, name):
        raise ConfigError(
            f"{folder / name} is not what this run wrote; restore it, or remove it to have it made again (a plan of one's own is plan.file)"
        )


def _recorded_digests(folder: Path) -> dict[str, str]:
    """Digests of the files that a run wrote before its ranks started; from the newest checkpoint if the digest file is unreadable."""
    try:
        return dict(json.loads((folder / loop.DIGESTS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # written by an older version, or damaged
        return dict(_newest_metadata(folder).get("files", {}))


def _newest_metadata(folder: Path) -> dict[str, Any]:
    """Return the metadata of the newest checkpoint that can be read; empty without one."""
    for saved in reversed(committed_checkpoints(folder / loop.CHECKPOINTS)):
        with suppress(CheckpointError, OSError):
            return dict(read_manifest(folder / loop.CHECKPOINTS / saved.name).extra)
    return {}


def _read_job(folder: Path, peak_flops: float) -> loop.TrainingJob:
    for name in (PLAN, DESCRIPTION):
        _check_digest(folder, name)
    return loop.TrainingJob(
        TrainingConfig.read(folder / CONFIG), read_plan(folder / PLAN), folder, read_description(folder / DESCRIPTION), peak_flops
    )


def rank_main(world: World, folder: str, peak_flops: float) -> dict[str, Any]:
    """Train the job of the run folder on one rank."""
    return loop.train(world, job_of(world, folder, peak_flops))


def job_of(world: World, folder: str, peak_flops: float) -> loop.TrainingJob:
    """Return the job of the run folder: inherited from the fork server, or read from disk."""
    ready = loop.inherited_job(world)
    return ready.job if ready is not None else _read_job(Path(folder), peak_flops)


def _train_in_world(world: World, config: TrainingConfig, folder: Path, planner: Planner) -> dict[str, Any]:
    """Train in ranks that were started elsewhere: rank 0 prepares the folder and locks it while it trains; all ranks read it."""
    with lock_run_folder(folder) if world.rank == 0 else nullcontext():
        return _train_prepared(world, config, folder, planner)


def _check_spares(config: TrainingConfig, protects: bool) -> None:
    """Raise ConfigError if `run.spares` is set, but a spare could not replace a failed rank."""
    if config.run.spares and (not protects or config.plan.num_trials > 1):
        raise ConfigError(
            f"run.spares = {config.run.spares}, and spare ranks wait for others to be lost, which takes ranks that torchrun, srun or ssh "
            'started, run.protect = "memory", run.resume = true and plan.trials = 0; set these, or run.spares = 0'
        )


def _train_prepared(world: World, config: TrainingConfig, folder: Path, planner: Planner) -> dict[str, Any]:
    peak_flops, spares = 0.0, config.run.spares
    protects = world.rendezvous is not None and world.num_ranks > 1 and config.run.protect != "none" and config.run.resume
    _check_spares(config, protects)
    if world.rank == 0:
        planned = prepare_run_folder(config, folder, planner)
        peak_flops = planned.peak_flops
        _plan_for_fewer(config, folder, planner, planned.plan, world)
        num_ranks = planned.plan.layout.num_ranks
        if num_ranks != world.num_ranks - spares:
            here = f"{world.num_ranks} are here" + (f", {spares} of them spares" if spares else "")
            to_set = f"set plan.ranks={world.num_ranks - spares}"
            if not spares and num_ranks < world.num_ranks:
                to_set += f", or, for ranks that wait until others are lost, run.spares={world.num_ranks - num_ranks}"
            raise Infeasible(f"the plan {planned.plan.layout} is for {num_ranks} ranks, {here}; start as many, or {to_set}")
        if config.plan.num_trials > 1:
            trials.end_trials(world)
    elif config.plan.num_trials > 1:
        trials.follow_trials(world)
    peak_flops = float(broadcast_from_first(world, int(peak_flops)))
    if not protects:
        return rank_main(world, str(folder), peak_flops)
    job = _read_job(folder, peak_flops)
    plans = {job.plan.layout.num_ranks: job.plan}
    for path in sorted(folder.glob(elastic.PLAN_PATTERN)):
        _check_digest(folder, path.name)
        plan = read_plan(path)
        if plan.batch_size == job.plan.batch_size:
            plans.setdefault(plan.layout.num_ranks, plan)
    return elastic.train(world, job, plans)


def _plan_for_fewer(config: TrainingConfig, folder: Path, planner: Planner, plan: Plan, world: World) -> None:
    """Write plans for fewer ranks to the folder, for when a host fails; existing ones are reused."""
    num_ranks = plan.layout.num_ranks
    if world.rendezvous is None or config.run.protect == "none":
        return
    for fewer in elastic.smaller_rank_counts(num_ranks, len(world.ranks_by_host(tuple(range(num_ranks))))):
        path = elastic.plan_path(folder, fewer)
        if path.exists() and _is_intact(folder, path.name) and read_plan(path).batch_size == plan.batch_size:
            continue
        try:
            smaller_plan = _plan_with_fewer_ranks(config, planner, plan, fewer)
        except (Infeasible, LayoutError) as error:
            print(f"shardwise: there is no plan for {fewer} ranks, should a host fail: {error}", file=sys.stderr)
            continue
        write_plan(replace(smaller_plan, batch_size=plan.batch_size), path)
        _record_digests(folder, _recorded_digests(folder) | {path.name: _file_digest(path)})


def _plan_with_fewer_ranks(config: TrainingConfig, planner: Planner, plan: Plan, num_ranks: int) -> Plan:
    """Plan for fewer ranks: a layout given by hand with fewer replicas if possible, else the best layout."""

    def plan_of(**changes: Any) -> Plan:
        section = config.plan.model_copy(update={"trials": 0, "file": "", "ranks": 0, **changes})
        return planner(config.model_copy(update={"plan": section}), None).plan

    if config.plan.layout:
        with suppress(LayoutError, Infeasible):
            if layout := elastic.with_fewer_replicas(plan.layout, num_ranks):
                return plan_of(layout=str(layout))
    # Another precision would change the results from there on.
    return plan_of(layout="", constrain=(*config.plan.constrain, f"ranks={num_ranks}", f"precision={plan.layout.precision}"))


def existing_plan(config: TrainingConfig, folder: Path) -> Plan | None:
    """Return the plan of `plan.file`, or the run folder's if the run resumes under the same `[plan]`; None if planning is needed."""
    if config.plan.file:
        return read_plan(config.plan.file)
    earlier = _earlier_config(folder)
    if earlier is not None and (folder / PLAN).exists() and earlier.plan == config.plan and earlier.train.batch == config.train.batch:
        _check_digest(folder, PLAN)
        return read_plan(folder / PLAN)
    return None


@contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Create the run folder and lock it against a second launcher on this machine.

    Raises:
        ConfigError: it cannot be written; RunError: it is in use.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"run.folder {folder} cannot be written: {error.strerror}; choose another run.folder") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise RunError(f"run.folder {folder} is in use by another shardwise train; wait for it, or choose another run.folder") from error
    finally:
        os.close(lock)


def prepare_run_folder(config: TrainingConfig, folder: Path, planner: Planner) -> PlannedRun:
    """Check the locked folder, prepare the data, get a plan, and write configuration, data description and plan for the ranks.

    Raises:
        ConfigError: the folder belongs to another run or is not a run folder; the data is missing or has changed.
        Infeasible: the plan is for another batch.
    """
    _check_folder(config, folder)
    try:
        _gather_text(config, folder)
        earlier = existing_plan(config, folder)
        if earlier is None:
            for path in folder.glob(elastic.PLAN_PATTERN):
                path.unlink()
        planned = planner(config, earlier)
        if planned.plan.batch_size != config.train.batch:
            raise Infeasible(
                f"the plan is for {planned.plan.batch_size} samples a step, train.batch is {config.train.batch}; "
                f"set train.batch={planned.plan.batch_size}, or plan again"
            )
        fewer = {name: digest for name, digest in _recorded_digests(folder).items() if Path(name).match(elastic.PLAN_PATTERN)}
        (folder / loop.DIGESTS).unlink(missing_ok=True)
        write_plan(planned.plan, folder / PLAN)
        written = fewer | {name: _file_digest(folder / name) for name in (PLAN, DESCRIPTION) if (folder / name).exists()}
        _record_digests(folder, written)
        # Computed from the plan in the folder, so that a resumed run has the same number of steps and the same learning rates.
        steps = config.train.steps_under(planned.plan)
        config = config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})
        text = config.dump().encode()
        replace_file(folder / CONFIG, text)
        _record_digests(folder, written | {CONFIG: hashlib.sha256(text).hexdigest()})
    except OSError as error:
        raise ConfigError(f"run.folder {folder} cannot be written: {error.strerror}; make room, or choose another run.folder") from error
    return planned


def _check_folder(config: TrainingConfig, folder: Path) -> None:
    for name in (CONFIG, PLAN, DESCRIPTION, loop.DIGESTS, METRICS_FILE):
        if (folder / name).exists() and not (folder / name).is_file():
            raise ConfigError(f"{folder / name} is no file; remove it, or choose another run.folder")
    earlier = _earlier_config(folder)
    if earlier is None:
        strangers = [path.name for path in folder.iterdir() if not path.name.startswith(".") and path.name not in _PREPARED_FILES]
        if strangers:
            raise ConfigError(
                f"run.folder {folder} holds {', '.join(sorted(strangers)[:3])} and no run of shardwise; choose an empty or a new folder"
            )
        return
    if not committed_checkpoints(folder / loop.CHECKPOINTS):
        return
    if not config.run.resume:
        raise ConfigError(
            f"run.folder {folder} holds the checkpoints of an earlier run, and run.resume is false; choose another run.folder, or remove it"
        )
    _report_changed_config(config, folder)
    for key in _FIXED_KEYS:
        for name, before, now in _list_differences(key, _value_at(earlier, key), _value_at(config, key)):
            raise ConfigError(
                f"run.folder {folder} is of another run: {name} was {_shorten_value(before)}, now it is {_shorten_value(now)}; "
                "choose another run.folder, or set it back to go on"
            )


def _earlier_config(folder: Path) -> TrainingConfig | None:
    """The configuration of the run that the folder belongs to; that of its newest checkpoint if the file is gone or damaged."""
    path = folder / CONFIG
    if path.exists() and _is_intact(folder, CONFIG):
        return TrainingConfig.read(path)
    saved = _saved_config(folder)
    return TrainingConfig.read(path) if saved is None and path.exists() else saved


def _saved_config(folder: Path) -> TrainingConfig | None:
    """The configuration in the newest checkpoint."""
    saved = _newest_metadata(folder).get("config")
    return TrainingConfig.model_validate_json(json.dumps(saved)) if saved is not None else None


def _report_changed_config(config: TrainingConfig, folder: Path) -> None:
    """Print that the configuration in the folder is gone or not what this run wrote, and what would be trained with otherwise."""
    path, saved = folder / CONFIG, _saved_config(folder)
    if saved is None or (path.exists() and _is_intact(folder, CONFIG)):
        return
    before, now = saved.model_dump(mode="json"), config.model_dump(mode="json")
    changes = [f"{name} was {_shorten_value(a)}, now {_shorten_value(b)}" for name, a, b in _list_differences("", before, now)]
    what = f"is not what this run wrote: {'; '.join(changes) or 'what it means is the same'}" if path.exists() else "was gone"
    print(f"shardwise: {path} {what}; it is written anew", file=sys.stderr)


def _value_at(config: TrainingConfig, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value.model_dump() if hasattr(value, "model_dump") else value


def _list_differences(key: str, before: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value before, value now) of every setting that differs, descending into tables."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted(before.keys() | now.keys()):
            yield from _list_differences(f"{key}.{name}" if key else name, before.get(name), now.get(name))
    elif before != now:
        yield key, before, now


def _shorten_value(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else text[:200] + "..."


def _gather_text(config: TrainingConfig, folder: Path) -> None:
    """Prepare the data and write its description to the folder; a resumed run keeps the data it has prepared."""
    description = folder / DESCRIPTION
    if config.data.source == "synthetic":
        description.unlink(missing_ok=True)
        return
    _check_digest(folder, DESCRIPTION)
    before = read_description(description)
    if before is not None and committed_checkpoints(folder / loop.CHECKPOINTS):
        if is_unchanged(before):
            return
        corpus = open_data(config.data, config.model.name, folder)
        if not describes_corpus(corpus, description):
            raise ConfigError(
                f"the text in {corpus.origin} is not what run.folder {folder} was trained on ({before.size} {before.unit} then, "
                f"{corpus.size} now); restore it, or choose another run.folder"
            )
        save_description(corpus, description)
        return
    save_description(open_data(config.data, config.model.name, folder), description)
