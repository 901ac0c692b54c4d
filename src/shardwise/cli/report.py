"""`shardwise report`: a page with pictures. In: a run folder or a plan. Out: one HTML file that needs nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli import options
from shardwise.cli.output import open_output, write_file
from shardwise.errors import ShardwiseError

if TYPE_CHECKING:
    from shardwise.plan.plan import Plan
    from shardwise.report.page import PageSubject

MAX_DRAWN_COMPUTES = 4096  # most computes of a picture, in each direction


def report(
    subject: Annotated[Path, typer.Argument(metavar="RUN|PLAN", help="A run folder, or a plan.toml.", show_default=False)],
    target: options.OutFile = None,
    as_json: options.Json = False,
) -> None:
    """Write a page about a run or a plan.

    Loss, throughput, the plan with its reasons, memory, timeline; one file that needs nothing else.

    \b
    Example:
      shardwise report runs/gpt_text -o page.html
    """
    with open_output(as_json) as out:
        target = target or (subject / "report.html" if subject.is_dir() else Path("report.html"))
        size_bytes = write_page(subject, target, timeline=True)
        out.text(f"written to {target} ({size_bytes / 1000:.0f} kB); open it in a browser")
        out.answer({"page": str(target), "size_bytes": size_bytes})


def write_page(subject: Path, target: Path, timeline: bool = False) -> int:
    """Write the page and return its size in bytes. With `timeline` a plan's page shows its simulated step.

    Raises:
        UsageError: a subject that cannot be read, or a target that cannot be written.
    """
    from shardwise.plan.plan_file import read_plan  # here: the command starts fast
    from shardwise.report.run_folder import read_folder

    if subject.is_dir():
        return write(read_folder(subject), target)
    about = subject_of_plan(read_plan(subject), timeline)
    commands = (f"shardwise explain {subject}", f"shardwise whatif {subject} gpus=... zero=...", f"shardwise simulate {subject}")
    return write(replace(about, next_commands=commands), target)


def subject_of_plan(plan: Plan, timeline: bool = False) -> PageSubject:
    """Return a page's subject: a plan, its machines and, with `timeline`, its simulated step."""
    from shardwise.report.page import PageSubject  # here: the command starts fast

    about = PageSubject(f"A plan for {plan.model}", f"{plan.batch_size} samples a step on {plan.cluster}", plan)
    return _with_machines(about, plan, timeline)


def write(about: PageSubject, target: Path) -> int:
    """Write a page and return its size in bytes. Raises `UsageError` where it cannot be written."""
    from shardwise.report.page import page_html  # here: the command starts fast

    return write_file(target, page_html(about))


def _with_machines(about: PageSubject, plan: Plan, is_drawn: bool) -> PageSubject:
    """Add the machines' figures and the simulated step; skipped where the plan's model or machines are not available."""
    from shardwise.cli.pricing_context import PricingContext  # here: the command starts fast
    from shardwise.cluster.cluster import Cluster
    from shardwise.report.cluster_tables import cluster_tables

    if plan.cluster == "here":
        return about
    try:
        machines = Cluster.parse(plan.cluster)
        facts = tuple((a, b) for a, b in cluster_tables(machines)[0].rows)
        about = replace(about, machine=facts, memory_limit_bytes=machines.memory_of(plan.layout.num_ranks))
        if is_drawn and not plan.uncaptured and plan.layout.pipeline * plan.layout.microbatches <= MAX_DRAWN_COMPUTES:
            from shardwise import api  # here: the command starts fast

            setting = PricingContext(plan.model, machines, plan.batch_size)
            prediction, timeline = api.simulate_subject(plan, setting.subject, machines, setting.source)
            about = replace(about, plan=replace(plan, prediction=prediction), simulated=timeline)  # an edited plan is priced anew
    except ShardwiseError:
        return about
    return about
