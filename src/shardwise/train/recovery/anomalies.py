"""Detection of anomalies in losses and gradient norms, and of hosts with too little memory for snapshots, as sentences for the log."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from shardwise.units import format_bytes
from shardwise.world.persistent_memory import STATE, available_bytes
from shardwise.world.world import World

MAX_MEMORY_SHARE = 0.5  # share of a host's free memory that the snapshots of its ranks may take
NUM_RECENT_STEPS = 10  # number of last losses that a jump is compared with, and the factor on their spread or on the largest norm


def loss_anomaly(loss: float, norm: float | None, is_scaled: bool, losses: Sequence[float]) -> str:
    """Describe why a loss or gradient norm is suspect, empty if it is not; the same on every rank. The norm may overflow if `is_scaled`.

    >>> loss_anomaly(90.0, None, False, [2.0, 2.2] * 5), loss_anomaly(2.1, 1.0, False, [2.0, 2.2] * 5)
    ('the loss went up to 90, from 2.2', '')
    """
    recent = losses[-NUM_RECENT_STEPS:]
    if not isfinite(loss):
        return f"the loss is {loss}"
    if norm is not None and not isfinite(norm) and not is_scaled:
        return f"the norm of the gradients is {norm}"
    if len(recent) == NUM_RECENT_STEPS and loss > max(recent) + NUM_RECENT_STEPS * (max(recent) - min(recent)):
        return f"the loss went up to {loss:.4g}, from {recent[-1]:.4g}"
    return ""


def gradient_anomaly(norms: Sequence[float], recent: Sequence[Sequence[float]]) -> str:
    """Describe why the gradients of a rank are suspect, empty if none is. `norms`: by rank; `recent`: those of the last steps.

    >>> from math import inf
    >>> gradient_anomaly([0.1, inf], []), gradient_anomaly([0.1, 3e9], [[0.1, 0.2]] * 10), gradient_anomaly([0.5, 1.9], [[0.1, 0.2]] * 10)
    ('the norm of the gradients of rank 1 is inf', 'the norm of the gradients of rank 1 went up to 3e+09, from 0.2', '')
    """
    for rank, norm in enumerate(norms):
        if not isfinite(norm):
            return f"the norm of the gradients of rank {rank} is {norm}"
    most = [max(column) for column in zip(*recent, strict=True)] if len(recent) == NUM_RECENT_STEPS else [0.0] * len(norms)
    for rank, (norm, largest) in enumerate(zip(norms, most, strict=True)):
        if 0 < NUM_RECENT_STEPS * largest < norm:
            return f"the norm of the gradients of rank {rank} went up to {norm:.4g}, from {recent[-1][rank]:.4g}"
    return ""


def explain_unprotected_state(world: World, size_bytes: int) -> str:
    """Describe why the state (`size_bytes` a rank) does not fit in persistent memory, empty if it does; the same on every rank."""
    assert world.recovery is not None
    words = describe_memory_shortage(world, 0 if world.recovery.memory.size(STATE) else size_bytes)
    return f"the state is not in persistent memory: {words}; if a rank fails, the run resumes from the last checkpoint" if words else ""


def describe_memory_shortage(world: World, required_bytes: int) -> str:
    """Describe a host with too little memory for its ranks, `required_bytes` each; empty if all fit. Every rank calls it."""
    everyone = tuple(range(world.num_ranks))
    ranks_here = next(box for box in world.ranks_by_host(everyone) if world.rank in box) if world.rendezvous else everyone
    all_need = world.all_gather_ints([required_bytes])
    need, free = sum(all_need[rank][0] for rank in ranks_here), available_bytes()
    short = need > 0 and need >= MAX_MEMORY_SHARE * free
    need_kib, short_kib = world.all_reduce_max([need >> 10 if short else 0, int(short) and int((1 << 50) - free) >> 10])
    if not need_kib:
        return ""
    free_bytes = format_bytes((1 << 50) - (short_kib << 10))
    ranks_need = f"{len(ranks_here)} ranks need" if len(ranks_here) > 1 else "1 rank needs"
    host = f"{'their' if len(ranks_here) > 1 else 'the'} host"
    return f"{ranks_need} {format_bytes(need_kib << 10)} of the {free_bytes} that are free on {host}, and no more than {MAX_MEMORY_SHARE:.0%} are taken"  # noqa: E501
