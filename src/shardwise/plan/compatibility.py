"""Compatibility of a layout's keys: tables of the values that go with a choice, and why a layout is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from shardwise.plan.ir.choice import AUTO
from shardwise.plan.ir.precision import MIXED, PRECISIONS
from shardwise.plan.ir.schedule_sizes import SCHEDULES, chunks_of
from shardwise.plan.residency import strip_layers

ValueTable = Mapping[str, tuple[int | str, ...]]
# Values of `split`: one for all microbatches, or one for each by its length.
SPLIT_FIXED, SPLIT_BY_LENGTH = "fixed", "lengths"
# Values of `scatter`: gradients are reduce-scattered in each microbatch, or in the last one.
EACH, LAST = "each", "last"
# Values that go with stages of different arrangements.
INNER_WITH: dict[str, tuple[int | str, ...]] = {
    "schedule": ("sequential", "gpipe", "1f1b", "zb-h1", "zb-h2"),
    "chunks": (1,),
    "expert": (1,),
    "compress": ("none",),
    "lend": (AUTO, "off"),
    "context": (1,),
    "channel": (1,),
    "shares": ("",),
    "batch_norm": ("exact",),
    "branch": (1,),
    "neighbours": ("branch",),
    "staleness": (0,),
    "servers": (0,),
}
# Values that go with late updates (staleness).
STALE_WITH: dict[str, tuple[int | str, ...]] = {
    "chunks": (1,),
    "schedule": ("1f1b", "gpipe", "sequential"),
    "expert": (1,),
    "zero": (0,),
    "offload": ("none", "activations"),
    "compress": ("none",),
    "context": (1,),
    "spatial": ("1",),
    "channel": (1,),
    "precision": tuple(name for name, one in PRECISIONS.items() if not one.scales_loss),
    "batch_norm": ("exact",),
    "branch": (1,),
}
# Values that go with parameter servers: those for late updates, and no other all-reduce.
SERVERS_WITH: dict[str, tuple[int | str, ...]] = {**STALE_WITH, "all_reduce": (AUTO,)}
# Values that go with branch parallelism.
BRANCH_WITH: dict[str, tuple[int | str, ...]] = {
    "sample_parallel": ("off",),
    "expert": (1,),
    "compress": ("none",),
    "shares": ("",),
    "batch_norm": ("exact",),
}
UNCHUNKED = tuple(name for name in SCHEDULES if chunks_of(name, 1) == 1)  # schedules that may have one stage a rank
# Values that go with a model that was not captured as a graph and so runs whole, of every key; None: all values.
UNCAPTURED_WITH: dict[str, tuple[int | str, ...] | None] = {
    "data": None, "tensor": (1,), "pipeline": (1,), "microbatches": None, "schedule": UNCHUNKED, "zero": (2, 1, 0),
    "recompute": ("none",), "threads": None,
    "precision": tuple(name for name, one in PRECISIONS.items() if not one.linear_dtype and not one.held_dtype),
    "chunks": (1,), "expert": (1,), "sequence_parallel": ("off",), "sample_parallel": ("off",), "offload": ("none", "optimizer"),
    "all_reduce": None, "compress": None, "inner": ("",), "staleness": None, "servers": None, "context": (1,), "attention": (AUTO,),
    "spatial": ("1",), "channel": (1,), "branch": (1,), "neighbours": ("branch",), "lend": None, "segment": (1,), "shares": ("",),
    "batch_norm": ("exact",), "compile": ("off",), "split": (SPLIT_FIXED,), "gradients": ("float32",), "shard": (0,),
    "scatter": (EACH,), "loss_chunks": (1,),
}  # fmt: skip
# Values that go with compiled stages: no offload or recompute inside of them, and no split backward.
COMPILE_WITH: dict[str, tuple[int | str, ...]] = {
    "expert": (1,),
    "branch": (1,),
    "recompute": ("none",),
    "offload": ("none", "optimizer"),
    "schedule": tuple(name for name in SCHEDULES if not name.startswith("zb-")),
}
# Values that go with 16-bit weights of which the optimizer has float32 pieces, and with 16-bit gradients of those.
MIXED_WITH: dict[str, tuple[int | str, ...]] = {"servers": (0,)}
# A schedule of the user's own says itself when gradients are scattered.
SCATTER_LAST_WITH: dict[str, tuple[int | str, ...]] = {"schedule": SCHEDULES}
# Values that go with a loss in chunks of rows: float8 has one scale for all rows.
LOSS_CHUNKS_WITH: dict[str, tuple[int | str, ...]] = {
    "precision": tuple(name for name, precision in PRECISIONS.items() if not precision.linear_dtype)
}
NARROW_GRADIENTS_WITH: dict[str, tuple[int | str, ...]] = {"precision": (MIXED, "float8", "float8-rows"), "compress": ("none",)}
# Values that go with a split by length: weights that do not depend on it, and microbatches in sequence.
SPLIT_WITH: dict[str, tuple[int | str, ...]] = {
    "pipeline": (1,),
    "chunks": (1,),
    "zero": (0, 1),
    "expert": (1,),
    "branch": (1,),
    "spatial": ("1",),
    "channel": (1,),
    "sample_parallel": ("off",),
    "shares": ("",),
    "batch_norm": ("exact",),
    "compress": ("none",),
    "staleness": (0,),
    "servers": (0,),
}


# Values that go with ZeRO inside groups of replicas (shard).
SHARD_WITH: dict[str, tuple[int | str, ...]] = {
    "expert": (1,),
    "branch": (1,),
    "inner": ("",),
    "compress": ("none",),
    "all_reduce": (AUTO, "native"),
    "staleness": (0,),
    "servers": (0,),
    "split": (SPLIT_FIXED,),
}


class ReplicaOptions(Protocol):
    """Keys of a layout that concern its replicas."""

    @property
    def data(self) -> int: ...
    @property
    def zero(self) -> int: ...
    @property
    def shard(self) -> int: ...
    @property
    def branch(self) -> int: ...
    @property
    def compile(self) -> str: ...
    @property
    def split(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def gradients(self) -> str: ...
    @property
    def scatter(self) -> str: ...
    @property
    def loss_chunks(self) -> int: ...
    @property
    def staleness(self) -> int: ...
    @property
    def servers(self) -> int: ...


def refuse_zero(layout: ReplicaOptions) -> str:
    """Return why a layout's state cannot be sharded so; empty where it can, or need not."""
    if layout.zero not in (0, 1, 2, 3):
        return f"zero={layout.zero} is unknown; ZeRO has the stages zero=0 (off), 1, 2 and 3"
    if layout.shard == 1:
        return "shard=1 shards state among one replica, which is none; use zero=0, or shard=2 or more"
    if layout.shard and layout.data % layout.shard:
        return f"shard={layout.shard} does not divide data={layout.data}, over whose replicas state is sharded"
    if layout.shard in (0, layout.data):
        return ""
    return refuse_incompatible(layout, SHARD_WITH, f"shard={layout.shard}", "shard=0 (all replicas)")


