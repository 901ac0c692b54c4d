"""`weft train` from the launcher's side: prepare the run folder, get a plan, start the ranks. In: a `Config`. Out: a summary.

The run folder holds `config.toml`, `plan.toml`, `metrics.jsonl`, `checkpoints/`, and at the end `model.safetensors`,
`timeline.json` and `sample.txt`. The ranks read the first two, so nothing but the folder's name is sent to them.
Not modelled: choosing a plan; whoever calls brings a planner.
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

from weft.errors import CheckpointError, ConfigError, Infeasible, LayoutError, RunError
from weft.plan.plan import Plan
from weft.plan.plan_file import read_plan, write_plan
from weft.run.state.checkpoint import committed, from_first, read_manifest
from weft.train import elastic, loop, trials
from weft.train.config import Config
from weft.train.corpus import DESCRIPTION, PREPARED, SUMS, describes_corpus, is_unchanged, open_data, read_description, save_description
from weft.train.metrics import FILE
from weft.world.children import LostKeeper
from weft.world.launch import engine_modules, launch
from weft.world.watch import Recovery
from weft.world.world import World

CONFIG, PLAN, LOCK = "config.toml", "plan.toml", ".lock"
STOP_GRACE_S = 120.0
RESTARTS = 3
TIMEOUT_S = 900.0
# What preparing leaves in a folder before it has a configuration: where it failed, the next attempt has the folder to itself.
_PREPARED = (PLAN, DESCRIPTION, PREPARED, "corpus.bin", SUMS, "machine.toml")
# What the numbering of samples and the meaning of a checkpoint hang on: a run that goes on must have the same.
_FIXED = ("model.name", "data", "train.batch", "train.optimizer", "train.seed")


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what it runs on: FLOP/s of all devices in the plan's precision (0: not known), and cpu, cuda or auto."""

    plan: Plan
    peak_flops: float = 0.0
    device: str = "auto"


Planner = Callable[[Config, Plan | None], Planned]


def train(config: Config, planner: Planner, world: World | None = None) -> dict[str, Any]:
    """Train under `config`, from the last checkpoint where there is one. Returns the summary that `weft train --json` prints.

    `planner(config, known)` is asked for a plan, or, where the run folder or `plan.file` has one, for what is known of the
    machines it runs on. `world`: the ranks where torchrun or srun has started them; otherwise they are started here.

    Raises:
        ConfigError: a run folder that cannot be used; Infeasible: a plan for another batch; and what the ranks raise.
    """
    folder = Path(config.run.folder or "runs/run")
    if world is not None:
        return _train_in(world, config, folder, planner)
    _check_spares(config, protects=False)  # a rank that is started here is replaced
    with locked(folder):
        planned = prepare(config, folder, planner)
        results = _started(config, folder, planned)
    summary: dict[str, Any] = results[0]
    return summary


def _started(config: Config, folder: Path, planned: Planned) -> list[Any]:
    """What the ranks return; they are started again, from the last checkpoint, where all of them were lost together."""
    layout, recovers = planned.plan.layout, config.run.protect != "none"
    # What a module asks a GPU's driver when it is imported would spoil the GPU for all forks.
    modules = engine_modules(planned.device)
    for left in reversed(range(RESTARTS if recovers and config.run.resume else 1)):
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
                recovery=Recovery(saved=lambda: _saved(folder)) if recovers else None,
                prepare=prepare_ranks if recovers and modules else None,
            )
        except LostKeeper as error:
            if not left:
                raise
            print(f"{error}; the ranks are started again, from the last checkpoint", file=sys.stderr)
    raise AssertionError


def _saved(folder: Path) -> int:
    return max((saved.step for saved in committed(folder / loop.CHECKPOINTS)), default=-1)


def prepare_ranks(folder: str, peak_flops: float) -> loop.Ready:
    """What the ranks need, made once before they are forked."""
    return loop.prepared(_job(Path(folder), peak_flops))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _check_digest(folder: Path, name: str) -> None:
    """Raise ConfigError where a file of the run folder is not what the run wrote: one flipped bit may make it another that can be read."""
    digest = _digests(folder).get(name)
    if digest is not None and (folder / name).exists() and _digest(folder / name) != digest:
        raise ConfigError(
            f"{folder / name} is not what this run wrote; restore it, or remove it to have it made again (a plan of one's own is plan.file)"
        )


