"""Trial runs: candidate plans measured for a few steps each, where the cost model cannot tell which is fastest.

On one machine every plan gets its own ranks, launched as by `shardwise train`, with its threads, allocator and matmul backend. Ranks that
torchrun or srun has started try plans for equally many ranks one after another, led by rank 0. Either way they run steps on an example
batch. Not modelled: other load on the machine.

The same decides on torch.compile: steps of a plan are measured with and without `compile=on`, and the faster total wins. Compile time
counts, as measured in the first steps of the trial. The compiled kernels stay in torch's cache on disk, so the run itself starts sooner.
Not modelled: recompilation for batches of other shapes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from shardwise.errors import Infeasible, LayoutError, ShardwiseError
from shardwise.plan.plan import LayoutCandidate, Plan
from shardwise.plan.plan_file import format_plan, parse_plan
from shardwise.run.engine import DeviceOptions, Engine
from shardwise.units import format_count, format_seconds
from shardwise.world.launch.launch import PASSIVE_WAIT, Launcher, engine_modules
from shardwise.world.launch.watch import LaunchOptions
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve

NUM_WARMUP_STEPS, MIN_TIMED_STEPS, MAX_TIMED_STEPS = 2, 3, 20  # warm-up steps, which are not timed; fewest and most timed steps
NUM_AUTOMATIC_TRIALS = 3  # most plans that are tried with trials = "auto"
MAX_TIME_RATIO = 1.25  # times the least predicted time: plans predicted to be slower than that are slower when measured, too
START_S = 6.0  # to launch ranks and build a model
MAX_RUN_SHARE = 0.05  # share of the run's predicted time that trials may take, since they mostly save more than that
TIMED_S = 3.0  # seconds of timed steps, if these are at least the fewest
SILENCE_TIMEOUT_S = 120.0  # after which a rank that does not answer has failed
TRIAL_NOISE = 0.02  # relative difference in step time below the noise between trials


@dataclass(frozen=True, slots=True)
class PlanTrial:
    """A plan with its median step time, each step's being the slowest rank's; `note` says why there is none."""

    plan: Plan
    measured_s: float | None
    note: str = ""


def select_distinct_candidates(candidates: Sequence[LayoutCandidate], limit: int) -> list[LayoutCandidate]:
    """Select the first candidate and those predicted to be fastest, at most `limit`, no two with the same sizes of mesh axes.

    Differences in microbatches, schedule or ZeRO alone are predicted well.
    """
    by_key: dict[tuple[object, ...], LayoutCandidate] = {}
    timed = [(c.prediction.step_time_s, c) for c in candidates if c.prediction is not None and not c.note]
    for _, c in (*timed[:1], *sorted(timed[1:], key=lambda pair: pair[0])):
        by_key.setdefault((c.layout.data, c.layout.inner_axes, c.layout.pipeline), c)
    return list(by_key.values())[:limit]


def num_worthwhile_trials(candidates: Sequence[LayoutCandidate], steps: int) -> int:
    """Number of plans worth a trial before a run of `steps` steps: those predicted about as fast, if trials are short against the run.

    >>> from shardwise.plan.layout import Layout
    >>> from shardwise.plan.plan import MemoryBreakdown, Prediction
    >>> two = [LayoutCandidate(Layout(), Prediction(1.1, 0, 0, MemoryBreakdown())), LayoutCandidate(Layout(data=2), Prediction(1.0, 0, 0, MemoryBreakdown()))]
    >>> num_worthwhile_trials(two, 100), num_worthwhile_trials(two, 1000)
    (0, 2)
    """  # noqa: E501
    predicted = [c.prediction.step_time_s for c in select_distinct_candidates(candidates, NUM_AUTOMATIC_TRIALS) if c.prediction is not None]
    near_s = [s for s in predicted if s <= MAX_TIME_RATIO * min(predicted)]
    trials_s = sum(START_S + (NUM_WARMUP_STEPS + steps_within(TIMED_S, s)) * s for s in near_s)
    return len(near_s) if len(near_s) > 1 and trials_s <= MAX_RUN_SHARE * steps * predicted[0] else 0


def try_plans(
    plans: Sequence[Plan],
    sequence: int | None = None,
    *,
    device: str = "auto",
    device_memory: float = 0.0,
    say: Callable[[str], object] = lambda line: None,
) -> list[PlanTrial]:
    """Measure every plan of a named model, one after another, in ranks launched here. `sequence`: as for `resolve`; `say`: progress."""
    trials = []
    lends = any(plan.layout.lend == "on" for plan in plans)
    with Launcher(env=PASSIVE_WAIT if lends else None, preload=engine_modules(device)) as launcher:
        for plan in plans:
            layout = plan.layout
            say(f"trying {layout}")
            try:
                seconds = launcher.launch(
                    timed_steps_on_rank, layout.num_ranks, format_plan(plan), sequence, num_steps(plan), device_memory,
                    options=LaunchOptions(threads=layout.threads, device=device, timeout_s=SILENCE_TIMEOUT_S, show=False),
                )  # fmt: skip
            except ShardwiseError as error:
                trials.append(PlanTrial(plan, None, str(error).splitlines()[0]))
                continue
            trials.append(PlanTrial(plan, median(max(times) for times in zip(*seconds, strict=True))))
    return trials


def try_plans_in_world(world: World, plans: Sequence[Plan], sequence: int | None = None, *, device_memory: float = 0.0) -> list[PlanTrial]:
    """Measure plans on rank 0 of ranks that exist, while the others call `follow_trials`; every plan is for all of these ranks.

    Raises the error of any rank, as the run itself would.
    """
    trials = []
    for plan in plans:
        request: dict[str, Any] = {
            "plan_text": format_plan(plan),
            "sequence": sequence,
            "steps": num_steps(plan),
            "device_memory": device_memory,
        }
        world.broadcast_text(lambda request=request: json.dumps(request))  # type: ignore[misc]
        trials.append(PlanTrial(plan, median(_slowest_step_times(world, **request))))
    return trials


def follow_trials(world: World) -> None:
    """Take part in the trials that rank 0 leads, until it calls `end_trials`."""
    while request := world.broadcast_text(str):
        _slowest_step_times(world, **json.loads(request))


def end_trials(world: World) -> None:
    """Release the ranks in `follow_trials`; called by rank 0 after the last trial."""
    world.broadcast_text(str)


def _slowest_step_times(world: World, plan_text: str, sequence: int | None, steps: int, device_memory: float) -> list[float]:
    """Seconds of each timed step on its slowest rank, the same on every rank."""
    seconds = torch.tensor(timed_steps_on_rank(world, plan_text, sequence, steps, device_memory), dtype=torch.float64, device=world.device)
    world.world_group.all_reduce(seconds, op="max")
    return [float(s) for s in seconds]


def num_steps(plan: Plan) -> int:
    """Number of steps to time: those predicted to take about `TIMED_S`, within bounds; the same on every rank.

    >>> from shardwise.plan.layout import Layout
    >>> num_steps(Plan(Layout(), "gpt-10m", "here", 16))
    3
    """
    return steps_within(TIMED_S, plan.prediction.step_time_s if plan.prediction is not None else TIMED_S)


def steps_within(seconds: float, step_s: float) -> int:
    """Number of steps of `step_s` seconds that take about `seconds`, within bounds.

    >>> steps_within(3.0, 0.5)
    6
    """
    return max(MIN_TIMED_STEPS, min(MAX_TIMED_STEPS, round(seconds / max(step_s, 1e-9))))


def timed_steps_on_rank(world: World, plan_text: str, sequence: int | None, steps: int, device_memory: float) -> list[float]:
    """Seconds of each timed step on this rank."""
    return all_steps_on_rank(world, plan_text, sequence, steps, device_memory)[NUM_WARMUP_STEPS:]


def all_steps_on_rank(world: World, plan_text: str, sequence: int | None, steps: int, device_memory: float) -> list[float]:
    """Seconds of each step on this rank, warm-up steps included."""
    plan = parse_plan(plan_text)
    resolved = resolve(plan.model, plan.batch_size, sequence)
    batch = resolved.batch(plan.batch_size)
    engine = Engine(
        plan, resolved.make, batch, resolved.loss, world, "adamw", seed=0, device=DeviceOptions(memory_limit_bytes=device_memory)
    )
    seconds = []
    for _ in range(NUM_WARMUP_STEPS + steps):
        world.world_group.barrier()
        began = time.perf_counter()
        _ = engine.step(batch).loss  # reading the loss waits for the accelerator
        seconds.append(time.perf_counter() - began)
    return seconds


def fastest_plan(trials: Sequence[PlanTrial]) -> Plan:
    """Return the plan of the fastest trial; of those within 2 % of it the first.

    Raises:
        Infeasible: no plan ran, with the first one's reason.
    """
    done = [t for t in trials if t.measured_s is not None]
    if not done:
        raise Infeasible(f"none of the {len(trials)} plans tried runs: {trials[0].plan.layout}: {trials[0].note}")
    return done[index_of_first_fastest([t.measured_s or 0.0 for t in done])].plan


def index_of_first_fastest(seconds: Sequence[float]) -> int:
    """Return the index of the first time that equals the fastest up to noise.

    >>> index_of_first_fastest([1.5, 1.01, 1.0])
    1
    """
    return next(i for i, time_s in enumerate(seconds) if time_s <= min(seconds) * (1 + TRIAL_NOISE))


def describe_trial(trial: PlanTrial) -> str:
    """Describe a trial: measured and predicted step time.

    >>> from shardwise.plan.layout import Layout
    >>> describe_trial(PlanTrial(Plan(Layout(), "gpt-10m", "here", 16), 0.25))
    'data=1 tensor=1 pipeline=1 took 250 ms'
    """
    if trial.measured_s is None:
        return f"{trial.plan.layout} does not run: {trial.note}"
    predicted = trial.plan.prediction
    prediction = f" ({format_seconds(predicted.step_time_s)} predicted)" if predicted is not None else ""
    return f"{trial.plan.layout} took {format_seconds(trial.measured_s)}{prediction}"


COMPILE_TIME_S = 120.0  # upper estimate of the compile time before it is measured; a GPT of 10 M parameters took less
COMPILE_TIMEOUT_S = 900.0  # after which a compiling rank counts as failed


@dataclass(frozen=True, slots=True)
class CompileTiming:
    """Median step time on the slowest rank, and the additional time of the warm-up steps."""

    step_s: float
    startup_s: float


def compiling_may_pay(plan: Plan, steps: int) -> bool:
    """Return whether a run of so many steps is long against the time of a trial.

    >>> from shardwise.plan.layout import Layout
    >>> from shardwise.plan.plan import MemoryBreakdown, Prediction
    >>> plan = Plan(Layout(), "gpt-10m", "here", 16, prediction=Prediction(1.0, 0, 0, MemoryBreakdown()))
    >>> compiling_may_pay(plan, 600), compiling_may_pay(plan, 6000)
    (False, True)
    """
    predicted = plan.prediction
    return predicted is not None and not plan.uncaptured and MAX_RUN_SHARE * steps * predicted.step_time_s >= 2 * COMPILE_TIME_S


def compile_saving_s(eager: CompileTiming, compiled: CompileTiming, steps: int) -> float:
    """Seconds that compiling saves in so many steps; negative if it takes longer than it saves.

    >>> compile_saving_s(CompileTiming(1.0, 0.0), CompileTiming(0.75, 60.0), 200), compile_saving_s(CompileTiming(1.0, 0.0), CompileTiming(0.75, 60.0), 1000)
    (-10.0, 190.0)
    """  # noqa: E501
    return steps * (eager.step_s - compiled.step_s) - (compiled.startup_s - eager.startup_s)


def choose_compilation(
    plan: Plan,
    steps: int,
    sequence: int | None = None,
    *,
    device: str = "auto",
    device_memory: float = 0.0,
    say: Callable[[str], object] = lambda line: None,
) -> Plan:
    """Return `plan`, with `compile=on` if that saves time in `steps` steps; the plan's reasons state the measurements."""
    try:
        compiled = replace(plan, layout=replace(plan.layout, compile="on"))
    except LayoutError:  # layouts that offload or compute again inside of a stage cannot be compiled
        return plan
    timed: list[CompileTiming] = []
    with Launcher(preload=engine_modules(device)) as launcher:
        for candidate in (plan, compiled):
            layout = candidate.layout
            say(f"trying {layout}")
            try:
                reports = launcher.launch(
                    all_steps_on_rank, layout.num_ranks, format_plan(candidate), sequence, num_steps(candidate),
                    device_memory,
                    options=LaunchOptions(threads=layout.threads, device=device, timeout_s=COMPILE_TIMEOUT_S, show=False),
                )  # fmt: skip
            except ShardwiseError as error:
                return _with_reason(plan, f"{layout} does not run: {str(error).splitlines()[0]}")
            timed.append(_timing_of_ranks(reports))
    saved_s, words = compile_saving_s(timed[0], timed[1], steps), " and ".join(format_seconds(timing.step_s) for timing in timed)
    reason = (
        f"a step takes {words} compiled, which takes {format_seconds(max(0.0, timed[1].startup_s - timed[0].startup_s))} at the start: "
    )
    reason += f"over {format_count(steps)} steps it {'saves' if saved_s > 0 else 'costs'} {format_seconds(abs(saved_s))}"
    return _with_reason(compiled if saved_s > 0 else plan, reason)


def _with_reason(plan: Plan, words: str) -> Plan:
    return replace(plan, reasons=(*plan.reasons, ("compile", words)))


def _timing_of_ranks(seconds: list[list[float]]) -> CompileTiming:
    """Combine every rank's seconds of all steps, the slowest rank of each step counting."""
    steps = [max(times) for times in zip(*seconds, strict=True)]
    step_s = median(steps[NUM_WARMUP_STEPS:])
    return CompileTiming(step_s, sum(steps[:NUM_WARMUP_STEPS]) - NUM_WARMUP_STEPS * step_s)
