"""What-if changes to a plan, `gpus=128 seq=8192 zero=3`: parse them and derive the changed layouts. Pricing is elsewhere.

A change adapts only the keys that depend on it, and reports them: more devices become more data replicas, another size of `tensor` or
`pipeline` keeps the number of devices, and the microbatch size of a rank stays the same where the batch allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import gcd
from typing import TYPE_CHECKING

from shardwise.cli.pricing_context import PricingContext
from shardwise.cluster.resize import resize_cluster
from shardwise.errors import Infeasible, LayoutError, UsageError, did_you_mean
from shardwise.plan.ir.axis import spatial_ranks
from shardwise.plan.ir.choice import AUTO
from shardwise.plan.ir.compression import Compression
from shardwise.plan.ir.custom_collective import collective_text_of
from shardwise.plan.ir.custom_schedule import actions_of, is_schedule_file
from shardwise.plan.ir.grid import normalize_grid
from shardwise.plan.ir.schedule_sizes import CHUNKED
from shardwise.plan.layout import KEYS, Layout
from shardwise.plan.layout_words import CHOICES, refuse_word, resolve_aliases
from shardwise.plan.plan import Plan
from shardwise.plan.residency import Residency, refuse_segment
from shardwise.plan.unequal_ranks import parse_inner

if TYPE_CHECKING:
    from shardwise.cluster.cluster import Cluster

DEVICE_KEYS = ("gpus", "devices")
SEQUENCE_KEYS = ("seq", "sequence")
NON_LAYOUT_KEYS = (*DEVICE_KEYS, *SEQUENCE_KEYS, "batch", "cluster", "stack")
TEXT_KEYS = (*(field.name for field in fields(Layout) if field.type == "str" and field.name in KEYS), "cluster", "stack")
FROM_ZERO, MOST_DIGITS = ("zero", "threads", "staleness", "servers", "shard"), 9


@dataclass(frozen=True, slots=True)
class RequestedChange:
    """One `key=value` word of the command line."""

    key: str
    value: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}"

    @property
    def grid(self) -> tuple[int, str] | None:
        """Number of ranks of a grid such as `tensor=2x2`, and the grid in canonical form. Raises `LayoutError` for an invalid grid."""
        return normalize_grid(self.value, 1) if self.key == "tensor" and "x" in self.value else None

    @property
    def number(self) -> int:
        """The value as an integer. Raises `UsageError` where it is none, or out of the key's range."""
        least = 0 if self.key in FROM_ZERO else 1
        if not self.value.isdecimal() or len(self.value) > MOST_DIGITS or int(self.value) < least:
            example = 128 if self.key in NON_LAYOUT_KEYS else 2
            most = 10**MOST_DIGITS - 1
            raise UsageError(f"{self}: {self.key} is a whole number from {least} to {most:,}, for example {self.key}={example}")
        return int(self.value)


def parse_changes(words: Sequence[str]) -> tuple[RequestedChange, ...]:
    """Parse words `key=value`, each key once.

    >>> [str(c) for c in parse_changes(["gpus=128", "zero=3"])]
    ['gpus=128', 'zero=3']

    Raises:
        UsageError: no word, a word without a value, an unknown key (names the nearest) or a value that the key cannot have.
    """
    keys = (*NON_LAYOUT_KEYS, *KEYS)
    changes: list[RequestedChange] = []
    pairs = [word.partition("=")[::2] for text in words for word in text.replace(",", " ").split()]
    for key, value in resolve_aliases(pairs):
        word = f"{key}={value}"
        if not value:
            raise UsageError(f"{key!r} is not KEY=VALUE; for example gpus=128, seq=8192 or zero=3")
        if key not in keys:
            raise UsageError(f"unknown change {word}{did_you_mean(key, keys)}; known: {', '.join(keys)}")
        if any(change.key == key for change in changes):
            raise UsageError(f"{key} is given twice; compare values by running whatif for each")
        # The layers in `recompute=full:...` are parsed by the layout.
        from_file = key in ("schedule", "all_reduce") and is_schedule_file(value)
        if key in CHOICES and not from_file and (why := refuse_word(key, value)):
            raise UsageError(f"{word}: {why}")
        change = RequestedChange(key, value)
        if change.grid is not None:
            changes.append(change)
            continue
        if key == "compress":
            _ = Compression.parse(value)
        elif key not in TEXT_KEYS:
            _ = change.number
        changes.append(change)
    if not changes:
        raise UsageError("whatif needs something to change; for example gpus=128, seq=8192, recompute=full or zero=3")
    return tuple(changes)