def _digests(folder: Path) -> dict[str, str]:
    """Of the files that a run wrote before its ranks began; where that file is damaged or gone, as the newest checkpoint has them."""
    try:
        return dict(json.loads((folder / loop.DIGESTS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # of an older run, or being written when its launcher died
        pass
    for saved in reversed(committed(folder / loop.CHECKPOINTS)):
        with suppress(CheckpointError, OSError):
            return dict(read_manifest(folder / loop.CHECKPOINTS / saved.name).extra.get("files", {}))
    return {}


def _job(where: Path, peak_flops: float) -> loop.Job:
    for name in (PLAN, DESCRIPTION):
        _check_digest(where, name)
    return loop.Job(Config.read(where / CONFIG), read_plan(where / PLAN), where, read_description(where / DESCRIPTION), peak_flops)


def rank_main(world: World, folder: str, peak_flops: float) -> dict[str, Any]:
    """What every rank runs; the run folder says the rest."""
    return loop.train(world, job_of(world, folder, peak_flops))


def job_of(world: World, folder: str, peak_flops: float) -> loop.Job:
    """What the run folder says, read once for all ranks where they are forked for it."""
    ready = loop.ready_for(world)
    return ready.job if ready is not None else _job(Path(folder), peak_flops)


def _train_in(world: World, config: Config, folder: Path, planner: Planner) -> dict[str, Any]:
    """As `train`, in ranks that exist: rank 0 prepares, and has the folder to itself for as long as it trains; all read what it wrote."""
    with locked(folder) if world.rank == 0 else nullcontext():
        return _train_prepared(world, config, folder, planner)


def _check_spares(config: Config, protects: bool) -> None:
    """Raise ConfigError where ranks are to wait for others to be lost, and none can take the place of another."""
    if config.run.spares and (not protects or config.plan.trials_asked > 1):
        raise ConfigError(
            f"run.spares = {config.run.spares}, and spare ranks wait for others to be lost, which takes ranks that torchrun, srun or ssh "
            'started, run.protect = "memory", run.resume = true and plan.trials = 0; set these, or run.spares = 0'
        )


def _train_prepared(world: World, config: Config, folder: Path, planner: Planner) -> dict[str, Any]:
    peak_flops, spares = 0.0, config.run.spares
    protects = world.joined is not None and world.num_ranks > 1 and config.run.protect != "none" and config.run.resume
    _check_spares(config, protects)
    if world.rank == 0:
        planned = prepare(config, folder, planner)
        peak_flops = planned.peak_flops
        _plan_for_fewer(config, folder, planner, planned.plan, world)
        num_ranks = planned.plan.layout.num_ranks
        if num_ranks != world.num_ranks - spares:
            here = f"{world.num_ranks} are here" + (f", {spares} of them spares" if spares else "")
            to_set = f"set plan.ranks={world.num_ranks - spares}"
            if not spares and num_ranks < world.num_ranks:
                to_set += f", or, for ranks that wait until others are lost, run.spares={world.num_ranks - num_ranks}"
            raise Infeasible(f"the plan {planned.plan.layout} is for {num_ranks} ranks, {here}; start as many, or {to_set}")
        if config.plan.trials_asked > 1:
            trials.end(world)
    elif config.plan.trials_asked > 1:
        trials.follow(world)
    peak_flops = float(from_first(world, int(peak_flops)))
    if not protects:
        return rank_main(world, str(folder), peak_flops)
    job = _job(folder, peak_flops)
    plans = {job.plan.layout.num_ranks: job.plan}
    for path in sorted(folder.glob(elastic.PLANS)):
        plan = read_plan(path)
        if plan.batch_size == job.plan.batch_size:
            plans.setdefault(plan.layout.num_ranks, plan)
    return elastic.train(world, job, plans)


def _plan_for_fewer(config: Config, folder: Path, planner: Planner, plan: Plan, world: World) -> None:
    """Leave plans for fewer ranks in the folder, for when a host is lost; those that it has are not made again."""
    num_ranks = plan.layout.num_ranks
    if world.joined is None or config.run.protect == "none":
        return
    for fewer in elastic.smaller(num_ranks, len(world.boxes(tuple(range(num_ranks))))):
        path = elastic.plan_file(folder, fewer)
        if path.exists() and read_plan(path).batch_size == plan.batch_size:
            continue
        try:
            smaller = _smaller(config, planner, plan, fewer)
        except (Infeasible, LayoutError) as error:
            print(f"weft: there is no plan for {fewer} ranks, should a host be lost: {error}", file=sys.stderr)
            continue
        write_plan(replace(smaller, batch_size=plan.batch_size), path)


def _smaller(config: Config, planner: Planner, plan: Plan, num_ranks: int) -> Plan:
    """A plan for fewer ranks: of a layout given by hand fewer replicas, where that can be, and else the best."""

    def plan_of(**words: Any) -> Plan:
        section = config.plan.model_copy(update={"trials": 0, "file": "", "ranks": 0, **words})
        return planner(config.model_copy(update={"plan": section}), None).plan

    if config.plan.layout:
        with suppress(LayoutError, Infeasible):
            if layout := elastic.with_fewer_replicas(plan.layout, num_ranks):
                return plan_of(layout=str(layout))
    # In another precision the run would compute something else from there on.
    return plan_of(layout="", constrain=(*config.plan.constrain, f"ranks={num_ranks}", f"precision={plan.layout.precision}"))


def existing_plan(config: Config, folder: Path) -> Plan | None:
    """The plan that needs no planning: `plan.file`'s, or the run folder's own where a run goes on under the same `[plan]`."""
    if config.plan.file:
        return read_plan(config.plan.file)
    earlier = _earlier(folder)
    if earlier is not None and (folder / PLAN).exists() and earlier.plan == config.plan and earlier.train.batch == config.train.batch:
        _check_digest(folder, PLAN)
        return read_plan(folder / PLAN)
    return None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The run folder, there and kept from a second launcher on this machine.

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
        raise RunError(f"run.folder {folder} is in use by another weft train; wait for it, or choose another run.folder") from error
    finally:
        os.close(lock)


def prepare(config: Config, folder: Path, planner: Planner) -> Planned:
    """Check the locked folder, gather the text, get a plan, and leave all three in it for the ranks.

    Raises:
        ConfigError: the folder belongs to another run or to nobody; the text is not there or has changed.
        Infeasible: the plan is for another batch.
    """
    _check_folder(config, folder)
    try:
        _gather_text(config, folder)
        earlier = existing_plan(config, folder)
        if earlier is None:
            for path in folder.glob(elastic.PLANS):
                path.unlink()
        planned = planner(config, earlier)
        if planned.plan.batch_size != config.train.batch:
            raise Infeasible(
                f"the plan is for {planned.plan.batch_size} samples a step, train.batch is {config.train.batch}; "
                f"set train.batch={planned.plan.batch_size}, or plan again"
            )
        (folder / loop.DIGESTS).unlink(missing_ok=True)
        write_plan(planned.plan, folder / PLAN)
        written = {name: _digest(folder / name) for name in (PLAN, DESCRIPTION) if (folder / name).exists()}
        (folder / loop.DIGESTS).write_text(json.dumps(written), encoding="utf-8")
        # From the plan in the folder, so that a run that goes on has as many, and the same learning rates.
        steps = config.train.steps_under(planned.plan)
        config = config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})
        temporary = folder / f".{CONFIG}.new"
        temporary.write_text(config.dump(), encoding="utf-8")
        os.replace(temporary, folder / CONFIG)
    except OSError as error:
        raise ConfigError(f"run.folder {folder} cannot be written: {error.strerror}; make room, or choose another run.folder") from error
    return planned


def _check_folder(config: Config, folder: Path) -> None:
    for name in (CONFIG, PLAN, DESCRIPTION, loop.DIGESTS, FILE):
        if (folder / name).exists() and not (folder / name).is_file():
            raise ConfigError(f"{folder / name} is no file; remove it, or choose another run.folder")
    earlier = _earlier(folder)
    if earlier is None:
        strangers = [path.name for path in folder.iterdir() if not path.name.startswith(".") and path.name not in _PREPARED]
        if strangers:
            raise ConfigError(
                f"run.folder {folder} holds {', '.join(sorted(strangers)[:3])} and no run of weft; choose an empty or a new folder"
            )
        return
    if not committed(folder / loop.CHECKPOINTS):
        return
    if not config.run.resume:
        raise ConfigError(
            f"run.folder {folder} holds the checkpoints of an earlier run, and run.resume is false; choose another run.folder, or remove it"
        )
    for key in _FIXED:
        for name, before, now in _differences(key, _at(earlier, key), _at(config, key)):
            raise ConfigError(
                f"run.folder {folder} is of another run: {name} was {_short(before)}, now it is {_short(now)}; "
                "choose another run.folder, or set it back to go on"
            )


def _earlier(folder: Path) -> Config | None:
    """The configuration of the run that the folder belongs to."""
    path = folder / CONFIG
    return Config.read(path) if path.exists() else None


def _at(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value.model_dump() if hasattr(value, "model_dump") else value


def _differences(key: str, before: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """What was set otherwise, key by key: of a table whose entries differ, not the table."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted(before.keys() | now.keys()):
            yield from _differences(f"{key}.{name}", before.get(name), now.get(name))
    elif before != now:
        yield key, before, now


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else text[:200] + "..."


def _gather_text(config: Config, folder: Path) -> None:
    """Leave a description of the text in the folder; a run that goes on keeps the text it has gathered."""
    description = folder / DESCRIPTION
    if config.data.source == "synthetic":
        description.unlink(missing_ok=True)
        return
    _check_digest(folder, DESCRIPTION)
    before = read_description(description)
    if before is not None and committed(folder / loop.CHECKPOINTS):
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
