"""Choice of torch.compile for a run: steps of its plan are measured with and without `compile=on`, and the faster total wins.

Compile time counts, as measured in the first steps of the trial. The compiled kernels stay in torch's cache on disk, so the run itself
starts sooner. Not modelled: recompilation for batches of other shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from weft.errors import LayoutError, WeftError
from weft.plan.plan import Plan
from weft.plan.plan_file import format_plan
from weft.train import trials
from weft.units import format_count, format_seconds
from weft.world.launch import Launcher, engine_modules

COMPILING_S = 120.0  # upper estimate of the compile time before it is measured; a GPT of 10 M parameters took less
PATIENCE_S = 900.0  # after which a compiling rank counts as failed


@dataclass(frozen=True, slots=True)
class Timed:
    """Median step time on the slowest rank, and the additional time of the warm-up steps."""

    step_s: float
    start_s: float


def compiling_may_pay(plan: Plan, steps: int) -> bool:
    """Return whether a run of so many steps is long against the time of a trial.

    >>> from weft.plan.layout import Layout
    >>> from weft.plan.plan import Memory, Prediction
    >>> plan = Plan(Layout(), "gpt-10m", "here", 16, prediction=Prediction(1.0, 0, 0, Memory()))
    >>> compiling_may_pay(plan, 600), compiling_may_pay(plan, 6000)
    (False, True)
    """
    predicted = plan.prediction
    return predicted is not None and not plan.uncaptured and trials.SHARE * steps * predicted.step_time_s >= 2 * COMPILING_S


def saves_s(eager: Timed, compiled: Timed, steps: int) -> float:
    """Seconds that compiling saves in so many steps; negative if it takes longer than it saves.

    >>> saves_s(Timed(1.0, 0.0), Timed(0.75, 60.0), 200), saves_s(Timed(1.0, 0.0), Timed(0.75, 60.0), 1000)
    (-10.0, 190.0)
    """
    return steps * (eager.step_s - compiled.step_s) - (compiled.start_s - eager.start_s)


def weighed(
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
    timed: list[Timed] = []
    with Launcher(preload=engine_modules(device)) as launcher:
        for candidate in (plan, compiled):
            layout = candidate.layout
            say(f"trying {layout}")
            try:
                reports = launcher.launch(
                    trials.all_steps, layout.num_ranks, format_plan(candidate), sequence, trials.num_steps(candidate), device_memory,
                    threads=layout.threads, device=device, timeout_s=PATIENCE_S, show=False,
                )  # fmt: skip
            except WeftError as error:
                return _because(plan, f"{layout} does not run: {str(error).splitlines()[0]}")
            timed.append(_together(reports))
    saved_s, words = saves_s(timed[0], timed[1], steps), " and ".join(format_seconds(timing.step_s) for timing in timed)
    reason = f"a step takes {words} compiled, which takes {format_seconds(max(0.0, timed[1].start_s - timed[0].start_s))} at the start: "
    reason += f"over {format_count(steps)} steps it {'saves' if saved_s > 0 else 'costs'} {format_seconds(abs(saved_s))}"
    return _because(compiled if saved_s > 0 else plan, reason)


def _because(plan: Plan, words: str) -> Plan:
    return replace(plan, reasons=(*plan.reasons, ("compile", words)))


def _together(seconds: list[list[float]]) -> Timed:
    """Combine every rank's seconds of all steps, the slowest rank of each step counting."""
    steps = [max(times) for times in zip(*seconds, strict=True)]
    step_s = median(steps[trials.WARM :])
    return Timed(step_s, sum(steps[: trials.WARM]) - trials.WARM * step_s)
