"""Sizes that each named pipeline schedule supports, to refuse others before there is a program. Everything else is a property of the
schedule (`shardwise.schedules.schedule`). A custom schedule is for the sizes of its program."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScheduleLimits:
    """Supported sizes. `chunks`: stages of each rank; 0 any number. `microbatch_multiple`: divisor of the number of microbatches;
    `max_microbatches`: at most that many; 0 any number."""

    chunks: int = 1
    microbatch_multiple: int = 1
    max_microbatches: int = 0


SCHEDULE_LIMITS = {
    "sequential": ScheduleLimits(),
    "gpipe": ScheduleLimits(),
    "1f1b": ScheduleLimits(),
    "interleaved": ScheduleLimits(chunks=0),
    "breadth-first": ScheduleLimits(chunks=0),
    "zb-h1": ScheduleLimits(),
    "zb-h2": ScheduleLimits(),
    "zb-v": ScheduleLimits(chunks=2),
    "chimera": ScheduleLimits(microbatch_multiple=2),  # half of them for each of two replicas
    "gems-mast": ScheduleLimits(microbatch_multiple=2, max_microbatches=2),
    "gems-master": ScheduleLimits(microbatch_multiple=2),
}
SCHEDULES = tuple(SCHEDULE_LIMITS)
CHUNKED = tuple(name for name, sizes in SCHEDULE_LIMITS.items() if not sizes.chunks)  # with any number of stages a rank


def limits_of_schedule(schedule: str) -> ScheduleLimits:
    """Return the sizes of a schedule; no limits for a custom one, which is for those of its actions."""
    return SCHEDULE_LIMITS.get(schedule, ScheduleLimits())


def chunks_of(schedule: str, chunks: int) -> int:
    """Number of stages a rank: the layout's where the schedule supports any number, else the schedule's."""
    return limits_of_schedule(schedule).chunks or chunks


def refuse_sizes(schedule: str, microbatches: int) -> str:
    """Return why a schedule is not for so many microbatches; empty where it is.

    >>> refuse_sizes("gems-mast", 4)
    'gems-mast has 2 microbatches, one a replica, not 4; use gems-master for 4'
    """
    sizes = limits_of_schedule(schedule)
    if sizes.max_microbatches and microbatches != sizes.max_microbatches:
        other = (
            f"use gems-master for {microbatches}"
            if microbatches % sizes.microbatch_multiple == 0
            else f"use microbatches={sizes.max_microbatches}"
        )
        return f"{schedule} has {sizes.max_microbatches} microbatches, one a replica, not {microbatches}; {other}"
    if microbatches % sizes.microbatch_multiple:
        return f"{schedule} has as many microbatches for either replica, not {microbatches}; use an even number"
    return ""
