"""Random graphs under random layouts, by number: verified by ranks against the serial run, or proven in this process without tolerance.

A number makes a model, its batch and its layout (`random_models`). Models are traced here; for `verify` ranks are forked once for many of
them. Used by the tests and by `scripts/verify_all --graphs`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import shardwise
from shardwise.errors import Infeasible, LayoutError, ModelError, RankError
from shardwise.model.sharding.sharding import FREE_LINKS
from shardwise.plan.plan import Plan
from shardwise.run.prove.field_tensor import NotProvable
from shardwise.run.prove.prove import prove_plan
from shardwise.run.prove.rank_threads import Exchange, thread_world
from shardwise.run.prove.serial_points import ProofModel, ProofOptions
from shardwise.run.rank_model.model_source import CachedModelSource
from shardwise.run.verify.verify import Options, verify_on_rank
from shardwise.world.launch.launch import launch
from shardwise.world.world import World
from tests.support.random_models import batch_of, layout_of, make
from tests.support.verified_models import Row

RANKS = (2, 4, 3, 8, 6)
REFUSED = (Infeasible, LayoutError, ModelError)
AT_ONCE = 25
ONE_POINT = 0.5  # a point alone misses an error with at most 1e-3


@dataclass(frozen=True)
class Example:
    """A model under a plan, traced."""

    seed: int
    plan: Plan
    batch: Any
    source: CachedModelSource

    def __str__(self) -> str:
        return f"{self.seed}: {replace(self.plan.layout, precision='float32')}"


@dataclass(frozen=True)
class RandomSubject:
    """The model of a number and its batch, with what was traced and run serially of them, for all layouts of the model."""

    seed: int
    model: ProofModel

    @classmethod
    def build(cls, seed: int) -> RandomSubject:
        """Build the model and the batch of a number."""
        batch, factory = batch_of(seed), partial(make, seed)
        torch.manual_seed(seed)
        return cls(seed, ProofModel(factory, batch, None, CachedModelSource.from_model(factory)))


def ranks_of(seed: int, variant: int = 0) -> int:
    """The number of ranks of a number's layout."""
    return RANKS[(seed // 2 + variant) % len(RANKS)]


def example(seed: int, variant: int = 0, subject: RandomSubject | None = None) -> Example:
    """Trace the model of a number and plan its layout. Raises an error of REFUSED where shardwise refuses the layout for the model."""
    layout = layout_of(seed, ranks_of(seed, variant), variant)
    subject = subject or RandomSubject.build(seed)
    batch, source = subject.model.batch, subject.model.source
    plan = shardwise.plan(partial(make, seed), batch, cluster="1xcpu-2", layout=replace(layout, precision="float32"), source=source)
    plan = replace(plan, layout=layout)
    if seed % 3 and not plan.uncaptured:  # models are so small that little would be cut by the planner's prices
        plan, source = replace(plan, shards=()), replace(source, prices=FREE_LINKS)
    source.capture_all(plan, batch, None)
    return Example(seed, plan, batch, source)


def _example_or_none(seed: int) -> Example | None:
    try:
        return example(seed)
    except REFUSED:
        return None


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
        mine = [one for seed in seeds if ranks_of(seed) == ranks and (one := _example_or_none(seed)) is not None]
        number += len(mine)
        for first in range(0, len(mine), AT_ONCE):
            found += wrong(mine[first : first + AT_ONCE], ranks)
    return number, found


def prove_graph(seed: int, variant: int = 0, subject: RandomSubject | None = None) -> Row:
    """Prove one number's layout at one point; never raises for what the model or shardwise does."""
    began = time.perf_counter()
    name, shown = f"random {seed}" + (f"/{variant}" if variant else ""), f"{ranks_of(seed, variant)} ranks"

    def row(status: str, note: str = "") -> Row:
        return Row(name, shown, "", status, {}, note, seconds=time.perf_counter() - began)

    try:
        subject = subject or RandomSubject.build(seed)
        one = example(seed, variant, subject)
        shown = str(replace(one.plan.layout, precision="float32"))
        return row(*prove_example(one, subject))
    except REFUSED as error:
        return row("refused", str(error))
    except Exception as error:
        # A crash is a finding, not the end of the run.
        return row("failed", f"{type(error).__name__}: {error}")


def prove_example(one: Example, subject: RandomSubject) -> tuple[str, str]:
    """Prove an example at one point; return "equal", "differs" or "not provable", and what is said of it."""
    model = replace(subject.model, source=one.source)
    try:
        proof = prove_plan(one.plan, model, ProofOptions(ONE_POINT, seed=one.seed), locates_difference=False)
    except NotProvable as error:
        return "not provable", str(error)
    return ("equal", "") if proof.ok else ("differs", proof.outcome)


def verify_in_threads(one: Example) -> str:
    """Verify an example in float64, its ranks threads of this process; return what differs, or nothing."""
    num_ranks = one.plan.layout.num_ranks
    room, results = Exchange(num_ranks), list[Any]()

    def run_rank(rank: int) -> None:
        world = thread_world(room, rank, num_ranks)
        results.append(verify_on_rank(world, one.plan, partial(make, one.seed), one.batch, None, one.source, Options(seed=one.seed)))

    room.run_ranks(run_rank)
    (result,) = [each for each in results if each is not None]
    return "" if result.ok and result.tolerance == 1e-9 else f"{result.worst}, {result.first_difference}"
