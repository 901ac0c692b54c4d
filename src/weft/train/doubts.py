"""What is not as it should be. In: a step's numbers and the losses before, or what keeping the state takes. Out: a sentence, or none."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from weft.units import format_bytes
from weft.world.kept import STATE, available_bytes
from weft.world.world import World

ROOM = 0.5  # of what is free, for the state of all ranks of a host
RECENT = 10  # last losses that a jump is told by, and how many times their spread it is; of norms how many times the largest


def doubt(loss: float, norm: float | None, is_scaled: bool, losses: Sequence[float]) -> str:
    """Why they may not be; every rank comes to the same. `norm`: of the gradients, which may overflow where the loss `is_scaled`.

    >>> doubt(90.0, None, False, [2.0, 2.2] * 5), doubt(2.1, 1.0, False, [2.0, 2.2] * 5)
    ('the loss went up to 90, from 2.2', '')
    """
    recent = losses[-RECENT:]
    if not isfinite(loss):
        return f"the loss is {loss}"
    if norm is not None and not isfinite(norm) and not is_scaled:
        return f"the norm of the gradients is {norm}"
    if len(recent) == RECENT and loss > max(recent) + RECENT * (max(recent) - min(recent)):
        return f"the loss went up to {loss:.4g}, from {recent[-1]:.4g}"
    return ""


def doubt_of_norms(norms: Sequence[float], recent: Sequence[Sequence[float]]) -> str:
    """Why the gradients of a rank may not be: `norms` by rank, and those of the last steps.

    >>> from math import inf
    >>> doubt_of_norms([0.1, inf], []), doubt_of_norms([0.1, 3e9], [[0.1, 0.2]] * 10), doubt_of_norms([0.5, 1.9], [[0.1, 0.2]] * 10)
    ('the norm of the gradients of rank 1 is inf', 'the norm of the gradients of rank 1 went up to 3e+09, from 0.2', '')
    """
    for rank, norm in enumerate(norms):
        if not isfinite(norm):
            return f"the norm of the gradients of rank {rank} is {norm}"
    most = [max(column) for column in zip(*recent, strict=True)] if len(recent) == RECENT else [0.0] * len(norms)
    for rank, (norm, before) in enumerate(zip(norms, most, strict=True)):
        if 0 < RECENT * before < norm:
            return f"the norm of the gradients of rank {rank} went up to {norm:.4g}, from {recent[-1][rank]:.4g}"
    return ""


def no_room(world: World, size_bytes: int) -> str:
    """Why the state of ranks is not kept in memory that outlives them: each needs so much; every rank calls it, and says the same."""
    assert world.survivor is not None
    words = short_of(world, 0 if world.survivor.memory.size(STATE) else size_bytes)
    return f"the state is not kept in memory: {words}; where a rank is lost the run goes on from the last checkpoint" if words else ""


def short_of(world: World, need_bytes: int) -> str:
    """Which memory of a host is too small for what its ranks need of it, each so much; empty where there is room. Every rank calls it."""
    everyone = tuple(range(world.num_ranks))
    here = next(box for box in world.boxes(everyone) if world.rank in box) if world.joined else everyone
    all_need = world.gathered_numbers([need_bytes])
    need, free = sum(all_need[rank][0] for rank in here), available_bytes()
    short = need > 0 and need >= ROOM * free
    need_kib, short_kib = world.maximum([need >> 10 if short else 0, int(short) and int((1 << 50) - free) >> 10])
    if not need_kib:
        return ""
    there = format_bytes((1 << 50) - (short_kib << 10))
    whose = f"{len(here)} ranks need" if len(here) > 1 else "1 rank needs"
    there = f"the {there} that are free on {'their' if len(here) > 1 else 'the'} host"
    return f"{whose} {format_bytes(need_kib << 10)} of {there}, and no more than {ROOM:.0%} are taken"
