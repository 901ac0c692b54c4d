"""`gpus=128 seq=8192 zero=3` as changes to a plan. In: a plan, its setting, words. Out: layouts in settings, to be priced.

A change moves what hangs on it and nothing else: more devices become more data replicas, another size of `tensor` or `pipeline` keeps
the number of devices, and the samples that a rank computes at once stay as many where the batch allows. What moved is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import gcd

from weft.cli.setting import Setting
from weft.cluster.resize import resized
from weft.errors import Infeasible, LayoutError, UsageError, nearest
from weft.plan.axis import spatial_ranks
from weft.plan.compression import Compression
from weft.plan.custom_schedule import actions_of, is_file
from weft.plan.grid import checked_grid
from weft.plan.inner import parse_inner
from weft.plan.layout import CHOICES, KEYS, Layout, refuse_word
from weft.plan.plan import Plan
from weft.plan.residency import Residency, refuse_segment
from weft.plan.schedule_sizes import CHUNKED

DEVICES = ("gpus", "devices")
SEQUENCE = ("seq", "sequence")
OTHERS = (*DEVICES, *SEQUENCE, "batch", "cluster")
WORDS = tuple(one.name for one in fields(Layout) if one.type == "str" and one.name in KEYS)
FROM_ZERO, MOST_DIGITS = ("zero", "threads", "staleness", "servers"), 9


@dataclass(frozen=True, slots=True)
class Change:
    """One word of the command line."""

    key: str
    value: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}"

    @property
    def grid(self) -> tuple[int, str] | None:
        """Of `tensor=2x2`: how many ranks that are, and the grid in its one form. Raises `LayoutError` where it is none."""
        return checked_grid(self.value, 1) if self.key == "tensor" and "x" in self.value else None

    @property
    def number(self) -> int:
        """Raises `UsageError` where the value is no whole number, or too small or large for its key."""
        least = 0 if self.key in FROM_ZERO else 1
        if not self.value.isdecimal() or len(self.value) > MOST_DIGITS or int(self.value) < least:
            example = 128 if self.key in OTHERS else 2
            most = 10**MOST_DIGITS - 1
            raise UsageError(f"{self}: {self.key} is a whole number from {least} to {most:,}, for example {self.key}={example}")
        return int(self.value)


def parse_changes(words: Sequence[str]) -> tuple[Change, ...]:
    """Words `key=value`, each key once.

    >>> [str(c) for c in parse_changes(["gpus=128", "zero=3"])]
    ['gpus=128', 'zero=3']

    Raises:
        UsageError: no word, a word without a value, an unknown key (names the nearest) or a value that the key cannot have.
    """
    keys = (*OTHERS, *KEYS)
    changes: list[Change] = []
    for word in (w for text in words for w in text.replace(",", " ").split()):
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise UsageError(f"{word!r} is not KEY=VALUE; for example gpus=128, seq=8192 or zero=3")
        if key not in keys:
            raise UsageError(f"unknown change {word}{nearest(key, keys)}; known: {', '.join(keys)}")
        if any(change.key == key for change in changes):
            raise UsageError(f"{key} is given twice; compare values by running whatif for each")
        # Which layers `recompute=full:...` names is for the layout to read.
        from_file = key == "schedule" and is_file(value)
        if key in CHOICES and not from_file and (why := refuse_word(key, value)):
            raise UsageError(f"{word}: {why}")
        change = Change(key, value)
        if change.grid is not None:
            changes.append(change)
            continue
        if key == "compress":
            _ = Compression.parse(value)
        elif key not in WORDS and key != "cluster":
            _ = change.number
        changes.append(change)
    if not changes:
        raise UsageError("whatif needs something to change; for example gpus=128, seq=8192, recompute=full or zero=3")
    return tuple(changes)


def apply(plan: Plan, setting: Setting, changes: Sequence[Change]) -> tuple[Setting, Layout, str]:
    """(setting, layout, what moved along) of a plan under changes.

    Raises:
        Infeasible: sizes that do not divide. LayoutError: choices that exclude each other. UsageError: machines that cannot be.
    """
    by_key = {change.key: change for change in changes}
    cluster = setting.cluster
    if "cluster" in by_key:
        from weft.cluster.cluster import Cluster

        cluster = Cluster.parse(by_key["cluster"].value)
    count = next((by_key[key].number for key in DEVICES if key in by_key), None)
    if count is not None:
        cluster = resized(cluster, count)
    sequence = next((by_key[key].number for key in SEQUENCE if key in by_key), None)
    batch = by_key["batch"].number if "batch" in by_key else None
    other = setting
    if cluster is not setting.cluster or sequence or batch:
        if sequence is not None and not setting.model.startswith("hf:") and ".py" not in setting.model:
            other = replace(setting.changed(cluster, batch, sequence), model=_at_sequence(setting.model, sequence), sequence=None)
        else:
            other = setting.changed(cluster, batch, sequence)
    # As many as are asked for, else as many of the new machines as the plan used of the old ones.
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
            wanted[key] = change.value if key in WORDS else int(change.value)
    if not cluster.kind.shares_hosts and plan.layout.threads:
        wanted.setdefault("threads", 0)  # of cores that the plan was for
    layout, moved = moved_along(plan.layout, wanted, ranks, plan.batch_size, other.batch_size)
    return other, layout, moved


def moved_along(old: Layout, wanted: Mapping[str, int | str], ranks: int, old_batch: int, batch: int) -> tuple[Layout, str]:
    """`old` with `wanted` on `ranks` devices, the rest fitted to it; and in words what was fitted.

    >>> layout, moved = moved_along(Layout(data=8, tensor=8, microbatches=4), {"tensor": 4}, 64, 1024, 1024)
    >>> str(layout), moved
    ('data=16 tensor=4 pipeline=1 microbatches=2', 'data 8 to 16, microbatches 4 to 2')
    """
    counts = ("data", "tensor", "pipeline", "microbatches", "chunks", "expert", "branch")
    sizes = {key: wanted.get(key, getattr(old, key)) for key in counts}
    n = {key: int(value) for key, value in sizes.items()}
    choices: dict[str, int | str] = {key: value for key, value in wanted.items() if key not in n}
    if "tensor" in wanted:
        choices.setdefault("grid", "")  # a count of tensor ranks is a line of them
    inner = str(wanted.get("inner", "" if {"data", "tensor", "pipeline"} & set(wanted) else old.inner))
    choices["inner"] = inner
    if inner:
        (n["data"], n["tensor"]), *others = parse_inner(inner)
        n["pipeline"] = n["pipeline"] if "pipeline" in wanted else 1 + len(others)
    elif "data" not in wanted:
        spatial, context = str(wanted.get("spatial", old.spatial)), int(wanted.get("context", old.context))
        share = n["tensor"] * n["pipeline"] * n["branch"] * context * spatial_ranks(spatial)
        if ranks % share:
            pieces = f" x context={context}" * (context > 1) + f" x spatial={spatial}" * (spatial != "1")
            raise Infeasible(
                f"{ranks} devices do not divide into tensor={n['tensor']} x pipeline={n['pipeline']}{pieces}; change one of them as well"
            )
        n["data"] = ranks // share
    if batch < n["data"]:
        raise Infeasible(f"a batch of {batch} has no sample for each of data={n['data']}; change batch= or another axis as well")
    if n["data"] != old.data:
        choices.setdefault("shares", "")  # which are of the replicas that there were
    if "microbatches" not in wanted:
        rows = max(1, old_batch // (old.data * old.microbatches))
        each, most = -(-batch // n["data"]), batch // n["data"]
        n["microbatches"] = next((m for m in range(max(1, -(-each // rows)), most + 1) if each % m == 0), most)
    schedule = str(wanted.get("schedule", old.schedule))
    other = any(n[key] != getattr(old, key) for key in ("pipeline", "microbatches", "chunks"))
    if old.actions and other and "schedule" not in wanted:
        schedule = "1f1b"  # one's own is for its ranks and microbatches alone
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
        which = Residency.parse(str(wanted.get("recompute", old.recompute)), str(wanted.get("offload", old.offload)), old.segment)
        if refuse_segment(which, int(wanted.get("zero", old.zero))):
            choices["segment"] = 1
    actions = old.actions if schedule == old.schedule and "schedule" not in wanted else actions_of(schedule)
    layout = replace(old, **{**choices, **n, "schedule": schedule, "actions": actions, "begins": ()})  # type: ignore[arg-type]
    moved = [
        " to ".join((f"{key} {getattr(old, key)}", str(getattr(layout, key)))) if getattr(layout, key) != "" else f"without {key}"
        for key in KEYS
        if key not in wanted and getattr(old, key) != getattr(layout, key)
    ]
    return layout, ", ".join(moved)


def neighbours(plan: Plan, num_devices: int) -> list[tuple[str, Layout]]:
    """Layouts that differ from the plan's in one choice and what hangs on it: (the choice, the layout)."""
    old = plan.layout
    tries: list[tuple[str, int | str]] = []
    for key in ("data", "tensor", "pipeline", "microbatches"):
        now = getattr(old, key)
        tries += [(key, now * 2), *([(key, now // 2)] if now % 2 == 0 else [])]
    tries += [("zero", stage) for stage in range(4) if stage != old.zero and (old.replicas > 1 or stage < old.zero)]
    for key in ("schedule", "recompute", "precision", "offload", "sequence_parallel", "sample_parallel"):
        tries += [(key, value) for value in CHOICES[key] if value != getattr(old, key)]
    if old.repeats_layers:
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
            layout, _ = moved_along(old, {key: value}, ranks, plan.batch_size, plan.batch_size)
        except (Infeasible, LayoutError):
            continue
        if layout not in [one for _, one in layouts]:
            layouts.append((f"{key}={value}", layout))
    return layouts


def _at_sequence(model: str, sequence: int) -> str:
    """A zoo name with its sequence replaced.

    >>> _at_sequence("gpt:layers=2,sequence=64", 128), _at_sequence("gpt-39b", 128)
    ('gpt:layers=2,sequence=128', 'gpt-39b:sequence=128')
    """
    name, _, words = model.partition(":")
    arguments = [word for word in words.split(",") if word and word.partition("=")[0].strip() != "sequence"]
    return f"{name}:{','.join([*arguments, f'sequence={sequence}'])}"
