"""Plan files: write a `Plan` as a short TOML file that a person can read and edit, and read it back.

A plan that is read equals the one that was written. Reading is strict: an unknown key, a wrong type or a newer format is refused with the
line, never ignored. Sizes are bytes, times are seconds.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, LayoutError, ShardwiseError, UsageError, did_you_mean
from shardwise.plan.data_context_splits import SplitPrice, Splits
from shardwise.plan.ir.axis import BRANCH, CHANNEL, axis_of
from shardwise.plan.ir.choice import AllReduceChoices
from shardwise.plan.ir.custom_collective import collective_text_of
from shardwise.plan.ir.custom_schedule import actions_of
from shardwise.plan.ir.grid import GRID_AXES, TENSOR
from shardwise.plan.ir.patterns import expand_sites, shorten_sites
from shardwise.plan.ir.toml_text import parse_toml, quote_key, quote_string
from shardwise.plan.layout import Layout
from shardwise.plan.layout_words import CHOICES
from shardwise.plan.plan import FORMAT_VERSION, LayoutCandidate, MemoryBreakdown, Plan, Prediction

KIND = "shardwise plan"
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((float, int), "a number"),
    "str": ((str,), "text in quotes"),
    "bool": ((bool,), "true or false"),
    "list": ((list,), "a list in brackets"),
    "dict": ((dict,), "a table"),
}
SHARD_AXES = (TENSOR, *GRID_AXES, CHANNEL, BRANCH)
_MEMORY = tuple(field.name for field in fields(MemoryBreakdown))
_FIELDS = tuple(one for one in fields(Layout) if one.repr)
_ALWAYS_WRITTEN = ("data", "tensor", "pipeline", "microbatches", "schedule", "zero", "recompute", "precision")
_KEY_COMMENTS = {
    "data": "replicas, each with its part of the batch",
    "tensor": "devices that share every layer",
    "pipeline": "stages, one after another",
    "microbatches": "parts of a replica's batch, one after another",
    "schedule": f"order of their forwards and backwards: {', '.join(CHOICES['schedule'])}, or a file of actions",
    "zero": "state sharded over replicas: 0 none, 1 optimizer state, 2 gradients too, 3 weights too",
    "recompute": f"activations recomputed in backward: {', '.join(CHOICES['recompute'])}, full:2, full:3/1, full:h.0-6+h.8",
    "segment": "layers that recompute=full recomputes together, saving only the input of the first",
    "precision": f"of matrix products: {', '.join(CHOICES['precision'])}",
    "threads": "cores of each rank; 0 is an equal share",
    "chunks": "stages of each rank, where the schedule takes any number",
    "expert": "replicas among which the experts of a layer are distributed",
    "sequence_parallel": f"norms and residuals sharded along the sequence over tensor: {', '.join(CHOICES['sequence_parallel'])}",
    "sample_parallel": f"samples sharded over tensor as well, where that is cheaper: {', '.join(CHOICES['sample_parallel'])}",
    "offload": f"offloaded to the host's memory: {', '.join(CHOICES['offload'])}, activations:2, all:h.0-6+h.8",
    "all_reduce": f"how gradients are reduced: {', '.join(CHOICES['all_reduce'])}",
    "shares": "the part of every batch that each replica has, where they differ: 3/2/2/1",
    "inner": "data x tensor of every stage, where stages differ: 4x1/2x2",
    "compress": "compression of gradients between replicas: none, bfloat16, int8, topk:FRACTION",
    "channel": "devices that share the channels of convolutions",
    "context": "devices that share a sequence, each with a shard of its positions",
    "attention": f"how these attend to one another's positions: {', '.join(CHOICES['attention'])}",
    "spatial": "devices that share an image, each with a shard: a count, or height x width; 4, 2x2, 2x2x2",
    "branch": "devices that each run some of the model's parallel branches, on all samples that they share",
    "neighbours": "whose devices are adjacent: branch, a replica's branches; data, replicas of a branch; pipeline, a replica's stages",
    "grid": "how the tensor ranks are arranged: rows x columns, or rows x columns x depth; 2x2, 2x2x2",
    "lend": "whether ranks that wait in the pipeline lend their cores: auto (no, unless the plan says on), off, on",
    "batch_norm": f"samples of its statistics, all or each replica's: {', '.join(CHOICES['batch_norm'])}",
    "gradients": f"dtype in which they are summed: {', '.join(CHOICES['gradients'])}",
    "scatter": f"microbatches in which zero=2 and 3 reduce-scatter gradients: {', '.join(CHOICES['scatter'])}",
    "loss_chunks": "parts of a microbatch's rows in which logits and their loss are computed, one after another",
    "compile": f"compile the computation between collectives: {', '.join(CHOICES['compile'])}",
    "split": f"data x context of the same ranks, fixed or for each microbatch by its length: {', '.join(CHOICES['split'])}",
    "shard": "adjacent replicas among which zero shards state, each such group with all of it; 0 is all replicas",
    "servers": "replicas that hold and update the weights for all, a shard each; 0 is none",
    "staleness": "steps by which updates come late, so that replicas need not wait for one another; 0 is at once",
}


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write `plan.toml` atomically. A cluster file is named relative to the plan's folder.

    Raises:
        UsageError: the folder cannot be written to.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(format_plan(_from_folder(plan, Path(), path.parent)), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UsageError(f"cannot write the plan to {path}: {error.strerror}; choose a folder that can be written to") from None


def read_plan(path: str | Path) -> Plan:
    """Read `plan.toml`.

    Raises:
        ConfigError: no such file, or a text that `parse_plan` refuses.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the plan {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the plan {path} is not text in UTF-8") from None
    return _from_folder(parse_plan(text, str(path)), Path(path).parent, Path())


def _from_folder(plan: Plan, old: Path, new: Path) -> Plan:
    """Return the plan with its cluster file, which is named relative to the folder `old`, named relative to `new`."""
    named = re.fullmatch(r"((?:\d+ devices? of )?)([^+]+\.toml)((?::.+)?)", plan.cluster)
    if named is None or not (old / named[2]).exists():
        return plan
    try:
        file = os.path.relpath(old / named[2], new)
    except ValueError:  # on another drive
        file = str((old / named[2]).absolute())
    return replace(plan, cluster=f"{named[1]}{named[2] if Path(named[2]).is_absolute() else file}{named[3]}")


def format_plan(plan: Plan) -> str:
    """Format a plan as text; empty fields are omitted.

    >>> plan = Plan(Layout(data=2, microbatches=2), "gpt:layers=4", "here", 8, reasons=(("data", "communication is cheap"),))
    >>> parse_plan(format_plan(plan)) == plan
    True
    """
    lines = [
        *_format_head(plan),
        *_format_layout(plan),
        *_format_shards(plan),
        *_format_splits(plan),
        *_format_prediction(plan),
        *_format_search(plan),
    ]
    if plan.layout.actions:
        lines += [
            "",
            "[schedules]  # text of the schedule, a line a rank; this is what runs, whatever is in the file by now",
            f"{quote_key(plan.layout.schedule)} = {_multiline_string(plan.layout.actions)}",
        ]
    if plan.layout.collective:
        lines += [
            "",
            "[collectives]  # text of the all-reduce, a line a rank; this is what runs, whatever is in the file by now",
            f"{quote_key(plan.layout.all_reduce)} = {_multiline_string(plan.layout.collective)}",
        ]
    return "\n".join(lines) + "\n"


def _format_head(plan: Plan) -> list[str]:
    lines = [
        "# How shardwise trains this model on this cluster. To change it, edit it: keys are checked, and predictions are only notes.",
        f"kind = {quote_string(KIND)}",
        f"format_version = {FORMAT_VERSION}",
        f"model = {quote_string(plan.model)}",
        f"cluster = {quote_string(plan.cluster)}",
        f"batch_size = {plan.batch_size}  # samples a step, over all ranks",
    ]
    if plan.bucket_bytes:
        lines.append(f"bucket_bytes = {plan.bucket_bytes}  # of gradients that are reduced at once")
    if plan.uncaptured:
        lines.append(f"uncaptured = {quote_string(plan.uncaptured)}  # why the model is not a graph; it trains by data parallelism")
    if plan.stages:
        sites = [quote_string(s) for s in shorten_sites(plan.stages)]
        lines += [
            "# site of the first operator of each stage after the first; {1..9..2} stands for 1, 3, 5, 7, 9",
            *_format_array("stages", sites),
        ]
    if plan.reasons:
        lines += [
            "# what was chosen, and why",
            *_format_array("reasons", [_format_list(quote_string(a), quote_string(b)) for a, b in plan.reasons]),
        ]
    if plan.replicated_operators:
        sites = [quote_string(s) for s in plan.replicated_operators]
        lines += ["# operators without a sharding rule; every rank computes them whole", *_format_array("replicated_operators", sites)]
    return lines


def _format_layout(plan: Plan) -> list[str]:
    axes = "data x tensor x pipeline" + " x context" * (plan.layout.context > 1) + " x spatial" * (plan.layout.spatial != "1")
    lines = ["", f"[layout]  # {plan.layout.num_ranks} ranks = {axes}; keys that are not here have their defaults"]
    for field in _FIELDS:
        value = getattr(plan.layout, field.name)
        if field.name in _ALWAYS_WRITTEN or value != field.default:
            lines.append(f"{field.name} = {quote_string(value) if isinstance(value, str) else value}  # {_KEY_COMMENTS[field.name]}")
    if plan.sums != AllReduceChoices():
        lines += ["", '[sums]  # algorithms of all_reduce = "auto", up to how many bytes', f"all_reduce = {quote_string(str(plan.sums))}"]
    return lines


def _format_shards(plan: Plan) -> list[str]:
    lines = []
    if len(dict(plan.shards)) != len(plan.shards):
        raise UsageError("the plan names an axis twice in shards")
    for axis, cuts in plan.shards:
        meaning = "rank that owns it" if axis_of(axis).owns_operators else "dimension that is sharded"
        lines += ["", f"[shards.{quote_key(axis)}]  # parameter = {meaning}; * stands for any layer number"]
        if len(dict(cuts)) != len(cuts):
            raise UsageError(f"the plan cuts a parameter twice over axis {axis}")
        lines += [f"{quote_key(name)} = {dim}" for name, dim in cuts]
    return lines


def _format_splits(plan: Plan) -> list[str]:
    splits = plan.splits
    if not splits.prices:
        return []
    prices = (
        (p.data, p.context, *(_format_list(*map(_format_number, seconds)) for seconds in (p.fixed_s, p.row_s))) for p in splits.prices
    )
    return [
        "",
        '[splits]  # prices that split = "lengths" compares',
        f"positions = {_format_list(*(_format_list(quote_string(path), str(dim)) for path, dim in splits.positions))}  # tensors of the "
        f"batch, their dimension",
        f"most = {splits.max_positions}  # positions of a microbatch on a rank, at most, for which memory is predicted",
        f"lengths = {_format_list(*map(str, splits.lengths))}",
        "# data, context; seconds of a microbatch at each length, and of each row of a replica",
        *_format_array("prices", [_format_list(*map(str, row)) for row in prices]),
    ]


def _read_splits(table: _PlanTable) -> Splits:
    if not table.data:
        return Splits()
    positions = tuple(tuple(table.check_columns("positions", row, ["str", "int"])) for row in table.take_rows("positions", "list"))
    most, lengths = table.take("most", "int"), table.take_rows("lengths", "int")
    prices = []
    for row in table.take_rows("prices", "list"):
        data, context, *seconds = table.check_columns("prices", row, ["int", "int", "list", "list"])
        prices.append(SplitPrice(data, context, *(tuple(float(table.check_type("prices", s, "float")) for s in each) for each in seconds)))
    table.finish()
    return Splits(positions, lengths, tuple(prices), most)


def _format_prediction(plan: Plan) -> list[str]:
    if not plan.prediction:
        return []
    lines = ["", "[prediction]  # of one step"]
    lines += [f"{key} = {_format_number(getattr(plan.prediction, key))}" for key in ("step_time_s", "mfu", "model_flops")]
    lines.append(f"parts_s = {_format_parts(plan.prediction.parts)}")
    lines += ["", "[prediction.memory_bytes]  # on the fullest device"]
    return lines + [f"{key} = {_format_number(getattr(plan.prediction.memory, key))}" for key in _MEMORY]


def _format_search(plan: Plan) -> list[str]:
    lines = ["", "[search]  # how this was found", f"planning_time_s = {_format_number(plan.planning_time_s)}"]
    if plan.bound_gap is not None:
        lines.append(f"bound_gap = {_format_number(plan.bound_gap)}  # above a time that no layout of the search beats, which is proven")
    if plan.candidates:
        lines += [
            "# layout, note; and of those that were priced step_time_s, mfu, model_flops,",
            f"# bytes of [{', '.join(_MEMORY)}], seconds by part",
            *_format_array("candidates", [_format_candidate(c) for c in plan.candidates]),
        ]
    return lines


def parse_plan(text: str, source: str = "plan.toml") -> Plan:
    """Parse the text of a plan; `source` is named in errors.

    Raises:
        ConfigError: not TOML, another kind of file, a newer format, an unknown or missing key, a wrong type.
        LayoutError, Infeasible: a layout or a plan that cannot be.
    """
    try:
        data = parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: {error}") from None
    top = _PlanTable(data, (), text, source)
    kind = top.take("kind", "str")
    if kind != KIND:
        raise top.error("kind", f'kind is "{kind}"; a plan has kind = "{KIND}"')
    version = top.take("format_version", "int")
    if version > FORMAT_VERSION:
        raise top.error(
            "format_version", f"format version {version} is newer than {FORMAT_VERSION}, which this shardwise reads; update shardwise"
        )
    if version < 1:
        raise top.error("format_version", f"format version {version} does not exist; the first is 1")
    values: dict[str, Any] = {
        "model": top.take("model", "str"),
        "cluster": top.take("cluster", "str"),
        "batch_size": top.take("batch_size", "int"),
        "bucket_bytes": top.take("bucket_bytes", "int", 0),
        "uncaptured": top.take("uncaptured", "str", ""),
        "stages": expand_sites(top.take_rows("stages", "str")),
        "replicated_operators": top.take_rows("replicated_operators", "str"),
        "reasons": tuple(tuple(top.check_columns("reasons", row, ["str", "str"])) for row in top.take_rows("reasons", "list")),
    }
    layout, sharded, search = top.table("layout"), top.table("shards", {}), top.table("search", {})
    prediction, sums, schedules = top.table("prediction", {}), top.table("sums", {}), top.table("schedules", {})
    collectives = top.table("collectives", {})
    values["splits"] = _read_splits(top.table("splits", {}))
    top.finish()
    words = {one.name: layout.take(one.name, str(one.type), one.default) for one in _FIELDS}
    layout.finish()
    files = _read_action_files(schedules, "schedule", words["schedule"])
    collective_files = _read_action_files(collectives, "all_reduce", words["all_reduce"])
    for axis in sharded.data:
        if axis not in SHARD_AXES:
            raise sharded.error(axis, f"[shards.{axis}] names no axis that cuts parameters; known: {', '.join(SHARD_AXES)}")
    values["shards"] = tuple((axis, _read_cuts(sharded.table(axis))) for axis in sharded.data)
    values["prediction"] = _read_prediction(prediction) if prediction.data else None
    values["planning_time_s"] = float(search.take("planning_time_s", "float", 0.0))
    values["bound_gap"] = search.take("bound_gap", "float", None)
    values["candidates"] = tuple(_read_candidate(row, search, files) for row in search.take_rows("candidates", "list"))
    search.finish()
    chosen = sums.take("all_reduce", "str", str(AllReduceChoices()))
    sums.finish()
    try:
        values["sums"] = AllReduceChoices.parse(chosen)
        texts = {"actions": actions_of(words["schedule"], files), "collective": collective_text_of(words["all_reduce"], collective_files)}
        return Plan(layout=Layout(**words, **texts), **values)  # type: ignore[arg-type]
    except ShardwiseError as error:
        raise type(error)(f"{source}: {error}") from None


def _read_action_files(table: _PlanTable, key: str, chosen: str) -> dict[str, str]:
    """Return the texts of files of actions by name: none but the one that the layout's `key` has `chosen`."""
    files = {name: table.take(name, "str") for name in table.data}
    for name in files:
        if name != chosen:
            found = f"[layout] {key} = {quote_string(chosen)}"
            raise table.error(name, f"[{table.path[-1]}] has {quote_string(name)}, and {found}; set that, or remove the table")
    return files


class _PlanTable:
    """A table of the file during reading: the keys read so far, and the lines of its keys."""

    def __init__(self, data: dict[str, Any], path: tuple[str, ...], text: str, source: str) -> None:
        self.data, self.path, self.text, self.source = data, path, text, source
        self.taken_keys: list[str] = []

    def take(self, key: str, kind: str, *default: Any) -> Any:
        self.taken_keys.append(key)
        if key not in self.data:
            if default:
                return default[0]
            self.finish(only_close_to=key)
            where = f"[{'.'.join(self.path)}]" if self.path else "the top"
            raise ConfigError(f"{self.source}: {where} lacks {key} = ..., {_TYPES[kind][1]}")
        return self.check_type(key, self.data[key], kind)

    def check_type(self, key: str, value: Any, kind: str) -> Any:
        types, words = _TYPES[kind]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise self.error(key, f"{key} has {json.dumps(value, default=str)[:60]}, but it takes {words}")
        return value

    def table(self, key: str, *default: dict[str, Any]) -> _PlanTable:
        return _PlanTable(self.take(key, "dict", *default), (*self.path, key), self.text, self.source)

    def take_rows(self, key: str, kind: str) -> tuple[Any, ...]:
        return tuple(self.check_type(key, row, kind) for row in self.take(key, "list", []))

    def check_columns(self, key: str, row: list[Any], kinds: list[str]) -> list[Any]:
        if len(row) != len(kinds):
            raise self.error(key, f"a row of {key} has {len(row)} entries, but it takes {len(kinds)}: {json.dumps(row, default=str)[:60]}")
        return [self.check_type(key, value, kind) for value, kind in zip(row, kinds, strict=True)]

    def finish(self, only_close_to: str = "") -> None:
        """Refuse a key that was not read; while a key is missing, only one that may be its misspelling."""
        for key in self.data:
            if key in self.taken_keys:
                continue
            close = did_you_mean(key, [only_close_to] if only_close_to else self.taken_keys, form="{}")
            if only_close_to and not close:
                continue
            where = f" in [{'.'.join(self.path)}]" if self.path else ""
            raise self.error(key, f"unknown key {key}{where}; {close or 'known: ' + ', '.join(self.taken_keys)}")

    def error(self, key: str, reason: str) -> ConfigError:
        line = _line_of(self.text, (*self.path, key))
        return ConfigError(f"{self.source} line {line}: {reason}" if line else f"{self.source}: {reason}")


def _line_of(text: str, path: tuple[str, ...]) -> int:
    """Return the line of a key or table header, counted from 1; 0 where it is written in a form that is not searched (a.b = 1)."""
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.split("\n"), 1):
        if header := re.match(r"\s*\[\[?([^\[\]]+)\]", line):
            table = tuple(part.strip().strip("\"'") for part in header[1].split("."))
            if table == path:
                return number
        elif (key := re.match(r"\s*(\"(?:[^\"\\]|\\.)*\"|[^=\s]+)\s*=", line)) and (*table, key[1].strip("\"'")) == path:
            return number
    return 0


