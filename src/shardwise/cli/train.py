"""`shardwise train`: plan, launch, train or resume by a configuration file and `key=value` words; writes a run folder with a page."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli import options
from shardwise.cli.output import CommandOutput, open_output
from shardwise.plan.plan import MemoryBreakdown
from shardwise.report.run_folder import MACHINE, PAGE, SUMMARY, copies_words, saving_words, straggler_words
from shardwise.report.tables import TextTable, measured_memory_table, reasons_table, summary_table
from shardwise.units import format_count, format_percent, format_seconds, parse_bytes

if TYPE_CHECKING:
    from shardwise.cluster.cluster import Cluster
    from shardwise.plan.plan import Plan
    from shardwise.train.config import TrainingConfig
    from shardwise.train.flow import PlannedRun
    from shardwise.world.world import World


STOPPED_EXIT_CODE = 75  # sysexits.h: a temporary failure, try again


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="What to train, on what, for how long.", show_default=False)],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the configuration to set instead.", show_default=False)
    ] = None,
    layout: options.LayoutText = None,
    device_memory: options.DeviceMemory = None,
    as_json: options.Json = False,
) -> None:
    """Plan, launch and train; run again to resume.

    Run again with the same configuration, it resumes from the last checkpoint.

    \b
    Example:
      shardwise train examples/gpt_text.toml
      shardwise train examples/gpt_text.toml steps=100 --layout "data=2"
    """
    from shardwise.world.launch.started import rank_from_environment  # here: the command starts fast

    with open_output(as_json) as out:
        overrides = {"plan.layout": layout, "plan.device_memory": device_memory}
        summary = run(config, [*(changes or ()), *(f"{key}={value}" for key, value in overrides.items() if value is not None)], out)
        if not rank_from_environment(os.environ):
            out.table(run_summary_table(summary))
            components = components_table(summary)
            if components.rows:
                out.table(components)
            if summary.get("memory_bytes"):
                predicted = summary.get("predicted_memory_bytes")
                out.table(measured_memory_table(summary["memory_bytes"], MemoryBreakdown(**predicted) if predicted else None))
            out.answer(summary)
        if summary["stopped"]:
            raise typer.Exit(STOPPED_EXIT_CODE)


def run(path: Path, changes: Sequence[str], out: CommandOutput, reasons: bool = True) -> dict[str, Any]:
    """Train, write the page, and return the summary; with `reasons` the plan's reasons are shown before the first step."""
    from shardwise.train.config import TrainingConfig  # here: the command starts fast

    config = TrainingConfig.read(path, changes)  # before torch is loaded, which takes seconds
    from shardwise.cli.report import write_page  # here: the configuration is read before torch is loaded
    from shardwise.train.flow import train as train_all
    from shardwise.world.launch.current import current_world
    from shardwise.world.launch.rank_settings import apply_launch_settings
    from shardwise.world.launch.started import rank_from_environment

    # Where torchrun, mpirun or srun started the ranks, possibly on several hosts.
    world = current_world() if rank_from_environment(os.environ) is not None else None
    if world is not None:
        apply_launch_settings(world)

    def planner(config: TrainingConfig, ready: Plan | None) -> PlannedRun:
        planned = make_plan(config, ready, out, world)
        out.table(summary_table(planned.plan))
        if config.run.prove:
            prove_before_start(config, planned.plan, out)
        if reasons:
            out.table(reasons_table(planned.plan))
        steps = config.train.steps_under(planned.plan)
        if steps < config.train.steps:
            out.message(
                f"{steps} steps instead of {config.train.steps}: as many as are predicted to take train.within_s = "
                f"{config.train.within_s:g} s here; steps={config.train.steps} train.within_s=0 makes all of them"
            )
        return planned

    summary = train_all(config, planner, world)
    if world is not None and world.rank:
        return summary
    folder = Path(summary["run_folder"])
    (folder / SUMMARY).write_text(json.dumps(summary) + "\n")
    write_page(folder, folder / PAGE)
    return summary


