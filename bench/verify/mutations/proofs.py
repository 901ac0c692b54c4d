"""Breaks one thing after another and tells what `prove` found. In: cases. Out: a row for each mutation and size; a page.

Ranks are threads of this process, which stays patched. A mutation that `prove` does not find is a finding, unless `verify` says of it that
it changes nothing: every rank then ends in the same training state, but for rounding.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.common.processes import ROOT
from bench.verify.mutations.cases import CASES, Case, Runs
from bench.verify.mutations.collectives import Broken
from bench.verify.mutations.table import MISSED, SAME, tried
from bench.verify.mutations.target import ON_ONE_RANK, ONE_ELEMENT, SCALED, Active, Change, Mutation
from bench.verify.mutations.weights import install, prepared
from shardwise.errors import ShardwiseError
from shardwise.plan.ir.mesh import Mesh
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run.prove import prove
from shardwise.run.prove.field_tensor import NotProvable
from shardwise.run.prove.prove import prove_plan
from shardwise.run.prove.serial_points import ProofModel, ProofOptions
from shardwise.run.verify.serial import SerialRun
from shardwise.world.world import World
from tests.support.verified_models import EAGER

FOUND, FAILED = "found", "ends the run"
SIZES = {SCALED: (1e-15, 1.0), ON_ONE_RANK: (1e-15,), ONE_ELEMENT: (1e-15,)}  # what is scaled is off by that; others are broken one way
ONE_POINT = 0.5
MOST_CASES = 3  # that are looked at where a mutation is not found


@dataclass(frozen=True)
class ProofRow:
    """One mutation of one size. `cases`: where it fired; `result`: the first one's that is not equal."""

    mutation: Mutation
    off: float
    cases: tuple[str, ...]
    result: str
    note: str = ""

    @property
    def broken(self) -> str:
        """How it is broken, with the size."""
        return self.mutation.how.replace("off by 1e-6", "twice" if self.off == 1.0 else f"off by {self.off:.0e}")


class ProofRuns:
    """Proves cases in this process, which it patches for good."""

    def __init__(self) -> None:
        self._runs, self._active, self._place = Runs(), Active(), threading.local()
        self._mesh_of: Callable[[int], Mesh] = Layout().mesh_of
        prepared()
        install(self._active)
        Broken(self._active, self._find_place).install()
        open_world, step, begin = prove.thread_world, SerialRun.step, SerialRun.__init__

        def open_noted_world(*args: Any) -> World:
            self._place.world = open_world(*args)
            return self._place.world  # type: ignore[no-any-return]

        def step_whole(serial: SerialRun, *args: Any, **options: Any) -> Any:
            with self._active.pause():
                return step(serial, *args, **options)

        def begin_whole(serial: SerialRun, *args: Any, **options: Any) -> None:
            with self._active.pause():
                begin(serial, *args, **options)

        prove.thread_world = open_noted_world
        SerialRun.step, SerialRun.__init__ = step_whole, begin_whole  # type: ignore[method-assign]

    def _find_place(self) -> tuple[World, Mesh] | None:
        world = getattr(self._place, "world", None)
        return None if world is None else (world, self._mesh_of(world.rank))

    def plan_of(self, case: Case) -> tuple[Plan, Any]:
        """Return the plan and the source of a case."""
        subject = self._runs.subject(case.model)
        plan, source = subject.plan(replace(Layout.parse(case.layout), precision="float64")), subject.source
        if case.eager and plan.layout.tensor > 1 and not plan.uncaptured:
            plan, source = replace(plan, shards=()), replace(source, prices=EAGER[case.eager])
        return plan, source

    def prove(self, case: Case, change: Change | None) -> tuple[str, str, set[Mutation]]:
        """Return (found, ends the run, or empty where equal; what was said; what fired)."""
        subject, (plan, source) = self._runs.subject(case.model), self.plan_of(case)
        self._mesh_of = plan.layout.mesh_of
        options = ProofOptions(ONE_POINT, seed=subject.seed, optimizer={"name": "adamw", "clip": case.clip})
        self._active.begin(change)
        for module, _ in prepared().values():  # a value that is kept from another run is not computed in this one
            for function in vars(module).values():
                if callable(getattr(function, "cache_clear", None)):
                    function.cache_clear()
        try:
            proof = prove_plan(plan, ProofModel(subject.make, subject.batch, subject.loss, source), options, locates_difference=False)
            result, note = ("", "") if proof.ok else (FOUND, proof.outcome)
        except NotProvable:
            if change is None:
                raise
            result, note = FAILED, "NotProvable"
        except (ShardwiseError, RuntimeError, IndexError, ValueError, AssertionError) as error:
            result, note = FAILED, f"{type(error).__name__}: {error}".split("\n")[0]
        fired = set(self._active.fired)
        self._active.begin(None)
        return result, note, fired

    def verify(self, case: Case, change: Change) -> str:
        """Return what `verify` says of a mutation: that it changes nothing, too, where every rank ends in the same state bit for bit."""
        outcome, _ = self._runs.run(case, [change])
        return SAME if outcome.ok and outcome.moved == 0.0 else tried(self._runs, case, [change.mutation])[change.mutation][0]


