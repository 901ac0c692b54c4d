"""`shardwise export`: a plan as another framework's configuration, with what is lost and what that costs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli import options
from shardwise.cli.output import CommandOutput, open_output, write_file
from shardwise.report.tables import TextTable
from shardwise.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from shardwise.cli.pricing_context import PricedVariant, PricingContext
    from shardwise.frameworks import ExportedConfiguration, ExportRequest, Framework
    from shardwise.plan.layout import Layout
    from shardwise.plan.plan import Plan

FRAMEWORK = """torchtitan, megatron, bridge, deepspeed, accelerate, transformers, lightning, axolotl, nanotron, axonn or pytorch."""
ToFramework = Annotated[str, typer.Option("--to", metavar="FRAMEWORK", help=FRAMEWORK, show_default=False)]
_LAYER = re.compile(r"^((?:[^./]+\.)*?[^./]+\.\d+)(?=[./]|$)")


def export_plan(
    file: options.PlanFile,
    to: ToFramework,
    cluster: options.OtherCluster = None,
    sequence: options.Sequence = None,
    target: options.OutFile = None,
    as_json: options.Json = False,
) -> None:
    """Write a plan as another framework's configuration.

    What the framework cannot say is refused by name, or told as lost with what that costs. The prediction is with the framework's own
    efficiency set, where one is known. Without -o the configuration is printed.

    \b
    Example:
      shardwise export plan.toml --to torchtitan -o run.args
      shardwise export plan.toml --to deepspeed
    """
    with open_output(as_json) as out:
        from shardwise.cli.pricing_context import read_plan_in_context  # here: the command starts fast
        from shardwise.frameworks import find_framework

        framework = find_framework(to)
        plan, setting = read_plan_in_context(file, out, cluster, sequence)
        out.answer(show_export(plan, setting, framework, out, target))


def show_export(
    plan: Plan, setting: PricingContext, framework: Framework, out: CommandOutput, target: Path | None = None
) -> dict[str, object]:
    """Write a plan as a framework's configuration, show what is lost, and return the record."""
    from shardwise.cli.variants import variant_record  # here: the command starts fast
    from shardwise.frameworks import export_layout

    with out.working(f"pricing {plan.model} for {framework.title}"):
        request = request_of_plan(plan, setting)
        exported = export_layout(framework, request)
        priced = with_stack(setting, framework, exported.layout).price(exported.layout, plan, framework.title)
    files = _write_files(exported, out, target)
    own = setting.price(plan.layout, plan, "the plan as it is")
    lost = _lost_records(exported, plan, setting, own)
    if lost:
        out.table(_lost_table(framework.title, lost))
    for note in exported.notes:
        out.message(note)
    out.message(_describe_prediction(priced))
    return {
        "framework": framework.name,
        "layout": str(exported.layout),
        "files": [{"name": name, "text": text, "path": path} for name, text, path in files],
        "lost": lost,
        "notes": list(exported.notes),
        "prediction": variant_record(priced),
        "efficiency_set": priced.context.cluster.stack or "torch",
    }


def with_stack(setting: PricingContext, framework: Framework, layout: Layout) -> PricingContext:
    """Return the context with the framework's efficiency set for a layout, where one is known for the device and none is chosen."""
    cluster = setting.cluster
    stack = framework.stack_of(cluster.device.name, layout)
    if cluster.stack or not stack or cluster.parts or cluster.speeds:
        return setting
    return setting.with_changes(replace(cluster, stack=stack, name=f"{cluster.name}@{stack}"))


def request_of_plan(plan: Plan, setting: PricingContext) -> ExportRequest:
    """Return what is exported of a plan: the layout, and sizes of its model where they are known."""
    from shardwise.frameworks import ExportRequest  # here: the command starts fast

    layers = list(dict.fromkeys(layer for operator in setting.graph.operators if (layer := layer_of_site(operator.site))))
    starts = tuple(dict.fromkeys(layer for site in plan.stages if (layer := layer_of_site(site))))
    bounds = [0, *(layers.index(start) for start in starts if start in layers), len(layers)]
    counts = tuple(after - before for before, after in pairwise(bounds))
    sizes = model_sizes(plan.model)
    return ExportRequest(
        plan.layout, plan.batch_size, plan.model, _sequence_of(plan, setting), len(layers), _block_class(setting, layers),
        counts if len(counts) == plan.layout.num_stages else (), starts if len(starts) == plan.layout.num_stages - 1 else (), sizes,
    )  # fmt: skip


def layer_of_site(site: str) -> str:
    """Return the numbered block that an operator's site lies in; empty outside of blocks.

    >>> layer_of_site("model.layers.3.mlp.up/linear"), layer_of_site("norm/layer_norm")
    ('model.layers.3', '')
    """
    found = _LAYER.match(site)
    return found[1] if found else ""


