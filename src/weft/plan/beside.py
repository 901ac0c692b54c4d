"""What goes with a choice of a layout that does not go with everything: tables by key, and why a layout is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from weft.plan.choice import AUTO
from weft.plan.precision import PRECISIONS
from weft.plan.residency import kind_of
from weft.plan.schedule_sizes import SCHEDULES

# What goes with stages that are arranged differently.
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
# What goes with updates that come late.
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
    "precision": tuple(name for name, one in PRECISIONS.items() if not one.scaled),
    "batch_norm": ("exact",),
    "branch": (1,),
}
# What goes with servers that hold the weights: what goes with late updates, and sums of no other kind.
SERVED_WITH: dict[str, tuple[int | str, ...]] = {**STALE_WITH, "all_reduce": (AUTO,)}
# What goes with ranks that own branches.
BRANCH_WITH: dict[str, tuple[int | str, ...]] = {
    "sample_parallel": ("off",),
    "expert": (1,),
    "compress": ("none",),
    "shares": ("",),
    "batch_norm": ("exact",),
}
# What goes with compiled stages: nothing that comes and goes inside of them, or has a backward in two parts.
COMPILE_WITH: dict[str, tuple[int | str, ...]] = {
    "expert": (1,),
    "branch": (1,),
    "zero": (0, 1, 2),
    "recompute": ("none",),
    "offload": ("none", "optimizer"),
    "schedule": tuple(name for name in SCHEDULES if not name.startswith("zb-")),
}
# Whether each microbatch may have a split of its own, by its length.
FIXED, LENGTHS = "fixed", "lengths"
# What goes with that: ranks whose weights do not depend on it, and microbatches that run one after another.
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


class Replicas(Protocol):
    """What a layout says of its replicas."""

    @property
    def data(self) -> int: ...
    @property
    def branch(self) -> int: ...
    @property
    def compile(self) -> str: ...
    @property
    def split(self) -> str: ...
    @property
    def staleness(self) -> int: ...
    @property
    def servers(self) -> int: ...


def refuse_staleness(layout: Replicas) -> str:
    """Why updates of a layout cannot come late; empty where they can, or need not."""
    if layout.staleness < 0:
        return f"staleness={layout.staleness}; it counts steps, so use staleness=0 for updates at once, or more"
    if not layout.staleness:
        return ""
    if layout.data == 1:
        return f"staleness={layout.staleness} lets replicas run ahead of each other, and data=1 has one; use data=2 or more, or staleness=0"
    return refuse_beside(layout, STALE_WITH, f"staleness={layout.staleness}", "staleness=0")


def refuse_servers(layout: Replicas) -> str:
    """Why no replicas of a layout can hold the weights for all; empty where some can, or need not."""
    if layout.servers < 0:
        return f"servers={layout.servers}; it counts replicas that hold the weights, so use servers=1 or more, or servers=0 for none"
    if not layout.servers:
        return ""
    if layout.data == 1 or layout.servers > layout.data:
        have, need = layout.data, max(2, layout.servers)
        return f"servers={layout.servers} of data={have}: servers are replicas, and serve others; use data={need} or more, or servers=0"
    return refuse_beside(layout, SERVED_WITH, f"servers={layout.servers}", "servers=0")


def refuse_together(layout: Replicas) -> str:
    """Why a choice of a layout does not go with another one; empty where all go together."""
    reason = refuse_beside(layout, COMPILE_WITH, "compile=on", "compile=off") if layout.compile == "on" else ""
    if not reason and layout.branch > 1:
        reason = refuse_beside(layout, BRANCH_WITH, f"branch={layout.branch}", "branch=1")
    if not reason and layout.split == LENGTHS:
        reason = refuse_beside(layout, SPLIT_WITH, f"split={LENGTHS}", f"split={FIXED}")
    return reason


def server_ranks(data: int, servers: int) -> tuple[int, ...]:
    """The replicas that are servers, evenly among all, so that hosts share what passes their ports.

    >>> server_ranks(8, 2), server_ranks(3, 3), server_ranks(4, 0)
    ((0, 4), (0, 1, 2), ())
    """
    return tuple(server * data // servers for server in range(servers))


def refuse_beside(layout: object, table: Mapping[str, tuple[int | str, ...]], word: str, remedy: str) -> str:
    """Why what a layout says does not go with a word, as a table has it; empty where it does. `remedy`: what else would do."""
    for key, values in table.items():
        if kind_of(key, value := getattr(layout, key)) not in values:
            return f"{key}={value} with {word} is not supported; use {' or '.join(f'{key}={value}' for value in values)}, or {remedy}"
    return ""
