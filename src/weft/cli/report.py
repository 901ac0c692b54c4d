"""`weft report`: a page with pictures. In: a run folder or a plan. Out: one HTML file that needs nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import options
from weft.cli.output import output, write_file
from weft.errors import WeftError

if TYPE_CHECKING:
    from weft.plan.plan import Plan
    from weft.report.page import Subject

MOST_DRAWN = 4096  # most computes of a picture, in each direction


def report(
    subject: Annotated[Path, typer.Argument(metavar="RUN|PLAN", help="A run folder, or a plan.toml.", show_default=False)],
    target: options.OutFile = None,
    as_json: options.Json = False,
) -> None:
    """Write a page about a run or a plan.

    Loss, throughput, the plan with its reasons, memory, timeline; one file that needs nothing else.

    \b
    Example:
      weft report runs/gpt_text -o page.html
    """
    with output(as_json) as out:
        target = target or (subject / "report.html" if subject.is_dir() else Path("report.html"))
        size_bytes = write_page(subject, target, timeline=True)
        out.text(f"written to {target} ({size_bytes / 1000:.0f} kB); open it in a browser")
        out.answer({"page": str(target), "size_bytes": size_bytes})


def write_page(subject: Path, target: Path, timeline: bool = False) -> int:
    """Write the page and return its size in bytes. With `timeline` a plan's page shows its simulated step.

    Raises:
        UsageError: a subject that cannot be read, or a target that cannot be written.
    """
    from weft.plan.plan_file import read_plan
    from weft.report.run_folder import read_folder

    if subject.is_dir():
        return write(read_folder(subject), target)
    about = about_plan(read_plan(subject), timeline)
    commands = (f"weft explain {subject}", f"weft whatif {subject} gpus=... zero=...", f"weft simulate {subject}")
    return write(replace(about, again=commands), target)


def about_plan(plan: Plan, timeline: bool = False) -> Subject:
    """Return a page's subject: a plan, its machines and, with `timeline`, its simulated step."""
    from weft.report.page import Subject

    about = Subject(f"A plan for {plan.model}", f"{plan.batch_size} samples a step on {plan.cluster}", plan)
    return _with_machines(about, plan, timeline)


def write(about: Subject, target: Path) -> int:
    """Write a page and return its size in bytes. Raises `UsageError` where it cannot be written."""
    from weft.report.page import page

    return write_file(target, page(about))


def _with_machines(about: Subject, plan: Plan, is_drawn: bool) -> Subject:
    """Add the machines' figures and the simulated step; skipped where the plan's model or machines are not available."""
    from weft.cli.setting import Setting
    from weft.cluster.cluster import Cluster
    from weft.report.cluster_tables import cluster_tables

    if plan.cluster == "here":
        return about
    try:
        machines = Cluster.parse(plan.cluster)
        facts = tuple((a, b) for a, b in cluster_tables(machines)[0].rows)
        about = replace(about, machine=facts, memory_limit_bytes=machines.memory_of(plan.layout.num_ranks))
        if is_drawn and not plan.uncaptured and plan.layout.pipeline * plan.layout.microbatches <= MOST_DRAWN:
            from weft import api

            setting = Setting(plan.model, machines, plan.batch_size)
            prediction, timeline = api.simulated(plan, setting.resolved, setting.given, cluster=machines, source=setting.source)
            about = replace(about, plan=replace(plan, prediction=prediction), simulated=timeline)  # an edited plan is priced anew
    except WeftError:
        return about
    return about
