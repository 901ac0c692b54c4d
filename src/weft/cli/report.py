"""`weft report`: a page with pictures. In: a run folder or a plan. Out: one HTML file that needs nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from weft.cli import options
from weft.cli.output import output
from weft.errors import UsageError


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
        size_bytes = write_page(subject, target)
        out.text(f"written to {target} ({size_bytes / 1000:.0f} kB); open it in a browser")
        out.answer({"page": str(target), "size_bytes": size_bytes})


def write_page(subject: Path, target: Path) -> int:
    """Write the page and return its size in bytes.

    Raises:
        UsageError: a subject that cannot be read, or a target that cannot be written.
    """
    from weft.plan.store import read_plan
    from weft.report.folder import read_folder
    from weft.report.page import Subject, page

    if subject.is_dir():
        about = read_folder(subject)
    else:
        plan = read_plan(subject)
        about = Subject(f"A plan for {plan.model}", f"{plan.batch_size} samples a step on {plan.cluster}", plan)
        about = replace(about, again=(f"weft simulate {subject}", f'weft verify {plan.model} --layout "{plan.layout}"'))
    text = page(about)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}; name a file in a folder that can be written to with -o") from None
    return len(text.encode())
