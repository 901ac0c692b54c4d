"""When each action of a program happens.

In: a program that has been checked, seconds of each compute, of each transfer and of each action that manages what is held.
Out: a `Timeline`, exact for these seconds. Not modelled: computes that slow one another or transfers down, a network that several
links share, the memory (see `memory`), and whatever a rank does between actions.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

from weft.plan.program import Compute, Manage, ManageOp, Program, Recv, Send, Value, effects, order
from weft.plan.timeline import COMPUTE_LANE, Span, Timeline

# What goes on beside the compute, one at a time on its lane. RESHARD and DROP only let go, and take no time.
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
    copies_beside: bool = True,
) -> Timeline:
    """Time every action.

    A rank computes one thing at a time, in its order. A send is posted and costs its rank nothing; each link (sender,
    receiver) carries one transfer at a time, first posted first, and a receive ends when its value is there. With
    `rendezvous` a transfer starts when both ranks have reached it and keeps both until it ends.

    Gathering weights, reducing gradients and copies to and from the host are posted like sends, each on its lane of its rank, and
    start when what they read is there; what reads their result waits for its end.

    Args:
        compute_s: seconds of a compute.
        transfer_s: seconds of a transfer: (value, sender, receiver).
        manage_s: seconds of an UNSHARD, REDUCE_GRAD, OFFLOAD or LOAD; RESHARD and DROP take none.
        copies_beside: False where a rank's processor makes the copies of OFFLOAD and LOAD itself, and computes nothing meanwhile.

    Returns:
        Spans in a legal order, on the lanes "compute", "send" (while the link carries it), "recv" (while the receiver
        waits for it: of no length where the value is there already), "collective", "offload" and "load".

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
    free_s: dict[tuple[int, str], float] = defaultdict(float)
    under_way: dict[tuple[int, Value], float] = {}  # what a lane is still making, and when it is there
    for rank, action in order(program, rendezvous):
        now = clock[rank]
        if isinstance(action, Manage):
            if action.op not in LANES:
                continue
            e, lane = effects(action, program), LANES[action.op]
            start = max(now, free_s[rank, lane], *[under_way.get((rank, value), 0.0) for value in e.reads])
            free_s[rank, lane] = end = start + manage_s(action)
            under_way.update(((rank, value), end) for value in (*e.writes, *e.adds))
            if lane != "collective" and not copies_beside:
                clock[rank] = end
            spans.append(Span(rank, lane, str(action), start, end, action.op.value))
            continue
        if under_way and not isinstance(action, Recv):
            now = max([now, *(under_way.get((rank, value), 0.0) for value in effects(action, program).reads)])
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
