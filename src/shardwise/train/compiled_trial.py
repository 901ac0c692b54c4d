"""Choice of torch.compile for a run: steps of its plan are measured with and without `compile=on`, and the faster total wins.

Compile time counts, as measured in the first steps of the trial. The compiled kernels stay in torch's cache on disk, so the run itself
starts sooner. Not modelled: recompilation for batches of other shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from shardwise.errors import LayoutError, ShardwiseError
from shardwise.plan.plan import Plan
from shardwise.plan.plan_file import format_plan
from shardwise.train import trials
from shardwise.units import format_count, format_seconds
from shardwise.world.launch.launch import Launcher, engine_modules
from shardwise.world.launch.watch import LaunchOptions

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
    return predicted is not None and not plan.uncaptured and trials.MAX_RUN_SHARE * steps * predicted.step_time_s >= 2 * COMPILE_TIME_S


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
    except LayoutError:  # layouts that offload or gather inside of a stage cannot be compiled
        return plan
    timed: list[CompileTiming] = []
    with Launcher(preload=engine_modules(device)) as launcher:
        for candidate in (plan, compiled):
            layout = candidate.layout
            say(f"trying {layout}")
            try:
                reports = launcher.launch(
                    trials.all_steps_on_rank, layout.num_ranks, format_plan(candidate), sequence, trials.num_steps(candidate),
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
    step_s = median(steps[trials.NUM_WARMUP_STEPS :])
    return CompileTiming(step_s, sum(steps[: trials.NUM_WARMUP_STEPS]) - trials.NUM_WARMUP_STEPS * step_s)
