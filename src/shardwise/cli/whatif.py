"""`shardwise whatif`: price a plan under changes, one row per change, and optionally the best plan under each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli import options
from shardwise.cli.output import CommandOutput, open_output
from shardwise.errors import Infeasible

if TYPE_CHECKING:
    from shardwise.cli.changes import RequestedChange
    from shardwise.cli.pricing_context import PricedVariant, PricingContext
    from shardwise.plan.plan import Plan


def whatif(
    file: options.PlanFile,
    changes: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE...", help="gpus, seq, batch, cluster, or a key of the layout.", show_default=False)
    ],
    cluster: options.OtherCluster = None,
    sequence: options.Sequence = None,
    replan: Annotated[bool, typer.Option("--replan", help="Beside each change, the best plan there is with it.")] = False,
    target: options.OutFile = None,
    as_json: options.Json = False,
) -> None:
    """Price a plan with something changed.

    Each change alone, then all together. More gpus become more data replicas; the samples that a rank computes at once stay as many.
    With -o the plan with all changes is written.

    \b
    Example:
      shardwise whatif plan.toml --cluster 8xdgx-h100 gpus=16 seq=2048 recompute=full zero=3
      shardwise whatif plan.toml cluster=8xdgx-h100 --replan
      shardwise whatif plan.toml stack=serial
    """
    with open_output(as_json) as out:
        from shardwise.cli.changes import parse_changes  # here: the command starts fast
        from shardwise.cli.pricing_context import read_plan_in_context
        from shardwise.plan.plan_file import write_plan

        wanted = parse_changes(changes)
        plan, setting = read_plan_in_context(file, out, cluster, sequence)
        rows = show_changes(plan, setting, wanted, out, replan, str(file))
        if target is not None:
            last = [v for v in rows if not v.name.startswith("best")][-1]
            if last.prediction is None:
                out.message(f"nothing is written to {target}: {last.name} cannot be")
            else:
                write_plan(last.context.plan(layout=last.layout), target)
                out.message(f"written to {target}")
        if all(v.prediction is None for v in rows[1:]):
            out.message("none of these changes can be; the notes say why, and what would")
            raise typer.Exit(Infeasible.exit_code)


def show_changes(
    plan: Plan, setting: PricingContext, wanted: tuple[RequestedChange, ...], out: CommandOutput, replan: bool, name: str
) -> list[PricedVariant]:
    """Price and show the plan as it is, with each change, and with all of them; with `replan` also the best plan for each."""
    from shardwise.cli.variants import variant_record, variants_table  # here: the command starts fast

    with out.working(f"pricing {len(wanted)} changes of {name}"):
        base = setting.price_plan(plan, "as it is")
        groups = [(change,) for change in wanted] + ([wanted] if len(wanted) > 1 else [])
        rows = [base]
        for group in groups:
            variant = _price_changes(plan, setting, group, " ".join(map(str, group)) if len(group) < 2 else "all together")
            rows.append(variant)
            if replan:
                rows.append(_best_with_changes(variant, "best with it" if len(group) < 2 else "best with all"))
    out.table(variants_table(f"{plan.model} on {setting.cluster.name}, with changes", "change", rows, base, with_layout=False))
    out.answer({"plan": name, "rows": [variant_record(v, base) for v in rows]})
    return rows


def _price_changes(plan: Plan, setting: PricingContext, changes: tuple[RequestedChange, ...], name: str) -> PricedVariant:
    """Price the plan with these changes; where sizes do not divide, the note says so."""
    from shardwise.cli.changes import apply_changes  # here: the command starts fast
    from shardwise.cli.pricing_context import PricedVariant

    try:
        changed_setting, layout, adapted = apply_changes(plan, setting, changes)
    except Infeasible as error:
        return PricedVariant(name, setting, plan.layout, None, str(error), False)
    return changed_setting.price(layout, plan, name, adapted)


def _best_with_changes(variant: PricedVariant, name: str) -> PricedVariant:
    """Return the search's choice in a variant's context."""
    from shardwise.report.tables import layout_words  # here: the command starts fast

    best = variant.context.best_variant(name)
    return replace(best, note=best.note or layout_words(best.layout)) if best.fits else replace(best, layout=variant.layout)
