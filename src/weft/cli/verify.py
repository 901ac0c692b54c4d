"""`weft verify`: the parallel run against the serial one. In: a model and a layout. Out: worst errors; exit 4 above the tolerance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from weft.cli import options
from weft.cli.output import output
from weft.errors import UsageError, VerifyError
from weft.report.tables import Table, measured_memory_table

_SCHEDULE = "A schedule of your own: the same as schedule=FILE in the layout."


def verify(
    model: options.Model,
    layout: options.LayoutText = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, metavar="N", help="Check that the layout has N ranks.", show_default=False)
    ] = None,
    batch: options.Batch = None,
    sequence: options.Sequence = None,
    steps: Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Training steps to compare.")] = 2,
    dtype: Annotated[str, typer.Option("--dtype", metavar="TYPE", help="float64, float32 or bfloat16.")] = "float64",
    tolerance: Annotated[
        float | None, typer.Option("--tolerance", metavar="X", help="Largest relative error; 1e-9 in float64.", show_default=False)
    ] = None,
    device_memory: options.DeviceMemory = None,
    schedule: Annotated[Path | None, typer.Option("--schedule", metavar="FILE", help=_SCHEDULE, show_default=False)] = None,
    as_json: options.Json = False,
) -> None:
    """Compare a layout with the serial model.

    It starts the ranks and compares loss, gradients and updated weights. Without --layout, --ranks N means data=N.

    \b
    Example:
      weft verify examples/mlp.py:make --layout "data=2 tensor=2"
      weft verify hf:gpt2.json --layout "pipeline=2 microbatches=4" --batch 8 --sequence 32
      weft verify gpt-tiny --layout "pipeline=2 microbatches=2 schedule=mine.txt"
    """
    with output(as_json) as out:
        from weft import api
        from weft.cli.subject import load_model
        from weft.plan.layout import Layout
        from weft.plan.own import read_actions

        wanted = Layout.parse(layout) if layout is not None else Layout(data=ranks or 1)
        if schedule is not None:
            wanted = wanted.with_schedule(schedule.name, read_actions(schedule))
        if ranks is not None and ranks != wanted.num_ranks:
            raise UsageError(
                f"--ranks {ranks}, but the layout {wanted} has {wanted.num_ranks} ranks; leave --ranks out, or change one of them"
            )
        subject = load_model(model, batch, sequence)
        with out.working(f"comparing {wanted} with the serial model over {steps} steps in {dtype}"):
            found = api.verify(subject, wanted, batch, steps=steps, dtype=dtype, tolerance=tolerance, device_memory=device_memory or 0)
        rows = tuple((name, f"{error:.3g}") for name, error in found.worst.items())
        out.text(f"{model}, {wanted}: worst relative error over {steps} steps in {dtype}, tolerance {found.tolerance:.0e}")
        out.table(Table("", ("", "error"), rows, right=(1,)))
        if found.replicated_operators:
            out.text("computed whole on every rank, for want of a rule: " + ", ".join(found.replicated_operators))
        if found.memory:
            predicted = api.plan(subject, batch, cluster="1xcpu-2", layout=replace(wanted, precision=dtype)).prediction
            out.table(measured_memory_table(found.memory, predicted.memory if predicted else None))
        out.text("the same as the serial model" if found.ok else f"differs first in {found.first_difference}")
        out.answer(
            {
                "ok": found.ok,
                "worst": found.worst,
                "first_difference": found.first_difference,
                "replicated_operators": list(found.replicated_operators),
                "layout": str(wanted),
                "tolerance": found.tolerance,
                "steps": steps,
                "dtype": dtype,
                "memory_bytes": found.memory,
            }
        )
        if not found.ok:
            out.message(f"the parallel run differs from the serial one above the tolerance, first in {found.first_difference}")
            raise typer.Exit(VerifyError.exit_code)