def refuse_staleness(layout: ReplicaOptions) -> str:
    """Return why updates of a layout cannot be late; empty where they can, or need not."""
    if layout.staleness < 0:
        return f"staleness={layout.staleness}; it counts steps, so use staleness=0 for updates at once, or more"
    if not layout.staleness:
        return ""
    if layout.data == 1:
        return f"staleness={layout.staleness} lets replicas run ahead of each other, and data=1 has one; use data=2 or more, or staleness=0"
    return refuse_incompatible(layout, STALE_WITH, f"staleness={layout.staleness}", "staleness=0")


def refuse_servers(layout: ReplicaOptions) -> str:
    """Return why no replicas of a layout can be parameter servers; empty where some can, or need not."""
    if layout.servers < 0:
        return f"servers={layout.servers}; it counts replicas that hold the weights, so use servers=1 or more, or servers=0 for none"
    if not layout.servers:
        return ""
    if layout.data == 1 or layout.servers > layout.data:
        have, need = layout.data, max(2, layout.servers)
        return f"servers={layout.servers} of data={have}: servers are replicas, and serve others; use data={need} or more, or servers=0"
    return refuse_incompatible(layout, SERVERS_WITH, f"servers={layout.servers}", "servers=0")


def refuse_combinations(layout: ReplicaOptions) -> str:
    """Return why a choice of a layout does not go with another one; empty where all go together."""
    reason = refuse_incompatible(layout, COMPILE_WITH, "compile=on", "compile=off") if layout.compile == "on" else ""
    if not reason and layout.branch > 1:
        reason = refuse_incompatible(layout, BRANCH_WITH, f"branch={layout.branch}", "branch=1")
    if not reason and layout.split == SPLIT_BY_LENGTH:
        reason = refuse_incompatible(layout, SPLIT_WITH, f"split={SPLIT_BY_LENGTH}", f"split={SPLIT_FIXED}")
    if not reason and PRECISIONS[layout.precision].held_dtype:
        reason = refuse_incompatible(layout, MIXED_WITH, f"precision={layout.precision}", "precision=bfloat16")
    if not reason and layout.scatter == LAST:
        reason = refuse_incompatible(layout, SCATTER_LAST_WITH, f"scatter={LAST}", f"scatter={EACH}")
    if not reason and layout.loss_chunks > 1:
        reason = refuse_incompatible(layout, LOSS_CHUNKS_WITH, f"loss_chunks={layout.loss_chunks}", "loss_chunks=1")
    if not reason and layout.gradients != "float32":
        reason = refuse_incompatible(layout, NARROW_GRADIENTS_WITH, f"gradients={layout.gradients}", "gradients=float32")
    return reason


def refuse_uncaptured(layout: object) -> str:
    """Return what to change in a layout for a model that runs whole; empty where all its keys apply to one."""
    table = {key: values for key, values in UNCAPTURED_WITH.items() if values is not None}
    remedies = [f"{key}={values[0]}" if values[0] != "" else f"no {key}" for key, _, values in _refused_values(layout, table)]
    return f"only data and zero apply; use {' '.join(remedies)}" if remedies else ""


def server_ranks(data: int, servers: int) -> tuple[int, ...]:
    """Return the replicas that are servers, evenly among all, so that hosts share the traffic.

    >>> server_ranks(8, 2), server_ranks(3, 3), server_ranks(4, 0)
    ((0, 4), (0, 1, 2), ())
    """
    return tuple(server * data // servers for server in range(servers))


def refuse_incompatible(layout: object, table: ValueTable, word: str, remedy: str) -> str:
    """Return why a layout's values do not go with a word, by a table; empty where they do. `remedy`: what else would do."""
    for key, value, values in _refused_values(layout, table):
        return f"{key}={value} with {word} is not supported; use {' or '.join(f'{key}={value}' for value in values)}, or {remedy}"
    return ""


def _refused_values(layout: object, table: ValueTable) -> Iterator[tuple[str, object, tuple[int | str, ...]]]:
    """Yield (key, value, values of the table) where a layout's value is none of the table's."""
    for key, values in table.items():
        if strip_layers(key, value := getattr(layout, key)) not in values:
            yield key, value, values