def _read_prediction(table: _PlanTable) -> Prediction:
    step, mfu, flops = (float(table.take(key, "float")) for key in ("step_time_s", "mfu", "model_flops"))
    parts = _read_parts(table, "parts_s", table.take_rows("parts_s", "list"))
    sizes = table.table("memory_bytes")
    memory = MemoryBreakdown(**{key: float(sizes.take(key, "float", 0.0)) for key in _MEMORY})
    sizes.finish()
    table.finish()
    return Prediction(step, mfu, flops, memory, parts)


def _read_parts(table: _PlanTable, key: str, rows: Sequence[Any]) -> tuple[tuple[str, float], ...]:
    pairs = (table.check_columns(key, table.check_type(key, row, "list"), ["str", "float"]) for row in rows)
    return tuple((name, float(seconds)) for name, seconds in pairs)


def _read_candidate(row: list[Any], table: _PlanTable, files: Mapping[str, str]) -> LayoutCandidate:
    try:
        layout = Layout.parse(table.check_type("candidates", row[0] if row else None, "str"), files)
    except LayoutError as error:
        raise table.error("candidates", f"a candidate's layout: {error}") from None
    if len(row) == 2:
        return LayoutCandidate(layout, None, table.check_columns("candidates", row, ["str", "str"])[1])
    _, note, step, mfu, flops, sizes, parts = table.check_columns(
        "candidates", row, ["str", "str", "float", "float", "float", "list", "list"]
    )
    memory = MemoryBreakdown(*map(float, table.check_columns("candidates", sizes, ["float"] * len(_MEMORY))))
    priced = Prediction(float(step), float(mfu), float(flops), memory, _read_parts(table, "candidates", parts))
    return LayoutCandidate(layout, priced, note)


