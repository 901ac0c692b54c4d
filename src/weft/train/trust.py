"""Steps that are made again where they are not to be believed. In: a step, the state before it. Out: its result, and who was at fault.

Before each update all ranks know the loss and the norm of every rank's own gradients. Where one of them is no number or far above the last
ten, nothing is updated: the state before is taken back, and the step is made once more. What it computes then, on the same bits, says
whose numbers were wrong. Nothing of this costs anything while no step is doubted, but for the norms.
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
    """In one attempt at a run; every rank makes one. `losses`: of the steps so far, to which the run adds."""

    def __init__(self, world: World, engine: Engine, snapshots: Snapshots, losses: Sequence[float], unstable: Callable[[], str]) -> None:
        """`unstable()`: what to say of a step whose gradients are no numbers, made twice."""
        self._world, self._engine, self._snapshots, self._losses, self._unstable = world, engine, snapshots, losses, unstable
        self._names = [v.name for v in engine.parts.graph.parameters]  # in one order on all ranks
        self._norms: deque[Sequence[float]] = deque(maxlen=RECENT)
        self._first: Evidence | None = None
        self._words, self._again = "", False
        self._step = 0
        snapshots.adds, self._fingerprints = True, engine.watch(self._judge)

    def step(self, step: int, make: Callable[[], T], doubt_of: Callable[[T], str], say: Say) -> T:
        """What `make` returns; `doubt_of` it, after the update. Raises Diverged where the state differs again, or cannot be taken back."""
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
        say(f"step {step + 1}: {why}; it is made again from the state before it")
        self._snapshots.restore(step)
        self._again = True
        outcome = make()
        if again := doubt_of(outcome):
            say(f"step {step + 1}: {again} again, so it was no fault of the machine{self._words}")
        elif self._words:
            say(f"step {step + 1}: {self._words}")
        return outcome

    def kept(self) -> None:
        """The state after the last step has been kept, and is as it should be."""
        self._fingerprints.keep(self._engine.step_index, self._snapshots.sums)

    def _judge(self, result: Result, norms: Sequence[float]) -> str:
        """Why a step is doubted before its update, the first time that it is made; the second time, what was wrong the first."""
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
        """What the step that was made again tells of the one before it; every rank calls it."""
        if self._first is None:
            return
        words = words_of(self._all(Finding.between(self._first, second, self._names)), self._names)
        if not why:
            self._words = f"made again, it is as it should be; what was wrong is {words}" if words else ""
            return
        within = words_of(self._all(Finding.within(second, self._names, is_odd[self._world.rank])), self._names)
        self._words = f": it comes from {within}" if within else ""
        if words:
            self._words += f", though {words} was another the first time"
        if any(is_odd):
            raise RunError(f"{why} at step {self._step + 1}, made twice{self._words}; {self._unstable()}")

    def _all(self, mine: Finding) -> list[Finding]:
        """Every rank's."""
        return [Finding(*told) for told in self._world.gathered_numbers([mine.loss, mine.gradients, mine.parameter])]

    def _blame(self, error: Diverged) -> str:
        """Whose state is no longer what it was after the last step, and which tensor; every rank calls it."""
        changed = self._snapshots.changed(self._step, others=error.since_update)
        name, slot = self._name(changed) if changed is not None else ("", "")
        slots = ["", *self._engine.spec.slots]
        place = 1 + self._names.index(name) if name in self._names else 0
        mine = 0 if changed is None else 1 + place * len(slots) + (slots.index(slot) if slot in slots else 0)
        told = self._world.gathered_numbers([mine])
        words = []
        for rank, (number,) in enumerate(told):
            if number:
                place, slot_number = divmod(number - 1, len(slots))
                what = f"{slots[slot_number]} of " * bool(slot_number) + self._names[place - 1] if place else "the state"
                words.append(f"{what} on rank {rank}")
        elsewhere = error.since_update and any(number and rank not in error.ranks for rank, (number,) in enumerate(told))
        if not words or elsewhere:  # the update went wrong, not what memory holds of it; or what is kept is wrong itself
            raise error
        return f"a bit was flipped in {' and '.join(words)}"

    def _name(self, changed: tuple[int, int]) -> tuple[str, str]:
        """(parameter, slot of the optimizer) of an element of the state; empty where it is of another kind."""
        engine, (number, element) = self._engine, changed
        if name := parameter_at(engine.parts.groups, number, element):
            return name, ""
        changing, fixed, _ = engine.state()
        if number >= len(changing):
            where = fixed[number - len(changing)].data_ptr()
            return next((name for name, p in engine.parts.parameters.items() if p.data_ptr() == where), ""), ""
        return engine.owner_of(changing[number], element)
