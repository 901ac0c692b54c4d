"""`shardwise audit`: run a serial and a parallel script of any framework, and name the first difference; exit 4 where they differ."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli import options
from shardwise.cli.output import CommandOutput, open_output
from shardwise.errors import VerifyError
from shardwise.report.tables import TextTable

if TYPE_CHECKING:
    from shardwise.audit.difference import AuditResult

_SERIAL = 'The serial run, as you would type it: "python train.py --batch 8". It runs three times.'
_PARALLEL = 'The parallel run: "torchrun --nproc-per-node 2 train.py --batch 4". Together its ranks must read the serial run\'s batches.'
_NOISE = "Serial runs with weights moved by one unit of rounding; they measure the tolerance."
_DROPOUT = "Apply dropout. By default masks are drawn and compared, but not applied: no parallel run has the serial run's masks."
_TO_END = "Let the scripts run to their end. By default they are ended after the last step that is compared."
_FOLDER = "Keep the records in this folder. Records of the serial run that lie there are used again."


def audit_scripts(  # noqa: PLR0913
    serial: Annotated[str, typer.Option("--serial", metavar="COMMAND", help=_SERIAL, show_default=False)],
    parallel: Annotated[str, typer.Option("--parallel", metavar="COMMAND", help=_PARALLEL, show_default=False)],
    steps: Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Optimizer steps to compare.")] = 3,
    noise_runs: Annotated[int, typer.Option("--noise-runs", min=1, metavar="N", help=_NOISE)] = 2,
    keep_dropout: Annotated[bool, typer.Option("--keep-dropout", help=_DROPOUT)] = False,
    to_end: Annotated[bool, typer.Option("--to-end", help=_TO_END)] = False,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Longest time of each run.")] = 1800.0,
    folder: Annotated[Path | None, typer.Option("--folder", metavar="DIR", help=_FOLDER, show_default=False)] = None,
    as_json: options.Json = False,
) -> None:
    """Compare a parallel training script of any framework with its serial run.

    The scripts are not changed. A recorder in each process writes weights, gradients, samples, losses and statistics of the
    first steps; the tolerance is the noise of rounding, measured in serial runs. Exit 0 where both compute the same, 4 where
    they differ or a run fails.
    The first difference is named: its step, parameter, ranks and kind.

    \b
    Example:
      shardwise audit --serial "python train.py --batch 8" --parallel "torchrun --nproc-per-node 2 train.py --batch 4"
      shardwise audit --serial "python train.py" --parallel "accelerate launch --num_processes 2 train.py" --steps 5 --json
    """
    with open_output(as_json) as out:
        from shardwise.audit.run import AuditOptions, audit_commands  # here: the command starts fast

        chosen = AuditOptions(steps, noise_runs, keep_dropout, not to_end, timeout, folder)
        with out.working(f"running the serial command {noise_runs + 1} times, and the parallel one", noise_runs + 2) as advance:
            result = audit_commands(serial, parallel, chosen, dict(os.environ), advance)
        _show_result(out, result)
        out.answer(result.record())
        if not result.equal:
            raise typer.Exit(VerifyError.exit_code)


def _show_result(out: CommandOutput, result: AuditResult) -> None:
    """Show the verdict, what differs, and the errors of each step."""
    if result.equal:
        out.text(f"equal within the noise of rounding: {len(result.steps)} steps, {result.ranks} ranks")
    else:
        out.text(f"different: {result.verdict}")
    for difference in result.differences:
        where = f"step {difference.step}: " if difference.step is not None else ""
        out.text(f"  {difference.kind}: {where}{difference.text}")
    rows = tuple(
        (f"step {s.step}", _format_loss(s.serial_loss), _format_loss(s.parallel_loss), f"{s.gradients:.2g}", f"{s.updates:.2g}")
        for s in result.steps
    )
    if rows:
        out.table(TextTable("", ("", "serial loss", "parallel loss", "gradients", "updates"), rows, right=(1, 2, 3, 4)))
        out.text(
            f"one unit of rounding ({result.noise.unit:.1g}) changes a usual gradient by {result.noise.gradients:.1g}; largest accepted "
            f"difference {result.noise.largest_accepted:.1g}; {result.noise.ignored} tensors are nothing but noise"
        )
    for note in result.notes:
        out.text(f"note: {note}")


def _format_loss(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.6f}"
