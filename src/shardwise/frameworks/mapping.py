"""Mapping between layouts and another framework's configuration, declared once and used by export and by import alike.

A `Framework` has rows, each a word of ours beside its key; what is no single key is written and read by a pair of functions in the
framework's file. Words are a layout's keys and `micro_batch`, `global_batch`, `sequence`, `devices`, `model`, and a model's sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import gcd
from typing import Any

from shardwise.errors import Infeasible, LayoutError, UsageError
from shardwise.plan.ir.precision import MIXED, PRECISIONS
from shardwise.plan.layout import DEFAULTS, KEYS, Layout
from shardwise.plan.residency import strip_layers

Words = dict[str, Any]
_ABSENT = (None, "auto", "null", "None", "")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


_BFLOAT16 = "bfloat16"  # their word for both: what they hold in 16 bits, and update in 32, is theirs to say
_AUTOCAST_TRAINERS = ("accelerate", "transformers", "lightning", "axolotl", "pytorch")


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A word and its key. `default`: the word's value where the key is absent; `values`: the framework's value for each of ours, where
    they differ; `aliases`: other keys with the same meaning, which are read only. At its default a word is not written, unless `always`."""

    word: str
    key: str
    default: Any = 1
    values: Mapping[Any, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    always: bool = False


@dataclass(frozen=True, slots=True)
class LostKey:
    """A choice that a framework cannot say: what it does instead, and why. `instead` is None where only its file cannot say it."""

    key: str
    value: Any
    instead: Any
    why: str


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What is exported. `layers`: number of repeated blocks; `block`: their class; `stage_layers`: blocks of every stage, if known;
    `stage_starts`: modules that stages after the first begin with;
    `sizes`: of the model, by our names (hidden, heads, ...)."""

    layout: Layout
    batch_size: int
    model: str = ""
    sequence: int = 0
    layers: int = 0
    block: str = ""
    stage_layers: tuple[int, ...] = ()
    stage_starts: tuple[str, ...] = ()
    sizes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def micro_batch(self) -> int:
        """Samples of a data replica in a microbatch. Raises LayoutError where they differ, which other frameworks cannot say."""
        count, rest = divmod(self.batch_size, self.layout.data * self.layout.microbatches)
        if rest:
            raise LayoutError(
                f"a batch of {self.batch_size} is unequal microbatches over data={self.layout.data} microbatches="
                f"{self.layout.microbatches}, which only shardwise has; use a batch that they divide"
            )
        return count

    @property
    def words(self) -> Words:
        """Return all words of the request."""
        layout = {key: getattr(self.layout, key) for key in KEYS}
        rest = {
            "micro_batch": self.micro_batch,
            "global_batch": self.batch_size,
            "sequence": self.sequence or None,
            "devices": self.layout.num_ranks,
            "model": self.model,
            "layers": self.layers or None,
        }
        return {**layout, **rest, **self.sizes}


@dataclass(frozen=True, slots=True)
class ExportedConfiguration:
    """Texts by file name, the first one the configuration itself; what was lost, what must be said elsewhere, and the layout that the
    framework runs."""

    framework: str
    files: Mapping[str, str]
    layout: Layout
    lost: tuple[LostKey, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ImportedConfiguration:
    """A configuration as a layout. `unpriced`: (key, value, why it is not in the price)."""

    framework: str
    layout: Layout
    batch_size: int
    micro_batch: int
    sequence: int = 0
    model: str = ""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    unpriced: tuple[tuple[str, str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def run_layout(self) -> Layout:
        """Return the layout as the framework runs it, for prices: its bfloat16 holds weights in 16 bits and updates 32-bit ones, except
        where trainers run unsharded weights under autocast."""
        is_autocast = self.framework in _AUTOCAST_TRAINERS and not self.layout.zero
        return self.layout if is_autocast or self.layout.precision != _BFLOAT16 else replace(self.layout, precision=MIXED)


class ConfigurationKeys:
    """Values of a file by dotted key; remembers which were read. A name matches a whole key or the end of one (`a.b` for `x.a.b`)."""

    def __init__(self, values: Mapping[str, Any], files: Mapping[str, str] | None = None) -> None:
        self.values = {".".join(part.lstrip("-") for part in key.split(".")).replace("-", "_"): value for key, value in values.items()}
        self.files = dict(files or {})
        self.read: set[str] = set()
        self.why: dict[str, str] = {}
        self.notes: list[str] = []

    def find(self, *names: str) -> list[str]:
        """Return the keys that one of the names matches, whole ones first."""
        whole = [key for name in names for key in self.values if key == name]
        return whole + [key for name in names for key in self.values if key.endswith("." + name) and key not in whole]

    def has(self, *names: str) -> bool:
        return any(self.values[key] not in _ABSENT for key in self.find(*names))

    def take(self, *names: str, default: Any = None) -> Any:
        """Return the first value under one of the names, and mark them all as read; `default` where there is none, or it is `auto`."""
        found = self.find(*names)
        self.read.update(found)
        return next((self.values[key] for key in found if self.values[key] not in _ABSENT), default)

    def take_flag(self, *names: str, default: bool = False) -> bool:
        """Return a switch; a flag without a value is on."""
        value = self.take(*names, default=default)
        if isinstance(value, str):
            if value.lower() in _TRUE + _FALSE:
                return value.lower() in _TRUE
            return True
        return bool(value)

    def take_number(self, *names: str, default: int = 0) -> int:
        """Return a whole number. Raises UsageError where the value is none."""
        value = self.take(*names, default=default)
        return parse_number(names[0], value)

    def leave(self, name: str, why: str) -> None:
        """Say why keys of this name are not in the price."""
        for key in self.find(name):
            self.why[key] = why
            self.read.discard(key)


def parse_number(name: str, value: Any) -> int:
    """Parse a whole number, `8` or `5e8`."""
    if value is True:
        raise UsageError(f"{name} has no value in the file: a variable that is set elsewhere? Write its value there")
    try:
        number = float(str(value).replace("_", ""))
    except ValueError:
        raise UsageError(f"{name} = {value!r} is not a number here; set it on the command line or in the file") from None
    if number != int(number):
        raise UsageError(f"{name} = {value!r} is not a whole number")
    return int(number)


_EIGHT_BIT_KEY = re.compile(r"(?:^|[._])(?:(?:mx|nv)?fp[48]|float8|int8|quantiz\w*|te_recipe\w*|torchao)(?:$|[._])|weight_dtype$")
_EIGHT_BIT_VALUE = re.compile(r"fp8|float8|mxfp|fp4|mx_|transformer.?engine|int8")
_SIXTEEN = (("bfloat16", ("bf16", "bfloat16")), ("float16", ("fp16", "float16", "16")), ("float64", ("64", "double")))


def parse_precision(text: str) -> tuple[str, str]:
    """Return our word for what people call a precision, and why it is not all of the price; of 8-bit recipes, what surrounds them.

    >>> parse_precision("bf16-mixed"), parse_precision("transformer-engine-float16")[0], parse_precision("no")
    (('bfloat16', ''), 'float16', ('float32', ''))
    """
    low = text.lower()
    word = next((ours for ours, names in _SIXTEEN if any(name in low for name in names)), "float32")
    if _EIGHT_BIT_VALUE.search(low):
        word = "bfloat16" if word == "float32" else word
        return word, f"products in 8 bits ({text}) are not priced: {word} is"
    if low.endswith("-true") and word in ("bfloat16", "float16"):
        return word, f"{text} has no 32-bit copy of the weights: {word} with one is priced"
    return word, ""


def shard_within_hosts(words: Words, per_host: int) -> None:
    """Set `shard`, where ZeRO shards among the ranks of a host and copies over hosts; `per_host` counts all of a host's ranks."""
    replicas = per_host // max(1, words.get("tensor", 1) * words.get("context", 1))
    if replicas >= 1 and words.get("zero") and (words.get("devices") or 0) > per_host:
        words["shard"] = replicas


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework's configuration. `signs`: keys by which a file of its own is recognised. `says`: values of the layout's keys that it can
    say, all for None; a key that is not there must be at its default. `loses`: keys that are told as lost, with what is run instead.
    `clip_key`: the key by which its trainer clips gradients at a norm of 1.0 unless it says otherwise, which changes the training.
    `stacks`: its efficiency set by the beginning of a device's name; `compiled_stack`: that of its compiled runs on other devices."""

    name: str
    title: str
    file_name: str
    signs: tuple[str, ...]
    rows: tuple[KeyRow, ...]
    says: Mapping[str, tuple[Any, ...] | None]
    read: Callable[[ConfigurationKeys, Words], None]
    write: Callable[[ExportRequest], Mapping[str, str]] | None = None
    loses: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    check: Callable[[ExportRequest], str] = lambda request: ""
    notes: Callable[[ExportRequest], list[str]] = lambda request: []
    unpriced: Mapping[str, str] = field(default_factory=dict)
    clip_key: str = ""
    stacks: Mapping[str, str] = field(default_factory=dict)
    compiled_stack: str = ""

    def stack_of(self, device: str, layout: Layout) -> str:
        """Return the efficiency set of a run of this framework; "" where none is known."""
        known = next((stack for start, stack in self.stacks.items() if device.startswith(start)), "")
        return known or (self.compiled_stack if layout.compile == "on" else "")


ALWAYS_LOST: dict[str, tuple[Any, str]] = {
    "threads": (0, "the framework's launcher decides"),
    "all_reduce": ("auto", "NCCL chooses the algorithm"),
    "lend": ("auto", "ranks of CPUs only"),
}
# Of frameworks that have no key for these; with one, another value is refused by name.
LOST_WITHOUT_KEY: dict[str, tuple[Any, str]] = {
    "neighbours": ("branch", "it orders ranks itself"),
    "segment": (1, "it recomputes block by block"),
}
NO_KEY = "it has no key for it"


def export_layout(framework: Framework, request: ExportRequest) -> ExportedConfiguration:
    """Write a layout as a framework's configuration.

    Raises:
        LayoutError: a choice that the framework cannot say, by name, with what it can.
    """
    if framework.write is None:
        raise UsageError(f"{framework.title} is read by import only")
    precision, lost = request.layout.precision, list[LostKey]()
    losses = {**ALWAYS_LOST, **{key: one for key, one in LOST_WITHOUT_KEY.items() if key not in framework.says}, **framework.loses}
    layout = replace(request.layout, precision=_BFLOAT16 if precision == MIXED else precision)
    layout = replace(layout, shard=layout.shard if layout.zero else 0)  # without effect there
    for key in KEYS:
        value = getattr(layout, key)
        if key == "tensor" and layout.grid:
            value = layout.grid
            if "grid" not in framework.says:
                raise LayoutError(
                    f"{framework.title} cannot say tensor={value}: its tensor ranks are in a line; use tensor={layout.tensor}"
                )
        if value == DEFAULTS[key] or _can_say(framework, key, value):
            continue
        if key == "precision" and PRECISIONS[value].linear_dtype and _can_say(framework, key, _BFLOAT16):
            lost.append(LostKey(key, value, MIXED, "it has no word for this recipe of products in 8 bits"))
            layout, precision = replace(layout, precision=_BFLOAT16), MIXED
            continue
        if key in losses:
            instead, why = losses[key]
            lost.append(LostKey(key, value, instead, why))
            layout = replace(layout, **{key: instead})
            continue
        values = framework.says.get(key, ())
        remedy = " or ".join(f"{key}={one}" for one in values or (DEFAULTS[key],))
        raise LayoutError(f"{framework.title} cannot say {key}={value}: {NO_KEY}; use {remedy}, or train it with shardwise")
    request = replace(request, layout=layout)
    if reason := framework.check(request):
        raise LayoutError(f"{framework.title}: {reason}")
    clipping = f"its trainer clips gradients at a norm of 1.0 unless {framework.clip_key} says otherwise; a layout clips nothing"
    notes = (*framework.notes(request), *([clipping] if framework.clip_key else []))
    run = replace(layout, precision=precision) if layout.precision == _BFLOAT16 else layout
    return ExportedConfiguration(framework.name, framework.write(request), run, tuple(lost), notes)


def _can_say(framework: Framework, key: str, value: Any) -> bool:
    if key not in framework.says:
        return False
    values = framework.says[key]
    if values is None:
        return not (key in ("recompute", "offload") and ":" in str(value))
    partial = f"{strip_layers(key, value)}:N" if isinstance(value, str) and ":" in value and value.partition(":")[2].isdecimal() else value
    return value in values or partial in values


def write_rows(rows: tuple[KeyRow, ...], words: Words) -> dict[str, Any]:
    """Return the framework's values by dotted key."""
    written: dict[str, Any] = {}
    for row in rows:
        value = words.get(row.word)
        if value is None or (value == row.default and not row.always) or (row.values and value not in row.values):
            continue
        written[row.key] = row.values.get(value, value)
    return written


def read_rows(rows: tuple[KeyRow, ...], keys: ConfigurationKeys) -> Words:
    """Return our words from a framework's values."""
    words: Words = {}
    for row in rows:
        value = keys.take(row.key, *row.aliases)
        if value is None:
            words.setdefault(row.word, row.default)
            continue
        back = {str(theirs).lower(): ours for ours, theirs in row.values.items()}
        if row.word == "precision" and row.values and str(value).lower() not in back:
            words[row.word], why = parse_precision(str(value))
            if why:
                keys.leave(row.key, why)
        elif row.values:
            if str(value).lower() not in back:
                keys.leave(row.key, f"{value} has no word of ours; {row.word}={row.default} is priced")
            words[row.word] = back.get(str(value).lower(), row.default)
        else:
            words[row.word] = parse_number(row.key, value) if isinstance(row.default, int) else value
    return words


def import_layout(framework: Framework, keys: ConfigurationKeys, devices: int = 0, words: Words | None = None) -> ImportedConfiguration:
    """Read a framework's values as a layout. `devices`: their number, where given; `words`: others that the command line gives.

    Raises:
        UsageError: the number of devices is in neither. Infeasible: sizes that do not divide.
    """
    found = read_rows(framework.rows, keys)
    found.update({key: value for key, value in (words or {}).items() if value})
    if devices:
        found["devices"] = devices
    framework.read(keys, found)
    found["devices"] = devices or found.get("devices") or 0
    layout, micro, notes = _layout_of_words(framework, found)
    for name, why in framework.unpriced.items():
        if not any(key in keys.read or _is_off(keys.values[key]) for key in keys.find(name)):
            keys.leave(name, why)
    _list_general(keys)
    unpriced = [(key, keys.values[key]) for key in keys.values if key not in keys.read]
    unpriced.sort(key=lambda pair: pair[0] not in keys.why)
    return ImportedConfiguration(
        framework.name, layout, micro * layout.data * layout.microbatches, micro, int(found.get("sequence") or 0),
        str(found.get("model") or ""), {key: found[key] for key in MODEL_SIZES if found.get(key)},
        tuple((key, str(value), keys.why.get(key, "")) for key, value in unpriced), (*notes, *dict.fromkeys(keys.notes)),
    )  # fmt: skip


def _list_general(keys: ConfigurationKeys) -> None:
    """List what means the same in every framework's file: 8-bit recipes that nobody read, and values that its trainer fills in."""
    for key, value in keys.values.items():
        text = str(value).lower()
        is_narrow = _EIGHT_BIT_KEY.search(key.lower()) or (len(text) < 40 and "/" not in text and _EIGHT_BIT_VALUE.search(text))
        if key not in keys.read and key not in keys.why and is_narrow and not _is_off(value):
            keys.why[key] = "8-bit numbers of this recipe are not priced"
        elif value == "auto" and key not in keys.why:
            keys.why[key] = "the trainer's arguments say it: give them beside, as a command line for example"
            keys.read.discard(key)


def _is_off(value: Any) -> bool:
    """Return whether a value switches nothing on; AdamW is what is priced."""
    return not value or str(value).lower() in (*_FALSE, "none", "null", "cpu_only") or str(value).lower() in _PRICED_OPTIMIZERS


_PRICED_OPTIMIZERS = ("adamw", "adam", "adamw_torch", "adamw_torch_fused", "adamw_hf")
MODEL_SIZES = ("layers", "hidden", "heads", "kv_heads", "feed_forward", "vocabulary", "experts", "top", "gated")


def _layout_of_words(framework: Framework, words: Words) -> tuple[Layout, int, list[str]]:
    """Return a layout, samples of a microbatch and replica, and what was adapted."""
    notes: list[str] = []
    per_replica = words["tensor"] * words.get("pipeline", 1) * words.get("context", 1)
    data = words.get("data") or 0
    if not data:
        devices = words["devices"]
        if not devices:
            raise UsageError(f"this {framework.title} configuration does not say on how many devices it runs; add --devices N or --cluster")
        if devices % per_replica:
            sizes = " x ".join(f"{key}={words[key]}" for key in ("tensor", "pipeline", "context") if words.get(key, 1) > 1)
            raise Infeasible(f"{sizes} are {per_replica} ranks, which do not divide {devices} devices; add --devices N for another number")
        data = devices // per_replica
    micro = int(words.get("micro_batch") or 1)
    microbatches = words.get("microbatches") or 0
    total = words.get("global_batch") or 0
    if not microbatches:
        microbatches, rest = divmod(total, micro * data) if total else (1, 0)
        if rest or not microbatches:
            raise Infeasible(f"a global batch of {total} is no multiple of {micro} samples on data={data} replicas; give another --devices")
    elif total and not words.get("micro_batch"):
        micro = max(1, total // (microbatches * data))
    expert = words.get("expert") or 1
    if data % expert:
        shared = gcd(expert, data)
        if expert % data and data % expert and shared == 1 and words["tensor"] == 1:
            raise Infeasible(
                f"expert={expert} does not divide data={data} replicas of {data * per_replica} devices; give another --devices"
            )
        notes.append(f"experts over {expert} ranks, tensor ranks among them, have no word of ours: expert={shared} is priced")
        expert = shared
    chosen = _layout_keys({**words, "data": data, "microbatches": microbatches, "expert": expert})
    for key, instead in (("compile", "off"), ("precision", _BFLOAT16)):
        is_special = chosen.get(key) == "on" or getattr(PRECISIONS.get(str(chosen.get(key))), "linear_dtype", "")
        try:
            return Layout(**chosen), micro, notes
        except LayoutError as error:
            if is_special:
                notes.append(f"{key}={chosen[key]} is not priced: {error}")
                chosen[key] = instead
    return Layout(**chosen), micro, notes


def _layout_keys(words: Words) -> Words:
    """Return the keys of a layout among words, without those that have no effect in it."""
    names = {one.name for one in fields(Layout)}
    chosen = {key: value for key, value in words.items() if key in names and value is not None}
    without = {"shard": not chosen.get("zero"), "attention": chosen.get("context", 1) == 1}
    without |= dict.fromkeys(("schedule", "chunks", "actions"), chosen.get("pipeline", 1) == 1)
    without["sequence_parallel"] = chosen.get("tensor", 1) == 1 and not chosen.get("grid")
    if chosen.get("shard") == 1:  # nothing is sharded in groups of one rank
        chosen["zero"], without["shard"] = 0, True
    return {key: value for key, value in chosen.items() if not without.get(key)}
