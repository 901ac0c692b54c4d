"""`shardwise simulate`: draw a simulated step of a plan, or of a model and a layout, as a timeline; or write a Perfetto trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli import options
from shardwise.cli.output import CommandOutput, open_output, write_file
from shardwise.errors import UsageError
from shardwise.units import format_seconds

if TYPE_CHECKING:
    from shardwise.cli.pricing_context import PricingContext
    from shardwise.plan.plan import Plan

_STRAGGLING = "Steps of data-parallel replicas (data=N), each late by this part of a step on average: 20x0.5."


def simulate(
    subject: Annotated[str, typer.Argument(metavar="PLAN|MODEL", help="A plan.toml, or a model with --layout.", show_default=False)],
    layout: options.LayoutText = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="CLUSTER", help="As for plan; of the plan, or here.", show_default=False)
    ] = None,
    batch: options.Batch = None,
    sequence: options.Sequence = None,
    delays: Annotated[str | None, typer.Option("--late", metavar="NxPART", help=_STRAGGLING, show_default=False)] = None,
    target: options.OutFile = None,
    as_json: options.Json = False,
) -> None:
    """Draw one step of a plan.

    What each rank does, and when; -o writes a trace that ui.perfetto.dev opens.

    \b
    Example:
      shardwise simulate plan.toml -o trace.json
      shardwise simulate gpt-10m --batch 16 --layout "pipeline=2 microbatches=4 schedule=1f1b"
      shardwise simulate gpt-10m --batch 16 --layout "data=2 servers=1 staleness=2" --late 20x0.5
    """
    with open_output(as_json) as out:
        chosen, setting = _plan_and_context(subject, layout, cluster, (batch, sequence), out)
        from shardwise import api  # here: the command starts fast
        from shardwise.report.gantt import gantt_text
        from shardwise.report.tables import prediction_record

        steps, part = _parse_stragglers(delays)
        prediction, timeline = api.simulate_subject(chosen, setting.subject, setting.cluster, setting.source, steps, part)
        if target is not None:
            write_file(Path(target), timeline.to_perfetto())
            out.message(f"written to {target}; open it in ui.perfetto.dev")
        each_s = timeline.total_s / steps
        words = prediction.time_breakdown if steps == 1 else f"{format_seconds(each_s)} a step"
        out.text(gantt_text(timeline, headline=f"{timeline.name}: {words}").plain)
        out.answer(
            {
                "layout": str(chosen.layout),
                **prediction_record(prediction),
                "bubble": timeline.bubble,
                "busy": [timeline.busy(rank) for rank in range(timeline.num_ranks)],
                "spans": len(timeline.spans),
                "simulated_step_s": each_s,
            }
        )


def _plan_and_context(
    subject: str, layout: str | None, cluster: str | None, sizes: tuple[int | None, int | None], out: CommandOutput
) -> tuple[Plan, PricingContext]:
    """Return the plan and its pricing context. `sizes`: samples of a batch, and tokens of a sample."""
    from shardwise.cli.pricing_context import PricingContext, read_plan_in_context  # here: the command starts fast
    from shardwise.plan.layout import Layout
    from shardwise.zoo.listing import check_model_text

    batch, sequence = sizes
    if not subject.endswith(".toml"):
        check_model_text(subject)
        fixed = Layout.parse(layout) if layout is not None else None
        from shardwise.zoo.resolve import resolve  # here: words are checked before torch is loaded

        machines = options.load_cluster(cluster or "here", out)
        setting = PricingContext(subject, machines, batch or resolve(subject, None, sequence).default_batch, sequence)
        return setting.plan(layout=fixed), setting
    if layout is not None:
        raise UsageError(f"{subject} is a plan and has its layout; edit it there, or name the model with --layout")
    return read_plan_in_context(Path(subject), out, cluster, sequence)


def _parse_stragglers(text: str | None) -> tuple[int, float]:
    """Parse (steps, mean delay of a replica as a fraction of a step).

    >>> _parse_stragglers("20x0.5"), _parse_stragglers(None)
    ((20, 0.5), (1, 0.0))
    """
    if text is None:
        return 1, 0.0
    steps, _, part = text.partition("x")
    try:
        return int(steps), float(part or "0")
    except ValueError:
        raise UsageError(f"--late {text}: give steps and a part of one, for example --late 20x0.5") from None
