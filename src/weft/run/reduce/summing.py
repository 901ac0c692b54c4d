"""Tells the groups that sum gradients by which algorithms. In: a plan and flat groups of parameters. Out: nothing; the groups know."""

from __future__ import annotations

from collections.abc import Sequence

from weft.collectives import build
from weft.plan.choice import NATIVE
from weft.plan.plan import Plan
from weft.run.state.parameters import FlatGroup
from weft.world.all_reduce import Sums
from weft.world.world import World


def choose_sums(plan: Plan, world: World, groups: Sequence[FlatGroup]) -> None:
    """Let sums go as the plan says; before the groups are connected, on all ranks."""
    choices, compresses = plan.all_reduce, plan.layout.compress != "none"
    for ranks in sorted({group.sum_ranks for group in groups if len(group.sum_ranks) > 1}):
        over = world.group(ranks)
        over.choose(Sums(over, choices, build, levels=compresses) if compresses or choices.names != (NATIVE,) else None)
