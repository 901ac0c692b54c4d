"""`shardwise serve`: find the cheapest placement of a workflow of models on heterogeneous workers for an accuracy and a request rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli import options
from shardwise.cli.output import CommandOutput, open_output, write_file
from shardwise.cli.serve_profile import profile
from shardwise.cli.serve_run import run_plan
from shardwise.errors import UsageError
from shardwise.report.tables import TextTable

if TYPE_CHECKING:
    from shardwise.serve.placement.assignment_milp import Demand, ServicePlan
    from shardwise.serve.placement.workflow import Machines, Workflow

app = typer.Typer(help="Place workflows of models on workers.", no_args_is_help=True, rich_markup_mode=None)
app.command("profile")(profile)
app.command("run")(run_plan)
_OUTPUT = "Write the plan here (TOML)."
_CLUSTER = "A file with [worker.NAME] and [[link]] tables; by default those of the workflow."
_LATENCY = "Seconds within which a share of requests is answered; 0 counts throughput alone."


@app.command("plan")
def plan(  # noqa: PLR0913
    workflow: Annotated[Path, typer.Argument(metavar="WORKFLOW.toml", help="Operators, their variants, accuracy.", show_default=False)],
    cluster: Annotated[Path | None, typer.Option("--cluster", metavar="FILE", help=_CLUSTER, show_default=False)] = None,
    accuracy: Annotated[float, typer.Option("--accuracy", metavar="A", help="At least.")] = 0.0,
    rate: Annotated[
        float | None, typer.Option("--rate", metavar="R", help="Requests/s; by default the workflow's.", show_default=False)
    ] = None,
    latency: Annotated[float, typer.Option("--latency", metavar="S", min=0.0, help=_LATENCY)] = 0.0,
    percentile: Annotated[float, typer.Option("--percentile", metavar="P", min=50.0, max=99.99, help="Per cent of requests.")] = 95.0,
    shared: Annotated[bool, typer.Option("--shared", help="A worker may run several operators.")] = False,
    most_spot: Annotated[float, typer.Option("--most-spot", min=0.0, max=1.0, help="Share of load that spot workers may take.")] = 1.0,
    limit: Annotated[float, typer.Option("--within", metavar="S", min=0.1, help="Seconds a search; then the best found so far.")] = 60.0,
    target: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help=_OUTPUT, show_default=False)] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="Draw accuracy against price.", show_default=False)
    ] = None,
    brief: Annotated[bool, typer.Option("--brief", help="The placement alone: no other accuracies, others' choices or reasons.")] = False,
    as_json: options.Json = False,
) -> None:
    """Place a workflow at the least price that is accurate enough and keeps up.

    Proven by mixed-integer programming; beside it what JellyBean's two steps, a greedy choice and everything in the highest tier would pay.

    \b
    Example:
      shardwise serve plan examples/serve/vqa.toml --accuracy 56
      shardwise serve plan examples/serve/vqa.toml --accuracy 54 --rate 20 --latency 0.5 --picture frontier.svg
    """
    with open_output(as_json) as out:
        from shardwise.report.canvas import check_suffix  # here: the command starts fast
        from shardwise.serve.placement.assignment_milp import Demand
        from shardwise.serve.placement.explain import refuse
        from shardwise.serve.placement.service_plan_file import format_service_plan
        from shardwise.serve.placement.service_planner import plan_service
        from shardwise.serve.placement.workflow_files import read_workflow_and_machines

        if picture is not None:
            check_suffix(picture)
        if picture is not None and brief:
            raise UsageError("--brief leaves out what --picture draws; give one of them")
        of, machines, usual = read_workflow_and_machines(workflow, cluster)
        ask = Demand(usual if rate is None else rate, accuracy, latency, percentile / 100, shared, most_spot)
        if not 0 < ask.rate < float("inf"):
            raise UsageError(f"{ask.rate:g} requests/s; say how many come in, --rate 40")
        with out.working(f"placing {of.name}"):
            placed = plan_service(of, machines, ask, limit)
            if placed is None:
                raise refuse(of, machines, ask, limit)
        _show_placement(out, of, placed)
        record = _placement_record(placed) | {"planning_time_s": placed.planning_time_s}
        if not brief:
            record |= _show_alternatives(of, machines, placed, limit, picture, out)
        if target is not None:
            write_file(target, format_service_plan(placed, str(workflow), str(cluster or "")))
            out.text(f"written to {target}")
        out.answer(record)


Baselines = list[tuple[str, "ServicePlan | None"]]


def _show_alternatives(
    workflow: Workflow, machines: Machines, placed: ServicePlan, limit: float, picture: Path | None, out: CommandOutput
) -> dict[str, Any]:
    """Show and draw prices at other accuracies, prices of baselines, and reasons; return a record of these."""
    from shardwise.serve.placement.explain import explain_plan, price_frontier  # here: the command starts fast

    with out.working("placing at other accuracies"):
        line = price_frontier(workflow, machines, placed.demand, limit)
        others = _place_by_baselines(workflow, machines, placed.demand)
        why = explain_plan(workflow, machines, placed, line, limit)
    _show_prices(out, placed, line, others)
    out.table(TextTable("Why", ("", ""), tuple((r.what, r.why) for r in why)))
    if picture is not None:
        _draw_frontier(workflow, placed, line, others, picture)
        out.text(f"written to {picture}")
    return {
        "reasons": [{"what": r.what, "why": r.why} for r in why],
        "frontier": [_placement_record(p) for p in line],
        "others": {name: p and _placement_record(p) for name, p in others},
    }


def _place_by_baselines(workflow: Workflow, machines: Machines, ask: Demand) -> Baselines:
    from shardwise.serve.placement.baselines import greedy, one_size, two_steps  # here: the command starts fast

    return [
        ("JellyBean's two steps", two_steps(workflow, machines, ask)),
        ("greedy", greedy(workflow, machines, ask)),
        ("one size: the most accurate, highest tier", one_size(workflow, machines, ask)),
    ]


def _show_placement(out: CommandOutput, workflow: Workflow, placed: ServicePlan) -> None:
    rows = []
    for choice in placed.choices:
        for i, s in enumerate(choice.shares):
            head = (choice.operator, choice.variant) if i == 0 else ("", "")
            rows.append(
                (
                    *head,
                    f"{s.machines:g} x {s.worker}",
                    f"{s.load:.4g}",
                    f"{s.load / choice.load:.0%}",
                    str(s.batch),
                    f"{s.utilisation:.0%}",
                )
            )
    columns = ("operator", "variant", "workers", "requests/s", "share", "batch", "busy")
    proven = "proven to be the least" if placed.bound_gap < 1e-6 else f"at most {placed.bound_gap:.1%} above the least"
    note = (
        f"${placed.price_per_hour:,.4f} an hour ({proven}): workers ${placed.compute_per_hour:,.4f}, traffic "
        f"${placed.communication_per_hour:,.4f}; accuracy {placed.accuracy:g}"
    )
    out.table(TextTable(f"{workflow.name} at {placed.demand.rate:g} requests/s", columns, tuple(rows), right=(3, 4, 5, 6), note=note))


def _show_prices(out: CommandOutput, placed: ServicePlan, line: Sequence[ServicePlan], others: Baselines) -> None:
    out.table(
        TextTable(
            "Accuracy and price", ("accuracy", "$ an hour", "workers", "traffic", "variants"),
            tuple(
                (f"{p.accuracy:g}", f"{p.price_per_hour:,.4f}", f"{p.compute_per_hour:,.4f}", f"{p.communication_per_hour:,.4f}",
                 ", ".join(c.variant for c in p.choices)) for p in line
            ),
            right=(0, 1, 2, 3), marked=tuple(i for i, p in enumerate(line) if abs(p.price_per_hour - placed.price_per_hour) < 1e-9),
        )
    )  # fmt: skip
    rows = []
    for name, p in (("shardwise", placed), *others):
        times = f"{p.price_per_hour / placed.price_per_hour:.3f}x" if p and placed.price_per_hour else ""
        rows.append((name, f"{p.price_per_hour:,.4f}", times, f"{p.accuracy:g}") if p else (name, "none fits", "", ""))
    ask = placed.demand
    note = (
        "The others keep up alone: neither latency, shared workers nor spot ones count."
        if ask.latency_s or ask.allows_shared_workers or ask.max_spot_share < 1
        else ""
    )
    out.table(TextTable("Against others", ("", "$ an hour", "", "accuracy"), tuple(rows), right=(1, 2, 3), marked=(0,), note=note))


def _draw_frontier(workflow: Workflow, placed: ServicePlan, line: Sequence[ServicePlan], others: Baselines, target: Path) -> None:
    from shardwise.report.frontier import frontier_picture  # here: the command starts fast

    points = [(p.accuracy, p.price_per_hour) for p in line]
    marks = [(name, [(p.accuracy, p.price_per_hour)]) for name, p in others if p is not None]
    title = f"{workflow.name}: accuracy and price at {placed.demand.rate:g} requests/s"
    frontier_picture(title, points, (placed.accuracy, placed.price_per_hour), marks).write(target)


def _placement_record(placed: ServicePlan) -> dict[str, Any]:
    """Return a placement's JSON object; shares are of the operator's load."""
    return {
        "price_per_hour": placed.price_per_hour,
        "compute_per_hour": placed.compute_per_hour,
        "communication_per_hour": placed.communication_per_hour,
        "accuracy": placed.accuracy,
        "latency_s": placed.latency_s or None,
        "bound_gap": placed.bound_gap,
        "assignment": {
            c.operator: {
                "variant": c.variant,
                "workers": {w: sum(s.load for s in c.shares if s.worker == w) / c.load for w in {s.worker: 0 for s in c.shares}},
                "machines": {w: sum(s.machines for s in c.shares if s.worker == w) for w in {s.worker: 0 for s in c.shares}},
                "batch": {s.worker: s.batch for s in c.shares},
            }
            for c in placed.choices
        },
    }
