"""`shardwise import`: another framework's configuration as a layout, priced: does it fit, what does it wait for."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli import options
from shardwise.cli.export import with_stack
from shardwise.cli.output import CommandOutput, open_output
from shardwise.errors import ModelError, ShardwiseError, UsageError
from shardwise.report.tables import TextTable
from shardwise.units import format_bytes, format_percent, format_seconds

if TYPE_CHECKING:
    from shardwise.cli.pricing_context import PricedVariant, PricingContext
    from shardwise.cluster.cluster import Cluster
    from shardwise.frameworks import ImportedConfiguration

_SOURCE = "A configuration file, a recipe (FILE.py:NAME, package.module:NAME, NAME), or after -- a command line."
_PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers", "margin")
_HUB_MODELS = (
    (r"llama.?(3|3\.1|3\.3)?.?8b", "llama-8b"), (r"llama.?(3|3\.1|3\.3)?.?70b", "llama-70b"), (r"llama.?(3|3\.1)?.?405b", "llama-405b"),
)  # fmt: skip
# Changes that make a layout smaller, tried alone and then two at a time, the cheaper ones first.
_SMALLER: tuple[Mapping[str, Any], ...] = (
    {"zero": 1}, {"microbatches": "more"}, {"zero": 2}, {"recompute": "selective"}, {"sequence_parallel": "on"}, {"zero": 3},
    {"recompute": "full"}, {"offload": "optimizer"},
)  # fmt: skip


def import_configuration(  # noqa: PLR0913
    source: Annotated[list[str], typer.Argument(metavar="FILE|RECIPE|-- COMMAND", help=_SOURCE, show_default=False)],
    model: Annotated[str | None, typer.Option("--model", metavar="MODEL", help="The model, where it is not in the file.")] = None,
    cluster: Annotated[str | None, typer.Option("--cluster", metavar="CLUSTER", help="The machines to price it on.")] = None,
    devices: Annotated[int | None, typer.Option("--devices", min=1, metavar="N", help="Devices it runs on, if not the cluster's.")] = None,
    framework: Annotated[str, typer.Option("--from", metavar="FRAMEWORK", help="Whose it is; by default by its keys.")] = "",
    recipe: Annotated[str, typer.Option("--recipe", metavar="NAME", help="Of a Python file with several recipes.")] = "",
    batch: options.Batch = None,
    sequence: options.Sequence = None,
    search_seconds: Annotated[
        float, typer.Option("--search-seconds", min=0.1, metavar="S", help="The best layout is sought so long.")
    ] = 60.0,
    target: options.OutFile = None,
    as_json: options.Json = False,
) -> None:
    """Read another framework's configuration, and price it.

    With a model and machines: whether it fits, by part; step time and MFU; what it waits for; the nearest layout that fits; and the best
    for the same machines. All that is not in the price is listed. With -o the layout is written as a plan.

    \b
    Example:
      shardwise import accelerate.yaml --model llama-8b --cluster dgx-h100 --batch 64
      shardwise import -- torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8 --bf16
    """
    with open_output(as_json) as out:
        from shardwise.plan.plan_file import write_plan  # here: the command starts fast

        machines = options.load_cluster(cluster, out) if cluster is not None else None
        imported = read_source(source, framework, recipe, devices or (machines.num_devices if machines is not None else 0))
        name = model or model_of_configuration(imported)
        record = _layout_record(imported, name)
        _show_layout(imported, name, out)
        setting = _pricing_context(imported, name, machines, batch, sequence, out)
        if setting is not None:
            record |= show_prices(imported, setting, out, search_seconds)
            if target is not None:
                write_plan(setting.plan(layout=imported.layout), target)
                out.message(f"written to {target}")
        _show_unpriced(imported, out)
        out.answer(record)


def read_source(source: list[str], framework: str, recipe: str, devices: int) -> ImportedConfiguration:
    """Read what the command line names: a file, a recipe, or a command."""
    from shardwise.frameworks import read_configuration  # here: the command starts fast
    from shardwise.frameworks.recipes import find_recipe

    if len(source) > 1 or " " in source[0]:
        words = source if len(source) > 1 else source[0].split()
        return read_configuration(words, framework, recipe, devices)
    path = Path(source[0]).expanduser()
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give the configuration file in it")
    if not path.is_file():
        if (found := find_recipe(source[0])) is None:
            raise UsageError(f"{source[0]} is neither a file nor a recipe of an installed framework; a command line follows --")
        path, recipe = found
    return read_configuration(path, framework, recipe, devices)


def model_of_configuration(imported: ImportedConfiguration) -> str:
    """Return a model of ours that the configuration's name or sizes mean; empty where none is known."""
    name = imported.model.lower().replace("_", "-")
    for pattern, model in _HUB_MODELS:
        if re.search(pattern, name) and "vision" not in name and "llama2" not in name and "llama-2" not in name:
            return model
    sizes = imported.sizes
    if not all(sizes.get(key) for key in ("layers", "hidden", "heads")) or sizes.get("experts"):
        return ""
    words = {key: sizes[key] for key in ("layers", "hidden", "heads", "vocabulary") if sizes.get(key)}
    if sizes.get("gated"):
        words |= {"kv_heads": sizes.get("kv_heads") or sizes["heads"]}
    if sizes.get("feed_forward"):
        words["inner"] = sizes["feed_forward"]
    if imported.sequence:
        words["sequence"] = imported.sequence
    return f"{'llama' if sizes.get('gated') else 'gpt'}:" + ",".join(f"{key}={value}" for key, value in words.items())


