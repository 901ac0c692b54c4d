"""Learning-rate schedules: the rate as a function of the step.

Three schedules are in closed form; all others are torch's or those of `transformers`, which are replayed from the first step on.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from functools import lru_cache
from math import cos, pi
from typing import Any

import torch

from shardwise.errors import UsageError, did_you_mean, format_error
from shardwise.train.config import CLOSED_FORM_SCHEDULES, TrainSection


def learning_rate(step: int, section: TrainSection) -> float:
    """Return the rate: linear warm-up over `warmup_steps`, then decay from `learning_rate` to `min_learning_rate` at `steps`, or another
    schedule.

    Steps count from 0; the first step of a warm-up has a rate above 0.

    >>> section = TrainSection(steps=10, warmup_steps=2, learning_rate=1.0, schedule="linear")
    >>> [learning_rate(step, section) for step in (0, 1, 2, 6)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if section.schedule not in CLOSED_FORM_SCHEDULES:
        return _cached_schedule(section.model_dump_json()).rate(step)
    if step < section.warmup_steps:
        return section.learning_rate * (step + 1) / section.warmup_steps
    progress = min(1.0, (step - section.warmup_steps) / max(1, section.steps - section.warmup_steps))
    match section.schedule:
        case "cosine":
            share = 0.5 * (1 + cos(pi * progress))
        case "linear":
            share = 1 - progress
        case _:
            share = 1.0
    return section.min_learning_rate + (section.learning_rate - section.min_learning_rate) * share


def check_schedule(section: TrainSection) -> None:
    """Raise UsageError if a schedule is unknown, rejects its options, or needs more than the step."""
    if section.schedule in CLOSED_FORM_SCHEDULES:
        raise UsageError(f'schedule = "{section.schedule}" has no schedule_options; it has min_learning_rate and warmup_steps')
    if section.min_learning_rate:
        raise UsageError(
            f'min_learning_rate is for {", ".join(CLOSED_FORM_SCHEDULES)}; schedule = "{section.schedule}" is told by schedule_options'
        )
    _ScheduleReplay(section).rate(0)


@lru_cache(maxsize=4)
def _cached_schedule(text: str) -> _ScheduleReplay:
    return _ScheduleReplay(TrainSection.model_validate_json(text))


class _ScheduleReplay:
    """The rates of a schedule of torch or `transformers`, replayed up to the largest step so far."""

    def __init__(self, section: TrainSection) -> None:
        self._optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=section.learning_rate, momentum=0.5)
        self._warmup = 0
        options, kinds = section.schedule_options, _torch_schedulers()
        try:
            if section.schedule.lower() in kinds:
                self._warmup = section.warmup_steps
                if "cycle_momentum" in _option_names(kinds[section.schedule.lower()]):
                    options = {"cycle_momentum": False} | options
                    if options["cycle_momentum"]:
                        what = f'schedule = "{section.schedule}"'
                        raise UsageError(f"{what}: cycle_momentum changes the momentum, which shardwise train does not; set it to false")
                self._schedule = kinds[section.schedule.lower()](self._optimizer, **options)
            else:
                self._schedule = _transformers_scheduler(section, self._optimizer)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f'schedule = "{section.schedule}" with schedule_options = {options}: {format_error(error)}') from error
        if "metrics" in inspect.signature(self._schedule.step).parameters:
            raise UsageError(
                f'schedule = "{section.schedule}" follows from losses, which a run that goes on does not know; use one of the step alone'
            )
        self._base = section.learning_rate
        self._rates = [self._current_rate()]

    def _current_rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def rate(self, step: int) -> float:
        """Return the rate of a step; the schedule begins after a warm-up of shardwise's own."""
        if step < self._warmup:
            return self._base * (step + 1) / self._warmup
        step -= self._warmup
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about optimizer steps, or steps beyond the schedule's end
            while len(self._rates) <= step:
                self._optimizer.step()
                self._schedule.step()
                self._rates.append(self._current_rate())
        return self._rates[step]


def _torch_schedulers() -> dict[str, Any]:
    """Return torch's schedulers by name in lower case."""
    module = torch.optim.lr_scheduler
    base = module.LRScheduler
    classes = {name.lower(): kind for name, kind in vars(module).items() if isinstance(kind, type) and issubclass(kind, base)}
    return {name: kind for name, kind in classes.items() if kind is not base and not name.startswith("_")}


def _option_names(kind: Any) -> set[str]:
    return set(inspect.signature(kind).parameters)


def _transformers_scheduler(section: TrainSection, optimizer: torch.optim.Optimizer) -> Any:
    name = section.schedule.lower()
    try:
        library = importlib.import_module("transformers.optimization")
    except ImportError as error:
        raise UsageError(_unknown_schedule_message(section.schedule, [])) from error
    names = [kind.value for kind in library.SchedulerType]
    if name not in names:
        raise UsageError(_unknown_schedule_message(section.schedule, names))
    return library.get_scheduler(name, optimizer, section.warmup_steps, section.steps, section.schedule_options or None)


def _unknown_schedule_message(name: str, more: list[str]) -> str:
    names = sorted({*CLOSED_FORM_SCHEDULES, *_torch_schedulers(), *more})
    return f'schedule = "{name}" is unknown{did_you_mean(name, tuple(names), 0.6)}; known: {", ".join(names)}'
