"""`shardwise cluster`: write, show and check cluster files, which describe devices, links and prices."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli import options
from shardwise.cli.output import open_output, write_file
from shardwise.errors import UsageError
from shardwise.report.tables import TextTable
from shardwise.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from shardwise.cluster.cluster import Cluster

app = typer.Typer(help="Describe machines: write, show and check cluster files.", no_args_is_help=True, rich_markup_mode=None)


@app.command("new")
def new_cluster(  # noqa: PLR0913
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the cluster is called.", show_default=False)],
    device: Annotated[str, typer.Option(help="A device of the catalogue, such as H100.", show_default=False)],
    devices: Annotated[int, typer.Option(help="Devices of a machine.", min=1)] = 8,
    nodes: Annotated[int, typer.Option(help="Machines.", min=1)] = 1,
    link: Annotated[str, typer.Option(help="What joins the devices of a machine; by default what machines with this device have.")] = "",
    network: Annotated[str, typer.Option(help="What joins the machines; by default as above.")] = "",
    price: Annotated[float, typer.Option(help="Dollars an hour, of all machines.", min=0)] = 0.0,
    priced: Annotated[str, typer.Option(help="Whose price it is, and of when.")] = "",
    out_file: Annotated[Path | None, typer.Option("-o", "--output", help="The file; otherwise it is printed.")] = None,
    as_json: options.Json = False,
) -> None:
    """Write a cluster file by names of the catalogue, to be changed by hand.

    \b
    Example:
      shardwise cluster new ours --device H100 --devices 4 --nodes 2 --price 25 --priced "our contract, 2026-10" -o ours.toml
    """
    with open_output(as_json) as out:
        from shardwise.cluster.catalogue import parse_cluster  # here: the command starts fast
        from shardwise.cluster.cluster_file import draft_cluster

        text = draft_cluster(name, device, devices, nodes=nodes, link=link, network=network, price_per_hour=price, priced=priced)
        described = parse_cluster(text)
        if out_file is None:
            if not as_json:
                typer.echo(text, nl=False)
        elif out_file.exists():
            raise UsageError(f"{out_file} exists; give another name, or remove it")
        else:
            write_file(out_file, text)
            out.message(f"wrote {out_file}; `shardwise cluster show {out_file}` has all of its figures, --cluster {out_file} plans for it")
        out.answer({"file": str(out_file or ""), "text": text, **_cluster_record(described)})


@app.command("show")
def show_cluster(
    cluster: Annotated[str, typer.Argument(metavar="[CLUSTER]", help="A name, a file, or here; without it, the catalogue.")] = "",
    toml: Annotated[bool, typer.Option("--toml", help="Print it as a cluster file with every figure.")] = False,
    as_json: options.Json = False,
) -> None:
    """Show a cluster's figures, links and price; without a name, all that the catalogue has.

    \b
    Example:
      shardwise cluster show 4xdgx-h100
      shardwise cluster show p4d.24xlarge --toml
    """
    with open_output(as_json) as out:
        from shardwise.cluster.catalogue import catalogue_names, dump  # here: the command starts fast

        if not cluster:
            for table in _catalogue_tables():
                out.table(table)
            out.answer({f"{kind}s": list(catalogue_names(kind)) for kind in ("node", "device", "link")})
            return
        described = options.load_cluster(cluster, out)
        if toml and not as_json:
            typer.echo(dump(described), nl=False)
            return
        out.table(_cluster_table(described))
        out.answer(_cluster_record(described))


@app.command("check")
def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A cluster file, or a name.", show_default=False)],
    as_json: options.Json = False,
) -> None:
    """Check a cluster file: exit 2 where it cannot be right, a sentence for each figure that is far from anything sold.

    \b
    Example:
      shardwise cluster check ours.toml
    """
    with open_output(as_json) as out:
        from shardwise.cluster.cluster_file import implausible_figures  # here: the command starts fast

        described = options.load_cluster(file, out)
        warnings = implausible_figures(described)
        for line in warnings:
            out.message(f"{file}: {line}")
        out.message(f"{file}: {len(warnings)} figures look wrong" if warnings else f"{file} can be read, and nothing in it looks wrong")
        out.answer({"ok": not warnings, "warnings": list(warnings), **_cluster_record(described)})


@app.command("schema")
def show_schema(as_json: options.Json = False) -> None:
    """Print the JSON schema of cluster files, for an editor that completes and checks TOML.

    \b
    Example:
      shardwise cluster schema
    """
    with open_output(as_json) as out:
        from shardwise.cluster.cluster_file import cluster_schema as cluster_schema  # here: the command starts fast

        if not as_json:
            typer.echo(json.dumps(cluster_schema(), indent=2))
        out.answer(cluster_schema())


def _cluster_record(cluster: Cluster) -> dict[str, Any]:
    return {
        "name": cluster.name,
        "num_devices": cluster.num_devices,
        "device": {**asdict(cluster.device), "peak_flops": dict(cluster.device.peak_flops)},
        "levels": [{"name": level.name, "size": level.size, **asdict(level.link)} for level in cluster.levels],
        "price_per_hour": cluster.price_per_hour,
        "priced": cluster.priced,
        "power_w": cluster.power_w,
        "parts": [_cluster_record(part) for part in cluster.parts],
    }


def _cluster_table(cluster: Cluster) -> TextTable:
    rows: list[tuple[str, str, str]] = []
    for part in cluster.parts or (cluster,):
        device = part.device
        rows.append((f"{part.num_devices} x {device.name}", f"{format_bytes(device.memory_bytes)} each", device.source))
        rows += [(f"  {precision}", f"{flops / 1e12:.4g} TFLOP/s", "") for precision, flops in device.peak_flops]
        rows.append(("  memory", f"{device.memory_bandwidth_bytes_per_s / 1e9:.4g} GB/s", ""))
        for level in part.levels:
            link = level.link
            figures = f"{link.bandwidth_bytes_per_s / 1e9:.4g} GB/s, {format_seconds(link.latency_s)}"
            rows.append((f"{level.name}: {level.size} joined", f"{figures}, {100 * link.efficiency:.0f} % reached", link.source))
        if part.price_per_hour:
            rows.append(("price", f"${part.price_per_hour:,.2f} an hour", part.priced))
        if part.power_w:
            rows.append(("power", f"{part.power_w / 1e3:.4g} kW", ""))
        if part.speeds:
            rows.append(("measured", f"{len(part.speeds)} speeds, {len(part.tables)} collectives", part.fingerprint))
    if cluster.between is not None:
        rows.append(("between parts", f"{cluster.between.bandwidth_bytes_per_s / 1e9:.4g} GB/s", cluster.between.source))
    return TextTable(f"{cluster.name}: {cluster.num_devices} devices", ("", "", "source"), tuple(rows))


def _catalogue_tables() -> tuple[TextTable, ...]:
    from shardwise.cluster.catalogue import catalogue_entry, catalogue_names  # here: the command starts fast

    def rows(kind: str, *keys: str) -> tuple[tuple[str, ...], ...]:
        entries = {name: catalogue_entry(kind, name) for name in catalogue_names(kind)}
        return tuple((name, *(_format_cell(figures.get(key, "")) for key in keys)) for name, figures in entries.items())

    machines = rows("node", "size", "device", "link", "network", "price_per_hour", "priced")
    return (
        TextTable("Machines", ("machine", "devices", "device", "link", "network", "$ an hour", "price of"), machines),
        TextTable("Devices", ("device", "memory, bytes", "source"), rows("device", "memory_bytes", "source")),
        TextTable("Links", ("link", "bytes/s", "latency, s", "source"), rows("link", "bandwidth_bytes_per_s", "latency_s", "source")),
    )


def _format_cell(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
