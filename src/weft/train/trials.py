"""Trial runs: candidate plans measured for a few steps each, where the cost model cannot tell which is fastest.

On one machine every plan gets its own ranks, launched as by `weft train`, with its threads, allocator and matmul backend. Ranks that
torchrun or srun has started try plans for equally many ranks one after another, led by rank 0. Either way they run steps on an example
batch. Not modelled: other load on the machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from weft.errors import Infeasible, WeftError
from weft.plan.plan import Candidate, Plan
from weft.plan.plan_file import format_plan, parse_plan
from weft.run.engine import Engine, OnDevice
from weft.units import format_seconds
from weft.world.launch import SLEEPING, Launcher, engine_modules
from weft.world.world import World
from weft.zoo.resolve import resolve

WARM, LEAST, MOST = 2, 3, 20  # warm-up steps, which are not timed; fewest and most timed steps
AUTO = 3  # most plans that are tried with trials = "auto"
NEAR = 1.25  # times the least predicted time: plans predicted to be slower than that are slower when measured, too
START_S = 6.0  # to launch ranks and build a model
SHARE = 0.05  # share of the run's predicted time that trials may take, since they mostly save more than that
LONG_S = 3.0  # seconds of timed steps, if these are at least the fewest
SILENT_S = 120.0  # after which a rank that does not answer has failed
CALM = 0.02  # relative difference in step time below the noise between trials


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan with its median step time, each step's being the slowest rank's; `note` says why there is none."""

    plan: Plan
    measured_s: float | None
    note: str = ""


def distinct(candidates: Sequence[Candidate], most: int) -> list[Candidate]:
    """Select the first candidate and those predicted to be fastest, at most `limit`, no two with the same sizes of mesh axes.

    Differences in microbatches, schedule or ZeRO alone are predicted well.
    """
    by_key: dict[tuple[object, ...], Candidate] = {}
    timed = [(c.prediction.step_time_s, c) for c in candidates if c.prediction is not None and not c.note]
    for _, c in (*timed[:1], *sorted(timed[1:], key=lambda pair: pair[0])):
        by_key.setdefault((c.layout.data, c.layout.inner_axes, c.layout.pipeline), c)
    return list(by_key.values())[:most]


def worthwhile(candidates: Sequence[Candidate], steps: int) -> int:
    """Number of plans worth a trial before a run of `steps` steps: those predicted about as fast, if trials are short against the run.

    >>> from weft.plan.layout import Layout
    >>> from weft.plan.plan import Memory, Prediction
    >>> two = [Candidate(Layout(), Prediction(1.1, 0, 0, Memory())), Candidate(Layout(data=2), Prediction(1.0, 0, 0, Memory()))]
    >>> worthwhile(two, 100), worthwhile(two, 1000)
    (0, 2)
    """
    predicted = [c.prediction.step_time_s for c in distinct(candidates, AUTO) if c.prediction is not None]
    near_s = [s for s in predicted if s <= NEAR * min(predicted)]
    trials_s = sum(START_S + (WARM + steps_within(LONG_S, s)) * s for s in near_s)
    return len(near_s) if len(near_s) > 1 and trials_s <= SHARE * steps * predicted[0] else 0


def try_all(
    plans: Sequence[Plan],
    sequence: int | None = None,
    *,
    device: str = "auto",
    device_memory: float = 0.0,
    say: Callable[[str], object] = lambda line: None,
) -> list[Trial]:
    """Measure every plan of a named model, one after another, in ranks launched here. `sequence`: as for `resolve`; `say`: progress."""
    trials = []
    lends = any(plan.layout.lend == "on" for plan in plans)
    with Launcher(env=SLEEPING if lends else None, preload=engine_modules(device)) as launcher:
        for plan in plans:
            layout = plan.layout
            say(f"trying {layout}")
            try:
                seconds = launcher.launch(
                    on_rank, layout.num_ranks, format_plan(plan), sequence, num_steps(plan), device_memory,
                    threads=layout.threads, device=device, timeout_s=SILENT_S, show=False,
                )  # fmt: skip
            except WeftError as error:
                trials.append(Trial(plan, None, str(error).splitlines()[0]))
                continue
            trials.append(Trial(plan, median(max(times) for times in zip(*seconds, strict=True))))
    return trials


