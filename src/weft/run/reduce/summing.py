"""Choice of the all-reduce algorithms of gradient groups, as the plan says."""

from __future__ import annotations

from collections.abc import Sequence

from weft.collectives import build
from weft.plan.choice import NATIVE
from weft.plan.plan import Plan
from weft.run.state.parameters import FlatGroup
from weft.world.all_reduce import Sums
from weft.world.world import World


def choose_sums(plan: Plan, world: World, groups: Sequence[FlatGroup]) -> None:
    """Set the all-reduce algorithms of the gradients' groups; call on all ranks, before the groups connect."""
    choices, compresses = plan.all_reduce, plan.layout.compress != "none"
    for ranks in sorted({group.sum_ranks for group in groups if len(group.sum_ranks) > 1}):
        over = world.group(ranks)
        over.choose(Sums(over, choices, build, levels=compresses) if compresses or choices.names != (NATIVE,) else None)
