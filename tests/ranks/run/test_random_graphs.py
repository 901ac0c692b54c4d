"""Random graphs under random layouts equal their serial runs in float64: sizes, kernels, strides, masks, loads of experts and meshes that
nobody chose.

A number makes a model, its batch and its layout; what fails is named by its number. Models are traced here and ranks forked once for many
of them. The long run has 2,000 numbers; SHARDWISE_RANDOM=FIRST:LAST runs others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

import shardwise
from shardwise.errors import Infeasible, LayoutError, ModelError, RankError
from shardwise.model.sharding.sharding import FREE_LINKS
from shardwise.plan.plan import Plan
from shardwise.run.rank_model.model_source import CachedModelSource
from shardwise.run.verify.verify import Options, verify_on_rank
from shardwise.world.launch.launch import launch
from shardwise.world.world import World
from tests.support.random_models import batch_of, layout_of, make

RANKS = (2, 4, 3, 8, 6)
REFUSED = (Infeasible, LayoutError, ModelError)
AT_ONCE = 25
# 9039: of two branches one alone has weights that its tensor ranks gather.
SAMPLE, LONG = (*range(12), 9039), range(1000, 3000)


@dataclass(frozen=True)
class Example:
    """A model under a plan, traced."""

    seed: int
    plan: Plan
    batch: Any
    source: CachedModelSource

    def __str__(self) -> str:
        return f"{self.seed}: {replace(self.plan.layout, precision='float32')}"


def example(seed: int, ranks: int) -> Example | None:
    """None where shardwise refuses the layout for the model, by an error of its own."""
    build, batch = partial(make, seed), batch_of(seed)
    try:
        layout = layout_of(seed, ranks)
        torch.manual_seed(seed)
        source = CachedModelSource.from_model(build)
        plan = shardwise.plan(build, batch, cluster="1xcpu-2", layout=replace(layout, precision="float32"), source=source)
        plan = replace(plan, layout=layout)
        if seed % 3 and not plan.uncaptured:  # models are so small that little would be cut by the planner's prices
            plan, source = replace(plan, shards=()), replace(source, prices=FREE_LINKS)
        source.capture_all(plan, batch, None)
    except REFUSED:
        return None
    return Example(seed, plan, batch, source)


def wrong(examples: list[Example], ranks: int) -> list[str]:
    """Those that differ from their serial runs, each with how far; where a rank fails, each is run by itself to find which."""

    def on_rank(world: World) -> list[str]:
        found = []
        for one in examples:
            result = verify_on_rank(world, one.plan, partial(make, one.seed), one.batch, None, one.source, Options(seed=one.seed))
            if result is not None and not (result.ok and result.tolerance == 1e-9):
                found.append(f"{one}: {result.worst}, {result.first_difference}")
        return found

    try:
        return launch(on_rank, ranks, timeout_s=240, show=False)[0]  # type: ignore[no-any-return]
    except RankError as error:
        if len(examples) == 1:
            return [f"{examples[0]}: {error}"]
        return [line for one in examples for line in wrong([one], ranks)]


def check(seeds: Iterable[int]) -> tuple[int, list[str]]:
    """(how many were verified, what is wrong)."""
    torch.set_num_threads(1)
    number, found = 0, []
    for ranks in RANKS:
        mine = [one for seed in seeds if RANKS[seed // 2 % len(RANKS)] == ranks and (one := example(seed, ranks)) is not None]
        number += len(mine)
        for first in range(0, len(mine), AT_ONCE):
            found += wrong(mine[first : first + AT_ONCE], ranks)
    return number, found


def test_random_graphs_equal_serial() -> None:
    first, _, last = os.environ.get("SHARDWISE_RANDOM", "").partition(":")
    seeds: Sequence[int] = range(int(first), int(last)) if first else SAMPLE
    number, found = check(seeds)
    assert not found, "\n".join(found)
    assert number >= len(seeds) // 2, f"only {number} of {len(seeds)} layouts are not refused"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(20))
def test_two_thousand_random_graphs_equal_serial(part: int) -> None:
    number, found = check(LONG[part * 100 : part * 100 + 100])
    assert not found, "\n".join(found)
    assert number >= 50
