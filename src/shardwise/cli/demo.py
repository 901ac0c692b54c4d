"""`shardwise demo`, which `scripts/demo` calls: probe the machine, plan, and train a GPT on text, end to end.

Each run has its own folder; an interrupted one is resumed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli import options
from shardwise.cli.output import CommandOutput, open_output
from shardwise.errors import UsageError

CONFIG = "examples/gpt_text.toml"
MACHINE_ROWS = 1
TRAINING_LIMIT_S = 90.0  # of training: with measuring, planning, starting and the page it stays within three minutes on a slow machine


def demo(
    changes: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="As for train.", show_default=False)] = None,
    text: Annotated[Path | None, typer.Option("--text", metavar="PATH", help="A text, or a folder of texts.", show_default=False)] = None,
    layout: options.LayoutText = None,
    project: Annotated[Path, typer.Option("--project", hidden=True)] = Path(),
) -> None:
    """Measure this machine, plan, and train a GPT on real text.

    \b
    Example:
      shardwise demo --text my.txt steps=200
    """
    with open_output(False) as out:
        from shardwise.cli.train import run, run_summary_table  # here: the command starts fast
        from shardwise.report.cluster_tables import cluster_tables

        if text is not None and not text.exists():
            raise UsageError(f"--text {text} is not there; name a file or a folder of texts")
        config = project / CONFIG
        folders = [word.partition("=")[2] for word in changes or () if word.partition("=")[0] == "run.folder"]
        folder = Path(folders[-1]) if folders and folders[-1] else next_run_folder(project / "runs")
        out.text("1. This machine")
        machines = options.load_cluster("here", out)
        for table in cluster_tables(machines)[:MACHINE_ROWS]:
            out.table(table)
        out.text(f"2. Plan and train: {config}, into {folder}")
        given_steps = {"steps", "train.steps"} & {word.partition("=")[0] for word in changes or ()}
        limit = [] if given_steps else [f"train.within_s={TRAINING_LIMIT_S:g}"]
        words = [f"run.folder={folder}", *limit, *([f"data.text={text.resolve()}"] if text is not None else []), *(changes or ())]
        if layout is not None:
            words.append(f"plan.layout={layout}")
        summary = run(config, words, out, reasons=False)
        out.table(run_summary_table(summary))
        show_results(folder, out)


def next_run_folder(runs: Path) -> Path:
    """Return `runs/demo`, or the first numbered folder without a report: a new one, or an interrupted run, which is resumed."""
    number = 1
    while True:
        folder = runs / ("demo" if number == 1 else f"demo-{number}")
        if not (folder / "report.html").exists():
            return folder
        number += 1


def show_results(folder: Path, out: CommandOutput) -> None:
    """Show the generated text, the plan with its reasons, the run folder, and commands to try next."""
    from shardwise.report.run_folder import read_folder  # here: the command starts fast
    from shardwise.report.tables import TextTable, reasons_table, summary_table

    subject = read_folder(folder)
    if subject.sample:
        out.text("\n3. What the model writes now\n")
        out.text("\n".join("    " + line for line in subject.sample.splitlines()))
    if subject.plan is not None:
        out.text("\n4. The plan, and the reasons for it\n")
        out.table(summary_table(subject.plan))
        out.table(reasons_table(subject.plan))
    out.table(TextTable(f"5. The run folder {folder}", ("", ""), subject.files))
    out.text("Next:")
    for line in (
        f"open {folder / 'report.html'} in a browser, {folder / 'timeline.json'} in ui.perfetto.dev",
        'shardwise verify gpt-tiny --layout "data=2 tensor=2 pipeline=2 microbatches=2"',
        f"shardwise train {CONFIG} data.text=my.txt steps=500",
        "shardwise plan gpt-39b --cluster 8xp3.16xlarge --batch 1024",
    ):
        out.text(f"    {line}")
