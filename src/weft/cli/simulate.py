"""`weft simulate`: one step of a plan as a timeline. In: a plan, or a model and a layout. Out: a picture, a trace for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli import options
from weft.cli.output import output, write_file
from weft.errors import UsageError


def simulate(
    subject: Annotated[str, typer.Argument(metavar="PLAN|MODEL", help="A plan.toml, or a model with --layout.", show_default=False)],
    layout: options.LayoutText = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="CLUSTER", help="As for plan; of the plan, or here.", show_default=False)
    ] = None,
    batch: options.Batch = None,
    sequence: options.Sequence = None,
    target: options.OutFile = None,
    as_json: options.Json = False,
) -> None:
    """Draw one step of a plan.

    What each rank does, and when; -o writes a trace that ui.perfetto.dev opens.

    \b
    Example:
      weft simulate plan.toml -o trace.json
      weft simulate gpt-10m --batch 16 --layout "pipeline=2 microbatches=4 schedule=1f1b"
    """
    with output(as_json) as out:
        from weft import api
        from weft.cli.operands import load_cluster, load_model
        from weft.cli.setting import Setting
        from weft.plan.layout import Layout
        from weft.plan.plan_file import read_plan
        from weft.report.gantt import gantt
        from weft.report.run_folder import MACHINE
        from weft.report.tables import prediction_record

        if subject.endswith(".toml"):
            if layout is not None:
                raise UsageError(f"{subject} is a plan and has its layout; edit it there, or name the model with --layout")
            chosen = read_plan(subject)
            # A run folder says what its plan was made for.
            beside = Path(subject).with_name(MACHINE)
            machines = load_cluster(cluster or (str(beside) if beside.exists() else chosen.cluster), out)
            setting = Setting(chosen.model, machines, chosen.batch_size, sequence)
        else:
            machines = load_cluster(cluster or "here", out)
            setting = Setting(subject, machines, batch or load_model(subject, None, sequence).default_batch, sequence)
            chosen = setting.plan(layout=Layout.parse(layout) if layout is not None else None)
        prediction, timeline = api.simulated(chosen, setting.resolved, setting.given, cluster=machines, source=setting.source)
        if target is not None:
            write_file(Path(target), timeline.to_perfetto())
            out.message(f"written to {target}; open it in ui.perfetto.dev")
        out.text(gantt(timeline, headline=f"{timeline.name}: {prediction.spent}"))
        out.answer(
            {
                "layout": str(chosen.layout),
                **prediction_record(prediction),
                "bubble": timeline.bubble,
                "busy": [timeline.busy(rank) for rank in range(timeline.num_ranks)],
                "spans": len(timeline.spans),
            }
        )
