"""Pipeline schedules: from sizes to a `Program`.

A schedule is one short function from sizes to the order of computes on each rank; `lower` adds the transfers, and `Schedule` derives
facts from the order. A new one is a file, a line in `SCHEDULES`, and a line in `shardwise.plan.layout` with the sizes that it supports.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from shardwise.errors import UsageError, did_you_mean
from shardwise.plan.ir.custom_schedule import custom_program
from shardwise.plan.ir.program import Compute, Links, Program, chain_links
from shardwise.plan.ir.schedule_sizes import CHUNKED, chunks_of, limits_of_schedule, refuse_sizes
from shardwise.plan.layout import Layout
from shardwise.schedules.breadth_first import breadth_first
from shardwise.schedules.chimera import chimera
from shardwise.schedules.custom import check_custom, program_for_links
from shardwise.schedules.gems import gems
from shardwise.schedules.gpipe import gpipe
from shardwise.schedules.interleaved import interleaved
from shardwise.schedules.lower import pipeline_program
from shardwise.schedules.one_f_one_b import one_f_one_b
from shardwise.schedules.schedule import FIRST_GRADIENTS, NO_GRADIENTS, LiveMicrobatches, Schedule
from shardwise.schedules.sequential import sequential
from shardwise.schedules.zero_bubble import zb_h1, zb_h2, zb_v

__all__ = [
    "FIRST_GRADIENTS",
    "NAMES",
    "NO_GRADIENTS",
    "SCHEDULES",
    "LiveMicrobatches",
    "Schedule",
    "build",
    "check_custom",
    "computes_by_rank",
    "layout_computes_by_rank",
    "program_of",
    "schedule_of",
]

# Stages, microbatches, links, and chunks of those that take any number -> [rank] its computes in order.
Generator = Callable[..., list[list[Compute]]]
SCHEDULES: dict[str, Generator] = {
    "sequential": sequential,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "breadth-first": breadth_first,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "chimera": chimera,
    "gems-mast": gems,
    "gems-master": gems,
}
NAMES = tuple(SCHEDULES)


def build(
    name: str, num_stages: int, num_microbatches: int, links: Links | None = None, rendezvous: bool = False, chunks: int = 1
) -> Program:
    """Return the program of a schedule by name: one stage a rank, `chunks` for `interleaved` and `breadth-first`, two for `zb-v`.

    `chimera` and `gems` place every stage on two ranks, for half of the microbatches each; `num_microbatches` counts both halves.

    Args:
        num_stages: number of stages of the whole pipeline, over all chunks.
        links: (producer, consumer) pairs of stages with producer < consumer; by default a chain.
        rendezvous: order transfers so that it runs even where a send waits for its receive (NCCL on one stream).
            sequential and gpipe need no change for that on a chain; 1f1b does, and becomes slower where sends are asynchronous.

    >>> print(build("1f1b", 2, 2))
    program 1f1b
    rank 0: 0F0 x(0,1,0)>1 0F1 x(0,1,1)>1 g(1,0,0)<1 0B0 g(1,0,1)<1 0B1
    rank 1: x(0,1,0)<0 1F0 1B0 g(1,0,0)>0 x(0,1,1)<0 1F1 1B1 g(1,0,1)>0

    Raises:
        UsageError: an unknown name, sizes that the schedule does not support, chunks for a schedule without them.
    """
    links = chain_links(num_stages) if links is None else links
    return pipeline_program(name, computes_by_rank(name, num_stages, num_microbatches, links, chunks), links, rendezvous)


def computes_by_rank(name: str, num_stages: int, num_microbatches: int, links: Links, chunks: int = 1) -> list[list[Compute]]:
    """Return [rank] -> its computes in order, without transfers; arguments and errors as of `build`."""
    if name not in SCHEDULES:
        raise UsageError(f"unknown schedule {name}{did_you_mean(name, NAMES, 0.4)}; known: {', '.join(NAMES)}")
    if num_stages < 1 or num_microbatches < 1:
        raise UsageError(f"{name} of {num_stages} stages and {num_microbatches} microbatches; it needs at least 1 of each")
    if chunks < 1:
        raise UsageError(f"{name} with {chunks} chunks a rank; it needs at least 1")
    if reason := refuse_sizes(name, num_microbatches):
        raise UsageError(reason)
    if chunks > 1 and chunks != chunks_of(name, chunks):
        raise UsageError(f"{name} has {_format_stage_count(chunks_of(name, 1))} a rank, not {chunks}; use interleaved with chunks={chunks}")
    if num_stages % chunks:
        raise UsageError(f"{num_stages} stages do not divide into {chunks} chunks a rank; use a multiple of {chunks}")
    if name in CHUNKED:
        return SCHEDULES[name](num_stages, num_microbatches, links, chunks)
    return SCHEDULES[name](num_stages, num_microbatches, links)


def schedule_of(layout: Layout) -> Schedule:
    """Return the `Schedule` of a layout, along a chain of stages."""
    if layout.actions:
        return _custom_schedule(layout.schedule, layout.actions)
    return _builtin_schedule(layout.schedule, layout.num_stages, layout.microbatches, layout.chunks)


@lru_cache(maxsize=1024)
def _builtin_schedule(name: str, num_stages: int, num_microbatches: int, chunks: int) -> Schedule:
    links = chain_links(num_stages)
    return Schedule(
        lambda count: computes_by_rank(name, num_stages, count, links, chunks),
        num_stages,
        num_microbatches,
        limits_of_schedule(name).microbatch_multiple,
    )


@lru_cache(maxsize=64)
def _custom_schedule(name: str, actions: str) -> Schedule:
    program = custom_program(name, actions)
    count = len(program.microbatches)
    return Schedule(lambda _: program.actions, program.num_stages, count, count)


def program_of(layout: Layout, links: Links, rendezvous: bool = False) -> Program:
    """Return the program of a layout's schedule, built-in or custom, for stages with these links.

    Raises:
        UsageError: as `build`. ProgramError: a custom schedule is for other links.
    """
    if (written := layout.program) is not None:
        return program_for_links(written, links, rendezvous)
    return build(layout.schedule, layout.num_stages, layout.microbatches, links, rendezvous, layout.chunks)


def layout_computes_by_rank(layout: Layout, links: Links) -> list[list[Compute]]:
    """Return [rank] -> the computes of a layout's schedule in order, without transfers."""
    if (written := layout.program) is not None:
        return [[action for action in row if isinstance(action, Compute)] for row in written.actions]
    return computes_by_rank(layout.schedule, layout.num_stages, layout.microbatches, links, layout.chunks)


def _format_stage_count(stages: int) -> str:
    return "one stage" if stages == 1 else f"{stages} stages"
