"""weft trains any PyTorch model in parallel: it plans, predicts, runs and proves.

>>> import weft
>>> weft.Layout.parse("data=2 tensor=2").num_ranks
4
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from weft import errors

if TYPE_CHECKING:
    from weft.api import auto_parallelize, comm_hook, parallelize, plan, shard, simulate, verify
    from weft.api_decode import decoder
    from weft.api_verbs import compare, estimate, explain, report, scaling, whatif
    from weft.cluster.cluster import Cluster
    from weft.plan.layout import Layout
    from weft.plan.plan import Plan
    from weft.plan.timeline import Timeline
    from weft.run.engine import Engine
    from weft.run.forms import Microbatches
    from weft.run.loop.checkpoints import load, save
    from weft.run.loop.divide import full_state_dict
    from weft.run.loop.module import accumulate
    from weft.run.proof.verification import Verification
    from weft.world.current import is_main
    from weft.world.current import print_once as print
    from weft.world.launch import launch

__version__ = "0.1.0"
__all__ = [
    "Cluster", "Engine", "Layout", "Microbatches", "Plan", "Timeline", "Verification", "accumulate", "auto_parallelize", "comm_hook",
    "compare", "decoder", "errors", "estimate", "explain", "full_state_dict", "is_main", "launch", "load", "parallelize", "plan", "print",
    "report", "save", "scaling", "shard", "simulate", "verify", "whatif",
]  # fmt: skip

# Looked up at first use, so that `weft --help` and programs that only read plans do not wait for torch.
_HOMES = {
    "Cluster": "weft.cluster.cluster",
    "decoder": "weft.api_decode",
    "Engine": "weft.run.engine",
    "full_state_dict": "weft.run.loop.divide",
    "Layout": "weft.plan.layout",
    "Microbatches": "weft.run.forms",
    "Plan": "weft.plan.plan",
    "Timeline": "weft.plan.timeline",
    "Verification": "weft.run.proof.verification",
    "accumulate": "weft.run.loop.module",
    "is_main": "weft.world.current",
    "launch": "weft.world.launch",
    "print": "weft.world.current:print_once",
    **dict.fromkeys(("load", "save"), "weft.run.loop.checkpoints"),
    **dict.fromkeys(("compare", "estimate", "explain", "scaling", "whatif"), "weft.api_verbs"),
    **dict.fromkeys(("comm_hook", "parallelize", "verify"), "weft.api"),
    **dict.fromkeys(("auto_parallelize", "shard"), "weft.api_loop"),  # a plain loop waits for no more than it needs
}
PACKAGES = ("plan", "report", "simulate")  # which are verbs too

if not TYPE_CHECKING:  # a type checker has the imports above, and then tells of names that are not there

    def __getattr__(name):
        if name in PACKAGES:
            return importlib.import_module(f"weft.{name}")
        if name in _HOMES:
            home, _, attribute = _HOMES[name].partition(":")
            return getattr(importlib.import_module(home), attribute or name)
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
