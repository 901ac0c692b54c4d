"""`weft plan`: choose a layout and show why, or price one given by hand. In: a model and machines. Out: tables, `plan.toml`."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.cli import options
from weft.cli.output import output


def plan(  # noqa: PLR0913
    model: options.Model,
    cluster: options.ClusterText = "here",
    batch: options.Batch = None,
    sequence: options.Sequence = None,
    layout: options.LayoutText = None,
    constrain: options.Constraints = None,
    objective: Annotated[
        str, typer.Option("--objective", metavar="NAME", help="What is made least: time, cost, energy or memory.")
    ] = "time",
    device_memory: options.DeviceMemory = None,
    trials: options.Trials = 0,
    target: options.OutFile = None,
    as_json: options.Json = False,
) -> None:
    """Choose a layout and show why.

    With --layout it prices that one instead.

    \b
    Example:
      weft plan gpt-10m --cluster here --batch 16 -o plan.toml
      weft plan gpt-39b --cluster 8xp3.16xlarge --batch 1024 --constrain "tensor<=8"
      weft plan gpt-10m --batch 16 --layout "data=2 pipeline=2 microbatches=4"
      weft plan resnet-18:image=1024 --batch 8 --device-memory 2GiB
    """
    with output(as_json) as out:
        from weft.cli.setting import Setting, named
        from weft.cli.subject import load_cluster, load_model
        from weft.plan.layout import Layout
        from weft.plan.store import write_plan
        from weft.report.tables import plan_record, plan_tables
        from weft.units import parse_bytes

        wanted = Layout.parse(layout) if layout is not None else None
        machines = load_cluster(cluster, out).limited(parse_bytes(device_memory or 0))
        name, sequence = named(model, sequence)
        size = batch or load_model(name, None, sequence).default_batch
        with out.working(f"planning {model} on {machines.name}"):
            setting = Setting(name, machines, size, sequence)
            chosen = setting.plan(constrain or (), objective, wanted, trials, out.message)
        if target is not None:  # first: whoever reads the tables may stop reading
            write_plan(chosen, target)
            out.message(
                f"written to {target}; edit it if you like, then: weft explain {target}, weft simulate {target}, "
                f'or plan.file = "{target}" in a training file'
            )
        for table in plan_tables(chosen):
            out.table(table)
        out.answer(plan_record(chosen))
