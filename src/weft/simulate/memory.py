"""How much each rank holds at most.

In: a program and the bytes of each value. Out: per rank the peak, and at which action. It follows from `effects` alone:
a rank's own actions decide what it holds, whatever the times. What is in the host's memory (`host`) is not counted. Not
modelled: what a compute needs only while it runs, and what a send or a copy to the host that is under way still keeps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.plan.program import KEPT, Compute, Effects, Op, Program, Recv, Value

ON_HOST = "host"


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes that `rank` holds, first during action number `step`; `parts` are (name of value, bytes) of the total."""

    rank: int
    size_bytes: float
    step: int
    action: str
    parts: tuple[tuple[str, float], ...]


def peak(program: Program, size_bytes: Callable[[Value], float]) -> tuple[Peak, ...]:
    """[rank] -> its peak.

    While an action runs, what it writes and what it will free are both there; only what passes into another value (the
    inputs of a forward into `saved`, `saved` into `half`) is counted once. A received value that is added needs a buffer
    of its own. Count `saved` with the stage's inputs and outputs in it.

    >>> from weft.schedules import build
    >>> [p.size_bytes for p in peak(build("1f1b", 4, 8), lambda value: float(value.name == "saved"))]
    [4.0, 3.0, 2.0, 1.0]
    """
    return tuple(_peak_of_rank(program, rank, size_bytes) for rank in range(program.num_ranks))


def in_flight(program: Program) -> tuple[int, ...]:
    """[rank] -> the most microbatches whose forward has run and whose backward (with its W) has not, over its stages, on the device."""
    return tuple(_most(row) for row in program.effects)


def kept_bytes(rows: Sequence[Sequence[Compute]], saved_bytes: Sequence[float], half_bytes: Sequence[float] | None = None) -> list[float]:
    """[rank] -> the most bytes that it keeps from forwards to backwards, from the order of its computes alone, for searches.

    Args:
        saved_bytes: by stage, of one microbatch. half_bytes: what of it is left between I and W; by default all.

    >>> from weft.schedules import rows
    >>> kept_bytes(rows("gems-master", 3, 4, ((0, 1), (1, 2))), [5.0, 1.0, 2.0])
    [5.0, 1.0, 5.0]
    """
    half_bytes = saved_bytes if half_bytes is None else half_bytes
    amounts = []
    for row in rows:
        held = most = 0.0
        for action in row:
            s = action.stage
            if action.op is Op.F:
                held += saved_bytes[s]
                most = max(most, held)
            elif action.op is Op.B:
                held -= saved_bytes[s]
            elif action.op is Op.I:
                held += half_bytes[s] - saved_bytes[s]
            elif action.op is Op.W:
                held -= half_bytes[s]
        amounts.append(most)
    return amounts


def _most(row: tuple[Effects, ...]) -> int:
    """What `peak` finds where saved and half count 1 and nothing else does: an action writes one of them, frees one, or passes one on."""
    held = most = 0
    for e in row:
        held += sum(v.name in KEPT for v in e.writes) - sum(v.name in KEPT for v in e.frees)
        most = max(most, held)
    return most


def _peak_of_rank(program: Program, rank: int, size_bytes: Callable[[Value], float]) -> Peak:
    held: dict[Value, float] = {}
    by_name: dict[str, float] = defaultdict(float)

    def hold(value: Value, size: float) -> None:
        held[value] = size
        by_name[value.name] += size

    for value in program.initial[rank]:
        hold(value, size_bytes(value))
    most, parts, step_of = sum(by_name.values()), dict(by_name), -1
    for step, (action, e) in enumerate(zip(program.actions[rank], program.effects[rank], strict=True)):
        created = {value: size_bytes(value) for value in (*e.writes, *e.adds) if value not in held and value.name != ON_HOST}
        extra = dict(created)
        if e.becomes in created:
            extra[e.becomes] = max(0.0, created[e.becomes] - sum(held.get(value, 0.0) for value in e.frees))
        if isinstance(action, Recv) and action.add:
            extra[action.value] = size_bytes(action.value)
        during = sum(by_name.values()) + sum(extra.values())
        if during > most:
            most, parts, step_of = during, dict(by_name), step
            for value, size in extra.items():
                parts[value.name] = parts.get(value.name, 0.0) + size
        for value, size in created.items():
            hold(value, size)
        for value in e.frees:
            by_name[value.name] -= held.pop(value, 0.0)
    action_text = str(program.actions[rank][step_of]) if step_of >= 0 else "start"
    return Peak(rank, most, max(step_of, 0), action_text, tuple(sorted(parts.items())))