def apply_changes(plan: Plan, setting: PricingContext, changes: Sequence[RequestedChange]) -> tuple[PricingContext, Layout, str]:
    """Return (pricing context, layout, description of the keys that were adapted) of a plan under changes.

    Raises:
        Infeasible: sizes that do not divide. LayoutError: choices that exclude each other. UsageError: an impossible cluster.
    """
    by_key = {change.key: change for change in changes}
    cluster = setting.cluster
    if "cluster" in by_key:
        from shardwise.cluster.cluster import Cluster  # here: the command starts fast

        cluster = Cluster.parse(by_key["cluster"].value)
    if "stack" in by_key:
        cluster = _with_efficiency_set(cluster, by_key["stack"].value)
    count = next((by_key[key].number for key in DEVICE_KEYS if key in by_key), None)
    if count is not None:
        cluster = resize_cluster(cluster, count)
    sequence = next((by_key[key].number for key in SEQUENCE_KEYS if key in by_key), None)
    batch = by_key["batch"].number if "batch" in by_key else None
    other = setting
    if cluster is not setting.cluster or sequence or batch:
        if sequence is not None and not setting.model.startswith("hf:") and ".py" not in setting.model:
            other = replace(setting.with_changes(cluster, batch, sequence), model=_at_sequence(setting.model, sequence), sequence=None)
        else:
            other = setting.with_changes(cluster, batch, sequence)
    # The number asked for, else all of the new cluster if the plan used all of the old one, else the same number.
    ranks = plan.layout.num_ranks
    if count is not None:
        ranks = count
    elif cluster is not setting.cluster:
        ranks = cluster.num_devices if ranks >= setting.cluster.num_devices or ranks > cluster.num_devices else ranks
    wanted: dict[str, int | str] = {}
    for key, change in by_key.items():
        if change.grid is not None:
            wanted["tensor"], wanted["grid"] = change.grid
        elif key in KEYS:
            wanted[key] = change.value if key in TEXT_KEYS else int(change.value)
    if not cluster.kind.shares_hosts and plan.layout.threads:
        wanted.setdefault("threads", 0)  # a number of the old machines' cores
    layout, moved = refit_layout(plan.layout, wanted, ranks, plan.batch_size, other.batch_size)
    return other, layout, moved


def _with_efficiency_set(cluster: Cluster, name: str) -> Cluster:
    """Return the cluster priced with another efficiency set: `serial` hides no communication, `eager` is autocast over float32 weights."""
    from shardwise.cost.calibration.efficiency import stack_of  # here: the command starts fast

    if cluster.kind.shares_hosts:  # processors, which are measured
        raise UsageError(f"stack={name} names an efficiency set of GPUs, and {cluster.name} has none; name GPUs with cluster=NAME")
    return replace(cluster, stack=stack_of(cluster.device, name).name)


REFIT_COUNTS = ("data", "tensor", "pipeline", "microbatches", "chunks", "expert", "branch")


