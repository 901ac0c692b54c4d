"""`shardwise scaling`: speed-up and efficiency of a model on several numbers of devices, as a table, a picture or a page.

Strong scaling keeps the batch, weak scaling the samples per device. Each size is planned anew, or has the given layout with more data
replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli import options
from shardwise.cli.output import CommandOutput, open_output, write_file
from shardwise.errors import Infeasible, UsageError

if TYPE_CHECKING:
    from shardwise.cli.pricing_context import PricedVariant, PricingContext
    from shardwise.plan.layout import Layout
    from shardwise.report.canvas import Picture
    from shardwise.report.scaling import ScalingPoint
    from shardwise.report.tables import TextTable

PAGE = ".html"
_DEVICES = "Numbers of devices, with commas; by default one machine, two, four, ... up to the cluster."
_WEAK = "The batch grows with the devices; --batch is that of the smallest number. Otherwise it stays."
_OUT = "Write the picture (.svg or .png), or a page with picture and table (.html)."


def scaling(  # noqa: PLR0913
    model: options.Model,
    cluster: options.ClusterText = "here",
    devices: Annotated[str | None, typer.Option("--devices", metavar="N,N,...", help=_DEVICES, show_default=False)] = None,
    weak: Annotated[bool, typer.Option("--weak", help=_WEAK)] = False,
    batch: options.Batch = None,
    sequence: options.Sequence = None,
    layout: options.LayoutText = None,
    constrain: options.Constraints = None,
    target: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help=_OUT, show_default=False)] = None,
    as_json: options.Json = False,
) -> None:
    """Say what more devices bring: the best plan of each size, its speed-up and efficiency.

    With --layout that layout is priced, with as many data replicas as fill the devices.

    \b
    Example:
      shardwise scaling gpt-39b --cluster 8xp3.16xlarge --devices 8,16,32,64 --batch 1024 -o scaling.svg
      shardwise scaling gpt-1.3b --cluster 64xdgx-a100-80 --weak --batch 64
    """
    with open_output(as_json) as out:
        from shardwise.cli.pricing_context import pricing_context_of_name  # here: the command starts fast
        from shardwise.plan.layout import Layout
        from shardwise.report.canvas import check_suffix
        from shardwise.zoo.listing import check_model_text

        if target is not None and target.suffix != PAGE:
            check_suffix(target)
        fixed = Layout.parse(layout) if layout is not None else None
        check_model_text(model)
        machines = options.load_cluster(cluster, out)
        counts = device_counts(devices, machines.node_size, machines.num_devices)
        first = pricing_context_of_name(model, machines, batch, sequence)
        rows = show_scaling(first, model, counts, out, weak=weak, layout=fixed, constraints=constrain or (), target=target)
        if not any(row["efficiency"] for row in rows):
            out.message("none of these sizes has a plan; the notes say why, and what would")
            raise typer.Exit(Infeasible.exit_code)


def show_scaling(
    first: PricingContext,
    model: str,
    counts: Sequence[int],
    out: CommandOutput,
    *,
    weak: bool = False,
    layout: Layout | None = None,
    constraints: Sequence[str] = (),
    target: Path | None = None,
) -> list[dict[str, object]]:
    """Plan and show each size; return their records. `first`: context with the batch of the smallest number of devices."""
    from shardwise.report.economy import work_unit  # here: the command starts fast

    variants: list[PricedVariant] = []
    with out.working(f"planning {model} on {', '.join(map(str, counts))} devices", len(counts)) as done:
        for count in counts:
            variants.append(_plan_at(first, count, counts[0], weak, layout, constraints))
            done()
    title = f"{model} on {first.cluster.device.name}, {'weak' if weak else 'strong'} scaling"
    rows = _show_sizes(out, title, counts, variants, target)
    out.answer({"model": model, "weak": weak, "unit": work_unit(first.graph).name, "sizes": rows})
    return rows


def _show_sizes(
    out: CommandOutput, title: str, counts: Sequence[int], variants: Sequence[PricedVariant], target: Path | None
) -> list[dict[str, object]]:
    """Show the table and write the picture of these sizes; return their records."""
    from shardwise.cli.variants import variant_record  # here: the command starts fast
    from shardwise.report.economy import work_unit
    from shardwise.report.scaling import scaling_picture, scaling_table, speedups_and_efficiencies

    sizes = [_scaling_point(count, v) for count, v in zip(counts, variants, strict=True)]
    unit = work_unit(variants[0].context.graph)
    table = scaling_table(title, sizes, unit.name if unit.tokens_per_sample else "epoch")
    out.table(table)
    ups = speedups_and_efficiencies(sizes)
    if any(ups) and target is not None:
        _write(target, scaling_picture(title, sizes), table)
        out.text(f"written to {target}")
    both = [up or (None, None) for up in ups]
    return [
        {"devices": count, **variant_record(v), "speedup": up, "efficiency": efficiency}
        for count, v, (up, efficiency) in zip(counts, variants, both, strict=True)
    ]


def device_counts(text: str | None, node: int, most: int) -> list[int]:
    """Return the numbers of devices, ascending.

    >>> device_counts("64,8", 8, 64), device_counts(None, 8, 48)
    ([8, 64], [8, 16, 32, 48])
    """
    if text is None:
        counts = [node]
        while counts[-1] * 2 < most:
            counts.append(counts[-1] * 2)
        return sorted({min(node, most), *counts, most})
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() and 0 < int(word) < 10**7 for word in words):
        raise UsageError(f"--devices {text}: numbers of devices with commas between them, for example --devices 8,64,512")
    return sorted({int(word) for word in words})


def _plan_at(first: PricingContext, count: int, least: int, weak: bool, layout: Layout | None, constraints: Sequence[str]) -> PricedVariant:
    """Plan for `count` devices."""
    from shardwise.cluster.resize import resize_cluster  # here: the command starts fast

    size = first.batch_size
    if weak:
        if size * count % least:
            raise UsageError(f"a batch of {size} on {least} devices is no whole number on {count}; use a batch that {least} divides")
        size = size * count // least
    setting = first.with_changes(resize_cluster(first.cluster, count), size if size != first.batch_size else None)
    return (
        setting.best_variant(f"{count}", constraints)
        if layout is None
        else _price_fixed_layout(setting, count, first.batch_size, least, layout)
    )


def _price_fixed_layout(setting: PricingContext, count: int, batch_size: int, least: int, wanted: Layout) -> PricedVariant:
    """Price the layout with data replicas that fill `count` devices, scaled from `least` devices with `batch_size` samples a step."""
    from shardwise.cli.changes import refit_layout  # here: the command starts fast
    from shardwise.cli.pricing_context import PricedVariant

    try:
        layout, _ = refit_layout(wanted, {"microbatches": wanted.microbatches}, least, batch_size, batch_size)
        layout, _ = refit_layout(layout, {}, count, batch_size, setting.batch_size)
    except Infeasible as error:
        return PricedVariant(f"{count}", setting, wanted, None, str(error), False)
    return setting.price(layout, name=f"{count}")


def _scaling_point(count: int, v: PricedVariant) -> ScalingPoint:
    from shardwise.cli.variants import unit_bill  # here: the command starts fast
    from shardwise.report.scaling import ScalingPoint

    cost = unit_bill(v) if v.fits else None
    return ScalingPoint(count, v.context.batch_size, v.layout, v.prediction if v.fits else None, cost.usd if cost else None, v.note)


def _write(target: Path, picture: Picture, table: TextTable) -> None:
    from shardwise.report.page import picture_page  # here: the command starts fast

    if target.suffix != PAGE:
        picture.write(target)
        return
    write_file(target, picture_page(picture, table))
