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

from shardwise.errors import RunError
from shardwise.run.engine import Engine
from shardwise.run.recovery.fingerprints import StateDiverged, SuspectStep, parameter_at_element
from shardwise.run.recovery.snapshots import Snapshots
from shardwise.run.recovery.step_evidence import StepAnomaly, StepEvidence, describe_anomalies
from shardwise.run.step.executor import RunResult
from shardwise.train.recovery.anomalies import NUM_RECENT_STEPS, gradient_anomaly, loss_anomaly
from shardwise.world.world import World

T = TypeVar("T")
Say = Callable[[str], None]


class StepGuard:
    """The guard of one attempt at a run; every rank has one. `losses`: of the steps so far; the run appends to it."""

    def __init__(
        self, world: World, engine: Engine, snapshots: Snapshots, losses: Sequence[float], instability_remedy: Callable[[], str]
    ) -> None:
        """`instability_remedy()`: advice for a step whose gradients are not finite in both runs."""
        self._world, self._engine, self._snapshots, self._losses, self._instability_remedy = (
            world,
            engine,
            snapshots,
            losses,
            instability_remedy,
        )
        self._parameter_names = [v.name for v in engine.rank_model.graph.parameters]  # in the same order on all ranks
        self._recent_norms: deque[Sequence[float]] = deque(maxlen=NUM_RECENT_STEPS)
        self._first_evidence: StepEvidence | None = None
        self._explanation, self._is_repeated = "", False
        self._step = 0
        snapshots.takes_fingerprints, self._fingerprints = True, engine.watch(self._find_anomaly)

    def run_step(self, step: int, run: Callable[[], T], find_anomaly: Callable[[T], str], say: Say) -> T:
        """Run a step with `run`, and once more if it is suspect; `find_anomaly` judges the outcome after the update. Return the outcome.

        Raises Diverged if the state differs again, or cannot be restored.
        """
        self._step, self._first_evidence, self._is_repeated, self._explanation = step, None, False, ""
        try:
            outcome = run()
            why = find_anomaly(outcome)
        except StateDiverged as error:
            if not self._snapshots.has(step):
                raise
            why = self._locate_corruption(error)
        except SuspectStep as error:
            why = str(error)
        if not why or not self._snapshots.has(step):
            return outcome
        say(f"step {step + 1}: {why}; it is rerun from the snapshot before it")
        self._snapshots.restore(step)
        self._is_repeated = True
        outcome = run()
        if anomaly := find_anomaly(outcome):
            say(f"step {step + 1}: {anomaly} again when rerun, so no machine is at fault{self._explanation}")
        elif self._explanation:
            say(f"step {step + 1}: {self._explanation}")
        return outcome

    def record_state(self) -> None:
        """Record the fingerprints of the snapshot after the last step, which is known to be correct."""
        self._fingerprints.record_expected(self._engine.step_index, self._snapshots.fingerprints)

    def _find_anomaly(self, result: RunResult, norms: Sequence[float]) -> str:
        """Return why a step is suspect before its update, empty if it is not; in the rerun, find what was wrong in the first run."""
        engine, scaled = self._engine, self._engine.loss_scale.is_scaled
        recent = list(self._recent_norms)
        why_norms = "" if scaled else gradient_anomaly(norms, recent)
        why = loss_anomaly(engine.loss_of(result), None, scaled, self._losses) or why_norms
        if not why and self._first_evidence is None:
            self._recent_norms.append(norms)
            return ""
        if not self._is_repeated and not self._snapshots.has(self._step):
            return ""
        evidence = StepEvidence.of_step(result.losses, engine.gradients.norms, engine.rank_model.groups)
        if not self._is_repeated:
            self._first_evidence = evidence
            return why
        self._compare_attempts(evidence, why, [not isfinite(x) for x in norms] if why_norms else [False] * len(norms))
        return ""

    def _compare_attempts(self, second: StepEvidence, anomaly: str, is_anomalous: Sequence[bool]) -> None:
        """Compare the rerun with the first run of a step, to find what was wrong; every rank calls it."""
        if self._first_evidence is None:
            return
        words = describe_anomalies(
            self._gather_anomalies(StepAnomaly.between(self._first_evidence, second, self._parameter_names)), self._parameter_names
        )
        if not anomaly:
            self._explanation = f"correct when rerun; wrong before was {words}" if words else ""
            return
        within = describe_anomalies(
            self._gather_anomalies(StepAnomaly.of_nonfinite(second, self._parameter_names, is_anomalous[self._world.rank])),
            self._parameter_names,
        )
        self._explanation = f": it comes from {within}" if within else ""
        if words:
            self._explanation += f", though {words} differed in the first run"
        if any(is_anomalous):
            raise RunError(f"{anomaly} at step {self._step + 1}, run twice{self._explanation}; {self._instability_remedy()}")

    def _gather_anomalies(self, local_anomaly: StepAnomaly) -> list[StepAnomaly]:
        """Gather the anomalies of all ranks (all-gather)."""
        numbers = self._world.all_gather_ints([local_anomaly.loss, local_anomaly.gradients, local_anomaly.parameter])
        return [StepAnomaly(loss, gradients, parameter) for loss, gradients, parameter in numbers]

    def _locate_corruption(self, error: StateDiverged) -> str:
        """Return which tensor on which rank differs from its snapshot; every rank calls it. Raises `error` if that explains nothing."""
        changed = self._snapshots.first_difference(self._step, includes_peers=error.since_update)
        name, slot = self._name_element(changed) if changed is not None else ("", "")
        slots = ["", *self._engine.optimizer_spec.slots]
        position = 1 + self._parameter_names.index(name) if name in self._parameter_names else 0
        local_code = 0 if changed is None else 1 + position * len(slots) + (slots.index(slot) if slot in slots else 0)
        codes = self._world.all_gather_ints([local_code])
        words = []
        for rank, (code,) in enumerate(codes):
            if code:
                position, slot_number = divmod(code - 1, len(slots))
                what = f"{slots[slot_number]} of " * bool(slot_number) + self._parameter_names[position - 1] if position else "the state"
                words.append(f"{what} on rank {rank}")
        elsewhere = error.since_update and any(code and rank not in error.ranks for rank, (code,) in enumerate(codes))
        if not words or elsewhere:  # the update itself was wrong, or the snapshot is corrupted
            raise error
        return f"a bit was flipped in {' and '.join(words)}"

    def _name_element(self, changed: tuple[int, int]) -> tuple[str, str]:
        """Return (parameter, optimizer slot) of an element of the state; empty strings if it belongs to neither."""
        engine, (number, element) = self._engine, changed
        if name := parameter_at_element(engine.rank_model.groups, number, element):
            return name, ""
        mutable, constant, _ = engine.state()
        if number >= len(mutable):
            address = constant[number - len(mutable)].data_ptr()
            return next((name for name, p in engine.rank_model.parameters.items() if p.data_ptr() == address), ""), ""
        return engine.owner_of(mutable[number], element)
