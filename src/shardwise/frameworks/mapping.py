"""Mapping between layouts and another framework's configuration, declared once and used by export and by import alike.

A `Framework` has rows, each a word of ours beside its key; what is no single key is written and read by a pair of functions in the
framework's file. Words are a layout's keys and `micro_batch`, `global_batch`, `sequence`, `devices`, `model`, and a model's sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import gcd
from typing import Any

from shardwise.errors import Infeasible, LayoutError, UsageError
from shardwise.plan.layout import DEFAULTS, KEYS, Layout
from shardwise.plan.residency import strip_layers

Words = dict[str, Any]
_ABSENT = (None, "auto", "null", "None", "")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


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


class ConfigurationKeys:
    """Values of a file by dotted key; remembers which were read. A name matches a whole key or the end of one (`a.b` for `x.a.b`)."""

    def __init__(self, values: Mapping[str, Any], files: Mapping[str, str] | None = None) -> None:
        self.values = {key.replace("-", "_"): value for key, value in values.items()}
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
    try:
        number = float(str(value).replace("_", ""))
    except ValueError:
        raise UsageError(f"{name} = {value!r} is not a number here; set it on the command line or in the file") from None
    if number != int(number):
        raise UsageError(f"{name} = {value!r} is not a whole number")
    return int(number)


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework's configuration. `signs`: keys by which a file of its own is recognised. `says`: values of the layout's keys that it can
    say, all for None; a key that is not there must be at its default. `loses`: keys that are told as lost, with what is run instead."""

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
    stacks: Mapping[str, str] = field(default_factory=dict)


ALWAYS_LOST: dict[str, tuple[Any, str]] = {
    "threads": (0, "the framework's launcher decides"),
    "all_reduce": ("auto", "NCCL chooses the algorithm"),
    "lend": ("auto", "ranks of CPUs only"),
}
NO_KEY = "it has no key for it"


def export_layout(framework: Framework, request: ExportRequest) -> ExportedConfiguration:
    """Write a layout as a framework's configuration.

    Raises:
        LayoutError: a choice that the framework cannot say, by name, with what it can.
    """
    if framework.write is None:
        raise UsageError(f"{framework.title} is read by import only")
    layout, lost = request.layout, []
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
        if key in {**ALWAYS_LOST, **framework.loses}:
            instead, why = {**ALWAYS_LOST, **framework.loses}[key]
            lost.append(LostKey(key, value, instead, why))
            layout = replace(layout, **{key: instead})
            continue
        values = framework.says.get(key, ())
        remedy = " or ".join(f"{key}={one}" for one in values or (DEFAULTS[key],))
        raise LayoutError(f"{framework.title} cannot say {key}={value}: {NO_KEY}; use {remedy}, or train it with shardwise")
    request = replace(request, layout=layout)
    if reason := framework.check(request):
        raise LayoutError(f"{framework.title}: {reason}")
    return ExportedConfiguration(framework.name, framework.write(request), layout, tuple(lost), tuple(framework.notes(request)))


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
        if row.values:
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
    framework.read(keys, found)
    found["devices"] = devices or found.get("devices") or 0
    layout, micro, notes = _layout_of_words(framework, found)
    for name, why in framework.unpriced.items():
        if not any(key in keys.read or _is_off(keys.values[key]) for key in keys.find(name)):
            keys.leave(name, why)
    unpriced = [(key, keys.values[key]) for key in keys.values if key not in keys.read]
    unpriced.sort(key=lambda pair: pair[0] not in keys.why)
    return ImportedConfiguration(
        framework.name, layout, micro * layout.data * layout.microbatches, micro, int(found.get("sequence") or 0),
        str(found.get("model") or ""), {key: found[key] for key in MODEL_SIZES if found.get(key)},
        tuple((key, str(value), keys.why.get(key, "")) for key, value in unpriced), (*notes, *dict.fromkeys(keys.notes)),
    )  # fmt: skip


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
    names = {one.name for one in fields(Layout)}
    chosen = {key: value for key, value in words.items() if key in names and value is not None}
    chosen |= {"data": data, "microbatches": microbatches, "expert": expert}
    if chosen.get("tensor", 1) == 1 and not chosen.get("grid"):
        chosen["sequence_parallel"] = "off"
    if chosen.get("context", 1) == 1:
        chosen.pop("attention", None)
    if chosen.get("pipeline", 1) == 1:
        for key in ("schedule", "chunks", "actions"):
            chosen.pop(key, None)
    if chosen.get("compile") == "on":
        try:
            return Layout(**chosen), micro, notes
        except LayoutError as error:
            notes.append(f"compiled, which is not priced: {error}")
            chosen["compile"] = "off"
    return Layout(**chosen), micro, notes