def _layout_record(imported: ImportedConfiguration, model: str) -> dict[str, Any]:
    return {
        "framework": imported.framework,
        "layout": str(imported.layout),
        "devices": imported.layout.num_ranks,
        "batch_size": imported.batch_size,
        "micro_batch_size": imported.micro_batch,
        "sequence": imported.sequence or None,
        "model": model or imported.model or None,
        "notes": list(imported.notes),
        "unpriced": [{"key": key, "value": value, "why": why} for key, value, why in imported.unpriced],
    }


def _show_layout(imported: ImportedConfiguration, model: str, out: CommandOutput) -> None:
    rows = [
        ("framework", imported.framework),
        ("layout", str(imported.layout)),
        ("devices", str(imported.layout.num_ranks)),
        ("batch", f"{imported.batch_size} samples a step, {imported.micro_batch} at once on a replica"),
        ("sequence", str(imported.sequence or "")),
        ("model", model or imported.model),
        *(("note", note) for note in imported.notes),
    ]
    out.table(TextTable("Imported", ("", ""), tuple(row for row in rows if row[1])))


def _pricing_context(
    imported: ImportedConfiguration, model: str, machines: Cluster | None, batch: int | None, sequence: int | None, out: CommandOutput
) -> PricingContext | None:
    """Return the context to price in; None, with what to add, where model or machines are unknown."""
    from shardwise.cli.pricing_context import pricing_context_of_name  # here: the command starts fast
    from shardwise.frameworks import find_framework

    missing = [option for option, known in (("--model", model), ("--cluster", machines)) if not known]
    if missing or machines is None:
        named = f" ({imported.model})" if imported.model and not model else ""
        out.message(
            f"the configuration does not say {' and '.join(missing)}{named}; add {'it' if len(missing) == 1 else 'them'} for a price"
        )
        return None
    size = batch or imported.batch_size
    try:
        setting = pricing_context_of_name(model, machines, size, sequence or imported.sequence or None)
    except ModelError as error:
        raise UsageError(f"the model {model} cannot be built here ({error}); give another name with --model") from None
    return with_stack(setting, find_framework(imported.framework), imported.layout)


class _SearchStopped(BaseException):
    """Raised by the clock; no handler of errors inside the search catches it."""


def best_within(setting: PricingContext, seconds: float) -> PricedVariant:
    """Return the search's choice, or a row without a prediction where it takes longer."""
    from shardwise.cli.pricing_context import PricedVariant  # here: the command starts fast
    from shardwise.plan.layout import Layout

    def stop_search(number: int, frame: object) -> None:
        raise _SearchStopped

    name = "best for these machines"
    before = signal.signal(signal.SIGALRM, stop_search)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return setting.best_variant(name)
    except _SearchStopped:
        return PricedVariant(name, setting, Layout(), None, f"not found in {seconds:g} s; --search-seconds N gives it more", False)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def show_prices(imported: ImportedConfiguration, setting: PricingContext, out: CommandOutput, seconds: float) -> dict[str, Any]:
    """Price the layout, the nearest that fits and the best, show them, and return the record."""
    from shardwise.cli.variants import variant_record, variants_table  # here: the command starts fast

    with out.working(f"pricing {setting.model}"):
        base = setting.price(imported.run_layout, name="as imported")
        rows = [base]
        nearest = None if base.fits else nearest_fit(setting, imported)
        rows += [nearest] if nearest is not None else []
        best = best_within(setting, seconds)
        rows.append(best)
    prediction = base.prediction
    if prediction is None:
        out.message(f"{imported.layout} cannot be on {setting.cluster.name}: {base.note}")
    else:
        out.table(_memory_table(base))
        out.text(_describe_waiting(base) + "\n")
    out.table(variants_table(f"{setting.model} on {setting.cluster.name}", "", rows, base if prediction else best))
    memory = {} if prediction is None else {part: getattr(prediction.memory, part) for part in (*_PARTS, "total")}
    limit = setting.cluster.memory_of(imported.layout.num_ranks) if prediction is not None else 0.0
    return {
        "fits": base.fits,
        "memory_bytes": memory,
        "memory_limit_bytes": limit or None,
        "shortage_bytes": max(0.0, memory["total"] - limit) if memory else None,
        "step_time_s": prediction.step_time_s if prediction else None,
        "mfu": prediction.mfu if prediction else None,
        "waits_for": dict(_waiting_parts(base)),
        "nearest_fit": variant_record(nearest, base) if nearest is not None else None,
        "better": variant_record(best, base),
        "efficiency_set": setting.cluster.stack or "torch",
        "rows": [variant_record(row, base) for row in rows],
    }


