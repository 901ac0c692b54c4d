"""`weft scaling`: speed-up and efficiency of a model on several numbers of devices, as a table, a picture or a page.

Strong scaling keeps the batch, weak scaling the samples per device. Each size is planned anew, or has the given layout with more data
replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import options
from weft.cli.output import Output, output, write_file
from weft.errors import Infeasible, UsageError

if TYPE_CHECKING:
    from weft.cli.setting import Setting, Variant
    from weft.plan.layout import Layout
    from weft.report.canvas import Picture
    from weft.report.scaling import Size
    from weft.report.tables import Table

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
      weft scaling gpt-39b --cluster 8xp3.16xlarge --devices 8,16,32,64 --batch 1024 -o scaling.svg
      weft scaling gpt-1.3b --cluster 64xdgx-a100-80 --weak --batch 64
    """
    with output(as_json) as out:
        from weft.cli.operands import load_cluster, load_model
        from weft.cli.setting import Setting, named
        from weft.plan.layout import Layout
        from weft.report.canvas import check_suffix

        if target is not None and target.suffix != PAGE:
            check_suffix(target)
        fixed = Layout.parse(layout) if layout is not None else None
        machines = load_cluster(cluster, out)
        counts = device_counts(devices, machines.node_size, machines.num_devices)
        name, sequence = named(model, sequence)
        first = Setting(name, machines, batch or load_model(name, None, sequence).default_batch, sequence)
        rows = say_scaling(first, model, counts, out, weak=weak, layout=fixed, constraints=constrain or (), target=target)
        if not any(row["efficiency"] for row in rows):
            out.message("none of these sizes has a plan; the notes say why, and what would")
            raise typer.Exit(Infeasible.exit_code)


def say_scaling(
    first: Setting,
    model: str,
    counts: Sequence[int],
    out: Output,
    *,
    weak: bool = False,
    layout: Layout | None = None,
    constraints: Sequence[str] = (),
    target: Path | None = None,
) -> list[dict[str, object]]:
    """Plan and show each size; return their records. `first`: context with the batch of the smallest number of devices."""
    from weft.report.economy import unit_of

    variants: list[Variant] = []
    with out.working(f"planning {model} on {', '.join(map(str, counts))} devices", len(counts)) as done:
        for count in counts:
            variants.append(_at(first, count, counts[0], weak, layout, constraints))
            done()
    title = f"{model} on {first.cluster.device.name}, {'weak' if weak else 'strong'} scaling"
    rows = _show(out, title, counts, variants, target)
    out.answer({"model": model, "weak": weak, "unit": unit_of(first.graph).name, "sizes": rows})
    return rows


def _show(out: Output, title: str, counts: Sequence[int], variants: Sequence[Variant], target: Path | None) -> list[dict[str, object]]:
    """Show the table and write the picture of these sizes; return their records."""
    from weft.cli.variants import record
    from weft.report.economy import unit_of
    from weft.report.scaling import scaling_picture, scaling_table, speedups

    sizes = [_size(count, v) for count, v in zip(counts, variants, strict=True)]
    unit = unit_of(variants[0].setting.graph)
    table = scaling_table(title, sizes, unit.name if unit.tokens_per_sample else "epoch")
    out.table(table)
    ups = speedups(sizes)
    if any(ups) and target is not None:
        _write(target, scaling_picture(title, sizes), table)
        out.text(f"written to {target}")
    both = [up or (None, None) for up in ups]
    return [
        {"devices": count, **record(v), "speedup": up, "efficiency": efficiency}
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


def _at(first: Setting, count: int, least: int, weak: bool, layout: Layout | None, constraints: Sequence[str]) -> Variant:
    """Plan for `count` devices."""
    from weft.cluster.resize import resized

    size = first.batch_size
    if weak:
        if size * count % least:
            raise UsageError(f"a batch of {size} on {least} devices is no whole number on {count}; use a batch that {least} divides")
        size = size * count // least
    setting = first.changed(resized(first.cluster, count), size if size != first.batch_size else None)
    return setting.best(f"{count}", constraints) if layout is None else _given(setting, count, first.batch_size, least, layout)


def _given(setting: Setting, count: int, batch_size: int, least: int, wanted: Layout) -> Variant:
    """Price the layout with data replicas that fill `count` devices, scaled from `least` devices with `batch_size` samples a step."""
    from weft.cli.changes import moved_along
    from weft.cli.setting import Variant

    try:
        layout, _ = moved_along(wanted, {"microbatches": wanted.microbatches}, least, batch_size, batch_size)
        layout, _ = moved_along(layout, {}, count, batch_size, setting.batch_size)
    except Infeasible as error:
        return Variant(f"{count}", setting, wanted, None, str(error), False)
    return setting.price(layout, name=f"{count}")


def _size(count: int, v: Variant) -> Size:
    from weft.cli.variants import bill_of
    from weft.report.scaling import Size

    cost = bill_of(v) if v.fits else None
    return Size(count, v.setting.batch_size, v.layout, v.prediction if v.fits else None, cost.usd if cost else None, v.note)


def _write(target: Path, picture: Picture, table: Table) -> None:
    from weft.report.page import sheet

    if target.suffix != PAGE:
        picture.write(target)
        return
    write_file(target, sheet(picture, table))
