"""The gradients of a stage that several ranks have, summed over them. In: a program with transfers. Out: the same with the exchange.

For GEMS and Chimera, whose two replicas each see some of the microbatches. A stage's sum is sent once its rank has added the last
microbatch to it and has sent the other all that it waits for, and received at the end, so that the exchange goes on beside the computes
that follow and delays none. Data replicas of the whole pipeline are not in a program: their sums are the executor's.
"""

from __future__ import annotations

from dataclasses import replace

from weft.plan.program import Action, Compute, Manage, ManageOp, Op, Program, Recv, Send, Value, effects


def exchange_gradients(program: Program, rendezvous: bool = False) -> Program:
    """Each rank that adds to the gradient of a stage gets the sum over all that do.

    Every one sends to every other and adds what it receives. With `rendezvous`, where that would block, the first of them adds all up and
    sends the sum back, stage after stage at the end of the program.

    >>> from weft.schedules import build
    >>> print(build("gems-mast", 2, 2).actions[1][-1], *map(str, build("gems-mast", 2, 2).actions[0][-3:]))
    dw(0)+<0 dw(1)>1 dw(0)+<1 dw(1)+<1
    """
    holders = _holders(program)
    shared = {value: ranks for value, ranks in holders.items() if len(ranks) > 1}
    if not shared:
        return program
    rows: list[list[Action]] = []
    for rank, row in enumerate(program.actions):
        last = {value: step for step, action in enumerate(row) for value in effects(action, program).adds if value in shared}
        free = {action.to: step for step, action in enumerate(row) if isinstance(action, Send)}  # after the last send to it
        sends: dict[int, list[Send]] = {}
        for value, step in sorted(last.items(), key=lambda item: item[1]):
            for peer in shared[value]:
                if peer != rank:
                    sends.setdefault(max(step, free.get(peer, 0)), []).append(Send(value, peer))
        line: list[Action] = []
        for step, action in enumerate(row):
            line += [action, *(sends.get(step, ()) if not rendezvous else ())]
        if not rendezvous:
            line += [Recv(send.value, send.to, add=True) for step in sorted(sends) for send in sends[step]]
        rows.append(line)
    if rendezvous:
        for value in sorted(shared, key=lambda value: value.index):
            first, *others = shared[value]
            for peer in others:
                rows[peer].append(Send(value, first))
                rows[first].append(Recv(value, peer, add=True))
            for peer in others:
                rows[first].append(Send(value, peer))
                rows[peer].append(Recv(value, first))
    return replace(program, actions=tuple(map(tuple, rows)))


def _holders(program: Program) -> dict[Value, list[int]]:
    """What each stage's gradient ends in -> the ranks that add to it."""
    reduced = {a.stage for row in program.actions for a in row if isinstance(a, Manage) and a.op is ManageOp.REDUCE_GRAD}
    holders: dict[Value, list[int]] = {}
    for rank, row in enumerate(program.actions):
        stages = {a.stage for a in row if isinstance(a, Compute) and a.op in (Op.B, Op.W)}
        for stage in sorted(stages):
            holders.setdefault(Value("grad" if stage in reduced else "dw", (stage,)), []).append(rank)
    return holders
