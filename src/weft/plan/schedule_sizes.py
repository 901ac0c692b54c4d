"""Sizes that each named pipeline schedule supports, to refuse others before there is a program. Everything else is a property of the
schedule (`weft.schedules.schedule`). A custom schedule is for the sizes of its program."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Supported sizes. `chunks`: stages of each rank; 0 any number. `microbatch_multiple`: divisor of the number of microbatches;
    `max_microbatches`: at most that many; 0 any number."""

    chunks: int = 1
    multiple: int = 1
    most: int = 0


SIZES = {
    "sequential": Sizes(),
    "gpipe": Sizes(),
    "1f1b": Sizes(),
    "interleaved": Sizes(chunks=0),
    "breadth-first": Sizes(chunks=0),
    "zb-h1": Sizes(),
    "zb-h2": Sizes(),
    "zb-v": Sizes(chunks=2),
    "chimera": Sizes(multiple=2),  # half of them for each of two replicas
    "gems-mast": Sizes(multiple=2, most=2),
    "gems-master": Sizes(multiple=2),
}
SCHEDULES = tuple(SIZES)
CHUNKED = tuple(name for name, sizes in SIZES.items() if not sizes.chunks)  # with any number of stages a rank


def sizes_of(schedule: str) -> Sizes:
    """Return the sizes of a schedule; no limits for a custom one, which is for those of its actions."""
    return SIZES.get(schedule, Sizes())


def chunks_of(schedule: str, chunks: int) -> int:
    """Number of stages a rank: the layout's where the schedule supports any number, else the schedule's."""
    return sizes_of(schedule).chunks or chunks


def refuse_sizes(schedule: str, microbatches: int) -> str:
    """Return why a schedule is not for so many microbatches; empty where it is.

    >>> refuse_sizes("gems-mast", 4)
    'gems-mast has 2 microbatches, one a replica, not 4; use gems-master for 4'
    """
    sizes = sizes_of(schedule)
    if sizes.most and microbatches != sizes.most:
        other = f"use gems-master for {microbatches}" if microbatches % sizes.multiple == 0 else f"use microbatches={sizes.most}"
        return f"{schedule} has {sizes.most} microbatches, one a replica, not {microbatches}; {other}"
    if microbatches % sizes.multiple:
        return f"{schedule} has as many microbatches for either replica, not {microbatches}; use an even number"
    return ""