def refit_layout(old: Layout, wanted: Mapping[str, int | str], ranks: int, old_batch: int, batch: int) -> tuple[Layout, str]:
    """Return `old` with `wanted` on `ranks` devices, other keys adapted; and a description of what was adapted.

    >>> layout, moved = refit_layout(Layout(data=8, tensor=8, microbatches=4), {"tensor": 4}, 64, 1024, 1024)
    >>> str(layout), moved
    ('data=16 tensor=4 pipeline=1 microbatches=2', 'data 8 to 16, microbatches 4 to 2')
    """
    sizes = {key: wanted.get(key, getattr(old, key)) for key in REFIT_COUNTS}
    n = {key: int(value) for key, value in sizes.items()}
    choices: dict[str, int | str] = {key: value for key, value in wanted.items() if key not in n}
    if "tensor" in wanted:
        choices.setdefault("grid", "")  # a count without a grid is one-dimensional
    inner = str(wanted.get("inner", "" if {"data", "tensor", "pipeline"} & set(wanted) else old.inner))
    choices["inner"] = inner
    if inner:
        (n["data"], n["tensor"]), *later_stages = parse_inner(inner)
        n["pipeline"] = n["pipeline"] if "pipeline" in wanted else 1 + len(later_stages)
    elif "data" not in wanted:
        spatial, context = str(wanted.get("spatial", old.spatial)), int(wanted.get("context", old.context))
        ranks_per_replica = n["tensor"] * n["pipeline"] * n["branch"] * context * spatial_ranks(spatial)
        if ranks % ranks_per_replica:
            pieces = f" x context={context}" * (context > 1) + f" x spatial={spatial}" * (spatial != "1")
            raise Infeasible(
                f"{ranks} devices do not divide into tensor={n['tensor']} x pipeline={n['pipeline']}{pieces}; change one of them as well"
            )
        n["data"] = ranks // ranks_per_replica
    if batch < n["data"]:
        raise Infeasible(f"a batch of {batch} has no sample for each of data={n['data']}; change batch= or another axis as well")
    if n["data"] != old.data:
        choices.setdefault("shares", "")  # the shares belong to the old replicas
    if "microbatches" not in wanted:
        rows = max(1, old_batch // (old.data * old.microbatches))
        each, most = -(-batch // n["data"]), batch // n["data"]
        n["microbatches"] = next((m for m in range(max(1, -(-each // rows)), most + 1) if each % m == 0), most)
    schedule = str(wanted.get("schedule", old.schedule))
    has_other_sizes = any(n[key] != getattr(old, key) for key in ("pipeline", "microbatches", "chunks"))
    if old.actions and has_other_sizes and "schedule" not in wanted:
        schedule = "1f1b"  # a user-defined schedule fits its own ranks and microbatches only
    if "chunks" in wanted and n["chunks"] > 1 and "schedule" not in wanted:
        schedule = "interleaved"
    if n["pipeline"] == 1 or schedule not in CHUNKED:
        n["chunks"] = n["chunks"] if "chunks" in wanted else 1
        schedule = "1f1b" if schedule in CHUNKED and "schedule" not in wanted else schedule
    elif n["chunks"] == 1:
        n["chunks"] = 2
    if "expert" not in wanted:
        n["expert"] = gcd(n["expert"], n["data"])
    if "segment" not in wanted:
        residency = Residency.parse(str(wanted.get("recompute", old.recompute)), str(wanted.get("offload", old.offload)), old.segment)
        if refuse_segment(residency, int(wanted.get("zero", old.zero))):
            choices["segment"] = 1
    choices |= _refit_all_reduce(old, wanted, n["data"])
    actions = old.actions if schedule == old.schedule and "schedule" not in wanted else actions_of(schedule)
    layout = replace(old, **{**choices, **n, "schedule": schedule, "actions": actions, "begins": ()})  # type: ignore[arg-type]
    moved = [
        " to ".join((f"{key} {getattr(old, key)}", str(getattr(layout, key)))) if getattr(layout, key) != "" else f"without {key}"
        for key in KEYS
        if key not in wanted and getattr(old, key) != getattr(layout, key)
    ]
    return layout, ", ".join(moved)


def _refit_all_reduce(old: Layout, wanted: Mapping[str, int | str], data: int) -> dict[str, int | str]:
    """Return the all-reduce and its text for so many replicas: a user-defined one is for its own ranks only."""
    kept = AUTO if old.collective and data != old.data else old.all_reduce
    all_reduce = str(wanted.get("all_reduce", kept))
    return {"all_reduce": all_reduce, "collective": old.collective if all_reduce == old.all_reduce else collective_text_of(all_reduce)}


def neighbouring_layouts(plan: Plan, num_devices: int) -> list[tuple[str, Layout]]:
    """Return (choice, layout) of layouts that differ from the plan's in one choice and the keys that depend on it."""
    old = plan.layout
    tries: list[tuple[str, int | str]] = []
    for key in ("data", "tensor", "pipeline", "microbatches"):
        now = getattr(old, key)
        tries += [(key, now * 2), *([(key, now // 2)] if now % 2 == 0 else [])]
    tries += [("zero", stage) for stage in range(4) if stage != old.zero and (old.replicas > 1 or stage < old.zero)]
    for key in ("schedule", "recompute", "precision", "offload", "sequence_parallel", "sample_parallel"):
        tries += [(key, value) for value in CHOICES[key] if value != getattr(old, key)]
    if old.recomputes_layers:
        tries += [("segment", old.segment * 2), *([("segment", old.segment // 2)] if old.segment % 2 == 0 else [])]
    if old.chunks > 1:
        tries.append(("chunks", old.chunks * 2))
    layouts: list[tuple[str, Layout]] = []
    for key, value in tries:
        if (
            (key == "schedule" and old.pipeline == 1)
            or (key in ("sequence_parallel", "sample_parallel") and old.tensor == 1)
            or value == "float64"
        ):
            continue
        if key == "schedule" and value == "sequential" and old.microbatches > 1:
            continue
        try:
            ranks = old.num_ranks
            if key == "data":
                ranks = ranks // old.data * int(value)
                if ranks > num_devices:
                    continue
            layout, _ = refit_layout(old, {key: value}, ranks, plan.batch_size, plan.batch_size)
        except (Infeasible, LayoutError):
            continue
        if layout not in [neighbour for _, neighbour in layouts]:
            layouts.append((f"{key}={value}", layout))
    return layouts


def _at_sequence(model: str, sequence: int) -> str:
    """Return a zoo name with its sequence length replaced.

    >>> _at_sequence("gpt:layers=2,sequence=64", 128), _at_sequence("gpt-39b", 128)
    ('gpt:layers=2,sequence=128', 'gpt-39b:sequence=128')
    """
    name, _, words = model.partition(":")
    arguments = [word for word in words.split(",") if word and word.partition("=")[0].strip() != "sequence"]
    return f"{name}:{','.join([*arguments, f'sequence={sequence}'])}"