def nearest_fit(setting: PricingContext, imported: ImportedConfiguration) -> PricedVariant | None:
    """Return the fastest layout with the fewest changes that fits; None where none of these does."""
    from itertools import combinations  # here: the command starts fast

    for count in (1, 2, 3):
        fitting = []
        for group in combinations(_SMALLER, count):
            changes: dict[str, Any] = {}
            for change in group:
                changes |= change
            if len(changes) < count or (variant := _price_changed(setting, imported, changes)) is None:
                continue
            fitting.append(variant)
        if fitting:
            return min(fitting, key=lambda variant: variant.prediction.step_time_s if variant.prediction else float("inf"))
    return None


def _price_changed(setting: PricingContext, imported: ImportedConfiguration, changes: dict[str, Any]) -> PricedVariant | None:
    layout = imported.run_layout
    if changes.get("microbatches") == "more":
        if imported.micro_batch == 1:
            return None
        changes = {**changes, "microbatches": layout.microbatches * imported.micro_batch}
    if all(getattr(layout, key) == value for key, value in changes.items()) or changes.get("zero", 3) < layout.zero:
        return None
    try:
        variant = setting.price(replace(layout, **changes), name="nearest that fits")
    except ShardwiseError:
        return None
    words = ", ".join(f"{key} {getattr(layout, key)} to {value}" for key, value in changes.items())
    return replace(variant, note=words) if variant.fits and variant.prediction is not None else None


def _memory_table(base: PricedVariant) -> TextTable:
    assert base.prediction is not None
    memory, limit = base.prediction.memory, base.context.cluster.memory_of(base.layout.num_ranks)
    rows = [(part, format_bytes(getattr(memory, part)), format_percent(getattr(memory, part) / limit)) for part in _PARTS]
    rows.append(("total", format_bytes(memory.total), format_percent(memory.total / limit)))
    over = memory.total - limit
    verdict = f"it does not fit: {format_bytes(over)} too much" if not base.fits else f"it fits, {format_bytes(-over)} are free"
    note = f"of {format_bytes(limit)}: {verdict}"
    return TextTable("Memory of a device", ("", "bytes", "share"), tuple(rows), right=(1, 2), note=note)


def _waiting_parts(base: PricedVariant) -> list[tuple[str, float]]:
    """Return the parts of a step that are no computation, with their seconds, the longest first."""
    if base.prediction is None:
        return []
    return sorted(((name, s) for name, s in base.prediction.parts if name != "compute" and s > 0), key=lambda pair: -pair[1])


def _describe_waiting(base: PricedVariant) -> str:
    assert base.prediction is not None
    step, parts = base.prediction.step_time_s, _waiting_parts(base)
    shown = ", ".join(f"{name} {format_seconds(s)} ({s / step:.0%})" for name, s in parts if s >= 0.005 * step)
    return f"A step is {format_seconds(step)}, MFU {base.prediction.mfu:.1%}. Besides computation it waits for: {shown or 'nothing'}."


def _show_unpriced(imported: ImportedConfiguration, out: CommandOutput) -> None:
    told = [(f"{key} = {value}"[:80], why) for key, value, why in imported.unpriced if why]
    if told:
        out.table(TextTable("Not in the price", ("in the file", "what is priced"), tuple(told)))
    rest = [key for key, _, why in imported.unpriced if not why]
    if rest:
        out.text(f"Without effect on the price, or unknown here: {', '.join(rest)}.")
