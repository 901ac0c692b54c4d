"""`shardwise serve profile`: measure a workflow's variants here, price them on other machines, and write the figures into its file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli import options
from shardwise.cli.output import CommandOutput, open_output, write_file
from shardwise.errors import UsageError
from shardwise.report.tables import TextTable
from shardwise.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from shardwise.serve.deploy.profile import Profile
    from shardwise.serve.placement.workflow import Machines, Workflow

_CLUSTER = "A file with [worker.NAME] tables; by default those of the workflow."
_OUTPUT = "Write the workflow with its profile here; by default into its own file."


def profile(
    workflow: Annotated[Path, typer.Argument(metavar="WORKFLOW.toml", help="Operators whose variants have a model or call.")],
    cluster: Annotated[Path | None, typer.Option("--cluster", metavar="FILE", help=_CLUSTER, show_default=False)] = None,
    batches: Annotated[str, typer.Option("--batches", metavar="N,N", help="Requests computed together.")] = "1,2,4,8",
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", min=0.0, help="Of each measurement; five runs at the least.")] = 0.5,
    compare: Annotated[bool, typer.Option("--compare", help="Price this machine, too, beside what was measured.")] = False,
    target: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help=_OUTPUT, show_default=False)] = None,
    as_json: options.Json = False,
) -> None:
    """Measure a workflow's variants here, price them on machines that are not here, and write the figures into its file.

    Workers whose device is `here` get measured seconds, with their threads; those with a CLUSTER's name what the cost model
    of training says.
    With labelled requests every choice of variants gets its accuracy.

    \b
    Example:
      shardwise serve profile examples/serve/tracking.toml --batches 1,4
      shardwise serve profile examples/serve/tracking.toml --compare -o profiled.toml
    """
    with open_output(as_json) as out:
        from shardwise.serve.deploy.profile import ProfileOptions  # here: the command starts fast
        from shardwise.serve.deploy.profile import profile_workflow as measured
        from shardwise.serve.placement.workflow_files import read_workflow_and_machines

        sizes = _parse_batch_sizes(batches)
        of, machines, _ = read_workflow_and_machines(workflow, cluster)
        devices = _load_devices(machines, compare, out)
        with out.working(f"measuring the variants of {of.name}"):
            figures = measured(of, machines, ProfileOptions(sizes, seconds, int(compare), devices))
        where = target or workflow
        write_file(where, _profiled_text(workflow, of, machines, figures))
        _show_profile(out, of, figures)
        for line in figures.skipped:
            out.message(line)
        out.text(f"written to {where}")
        out.answer(_profile_record(of, machines, figures))


def _parse_batch_sizes(text: str) -> tuple[int, ...]:
    sizes = text.split(",")
    if not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        raise UsageError(f"--batches {text} is no list of sizes; write --batches 1,2,4,8")
    return tuple(sorted({int(size) for size in sizes}))


def _load_devices(machines: Machines, compare: bool, out: CommandOutput) -> dict[str, Any]:
    names = {w.device for w in machines.workers if w.device != "here"} | ({"here"} if compare else set())
    return {name: options.load_cluster(name, out) for name in sorted(names)}


def _profiled_text(file: Path, workflow: Workflow, machines: Machines, figures: Profile) -> str:
    from shardwise.serve.placement.profile_file import with_profile  # here: the command starts fast

    keys = [(op.name, v.name) for op in workflow.operators for v in op.variants]
    variants = {k: (figures.latency_s(k, machines), figures.output_bytes[k], figures.memory_bytes[k]) for k in keys}
    names = [op.name for op in workflow.operators]
    return with_profile(file.read_text(encoding="utf-8"), variants, names, figures.accuracy, str(file))


def _show_profile(out: CommandOutput, workflow: Workflow, figures: Profile) -> None:
    rows: list[tuple[str, ...]] = []
    for op in workflow.operators:
        for v in op.variants:
            key, priced = (op.name, v.name), figures.priced.get((op.name, v.name), {})
            entries: list[tuple[str, ...]] = []
            for threads, by_batch in figures.measured[key].items():
                for batch, t in by_batch.items():
                    here = priced.get("here", {}).get(batch)
                    seconds = (format_seconds(t.median_s), format_seconds(t.p95_s), format_seconds(t.p99_s))
                    price = format_seconds(here) if here else ""
                    entries.append(
                        (
                            f"here, {threads} thread{'s' * (threads > 1)}",
                            str(batch),
                            *seconds,
                            _format_request_rate(batch / t.median_s),
                            price,
                        )
                    )
            elsewhere = ((device, batch, s) for device, by_batch in priced.items() if device != "here" for batch, s in by_batch.items())
            entries += [
                (device, str(batch), "", "", "", _format_request_rate(batch / s), format_seconds(s)) for device, batch, s in elsewhere
            ]
            memory = format_bytes(figures.memory_bytes[key])
            rows += [(*(key if i == 0 else ("", "")), *row, memory if i == 0 else "") for i, row in enumerate(entries)]
    columns = ("operator", "variant", "on", "batch", "p50", "p95", "p99", "requests/s", "priced", "memory")
    out.table(TextTable(f"Variants of {workflow.name}", columns, tuple(rows), right=tuple(range(3, 10))))
    if figures.accuracy:
        names = tuple(op.name for op in workflow.operators)
        lines = tuple((*choice, f"{value:.4g}") for choice, value in figures.accuracy.items())
        out.table(TextTable("Accuracy", (*names, "accuracy"), lines, right=(len(names),)))


def _format_request_rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def _profile_record(workflow: Workflow, machines: Machines, figures: Profile) -> dict[str, Any]:
    return {
        "variants": [
            {
                "operator": op.name,
                "variant": v.name,
                "latency_s": figures.latency_s((op.name, v.name), machines),
                "measured": [
                    {"threads": n, "batch": b, "median_s": t.median_s, "p95_s": t.p95_s, "p99_s": t.p99_s, "requests_per_s": b / t.median_s}
                    for n, by_batch in figures.measured[op.name, v.name].items()
                    for b, t in by_batch.items()
                ],
                "priced_s": figures.priced.get((op.name, v.name), {}),
                "output_bytes": figures.output_bytes[op.name, v.name],
                "memory_bytes": figures.memory_bytes[op.name, v.name],
            }
            for op in workflow.operators
            for v in op.variants
        ],
        "accuracy": [{"variants": list(choice), "accuracy": value} for choice, value in figures.accuracy.items()],
        "skipped": figures.skipped,
    }
