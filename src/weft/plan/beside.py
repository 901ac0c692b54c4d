"""What goes with a choice of a layout that does not go with everything: tables by key, and why a layout is refused."""

from __future__ import annotations

from collections.abc import Mapping

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
}
# What goes with updates that come late.
STALE_WITH: dict[str, tuple[int | str, ...]] = {
    "tensor": (1,),
    "pipeline": (1,),
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
    "context": (1,),
    "spatial": ("1",),
    "zero": (0, 1, 2),
    "recompute": ("none",),
    "offload": ("none", "optimizer"),
    "schedule": tuple(name for name in SCHEDULES if not name.startswith("zb-")),
}


def refuse_beside(layout: object, table: Mapping[str, tuple[int | str, ...]], word: str, remedy: str) -> str:
    """Why what a layout says does not go with a word, as a table has it; empty where it does. `remedy`: what else would do."""
    for key, known in table.items():
        if kind_of(key, value := getattr(layout, key)) not in known:
            return f"{key}={value} with {word} is not built; use {' or '.join(f'{key}={value}' for value in known)}, or {remedy}"
    return ""