def _block_class(setting: PricingContext, layers: list[str]) -> str:
    """Return the class name of the repeated block; empty where the model has none, or cannot be built without memory."""
    import torch  # here: torch is slow to import

    try:
        with torch.device("meta"):
            module = setting.resolved.make()
        return type(module.get_submodule(layers[0])).__name__ if layers else ""
    except (AttributeError, RuntimeError, NotImplementedError):
        return ""


def _sequence_of(plan: Plan, setting: PricingContext) -> int:
    from shardwise.report.economy import work_unit  # here: the command starts fast

    return int(work_unit(setting.graph).tokens_per_sample or 0)


def model_sizes(model: str) -> dict[str, Any]:
    """Return a zoo model's sizes by the names of `shardwise.frameworks`; empty for other models."""
    from shardwise.zoo.gpt import SIZES as GPT_SIZES  # here: the command starts fast, and these import torch
    from shardwise.zoo.llama import SIZES as LLAMA_SIZES

    name = model.partition(":")[0]
    config: Any = {**GPT_SIZES, **LLAMA_SIZES}.get(name) or {"llama": LLAMA_SIZES["llama-8b"], "gpt": GPT_SIZES["gpt-125m"]}.get(name)
    if config is None:
        return {}
    given = dict(word.split("=", 1) for word in model.partition(":")[2].split(",") if "=" in word)

    def value(key: str) -> int:
        text = str(given.get(key, getattr(config, key, 0)))
        return int(text) if text.isdecimal() else 0

    sizes = {key: value(key) for key in ("layers", "hidden", "heads", "kv_heads")}
    return {**sizes, "feed_forward": value("inner"), "vocabulary": value("vocabulary"), "gated": name.startswith("llama")}


def _write_files(exported: ExportedConfiguration, out: CommandOutput, target: Path | None) -> list[tuple[str, str, str]]:
    written = []
    for number, (name, text) in enumerate(exported.files.items()):
        path = None if target is None else target if not number else target.with_name(name)
        if path is None:
            out.text(text.rstrip("\n") if not number else f"# {name}\n{text.rstrip()}")
        else:
            write_file(path, text)
            out.message(f"written to {path}")
        written.append((name, text, str(path or "")))
    return written


def _lost_records(exported: ExportedConfiguration, plan: Plan, setting: PricingContext, own: PricedVariant) -> list[Mapping[str, object]]:
    """Return what is lost, each with what it alone costs by our own prices."""
    records: list[Mapping[str, object]] = []
    for lost in exported.lost:
        without = _price_without(setting, plan, {lost.key: lost.instead})
        before, after = own.prediction, without.prediction if without is not None else None
        both = before is not None and after is not None
        records.append(
            {
                "key": lost.key,
                "value": lost.value,
                "instead": lost.instead,
                "why": lost.why,
                "step_time_s": after.step_time_s - before.step_time_s if both and before and after else None,
                "memory_bytes": after.memory.total - before.memory.total if both and before and after else None,
            }
        )
    return records


def _price_without(setting: PricingContext, plan: Plan, changes: Mapping[str, Any]) -> PricedVariant | None:
    from shardwise.errors import ShardwiseError  # here: the command starts fast

    try:
        layout: Layout = replace(plan.layout, **changes)
        return setting.price(layout, plan)
    except ShardwiseError:
        return None


def _lost_table(title: str, records: list[Mapping[str, object]]) -> TextTable:
    rows = []
    for record in records:
        time, memory = record["step_time_s"], record["memory_bytes"]
        cost = "not priced"
        if isinstance(time, float) and isinstance(memory, float):
            cost = f"{_format_signed(time, format_seconds(abs(time)))} a step, {_format_signed(memory, format_bytes(abs(memory)))}"
        rows.append((f"{record['key']}={record['value']}", f"{record['key']}={record['instead']}", cost, str(record["why"])))
    return TextTable(f"Lost in {title}", ("the plan", "runs as", "costs, by our prices", "because"), tuple(rows))


def _format_signed(value: float, text: str) -> str:
    return f"{'-' if value < 0 else '+'}{text}"


def _describe_prediction(priced: PricedVariant) -> str:
    prediction, cluster = priced.prediction, priced.context.cluster
    if prediction is None:
        return f"{priced.layout} cannot be on {cluster.name}: {priced.note}"
    fits = "" if priced.fits else f"; {priced.note}"
    return (
        f"predicted for {priced.name} (efficiency set @{cluster.stack or 'torch'}): {format_seconds(prediction.step_time_s)} a step, "
        f"MFU {prediction.mfu:.1%}, {format_bytes(prediction.memory.total)} of a device{fits}"
    )