def proof_rows(
    cases: Sequence[Case] = CASES, wanted: str = "", tell: Callable[[str], object] = print, runs: ProofRuns | None = None
) -> tuple[list[ProofRow], list[str]]:
    """Return (a row for each mutation and size that fires anywhere, cases that are not provable and why)."""
    runs = runs or ProofRuns()
    where: dict[Mutation, list[Case]] = {}
    refused, times_s = [], dict[Case, float]()
    for case in cases:
        began = time.process_time()
        try:
            result, note, fired = runs.prove(case, None)
        except NotProvable as error:
            refused.append(f"{case}: {error}")
            continue
        if result == FAILED:
            refused.append(f"{case}: {note}")
            continue
        if result:
            raise RuntimeError(f"{case} is not equal with nothing broken: {note}")
        times_s[case] = time.process_time() - began
        tell(f"{case}: {len(fired)} mutations fire, {times_s[case]:.1f} s")
        for mutation in fired:
            where.setdefault(mutation, []).append(case)
    found = []
    for mutation in sorted(m for m in where if wanted in m.site):
        for off in SIZES.get(mutation.how, (1.0,)):
            found.append(_judge(runs, Change(mutation, off), sorted(where[mutation], key=times_s.__getitem__)))
            tell(f"{mutation.site} | {mutation.kind} | {found[-1].broken}: {found[-1].result} {found[-1].note}")
    return found, refused


def _judge(runs: ProofRuns, change: Change, cases: Sequence[Case]) -> ProofRow:
    def row(result: str, note: str = "") -> ProofRow:
        return ProofRow(change.mutation, change.off, tuple(map(str, cases)), result, note)

    for case in cases[:MOST_CASES]:
        result, note, fired = runs.prove(case, change)
        if result:
            return row(result, note)
        if change.mutation not in fired:
            return row(MISSED, "it did not fire")
    seen = runs.verify(cases[0], change)
    return row(SAME if seen == SAME else MISSED, f"verify: {seen}")


def document_proofs(found: Sequence[ProofRow], refused: Sequence[str]) -> str:
    """Return the page."""
    count = {result: sum(row.result == result for row in found) for result in (FOUND, FAILED, SAME, MISSED)}
    lines = [
        "# Mutations and proofs",
        "",
        "Written by `scripts/validate mutations --prove`. Every collective, every weight of a sum, every bound of a slice and every dual",
        "of a redistribution of the runtime is broken once, and `shardwise prove` must find it at one random point. Sites and ways to",
        "break them are those of [what `verify` sees](mutations.md); here the smallest is 1e-15, which no comparison of float64 sees.",
        "*One element*: the last one of the last member's result. *One element too far*: a slice begins and ends one element later, or",
        "earlier where there is none. What `prove` does not find is given to `verify`: *changes nothing* is what that found equal, too,",
        "with every rank in the same training state. Two kinds of sites have no part in a proof, and are missed: the message of",
        "fingerprints, which there carries no loss, and views of one gradient buffer for all buckets, which ranks that share memory have.",
        "",
        f"{len(found)} mutations fired: {count[FOUND]} were found, {count[FAILED]} ended the run with an error, {count[SAME]} changed "
        f"nothing, {count[MISSED]} were missed.",
        "",
        "| where | what | broken | fires in | result |",
        "|---|---|---|---|---|",
    ]
    for row in found:
        site, _, expression = row.mutation.site.partition(": ")
        more = f" and {len(row.cases) - 1} more" if len(row.cases) > 1 else ""
        what = f"`{expression.replace('|', '/')}`" if expression else row.mutation.kind
        lines.append(f"| {site.replace(' < ', ', from ')} | {what} | {row.broken} | {row.cases[0]}{more} | {row.result} |")
    if refused:
        lines += ["", "Cases of `verify` that are not provable:", "", *(f"- {line.replace(f'{ROOT}/', '')}" for line in refused)]
    return "\n".join(lines) + "\n"