def prove_before_start(config: TrainingConfig, plan: Plan, out: CommandOutput) -> None:
    """Prove a plan, reduced if it is large. Raises VerifyError if it is not what the serial model computes."""
    from shardwise.api_prove import prove  # here: the command starts fast
    from shardwise.errors import VerifyError
    from shardwise.train.optimizers import optimizer_of
    from shardwise.train.training_task import sequence_length_of

    with out.working("proving the plan (run.prove)"):
        proof = prove(
            config.model.name, plan, plan.batch_size, optimizer=optimizer_of(config.train), sequence=sequence_length_of(config),
            cut_everything=False,
        )  # fmt: skip
    assert not isinstance(proof, tuple)
    out.message(f"proof of {proof.model} under {proof.layout}: {proof.outcome}{f'; {proof.reduction}' if proof.reduction else ''}")
    if not proof.ok:
        raise VerifyError(
            f"the plan does not compute what the serial model does ({proof.outcome}), so nothing was started; plan another layout, or "
            "start it unproven with run.prove=false"
        )


def make_plan(config: TrainingConfig, ready: Plan | None, out: CommandOutput, world: World | None = None) -> PlannedRun:
    """Choose the plan of a configuration, or take `ready`; write the cluster file, and add the machines' peak FLOP/s.

    `world`: the ranks that exist, of which this is rank 0; trials run on them.
    """
    from shardwise import api  # here: the command starts fast
    from shardwise.cluster.catalogue import dump
    from shardwise.plan.layout import Layout
    from shardwise.run.rank_model.model_source import CachedModelSource
    from shardwise.train.check_tokens import check_tokens
    from shardwise.train.flow import PlannedRun
    from shardwise.train.optimizers import optimizer_of
    from shardwise.train.training_task import sequence_length_of, with_positions
    from shardwise.train.trials import choose_compilation, compiling_may_pay, num_worthwhile_trials
    from shardwise.zoo.resolve import resolve

    cluster = options.load_cluster(config.plan.cluster, out)
    check_cluster_is_local(cluster, config, world)
    if ready is None or config.plan.file:
        subject = with_positions(resolve(config.model.name, config.train.batch, sequence_length_of(config)), config)
        source = CachedModelSource.from_model(subject.make)
        example = api.batch_shapes(subject, config.train.batch, source)
        check_tokens(config, source, example, subject.loss)
    if ready is not None:
        plan = ready
        if note := _schedule_change_note(plan, Path(config.plan.file or Path(config.run.folder) / "plan.toml")):
            out.message(note)
    else:
        words = [*config.plan.constrain, *([f"ranks<={config.plan.ranks}"] if config.plan.ranks else [])]
        request = api.PlanRequest(
            cluster, Layout.parse(config.plan.layout) if config.plan.layout else None, words, source=source,
            device_memory=parse_bytes(config.plan.device_memory or 0), optimizer=optimizer_of(config.train),
            sequence=sequence_length_of(config), say=out.message, world=world,
        )  # fmt: skip
        asked = api.subject_of(subject, example, None)
        with out.working(f"planning {config.model.name} on {cluster.name}"):
            plan = api.plan_subject(asked, request)
            if request.layout is None:
                trials = config.plan.num_trials
                if config.plan.trials == "auto" and world is None and api.is_this_machine(cluster):
                    trials = num_worthwhile_trials(plan.candidates, config.train.steps_under(plan))
                plan = api.choose_by_trials(
                    plan, replace(request, trials=trials), lambda layout: api.plan_subject(asked, replace(request, layout=layout))
                )
                steps = config.train.steps_under(plan)
                if config.plan.trials != 0 and world is None and api.is_this_machine(cluster) and compiling_may_pay(plan, steps):
                    device, limit = cluster.kind.torch, request.device_memory
                    plan = choose_compilation(plan, steps, request.sequence, device=device, device_memory=limit, say=out.message)
    (Path(config.run.folder) / MACHINE).write_text(dump(cluster))
    prediction = plan.prediction
    # The peak that the predicted MFU refers to, so that measured and predicted MFU are comparable.
    peak_flops = prediction.model_flops / prediction.step_time_s / prediction.mfu if prediction and prediction.mfu > 0 else 0.0
    return PlannedRun(plan, peak_flops)


