"""weft trains any PyTorch model in parallel: it plans, predicts, runs and proves.

>>> import weft
>>> weft.Layout.parse("data=2 tensor=2").num_ranks
4
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from weft import errors

if TYPE_CHECKING:
    from weft.api import auto_parallelize, comm_hook, parallelize, shard, verify
    from weft.cluster.cluster import Cluster
    from weft.plan.layout import Layout
    from weft.plan.plan import Plan
    from weft.run.engine import Engine
    from weft.run.loop.checkpoints import load, save
    from weft.run.loop.divide import full_state_dict
    from weft.world.launch import launch

__version__ = "0.1.0"
__all__ = [
    "Cluster", "Engine", "Layout", "Plan", "auto_parallelize", "comm_hook", "errors", "full_state_dict", "launch", "load", "parallelize",
    "plan", "save", "shard", "simulate", "verify",
]  # fmt: skip

# Looked up at first use, so that `weft --help` and programs that only read plans do not wait for torch.
_HOMES = {
    "Cluster": "weft.cluster.cluster",
    "Engine": "weft.run.engine",
    "full_state_dict": "weft.run.loop.divide",
    "Layout": "weft.plan.layout",
    "Plan": "weft.plan.plan",
    "launch": "weft.world.launch",
    **dict.fromkeys(("load", "save"), "weft.run.loop.checkpoints"),
    **dict.fromkeys(("auto_parallelize", "comm_hook", "parallelize", "shard", "verify"), "weft.api"),
}


def __getattr__(name: str) -> Any:
    if name in ("plan", "simulate"):
        return importlib.import_module(f"weft.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'weft' has no attribute {name!r}")
