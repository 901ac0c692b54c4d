"""shardwise trains any PyTorch model in parallel: it plans, predicts, runs and proves.

>>> import shardwise
>>> shardwise.Layout.parse("data=2 collectives=2").num_ranks
4
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from shardwise import errors

if TYPE_CHECKING:
    from shardwise.api import auto_parallelize, comm_hook, parallelize, plan, shard, simulate, verify
    from shardwise.api_decode import decoder
    from shardwise.api_prove import prove
    from shardwise.cli.functions import compare, estimate, explain, report, scaling, whatif
    from shardwise.cluster.cluster import Cluster
    from shardwise.plan.ir.timeline import Timeline
    from shardwise.plan.layout import Layout
    from shardwise.plan.plan import Plan
    from shardwise.run.engine import Engine
    from shardwise.run.loop.checkpoints import load, save
    from shardwise.run.loop.module import accumulate
    from shardwise.run.loop.replica_values import gather_rows as gather
    from shardwise.run.loop.replica_values import reduce_over_replicas as reduce
    from shardwise.run.loop.shard_module import full_state_dict
    from shardwise.run.rank_model.capture_cache import Microbatches
    from shardwise.run.verify.verification import Verification
    from shardwise.world.launch.current import current_num_ranks as num_ranks
    from shardwise.world.launch.current import current_rank as rank
    from shardwise.world.launch.current import is_main
    from shardwise.world.launch.current import print_once as print
    from shardwise.world.launch.launch import launch

__version__ = "0.1.0"
__all__ = [
    "Cluster", "Engine", "Layout", "Microbatches", "Plan", "Timeline", "Verification", "accumulate", "auto_parallelize", "comm_hook",
    "compare", "decoder", "errors", "estimate", "explain", "full_state_dict", "gather", "is_main", "launch", "load", "num_ranks",
    "parallelize", "plan", "print", "prove", "rank", "reduce", "report", "save", "scaling", "shard", "simulate", "verify", "whatif",
]  # fmt: skip

# Looked up at first use, so that `shardwise --help` and programs that only read plans do not wait for torch.
_HOMES = {
    "Cluster": "shardwise.cluster.cluster",
    "decoder": "shardwise.api_decode",
    "prove": "shardwise.api_prove",
    "Engine": "shardwise.run.engine",
    "full_state_dict": "shardwise.run.loop.shard_module",
    "Layout": "shardwise.plan.layout",
    "Microbatches": "shardwise.run.rank_model.capture_cache",
    "Plan": "shardwise.plan.plan",
    "Timeline": "shardwise.plan.ir.timeline",
    "Verification": "shardwise.run.verify.verification",
    "accumulate": "shardwise.run.loop.module",
    "is_main": "shardwise.world.launch.current",
    "launch": "shardwise.world.launch.launch",
    "gather": "shardwise.run.loop.replica_values:gather_rows",
    "num_ranks": "shardwise.world.launch.current:current_num_ranks",
    "print": "shardwise.world.launch.current:print_once",
    "rank": "shardwise.world.launch.current:current_rank",
    "reduce": "shardwise.run.loop.replica_values:reduce_over_replicas",
    **dict.fromkeys(("load", "save"), "shardwise.run.loop.checkpoints"),
    **dict.fromkeys(("compare", "estimate", "explain", "scaling", "whatif"), "shardwise.cli.functions"),
    **dict.fromkeys(("comm_hook", "parallelize", "verify"), "shardwise.api"),
    **dict.fromkeys(("auto_parallelize", "shard"), "shardwise.api_loop"),  # a plain loop waits for no more than it needs
}
PACKAGES = ("plan", "report", "simulate")  # which are verbs too

if not TYPE_CHECKING:  # a type checker has the imports above, and then tells of names that are not there

    def __getattr__(name):
        if name in PACKAGES:
            return importlib.import_module(f"shardwise.{name}")
        if name in _HOMES:
            home, _, attribute = _HOMES[name].partition(":")
            return getattr(importlib.import_module(home), attribute or name)
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