def check_cluster_is_local(cluster: Cluster, config: TrainingConfig, world: World | None) -> None:
    """Raise ConfigError where the plan needs devices that this machine lacks. `world`: ranks that torchrun or srun has started."""
    import torch  # here: the command starts fast

    from shardwise import api
    from shardwise.errors import ConfigError

    if api.is_this_machine(cluster) if world is None else cluster.kind.torch == world.device.type:
        return
    hosts, num_gpus = cluster.num_nodes, torch.cuda.device_count()
    devices = f"{cluster.num_devices} {cluster.device.name}" + (f" in {hosts} machines" if hosts > 1 else "")
    has = f"{num_gpus} GPUs" if num_gpus else "no GPU that torch can use"
    raise ConfigError(
        f"plan.cluster = {config.plan.cluster} is {devices}, and what would train is one machine with {os.cpu_count()} processor cores and "
        f"{has}: train on what is here with plan.cluster=here; ask for the plan alone with `shardwise plan {config.model.name} --cluster "
        f"{config.plan.cluster} --batch {config.train.batch}`; or start shardwise train on those machines, with torchrun or SLURM"
    )


def _schedule_change_note(plan: Plan, file: Path) -> str:
    """Return a message if the schedule's file differs from the copy in the plan `file`, which is the one that runs; else empty."""
    from shardwise.plan.ir.custom_schedule import read_actions  # here: the command starts fast

    name = plan.layout.schedule
    if not plan.layout.actions or not Path(name).is_file() or read_actions(name) == plan.layout.actions:
        return ""
    return f"{name} has changed since it was planned; this runs what {file} has of it: remove that, or plan again, for the new one"


def run_summary_table(summary: dict[str, Any]) -> TextTable:
    """Tabulate the results of a run."""
    rows = [("run folder", str(summary["run_folder"])), ("step", str(summary["step"]))]
    if summary.get("loss") is not None:
        rows.append(("loss", f"{summary['loss']:.3f}"))
    if summary.get("eval_loss") is not None:
        baseline = summary.get("byte_frequency_loss")
        suffix = f"; {baseline:.3f} from byte frequencies alone" if baseline else ""
        rows.append(("loss, held out", f"{summary['eval_loss']:.3f}{suffix}"))
    if summary.get("tokens_per_s"):
        rows.append(("throughput", f"{format_count(summary['tokens_per_s'])} tokens/s"))
    if summary.get("step_time_s"):
        predicted = summary.get("predicted_step_time_s")
        rows.append(
            ("step time", format_seconds(summary["step_time_s"]) + (f"; predicted {format_seconds(predicted)}" if predicted else ""))
        )
    if summary.get("data_wait_s") is not None and summary.get("step_time_s"):
        rows.append(("waiting for data", f"{format_seconds(summary['data_wait_s'])} in all, on the rank that waited longest"))
    if copies := copies_words(summary):
        rows.append(("copied to another host", copies))
    if waited := straggler_words(summary):
        rows.append(("waiting for a rank", waited))
    if saving := saving_words(summary):
        rows.append(("saving", saving))
    if summary.get("mfu"):
        rows.append(("MFU", format_percent(summary["mfu"])))
    return TextTable("Trained" if not summary.get("stopped") else "Stopped early; the same command resumes", ("", ""), tuple(rows))


def components_table(summary: dict[str, Any]) -> TextTable:
    """Tabulate predicted and measured step time by component; empty where either is not known."""
    predicted, measured = summary.get("predicted_parts_s") or {}, summary.get("measured_parts_s") or {}
    rows = []
    if predicted and measured:
        names = [*predicted, *(name for name in measured if name not in predicted)]
        pairs = [(name, predicted.get(name, 0.0), measured.get(name, 0.0)) for name in names]
        total = summary.get("predicted_step_time_s") or sum(x for _, x, _ in pairs), sum(y for _, _, y in pairs)
        for name, x, y in (*pairs, ("step", *total)):
            off = f"{(x - y) / total[1]:+.1%}" if total[1] else ""
            rows.append((name, *(format_seconds(s) if s > 1e-9 else "0 s" for s in (x, y)), off))
    note = "medians of the last steps, on the rank that computes most" if rows else ""
    columns = ("component", "predicted", "measured", "difference, of the step")
    return TextTable(
        "Predicted against measured", columns, tuple(rows), right=(1, 2, 3), marked=(len(rows) - 1,) if rows else (), note=note
    )
