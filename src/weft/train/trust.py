"""Detection of silent data corruption: a suspect step is rerun from the snapshot before it, and the faulty rank is named.

Before each update all ranks know the loss and every rank's gradient norm. If one is not finite or far above the last ten, nothing is
updated: the snapshot is restored, and the step is run once more on the same bits; a difference between the two runs tells which rank was
wrong. An unsuspicious step costs nothing but the norms.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import isfinite
from typing import TypeVar

from weft.errors import RunError
from weft.run.engine import Engine
from weft.run.state.evidence import Evidence, Finding, words_of
from weft.run.state.fingerprints import Diverged, Doubted, parameter_at
from weft.run.state.snapshots import Snapshots
from weft.run.step.executor import Result
from weft.train.doubts import RECENT, doubt, doubt_of_norms
from weft.world.world import World

T = TypeVar("T")
Say = Callable[[str], None]


class Trust:
    """The guard of one attempt at a run; every rank has one. `losses`: of the steps so far; the run appends to it."""

    def __init__(self, world: World, engine: Engine, snapshots: Snapshots, losses: Sequence[float], unstable: Callable[[], str]) -> None:
        """`instability_remedy()`: advice for a step whose gradients are not finite in both runs."""
        self._world, self._engine, self._snapshots, self._losses, self._unstable = world, engine, snapshots, losses, unstable
        self._names = [v.name for v in engine.parts.graph.parameters]  # in the same order on all ranks
        self._norms: deque[Sequence[float]] = deque(maxlen=RECENT)
        self._first: Evidence | None = None
        self._words, self._again = "", False
        self._step = 0
        snapshots.adds, self._fingerprints = True, engine.watch(self._judge)

    def step(self, step: int, make: Callable[[], T], doubt_of: Callable[[T], str], say: Say) -> T:
        """Run a step with `run`, and once more if it is suspect; `find_anomaly` judges the outcome after the update. Return the outcome.

        Raises Diverged if the state differs again, or cannot be restored.
        """
        self._step, self._first, self._again, self._words = step, None, False, ""
        try:
            outcome = make()
            why = doubt_of(outcome)
        except Diverged as error:
            if not self._snapshots.has(step):
                raise
            why = self._blame(error)
        except Doubted as error:
            why = str(error)
        if not why or not self._snapshots.has(step):
            return outcome
        say(f"step {step + 1}: {why}; it is rerun from the snapshot before it")
        self._snapshots.restore(step)
        self._again = True
        outcome = make()
        if anomaly := doubt_of(outcome):
            say(f"step {step + 1}: {anomaly} again when rerun, so no machine is at fault{self._words}")
        elif self._words:
            say(f"step {step + 1}: {self._words}")
        return outcome

    def kept(self) -> None:
        """Record the fingerprints of the snapshot after the last step, which is known to be correct."""
        self._fingerprints.keep(self._engine.step_index, self._snapshots.sums)

    def _judge(self, result: Result, norms: Sequence[float]) -> str:
        """Return why a step is suspect before its update, empty if it is not; in the rerun, find what was wrong in the first run."""
        engine, scaled = self._engine, self._engine.scale.scaled
        recent = list(self._norms)
        why_norms = "" if scaled else doubt_of_norms(norms, recent)
        why = doubt(engine.loss_of(result), None, scaled, self._losses) or why_norms
        if not why and self._first is None:
            self._norms.append(norms)
            return ""
        if not self._again and not self._snapshots.has(self._step):
            return ""
        evidence = Evidence.of(result.losses, engine.gradients.norms, engine.parts.groups)
        if not self._again:
            self._first = evidence
            return why
        self._compare(evidence, why, [not isfinite(x) for x in norms] if why_norms else [False] * len(norms))
        return ""

    def _compare(self, second: Evidence, why: str, is_odd: Sequence[bool]) -> None:
        """Compare the rerun with the first run of a step, to find what was wrong; every rank calls it."""
        if self._first is None:
            return
        words = words_of(self._all(Finding.between(self._first, second, self._names)), self._names)
        if not why:
            self._words = f"correct when rerun; wrong before was {words}" if words else ""
            return
        within = words_of(self._all(Finding.within(second, self._names, is_odd[self._world.rank])), self._names)
        self._words = f": it comes from {within}" if within else ""
        if words:
            self._words += f", though {words} differed in the first run"
        if any(is_odd):
            raise RunError(f"{why} at step {self._step + 1}, run twice{self._words}; {self._unstable()}")

    def _all(self, mine: Finding) -> list[Finding]:
        """Gather the anomalies of all ranks (all-gather)."""
        return [Finding(*numbers) for numbers in self._world.gathered_numbers([mine.loss, mine.gradients, mine.parameter])]

    def _blame(self, error: Diverged) -> str:
        """Return which tensor on which rank differs from its snapshot; every rank calls it. Raises `error` if that explains nothing."""
        changed = self._snapshots.changed(self._step, others=error.since_update)
        name, slot = self._name(changed) if changed is not None else ("", "")
        slots = ["", *self._engine.spec.slots]
        position = 1 + self._names.index(name) if name in self._names else 0
        local_code = 0 if changed is None else 1 + position * len(slots) + (slots.index(slot) if slot in slots else 0)
        codes = self._world.gathered_numbers([local_code])
        words = []
        for rank, (code,) in enumerate(codes):
            if code:
                position, slot_number = divmod(code - 1, len(slots))
                what = f"{slots[slot_number]} of " * bool(slot_number) + self._names[position - 1] if position else "the state"
                words.append(f"{what} on rank {rank}")
        elsewhere = error.since_update and any(code and rank not in error.ranks for rank, (code,) in enumerate(codes))
        if not words or elsewhere:  # the update itself was wrong, or the snapshot is corrupted
            raise error
        return f"a bit was flipped in {' and '.join(words)}"

    def _name(self, changed: tuple[int, int]) -> tuple[str, str]:
        """Return (parameter, optimizer slot) of an element of the state; empty strings if it belongs to neither."""
        engine, (number, element) = self._engine, changed
        if name := parameter_at(engine.parts.groups, number, element):
            return name, ""
        mutable, constant, _ = engine.state()
        if number >= len(mutable):
            address = constant[number - len(mutable)].data_ptr()
            return next((name for name, p in engine.parts.parameters.items() if p.data_ptr() == address), ""), ""
        return engine.owner_of(mutable[number], element)
