"""`weft whatif`: price a plan under changes, one row per change, and optionally the best plan under each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import options
from weft.cli.output import Output, output
from weft.errors import Infeasible

if TYPE_CHECKING:
    from weft.cli.changes import Change
    from weft.cli.setting import Setting, Variant
    from weft.plan.plan import Plan


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
      weft whatif plan.toml --cluster 8xdgx-h100 gpus=16 seq=2048 recompute=full zero=3
      weft whatif plan.toml cluster=8xdgx-h100 --replan
    """
    with output(as_json) as out:
        from weft.cli.changes import parse_changes
        from weft.cli.setting import setting_of
        from weft.plan.plan_file import read_plan, write_plan

        plan = read_plan(file)
        wanted = parse_changes(changes)
        setting = setting_of(plan, file, out, cluster, sequence)
        rows = say_changes(plan, setting, wanted, out, replan, str(file))
        if target is not None:
            last = [v for v in rows if not v.name.startswith("best")][-1]
            if last.prediction is None:
                out.message(f"nothing is written to {target}: {last.name} cannot be")
            else:
                write_plan(last.setting.plan(layout=last.layout), target)
                out.message(f"written to {target}")
        if all(v.prediction is None for v in rows[1:]):
            out.message("none of these changes can be; the notes say why, and what would")
            raise typer.Exit(Infeasible.exit_code)


def say_changes(plan: Plan, setting: Setting, wanted: tuple[Change, ...], out: Output, replan: bool, name: str) -> list[Variant]:
    """Price and show the plan as it is, with each change, and with all of them; with `replan` also the best plan for each."""
    from weft.cli.variants import record, variants_table

    with out.working(f"pricing {len(wanted)} changes of {name}"):
        base = setting.base(plan, "as it is")
        groups = [(change,) for change in wanted] + ([wanted] if len(wanted) > 1 else [])
        rows = [base]
        for group in groups:
            variant = _changed(plan, setting, group, " ".join(map(str, group)) if len(group) < 2 else "all together")
            rows.append(variant)
            if replan:
                rows.append(_best(variant, "best with it" if len(group) < 2 else "best with all"))
    out.table(variants_table(f"{plan.model} on {setting.cluster.name}, with changes", "change", rows, base, with_layout=False))
    out.answer({"plan": name, "rows": [record(v, base) for v in rows]})
    return rows


def _changed(plan: Plan, setting: Setting, changes: tuple[Change, ...], name: str) -> Variant:
    """Price the plan with these changes; where sizes do not divide, the note says so."""
    from weft.cli.changes import apply
    from weft.cli.setting import Variant

    try:
        changed_setting, layout, adapted = apply(plan, setting, changes)
    except Infeasible as error:
        return Variant(name, setting, plan.layout, None, str(error), False)
    return changed_setting.price(layout, plan, name, adapted)


def _best(variant: Variant, name: str) -> Variant:
    """Return the search's choice in a variant's context."""
    from weft.report.tables import layout_words

    best = variant.setting.best(name)
    return replace(best, note=best.note or layout_words(best.layout)) if best.fits else replace(best, layout=variant.layout)
