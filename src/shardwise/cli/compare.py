"""`shardwise compare`: two plans side by side, each priced anew, or two timelines kind by kind and action by action."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli import options
from shardwise.cli.output import CommandOutput, open_output
from shardwise.errors import UsageError
from shardwise.report.tables import TextTable

if TYPE_CHECKING:
    from shardwise.cli.pricing_context import PricedVariant
    from shardwise.plan.ir.timeline import Timeline
    from shardwise.plan.ir.timeline_difference import TimelineDifference
    from shardwise.plan.plan import Plan

_MAX_ACTIONS = 12  # actions whose durations differ most

File = Annotated[Path, typer.Argument(metavar="PLAN|TIMELINE", help="A plan.toml, or a timeline as JSON.", show_default=False)]


def compare(first: File, second: File, cluster: options.OtherCluster = None, as_json: options.Json = False) -> None:
    """Compare two plans, or two timelines.

    Plans are priced anew, each on its own machines; timelines, simulated or measured, are compared kind by kind and action by action.

    \b
    Example:
      shardwise compare plan.toml other.toml
      shardwise compare runs/demo/timeline.json trace.json
    """
    with open_output(as_json) as out:
        traces = [file.suffix == ".json" for file in (first, second)]
        if all(traces):
            _compare_timelines(first, second, out)
        elif any(traces):
            raise UsageError(
                f"{first} and {second} are a plan and a timeline; compare two of a kind (shardwise simulate PLAN -o writes a timeline)"
            )
        else:
            _compare_plans(first, second, cluster, out)


def _compare_plans(first: Path, second: Path, cluster: str | None, out: CommandOutput) -> None:
    from shardwise.cli.pricing_context import read_plan_in_context  # here: the command starts fast

    (left, left_setting), (right, right_setting) = (read_plan_in_context(file, out, cluster) for file in (first, second))
    with out.working(f"pricing {first} and {second}"):
        priced = [left_setting.price_plan(left, str(first)), right_setting.price_plan(right, str(second))]
    show_plan_comparison((left, right), priced, out)


def show_plan_comparison(plans: tuple[Plan, Plan], priced: Sequence[PricedVariant], out: CommandOutput) -> None:
    """Show two priced plans side by side, and the parameters that they shard differently."""
    from shardwise.cli.variants import comparison_table, variant_record  # here: the command starts fast

    left, right = priced
    out.table(comparison_table("Plans", left, right))
    cuts = _shards_table(plans, (left.name, right.name))
    if cuts.rows:
        out.table(cuts)
    out.answer({"plans": [variant_record(left), variant_record(right, left)]})


def _shards_table(plans: tuple[Plan, Plan], names: tuple[str, str]) -> TextTable:
    """Tabulate the parameters that the two plans shard differently."""
    left, right = ({(axis, name): dim for axis, cuts in plan.shards for name, dim in cuts} for plan in plans)
    rows = tuple(
        (name, axis, *("whole" if cuts.get((axis, name)) is None else f"dim {cuts[axis, name]}" for cuts in (left, right)))
        for axis, name in {**left, **right}
        if left.get((axis, name)) != right.get((axis, name))
    )
    return TextTable("Parameters that are sharded differently", ("parameter", "axis", *names), rows)


def _actions_table(difference: TimelineDifference, a: Timeline, b: Timeline) -> TextTable:
    """Tabulate the computes whose durations differ most, with the difference of their ends."""
    from shardwise.units import format_seconds  # here: the command starts fast

    def signed(seconds: float) -> str:
        return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"

    rows = tuple(
        (
            f"{d.rank}",
            d.name,
            format_seconds(d.end_a_s - d.start_a_s),
            format_seconds(d.end_b_s - d.start_b_s),
            signed(d.added_duration_s),
            signed(d.delay_s),
        )
        for d in difference.largest(_MAX_ACTIONS)
    )
    unmatched = difference.only_a + difference.only_b
    suffix = f"; {unmatched} in one only" if unmatched else ""
    title = f"Actions that differ most, of {len(difference.actions)} that both have{suffix}"
    columns = ("rank", "action", a.name or "first", b.name or "second", "longer", "ends later")
    return TextTable(title, columns, rows, right=(0, 2, 3, 4, 5))


def _compare_timelines(first: Path, second: Path, out: CommandOutput) -> None:
    from shardwise.report.run_folder import read_trace  # here: the command starts fast

    for file in (first, second):
        if not file.is_file():
            raise UsageError(f"{file} is not there; shardwise simulate PLAN -o {file} writes one")
    show_timeline_comparison(read_trace(first), read_trace(second), out, (str(first), str(second)))


def show_timeline_comparison(a: Timeline, b: Timeline, out: CommandOutput, names: tuple[str, str] = ("first", "second")) -> None:
    """Show two timelines kind by kind, and the actions that differ most; `names` where timelines have none."""
    from shardwise.plan.ir.timeline import compare as by_kind  # here: the command starts fast
    from shardwise.plan.ir.timeline_difference import compare_by_action
    from shardwise.units import format_percent, format_seconds

    if a.is_step != b.is_step:
        out.message("one of them has only the actions of its program, so only these are compared")
        a, b = a.program, b.program
    kinds = by_kind(a, b)
    rows = [("in all", "", format_seconds(a.total_s), format_seconds(b.total_s), f"{b.total_s / a.total_s:.2f}x" if a.total_s else "")]
    rows += [
        (
            k.kind,
            f"{k.count_a}" if k.count_a == k.count_b else f"{k.count_a} and {k.count_b}",
            format_seconds(k.seconds_a),
            format_seconds(k.seconds_b),
            f"{k.ratio:.2f}x" if k.ratio == k.ratio else "",
        )
        for k in kinds
    ]
    rows.append(("bubble", "", format_percent(a.bubble), format_percent(b.bubble), ""))
    columns = ("", "spans", a.name or names[0], b.name or names[1], "second a span")
    out.table(TextTable("Timelines", columns, tuple(rows), right=(1, 2, 3, 4)))
    difference = compare_by_action(a, b)
    if difference.actions:
        out.table(_actions_table(difference, a, b))
    out.answer(
        {
            "total_s": [a.total_s, b.total_s],
            "total_difference": difference.relative_difference,
            "actions": [
                {
                    "rank": d.rank,
                    "action": d.name,
                    "start_s": [d.start_a_s, d.start_b_s],
                    "end_s": [d.end_a_s, d.end_b_s],
                    "longer_s": d.added_duration_s,
                    "later_s": d.delay_s,
                }
                for d in difference.actions
            ],
            "unmatched": [difference.only_a, difference.only_b],
            "bubble": [a.bubble, b.bubble],
            "kinds": [
                {"kind": k.kind, "counts": [k.count_a, k.count_b], "seconds": [k.seconds_a, k.seconds_b], "ratio": k.ratio} for k in kinds
            ],
        }
    )
