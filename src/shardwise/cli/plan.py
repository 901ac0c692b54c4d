"""`shardwise plan`: choose a layout and show why, or price one given by hand. In: a model and machines. Out: tables, `plan.toml`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli import options
from shardwise.cli.export import FRAMEWORK, show_export
from shardwise.cli.output import CommandOutput, open_output

if TYPE_CHECKING:
    from shardwise.cli.pricing_context import PricingContext
    from shardwise.plan.plan import Plan


def plan(  # noqa: PLR0913
    model: options.Model,
    cluster: options.ClusterText = "here",
    batch: options.Batch = None,
    sequence: options.Sequence = None,
    layout: options.LayoutText = None,
    constrain: options.Constraints = None,
    objective: Annotated[str, typer.Option("--objective", metavar="NAME", help="What to minimise: time, cost, energy or memory.")] = "time",
    device_memory: options.DeviceMemory = None,
    trials: options.Trials = 0,
    by_layer: Annotated[bool, typer.Option("--by-layer", help="Also show what each layer costs under each way of sharding it.")] = False,
    to: Annotated[str | None, typer.Option("--to", metavar="FRAMEWORK", help=f"Also show it as the configuration of {FRAMEWORK}")] = None,
    target: options.OutFile = None,
    as_json: options.Json = False,
) -> None:
    """Choose a layout and show why.

    With --layout it prices that one instead. With --to it is written as another framework's configuration too, as `export` does.

    \b
    Example:
      shardwise plan gpt-10m --cluster here --batch 16 -o plan.toml
      shardwise plan gpt-39b --cluster 8xp3.16xlarge --batch 1024 --constrain "tensor<=8"
      shardwise plan gpt-10m --batch 16 --layout "data=2 pipeline=2 microbatches=4"
      shardwise plan resnet-18:image=1024 --batch 8 --device-memory 2GiB
      shardwise plan gpt-125m --cluster p4d.24xlarge --batch 64 --by-layer
      shardwise plan llama-8b --cluster dgx-h100 --batch 64 --to torchtitan
    """
    with open_output(as_json) as out:
        from shardwise.cli.pricing_context import pricing_context_of_name  # here: the command starts fast
        from shardwise.frameworks import find_framework
        from shardwise.plan.layout import Layout
        from shardwise.plan.plan_file import write_plan
        from shardwise.report.tables import plan_record, plan_tables
        from shardwise.solve.constraints import parse_constraints
        from shardwise.solve.score import check_objective
        from shardwise.units import parse_bytes
        from shardwise.zoo.listing import check_model_text

        wanted = Layout.parse(layout) if layout is not None else None
        check_model_text(model)  # what is wrong with the words, before the machine is measured and torch is loaded
        check_objective(objective)
        if to is not None:
            _ = find_framework(to)
        for words in constrain or ():
            _ = parse_constraints(words)
        memory_limit = parse_bytes(device_memory or 0)
        machines = options.load_cluster(cluster, out).with_memory_limit(memory_limit)
        setting = pricing_context_of_name(model, machines, batch, sequence)
        with out.working(f"planning {model} on {machines.name}"):
            chosen = setting.plan(constrain or (), objective, wanted, trials, out.message)
        if target is not None:  # before the tables: their reader may close the pipe
            write_plan(chosen, target)
            out.message(f"written to {target}; then: shardwise explain {target}, simulate {target}, or plan.file = in a training file")
        for table in plan_tables(chosen):
            out.table(table)
        record = plan_record(chosen) | (_by_layer(chosen, setting, out) if by_layer else {})
        if to is not None:
            record["export"] = show_export(chosen, setting, find_framework(to), out)
        out.answer(record)


def _by_layer(plan: Plan, setting: PricingContext, out: CommandOutput) -> dict[str, object]:
    """Show the table of layers over the plan's ranks of one machine, and return its records."""
    from shardwise.cost.operators.layers import price_layers  # here: the command starts fast
    from shardwise.report.placements import layers_record, layers_table

    machines, layout = setting.cluster, plan.layout
    if plan.uncaptured or machines.parts:
        reason = "the model is not captured" if plan.uncaptured else f"{machines.name} has several kinds of devices"
        out.message(f"{reason}, so layers are not priced one by one")
        return {"layers": []}
    ranks = min(layout.num_ranks, machines.node_size)
    with out.working("pricing layers"):
        rows = price_layers(setting.graph, machines, plan.batch_size, ranks, layout.precision)
        taken = setting.sharding(plan).labels
    out.table(layers_table(f"Layers, {plan.batch_size} samples at once over {ranks} ranks", rows, taken))
    return {"layers": layers_record(rows, taken), "layer_ranks": ranks}
