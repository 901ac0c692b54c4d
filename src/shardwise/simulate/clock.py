"""Discrete-event simulation of a pipeline program: start and end of each action.

In: a checked program, seconds of each compute, transfer and residency action (gather, reduce, offload, load). Out: a `Timeline`, exact for
these seconds. Not modelled: contention between computes and transfers, a network that several links share, memory (see `memory`), and
overhead between actions.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

from shardwise.plan.ir.program import Compute, Manage, ManageOp, Program, Recv, Send, Value, effects_of, order_actions
from shardwise.plan.ir.timeline import COMPUTE_LANE, Span, Timeline

# Actions concurrent with compute, one at a time per lane. RESHARD and DROP only free memory, and take no time.
LANES = {
    ManageOp.UNSHARD: "collective",
    ManageOp.REDUCE_GRAD: "collective",
    ManageOp.OFFLOAD: "offload",
    ManageOp.LOAD: "load",
}


def simulate(
    program: Program,
    compute_s: Callable[[Compute], float],
    transfer_s: Callable[[Value, int, int], float],
    rendezvous: bool = False,
    manage_s: Callable[[Manage], float] = lambda action: 0.0,
    copies_overlap: bool = True,
) -> Timeline:
    """Simulate the program and return the time of every action.

    A rank runs one compute at a time, in its order. A send is asynchronous and costs its rank nothing; each link (sender,
    receiver) carries one transfer at a time, first posted first, and a receive ends when its value has arrived. With
    `rendezvous` a transfer starts when both ranks have reached it and blocks both until it ends.

    Weight gathers, gradient reductions and host copies are asynchronous like sends, each on its lane of its rank, and
    start when their inputs are available; actions that read their result wait for its end.

    Args:
        compute_s: seconds of a compute.
        transfer_s: seconds of a transfer: (value, sender, receiver).
        manage_s: seconds of an UNSHARD, REDUCE_GRAD, OFFLOAD or LOAD; RESHARD and DROP take none.
        copies_overlap: False if the compute lane itself makes the copies of OFFLOAD and LOAD.

    Returns:
        Spans in a legal order, on the lanes "compute", "send" (while the link carries it), "recv" (while the receiver
        waits for it: of length 0 if the value has already arrived), "collective", "offload" and "load".

    >>> from shardwise.schedules import build
    >>> simulate(build("gpipe", 3, 3), lambda action: 1.0, lambda *_: 0.0).total_s
    10.0

    Raises:
        ProgramError: the program cannot run to its end.
    """
    clock = [0.0] * program.num_ranks
    link_free: dict[tuple[int, int], float] = defaultdict(float)
    arrivals: dict[tuple[int, int, Value], deque[float]] = defaultdict(deque)
    spans: list[Span] = []
    free_s: dict[tuple[int, str], float] = defaultdict(float)
    under_way: dict[tuple[int, Value], float] = {}  # pending results of a lane, and their end
    for rank, action in order_actions(program, rendezvous):
        now = clock[rank]
        if isinstance(action, Manage):
            if action.op not in LANES:
                continue
            e, lane = effects_of(action, program), LANES[action.op]
            start = max(now, free_s[rank, lane], *[under_way.get((rank, value), 0.0) for value in e.reads])
            free_s[rank, lane] = end = start + manage_s(action)
            under_way.update(((rank, value), end) for value in (*e.writes, *e.adds))
            if lane != "collective" and not copies_overlap:
                clock[rank] = end
            spans.append(Span(rank, lane, str(action), start, end, action.op.value))
            continue
        if under_way and not isinstance(action, Recv):
            now = max([now, *(under_way.get((rank, value), 0.0) for value in effects_of(action, program).reads)])
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
