"""Peak memory of each rank of a program.

In: a program and the bytes of each value. Out: per rank the peak, and at which action. It follows from `effects` alone:
a rank's own actions decide, whatever the times. Host memory (`host`) is not counted. Not modelled: workspace of a compute,
and values that a send or offload in progress keeps alive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.plan.ir.program import SAVED_VALUES, Compute, ComputeOp, Effects, Program, Recv, Value

ON_HOST = "host"


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Peak bytes of `rank`, first reached during action number `step`; `parts` are (name of value, bytes) of the total."""

    rank: int
    size_bytes: float
    step: int
    action: str
    parts: tuple[tuple[str, float], ...]


def peak_memory(program: Program, size_bytes: Callable[[Value], float]) -> tuple[PeakMemory, ...]:
    """Return [rank] -> its peak.

    During an action both its results and the values that it will free are alive; only values that become part of another (inputs
    of a forward become part of `saved`, `saved` of `half`) are counted once. A received value that is added needs a separate
    buffer. `saved` must include the stage's inputs and outputs.

    >>> from shardwise.schedules import build
    >>> [p.size_bytes for p in peak_memory(build("1f1b", 4, 8), lambda value: float(value.name == "saved"))]
    [4.0, 3.0, 2.0, 1.0]
    """
    return tuple(_peak_of_rank(program, rank, size_bytes) for rank in range(program.num_ranks))


def in_flight(program: Program) -> tuple[int, ...]:
    """Return [rank] -> the most microbatches in flight (forward done, backward with its W not) over its stages, on the device."""
    return tuple(_max_in_flight(row) for row in program.effects)


def peak_saved_bytes(
    rows: Sequence[Sequence[Compute]], saved_bytes: Sequence[float], half_bytes: Sequence[float] | None = None
) -> list[float]:
    """Return [rank] -> peak bytes saved between forwards and backwards, from the order of its computes alone, for searches.

    Args:
        saved_bytes: by stage, of one microbatch. half_bytes: the part of it retained between I and W; by default all.

    >>> from shardwise.schedules import computes_by_rank
    >>> peak_saved_bytes(computes_by_rank("gems-master", 3, 4, ((0, 1), (1, 2))), [5.0, 1.0, 2.0])
    [5.0, 1.0, 5.0]
    """
    half_bytes = saved_bytes if half_bytes is None else half_bytes
    amounts = []
    for row in rows:
        saved = peak_saved = 0.0
        for action in row:
            s = action.stage
            if action.op is ComputeOp.F:
                saved += saved_bytes[s]
                peak_saved = max(peak_saved, saved)
            elif action.op is ComputeOp.B:
                saved -= saved_bytes[s]
            elif action.op is ComputeOp.I:
                saved += half_bytes[s] - saved_bytes[s]
            elif action.op is ComputeOp.W:
                saved -= half_bytes[s]
        amounts.append(peak_saved)
    return amounts


def _max_in_flight(row: tuple[Effects, ...]) -> int:
    """Return the peak if `saved` and `half` count 1 and nothing else does: an action writes one, frees one, or converts one."""
    saved = peak_saved = 0
    for e in row:
        saved += sum(v.name in SAVED_VALUES for v in e.writes) - sum(v.name in SAVED_VALUES for v in e.frees)
        peak_saved = max(peak_saved, saved)
    return peak_saved


def _peak_of_rank(program: Program, rank: int, size_bytes: Callable[[Value], float]) -> PeakMemory:
    held: dict[Value, float] = {}
    by_name: dict[str, float] = defaultdict(float)

    def hold(value: Value, size: float) -> None:
        held[value] = size
        by_name[value.name] += size

    for value in program.initial[rank]:
        hold(value, size_bytes(value))
    peak_bytes, peak_parts, peak_step = sum(by_name.values()), dict(by_name), -1
    for step, (action, e) in enumerate(zip(program.actions[rank], program.effects[rank], strict=True)):
        created = {value: size_bytes(value) for value in (*e.writes, *e.adds) if value not in held and value.name != ON_HOST}
        extra = dict(created)
        if e.becomes in created:
            extra[e.becomes] = max(0.0, created[e.becomes] - sum(held.get(value, 0.0) for value in e.frees))
        if isinstance(action, Recv) and action.add:
            extra[action.value] = size_bytes(action.value)
        during = sum(by_name.values()) + sum(extra.values())
        if during > peak_bytes:
            peak_bytes, peak_parts, peak_step = during, dict(by_name), step
            for value, size in extra.items():
                peak_parts[value.name] = peak_parts.get(value.name, 0.0) + size
        for value, size in created.items():
            hold(value, size)
        for value in e.frees:
            by_name[value.name] -= held.pop(value, 0.0)
    action_text = str(program.actions[rank][peak_step]) if peak_step >= 0 else "start"
    return PeakMemory(rank, peak_bytes, max(peak_step, 0), action_text, tuple(sorted(peak_parts.items())))
