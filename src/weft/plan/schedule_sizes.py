"""For what sizes a pipeline schedule by name is: what is refused before there is a program. Everything else a schedule answers itself
(`weft.schedules.schedule`). A schedule of the user's own is for the sizes of its program."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a schedule is for. `chunks`: stages of each rank; 0 as many as are asked for. `multiple`: of how many microbatches it runs a
    multiple, `most`: and at most how many; 0 any number."""

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
    "chimera": Sizes(multiple=2),  # as many for either of two replicas
    "gems-mast": Sizes(multiple=2, most=2),
    "gems-master": Sizes(multiple=2),
}
SCHEDULES = tuple(SIZES)
CHUNKED = tuple(name for name, sizes in SIZES.items() if not sizes.chunks)  # with as many stages a rank as are asked for


def sizes_of(schedule: str) -> Sizes:
    """What a schedule is for; one of the user's own for what its actions are, so that nothing else limits it."""
    return SIZES.get(schedule, Sizes())


def chunks_of(schedule: str, chunks: int) -> int:
    """Stages a rank: what is asked for with a schedule that has any number, else what the schedule has."""
    return sizes_of(schedule).chunks or chunks


def refuse_sizes(schedule: str, microbatches: int) -> str:
    """Why a schedule is not for so many microbatches; empty where it is.

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