def _read_cuts(table: _PlanTable) -> tuple[tuple[str, int], ...]:
    cuts = tuple((name, int(table.take(name, "int"))) for name in table.data)
    for name, dim in cuts:
        if dim < 0:
            raise table.error(name, f"{name} = {dim}; dimensions are counted from 0")
    return cuts


def _format_candidate(candidate: LayoutCandidate) -> str:
    head = [quote_string(str(candidate.layout)), quote_string(candidate.note)]
    if not candidate.prediction:
        return _format_list(*head)
    p = candidate.prediction
    sizes = _format_list(*(_format_number(getattr(p.memory, key)) for key in _MEMORY))
    return _format_list(
        *head, _format_number(p.step_time_s), _format_number(p.mfu), _format_number(p.model_flops), sizes, _format_parts(p.parts)
    )


def _format_parts(parts: tuple[tuple[str, float], ...]) -> str:
    return _format_list(*(_format_list(quote_string(name), _format_number(seconds)) for name, seconds in parts))


def _format_array(key: str, rows: list[str]) -> list[str]:
    return [f"{key} = [", *(f"    {row}," for row in rows), "]"]


def _format_list(*items: str) -> str:
    return f"[{', '.join(items)}]"


def _format_number(number: float) -> str:
    return str(number) if isinstance(number, int) else repr(float(number))


def _multiline_string(text: str) -> str:
    """Format a TOML string of several lines, each as it is in the text."""
    lines = "\n".join(quote_string(line)[1:-1] for line in text.split("\n"))
    return f'"""\n{lines}"""'
