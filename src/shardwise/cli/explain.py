"""`shardwise explain`: a plan's candidates, reasons, the prices of other choices, the optimality bound, and operators' placements."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli import options
from shardwise.cli.output import CommandOutput, open_output
from shardwise.plan.bound import describe_bound
from shardwise.report.tables import reasons_table, refusal_words, summary_table
from shardwise.units import format_seconds

if TYPE_CHECKING:
    from shardwise.cli.pricing_context import PricedVariant, PricingContext
    from shardwise.plan.plan import Plan
    from shardwise.report.placements import PlacementRow

MAX_CANDIDATES = 8


def explain(
    file: options.PlanFile,
    cluster: options.OtherCluster = None,
    sequence: options.Sequence = None,
    most: Annotated[int, typer.Option("--candidates", min=1, metavar="N", help="Rows of the table of candidates.")] = MAX_CANDIDATES,
    brief: Annotated[bool, typer.Option("--brief", help="Only what the plan's file says: neither other choices nor placements.")] = False,
    as_json: options.Json = False,
) -> None:
    """Say why a plan is what it is.

    The best candidates with time, memory, money and energy; a reason for each choice; what each other choice would cost, priced anew;
    how far from the best the search may be; and how the operators of each repeated layer are placed.

    \b
    Example:
      shardwise explain plan.toml
    """
    with open_output(as_json) as out:
        from shardwise.cli.pricing_context import read_plan_in_context  # here: the command starts fast

        plan, setting = read_plan_in_context(file, out, cluster, sequence)
        show_explanation(plan, setting, out, most, brief)


def show_explanation(plan: Plan, setting: PricingContext, out: CommandOutput, most: int = MAX_CANDIDATES, brief: bool = False) -> None:
    """Show a full explanation of a plan with `most` candidates; with `brief` neither other choices nor placements."""
    from shardwise.cli.variants import variant_record, variants_table  # here: the command starts fast

    out.table(summary_table(plan))
    if plan.uncaptured:
        out.table(reasons_table(plan))
        out.answer({"layout": str(plan.layout), "reasons": _reason_records(plan), "candidates": [], "bound_gap": None})
        return
    with out.working(f"pricing {plan.model}"):
        base = setting.price_plan(plan, "chosen")
        shown = candidate_variants(plan, setting, base, most)
    out.table(variants_table("Candidates", "", shown, base))
    out.table(reasons_table(plan))
    bound = _describe_search(plan)
    out.text(bound + "\n")
    other_choices, placed = ([], ()) if brief else _show_alternatives(plan, setting, base, out)
    out.answer(
        {
            **variant_record(base),
            "model": plan.model,
            "planning_time_s": plan.planning_time_s,
            "bound_gap": plan.bound_gap,
            "bound": bound,
            "reasons": _reason_records(plan),
            "candidates": [variant_record(v, base) for v in shown],
            "other_choices": [variant_record(v, base) for v in other_choices],
            "placements": [asdict(p) for p in placed],
        }
    )


def _show_alternatives(
    plan: Plan, setting: PricingContext, base: PricedVariant, out: CommandOutput
) -> tuple[list[PricedVariant], tuple[PlacementRow, ...]]:
    """Price and show what is not in the plan file: other choices and the placements of operators."""
    from shardwise.cli.changes import neighbouring_layouts  # here: the command starts fast
    from shardwise.cli.variants import variants_table
    from shardwise.report.placements import placement_rows, placements_table

    with out.working("pricing other choices"):
        tries = neighbouring_layouts(plan, setting.cluster.num_devices)
        variants = [setting.price(layout, plan, name, _describe_refit(plan, layout, name)) for name, layout in tries]
        variants = [v for v in variants if v.prediction is not None]
        sharding = setting.sharding(plan)
        placed = placement_rows(setting.graph, sharding)
    out.table(variants_table("What another choice would cost", "choice", [base, *variants], base, with_layout=False))
    table = placements_table(placed, sharding.sizes)
    if table.rows:
        out.table(table)
    return variants, placed


def candidate_variants(plan: Plan, setting: PricingContext, base: PricedVariant, most: int) -> list[PricedVariant]:
    """Return the chosen layout, then the search's other candidates by step time, then the refused ones."""
    from shardwise.cli.pricing_context import PricedVariant  # here: the command starts fast

    not_chosen = [c for c in plan.candidates if c.layout != plan.layout]
    timed = sorted(
        (c for c in not_chosen if c.prediction is not None and not c.note), key=lambda c: c.prediction.step_time_s if c.prediction else 0
    )
    refused = [c for c in not_chosen if c.prediction is None or c.note]
    variants = [base]
    for number, c in enumerate([*timed, *refused][: most - 1], start=2):
        variants.append(PricedVariant(str(number), setting, c.layout, c.prediction, refusal_words(c.note), not c.note))
    return variants


def _describe_search(plan: Plan) -> str:
    """Describe how long the search took, and how far the plan may be from the optimum."""
    took = f"Found in {format_seconds(plan.planning_time_s)}" if plan.planning_time_s else "Priced as given"
    bound = dict(plan.reasons).get("bound") or describe_bound(plan.prediction.step_time_s if plan.prediction else 0.0, None)
    return f"{took}; {bound}."


def _reason_records(plan: Plan) -> list[dict[str, str]]:
    return [{"choice": choice, "reason": reason} for choice, reason in plan.reasons]


def _describe_refit(plan: Plan, layout: object, name: str) -> str:
    """Describe the other keys that change with a choice."""
    from shardwise.plan.layout import KEYS  # here: the command starts fast

    key = name.partition("=")[0]
    adapted = [
        f"{k} {getattr(plan.layout, k)} to {getattr(layout, k)}" for k in KEYS if k != key and getattr(plan.layout, k) != getattr(layout, k)
    ]
    return ", ".join(adapted)
