"""`weft explain`: a plan's candidates, reasons, the prices of other choices, the optimality bound, and operators' placements."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import options
from weft.cli.output import Output, output
from weft.plan.bound import bound_words
from weft.report.tables import reasons_table, refusal_words, summary_table
from weft.units import format_seconds

if TYPE_CHECKING:
    from weft.cli.setting import Setting, Variant
    from weft.plan.plan import Plan
    from weft.report.placements import Placed

MOST_CANDIDATES = 8


def explain(
    file: options.PlanFile,
    cluster: options.OtherCluster = None,
    sequence: options.Sequence = None,
    most: Annotated[int, typer.Option("--candidates", min=1, metavar="N", help="Rows of the table of candidates.")] = MOST_CANDIDATES,
    brief: Annotated[bool, typer.Option("--brief", help="Only what the plan's file says: neither other choices nor placements.")] = False,
    as_json: options.Json = False,
) -> None:
    """Say why a plan is what it is.

    The best candidates with time, memory, money and energy; a reason for each choice; what each other choice would cost, priced anew;
    how far from the best the search may be; and how the operators of each repeated layer are placed.

    \b
    Example:
      weft explain plan.toml
    """
    with output(as_json) as out:
        from weft.cli.setting import setting_of
        from weft.plan.plan_file import read_plan

        plan = read_plan(file)
        say_why(plan, setting_of(plan, file, out, cluster, sequence), out, most, brief)


def say_why(plan: Plan, setting: Setting, out: Output, most: int = MOST_CANDIDATES, brief: bool = False) -> None:
    """Show a full explanation of a plan with `most` candidates; with `brief` neither other choices nor placements."""
    from weft.cli.variants import record, variants_table

    out.table(summary_table(plan))
    if plan.uncaptured:
        out.table(reasons_table(plan))
        out.answer({"layout": str(plan.layout), "reasons": _reasons(plan), "candidates": [], "bound_gap": None})
        return
    with out.working(f"pricing {plan.model}"):
        base = setting.base(plan, "chosen")
        shown = candidates(plan, setting, base, most)
    out.table(variants_table("Candidates", "", shown, base))
    out.table(reasons_table(plan))
    bound = _found(plan)
    out.text(bound + "\n")
    other_choices, placed = ([], ()) if brief else _beyond(plan, setting, base, out)
    out.answer(
        {
            **record(base),
            "model": plan.model,
            "planning_time_s": plan.planning_time_s,
            "bound_gap": plan.bound_gap,
            "bound": bound,
            "reasons": _reasons(plan),
            "candidates": [record(v, base) for v in shown],
            "other_choices": [record(v, base) for v in other_choices],
            "placements": [asdict(p) for p in placed],
        }
    )


def _beyond(plan: Plan, setting: Setting, base: Variant, out: Output) -> tuple[list[Variant], tuple[Placed, ...]]:
    """Price and show what is not in the plan file: other choices and the placements of operators."""
    from weft.cli.changes import neighbours
    from weft.cli.variants import variants_table
    from weft.report.placements import placements, placements_table

    with out.working("pricing other choices"):
        tries = neighbours(plan, setting.cluster.num_devices)
        variants = [setting.price(layout, plan, name, _moved(plan, layout, name)) for name, layout in tries]
        variants = [v for v in variants if v.prediction is not None]
        sharding = setting.sharding(plan)
        placed = placements(setting.graph, sharding)
    out.table(variants_table("What another choice would cost", "choice", [base, *variants], base, with_layout=False))
    table = placements_table(placed, sharding.sizes)
    if table.rows:
        out.table(table)
    return variants, placed


def candidates(plan: Plan, setting: Setting, base: Variant, most: int) -> list[Variant]:
    """Return the chosen layout, then the search's other candidates by step time, then the refused ones."""
    from weft.cli.setting import Variant

    not_chosen = [c for c in plan.candidates if c.layout != plan.layout]
    timed = sorted(
        (c for c in not_chosen if c.prediction is not None and not c.note), key=lambda c: c.prediction.step_time_s if c.prediction else 0
    )
    refused = [c for c in not_chosen if c.prediction is None or c.note]
    variants = [base]
    for number, c in enumerate([*timed, *refused][: most - 1], start=2):
        variants.append(Variant(str(number), setting, c.layout, c.prediction, refusal_words(c.note), not c.note))
    return variants


def _found(plan: Plan) -> str:
    """Describe how long the search took, and how far the plan may be from the optimum."""
    took = f"Found in {format_seconds(plan.planning_time_s)}" if plan.planning_time_s else "Priced as given"
    bound = dict(plan.reasons).get("bound") or bound_words(plan.prediction.step_time_s if plan.prediction else 0.0, None)
    return f"{took}; {bound}."


def _reasons(plan: Plan) -> list[dict[str, str]]:
    return [{"choice": choice, "reason": reason} for choice, reason in plan.reasons]


def _moved(plan: Plan, layout: object, name: str) -> str:
    """Describe the other keys that change with a choice."""
    from weft.plan.layout import KEYS

    key = name.partition("=")[0]
    adapted = [
        f"{k} {getattr(plan.layout, k)} to {getattr(layout, k)}" for k in KEYS if k != key and getattr(plan.layout, k) != getattr(layout, k)
    ]
    return ", ".join(adapted)
