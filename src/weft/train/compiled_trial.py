"""Whether compiling pays for a run: steps of its plan with `compile=on` beside those without, by the clock. In: a plan, its steps.

Out: the plan that is faster over all of them, and why. What compiling takes is counted: the first steps of the trial. What it compiled
stays in torch's cache on the disk, so the run itself starts sooner. Not modelled: batches of other forms, which compile anew.
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

COMPILING_S = 120.0  # that ranks may take to compile, before it is known; a GPT of 10 M took less
PATIENCE_S = 900.0  # after which a rank that compiles has failed


@dataclass(frozen=True, slots=True)
class Timed:
    """Median seconds of a step, the slowest rank's, and what the steps before took beyond theirs."""

    step_s: float
    start_s: float


def compiling_may_pay(plan: Plan, steps: int) -> bool:
    """Whether a run of so many steps is long beside what trying takes.

    >>> from weft.plan.layout import Layout
    >>> from weft.plan.plan import Memory, Prediction
    >>> plan = Plan(Layout(), "gpt-10m", "here", 16, prediction=Prediction(1.0, 0, 0, Memory()))
    >>> compiling_may_pay(plan, 600), compiling_may_pay(plan, 6000)
    (False, True)
    """
    predicted = plan.prediction
    return predicted is not None and not plan.uncaptured and trials.SHARE * steps * predicted.step_time_s >= 2 * COMPILING_S


def saves_s(eager: Timed, compiled: Timed, steps: int) -> float:
    """Seconds that compiling saves in so many steps; below zero where it takes longer than it saves.

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
    """`plan`, or the same with `compile=on` where that saves time in `steps` steps; the reasons say what was measured."""
    try:
        other = replace(plan, layout=replace(plan.layout, compile="on"))
    except LayoutError:  # what comes and goes inside of compiled stages
        return plan
    timed: list[Timed] = []
    with Launcher(preload=engine_modules(device)) as launcher:
        for one in (plan, other):
            say(f"trying {one.layout}")
            try:
                reports = launcher.launch(
                    trials.all_steps, one.layout.num_ranks, format_plan(one), sequence, trials.num_steps(one), device_memory,
                    threads=one.layout.threads, device=device, timeout_s=PATIENCE_S, show=False,
                )  # fmt: skip
            except WeftError as error:
                return _because(plan, f"{one.layout} does not run: {str(error).splitlines()[0]}")
            timed.append(_together(reports))
    saved, words = saves_s(timed[0], timed[1], steps), " and ".join(format_seconds(one.step_s) for one in timed)
    said = f"a step takes {words} compiled, which takes {format_seconds(max(0.0, timed[1].start_s - timed[0].start_s))} at the start: "
    said += f"over {format_count(steps)} steps it {'saves' if saved > 0 else 'costs'} {format_seconds(abs(saved))}"
    return _because(other if saved > 0 else plan, said)


def _because(plan: Plan, words: str) -> Plan:
    return replace(plan, reasons=(*plan.reasons, ("compile", words)))


def _together(seconds: list[list[float]]) -> Timed:
    """Of every rank's seconds of all steps."""
    steps = [max(times) for times in zip(*seconds, strict=True)]
    step_s = median(steps[trials.WARM :])
    return Timed(step_s, sum(steps[: trials.WARM]) - trials.WARM * step_s)
