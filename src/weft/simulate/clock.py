"""When each action of a program happens.

In: a program that has been checked, seconds of each compute and of each transfer. Out: a `Timeline`, exact for these
seconds. Not modelled: computes that slow one another or transfers down, a network that several links share, the memory
(see `memory`), and whatever a rank does between actions.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

from weft.plan.program import Compute, Program, Send, Value, order
from weft.plan.timeline import COMPUTE_LANE, Span, Timeline


def simulate(
    program: Program,
    compute_s: Callable[[Compute], float],
    transfer_s: Callable[[Value, int, int], float],
    rendezvous: bool = False,
) -> Timeline:
    """Time every action.

    A rank computes one thing at a time, in its order. A send is posted and costs its rank nothing; each link (sender,
    receiver) carries one transfer at a time, first posted first, and a receive ends when its value is there. With
    `rendezvous` a transfer starts when both ranks have reached it and keeps both until it ends.

    Args:
        compute_s: seconds of a compute.
        transfer_s: seconds of a transfer: (value, sender, receiver).

    Returns:
        Spans in a legal order, on the lanes "compute", "send" (while the link carries it) and "recv" (while the receiver
        waits for it: of no length where the value is there already).

    >>> from weft.schedules import build
    >>> simulate(build("gpipe", 3, 3), lambda action: 1.0, lambda *_: 0.0).total_s
    10.0

    Raises:
        ProgramError: the program cannot run to its end.
    """
    clock = [0.0] * program.num_ranks
    link_free: dict[tuple[int, int], float] = defaultdict(float)
    arrivals: dict[tuple[int, int, Value], deque[float]] = defaultdict(deque)
    spans: list[Span] = []
    for rank, action in order(program, rendezvous):
        now = clock[rank]
        if isinstance(action, Compute):
            clock[rank] = end = now + compute_s(action)
            spans.append(Span(rank, COMPUTE_LANE, str(action), now, end, action.op.value))
        elif isinstance(action, Send):
            to, value = action.to, action.value
            start = max(now, clock[to] if rendezvous else link_free[rank, to])
            end = start + transfer_s(value, rank, to)
            if rendezvous:
                clock[rank] = end
            link_free[rank, to] = end
            arrivals[rank, to, value].append(end)
            spans.append(Span(rank, "send", str(action), start, end, "send"))
        else:
            clock[rank] = end = max(now, arrivals[action.source, rank, action.value].popleft())
            spans.append(Span(rank, "recv", str(action), now, end, "recv"))
    return Timeline(program.name, program.num_ranks, tuple(spans))
