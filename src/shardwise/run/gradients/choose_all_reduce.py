"""Choice of the all-reduce algorithms of gradient groups, as the plan says."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.collectives import build
from shardwise.plan.ir.choice import NATIVE
from shardwise.plan.plan import Plan
from shardwise.run.state.parameters import FlatGroup
from shardwise.world.comm.all_reduce import CollectiveDispatcher
from shardwise.world.world import World


def choose_all_reduce(plan: Plan, world: World, groups: Sequence[FlatGroup]) -> None:
    """Set the all-reduce algorithms of the gradients' groups; call on all ranks, before the groups connect."""
    choices, compresses = plan.all_reduce, plan.layout.compress != "none"
    for ranks in sorted({group.sum_ranks for group in groups if len(group.sum_ranks) > 1}):
        over = world.group(ranks)
        over.use_dispatcher(
            CollectiveDispatcher(over, choices, build, levels=compresses) if compresses or choices.names != (NATIVE,) else None
        )
