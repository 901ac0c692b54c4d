"""Plans tried for a few steps, for where prices cannot tell them apart. In: plans of a model by name. Out: seconds of each.

On one machine every plan gets ranks of its own, started as `weft train` starts them, with its threads, allocator and library of products.
Ranks that torchrun or srun has started try plans for as many ranks one after the other, led by rank 0. Either way they make steps on an
example batch. Not modelled: what else runs there meanwhile.
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

WARM, LEAST, MOST = 2, 3, 20  # steps that are not timed, and the fewest and the most that are
AUTO = 3  # plans that are tried where nobody asked for trials
NEAR = 1.25  # of the least predicted time: what is predicted to take longer is slower by the clock too
START_S = 6.0  # until ranks stand and have built a model
SHARE = 0.05  # of the run's predicted time that trials may take, since what they find is mostly more than that
LONG_S = 3.0  # of timed steps, where that is no fewer than `LEAST`
SILENT_S = 120.0  # after which a rank that says nothing has failed
CALM = 0.02  # of a step: less than what one trial differs from the next by


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan with the median seconds of its steps, each the slowest rank's; `note` says why there are none."""

    plan: Plan
    measured_s: float | None
    note: str = ""


def distinct(candidates: Sequence[Candidate], most: int) -> list[Candidate]:
    """The first candidate and those predicted to be fastest, at most `most`, of which no two divide the ranks among the same axes.

    What differs in microbatches, schedule or ZeRO alone differs by what prices tell well.
    """
    by_key: dict[tuple[object, ...], Candidate] = {}
    timed = [(c.prediction.step_time_s, c) for c in candidates if c.prediction is not None and not c.note]
    for _, one in (*timed[:1], *sorted(timed[1:], key=lambda pair: pair[0])):
        by_key.setdefault((one.layout.data, one.layout.inner_axes, one.layout.pipeline), one)
    return list(by_key.values())[:most]


def worthwhile(candidates: Sequence[Candidate], steps: int) -> int:
    """How many plans to try, 0 for none, before `steps` steps of the first: those predicted about as fast, where the run is long beside it.

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
    """Steps of every plan of a model that goes by name, one plan after the other. `sequence`: as for `resolve`; `say` hears of each."""
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
    """As `try_all` on rank 0 of ranks that exist, while the others `follow`; every plan is for as many ranks.

    Raises what any rank raises, as the run itself would.
    """
    trials = []
    for plan in plans:
        order = (format_plan(plan), sequence, num_steps(plan), device_memory)
        world.told(lambda order=order: json.dumps(order))  # type: ignore[misc]
        trials.append(Trial(plan, median(_together(world, *order))))
    return trials


def follow(world: World) -> None:
    """What the other ranks do while rank 0 plans and tries, until it calls `end`."""
    while order := world.told(str):
        _together(world, *json.loads(order))


def end(world: World) -> None:
    """Rank 0's word to those that `follow`: there are no more trials."""
    world.told(str)


def _together(world: World, plan_text: str, sequence: int | None, steps: int, device_memory: float) -> list[float]:
    """Seconds of each step on its slowest rank, on every rank."""
    seconds = torch.tensor(on_rank(world, plan_text, sequence, steps, device_memory), dtype=torch.float64, device=world.device)
    world.everyone.all_reduce(seconds, op="max")
    return [float(s) for s in seconds]


def num_steps(plan: Plan) -> int:
    """Steps to time: as many as are predicted to take `LONG_S`, within bounds; the same on every rank.

    >>> from weft.plan.layout import Layout
    >>> num_steps(Plan(Layout(), "gpt-10m", "here", 16))
    3
    """
    return steps_within(LONG_S, plan.prediction.step_time_s if plan.prediction is not None else LONG_S)


def steps_within(seconds: float, step_s: float) -> int:
    """Steps of `step_s` seconds to time in about `seconds`.

    >>> steps_within(3.0, 0.5)
    6
    """
    return max(LEAST, min(MOST, round(seconds / max(step_s, 1e-9))))


def on_rank(world: World, plan_text: str, sequence: int | None, steps: int, device_memory: float) -> list[float]:
    """Seconds of each timed step, on one rank."""
    return all_steps(world, plan_text, sequence, steps, device_memory)[WARM:]


def all_steps(world: World, plan_text: str, sequence: int | None, steps: int, device_memory: float) -> list[float]:
    """The same with the steps before."""
    plan = parse_plan(plan_text)
    subject = resolve(plan.model, plan.batch_size, sequence)
    batch = subject.batch(plan.batch_size)
    engine = Engine(plan, subject.make, batch, subject.loss, world, "adamw", seed=0, device=OnDevice(memory=device_memory))
    seconds = []
    for _ in range(WARM + steps):
        world.everyone.barrier()
        began = time.perf_counter()
        _ = engine.step(batch).loss  # where the step runs on an accelerator, its loss is there when it has ended
        seconds.append(time.perf_counter() - began)
    return seconds


def fastest(trials: Sequence[Trial]) -> Plan:
    """The plan of the fastest trial; of those within 2 % of it the first.

    Raises:
        Infeasible: none ran, with the first one's reason.
    """
    done = [t for t in trials if t.measured_s is not None]
    if not done:
        raise Infeasible(f"none of the {len(trials)} plans tried runs: {trials[0].plan.layout}: {trials[0].note}")
    return done[first_fastest([t.measured_s or 0.0 for t in done])].plan


def first_fastest(seconds: Sequence[float]) -> int:
    """Where the first stands that is about as fast as the fastest.

    >>> first_fastest([1.5, 1.01, 1.0])
    1
    """
    return next(i for i, one in enumerate(seconds) if one <= min(seconds) * (1 + CALM))


def trial_words(trial: Trial) -> str:
    """One trial in words: measured beside predicted.

    >>> from weft.plan.layout import Layout
    >>> trial_words(Trial(Plan(Layout(), "gpt-10m", "here", 16), 0.25))
    'data=1 tensor=1 pipeline=1 took 250 ms'
    """
    if trial.measured_s is None:
        return f"{trial.plan.layout} does not run: {trial.note}"
    predicted = trial.plan.prediction
    said = f" ({format_seconds(predicted.step_time_s)} predicted)" if predicted is not None else ""
    return f"{trial.plan.layout} took {format_seconds(trial.measured_s)}{said}"