def try_in(world: World, plans: Sequence[Plan], sequence: int | None = None, *, device_memory: float = 0.0) -> list[Trial]:
    """Measure plans on rank 0 of ranks that exist, while the others call `follow_trials`; every plan is for all of these ranks.

    Raises the error of any rank, as the run itself would.
    """
    trials = []
    for plan in plans:
        request = (format_plan(plan), sequence, num_steps(plan), device_memory)
        world.told(lambda request=request: json.dumps(request))  # type: ignore[misc]
        trials.append(Trial(plan, median(_together(world, *request))))
    return trials


def follow(world: World) -> None:
    """Take part in the trials that rank 0 leads, until it calls `end_trials`."""
    while request := world.told(str):
        _together(world, *json.loads(request))


def end(world: World) -> None:
    """Release the ranks in `follow_trials`; called by rank 0 after the last trial."""
    world.told(str)


def _together(world: World, plan_text: str, sequence: int | None, steps: int, device_memory: float) -> list[float]:
    """Seconds of each timed step on its slowest rank, the same on every rank."""
    seconds = torch.tensor(on_rank(world, plan_text, sequence, steps, device_memory), dtype=torch.float64, device=world.device)
    world.everyone.all_reduce(seconds, op="max")
    return [float(s) for s in seconds]


def num_steps(plan: Plan) -> int:
    """Number of steps to time: those predicted to take about `TIMED_S`, within bounds; the same on every rank.

    >>> from weft.plan.layout import Layout
    >>> num_steps(Plan(Layout(), "gpt-10m", "here", 16))
    3
    """
    return steps_within(LONG_S, plan.prediction.step_time_s if plan.prediction is not None else LONG_S)


def steps_within(seconds: float, step_s: float) -> int:
    """Number of steps of `step_s` seconds that take about `seconds`, within bounds.

    >>> steps_within(3.0, 0.5)
    6
    """
    return max(LEAST, min(MOST, round(seconds / max(step_s, 1e-9))))


def on_rank(world: World, plan_text: str, sequence: int | None, steps: int, device_memory: float) -> list[float]:
    """Seconds of each timed step on this rank."""
    return all_steps(world, plan_text, sequence, steps, device_memory)[WARM:]


def all_steps(world: World, plan_text: str, sequence: int | None, steps: int, device_memory: float) -> list[float]:
    """Seconds of each step on this rank, warm-up steps included."""
    plan = parse_plan(plan_text)
    resolved = resolve(plan.model, plan.batch_size, sequence)
    batch = resolved.batch(plan.batch_size)
    engine = Engine(plan, resolved.make, batch, resolved.loss, world, "adamw", seed=0, device=OnDevice(memory=device_memory))
    seconds = []
    for _ in range(WARM + steps):
        world.everyone.barrier()
        began = time.perf_counter()
        _ = engine.step(batch).loss  # reading the loss waits for the accelerator
        seconds.append(time.perf_counter() - began)
    return seconds


def fastest(trials: Sequence[Trial]) -> Plan:
    """Return the plan of the fastest trial; of those within 2 % of it the first.

    Raises:
        Infeasible: no plan ran, with the first one's reason.
    """
    done = [t for t in trials if t.measured_s is not None]
    if not done:
        raise Infeasible(f"none of the {len(trials)} plans tried runs: {trials[0].plan.layout}: {trials[0].note}")
    return done[first_fastest([t.measured_s or 0.0 for t in done])].plan


def first_fastest(seconds: Sequence[float]) -> int:
    """Return the index of the first time that equals the fastest up to noise.

    >>> first_fastest([1.5, 1.01, 1.0])
    1
    """
    return next(i for i, time_s in enumerate(seconds) if time_s <= min(seconds) * (1 + CALM))


def trial_words(trial: Trial) -> str:
    """Describe a trial: measured and predicted step time.

    >>> from weft.plan.layout import Layout
    >>> trial_words(Trial(Plan(Layout(), "gpt-10m", "here", 16), 0.25))
    'data=1 tensor=1 pipeline=1 took 250 ms'
    """
    if trial.measured_s is None:
        return f"{trial.plan.layout} does not run: {trial.note}"
    predicted = trial.plan.prediction
    prediction = f" ({format_seconds(predicted.step_time_s)} predicted)" if predicted is not None else ""
    return f"{trial.plan.layout} took {format_seconds(trial.measured_s)}{prediction}"
