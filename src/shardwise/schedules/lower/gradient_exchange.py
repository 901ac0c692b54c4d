"""All-reduce the gradients of a stage that is on several ranks. In: a program with transfers. Out: the same with the exchange.

For GEMS and Chimera, whose two replicas each process some of the microbatches. A stage's sum is sent once its rank has accumulated the
last microbatch and has sent the peer everything that it waits for, and received at the end, so that the exchange overlaps the following
computes and delays none. Data replicas of the whole pipeline are not in a program: the executor reduces their gradients.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.plan.ir.program import Action, Compute, ComputeOp, Manage, ManageOp, Program, Recv, Send, Value, effects_of


def exchange_gradients(program: Program, rendezvous: bool = False) -> Program:
    """Add the transfers that give each rank that accumulates a stage's gradient the sum over all such ranks.

    Every such rank sends to every other and adds what it receives. With `rendezvous`, where that would block, the first of them reduces and
    sends the sum back, stage after stage at the end of the program.

    >>> from shardwise.schedules import build
    >>> print(build("gems-mast", 2, 2).actions[1][-1], *map(str, build("gems-mast", 2, 2).actions[0][-3:]))
    dw(0)+<0 dw(1)>1 dw(0)+<1 dw(1)+<1
    """
    holders = _ranks_by_gradient(program)
    shared = {value: ranks for value, ranks in holders.items() if len(ranks) > 1}
    if not shared:
        return program
    rows: list[list[Action]] = []
    for rank, row in enumerate(program.actions):
        last = {value: step for step, action in enumerate(row) for value in effects_of(action, program).adds if value in shared}
        last_send = {action.to: step for step, action in enumerate(row) if isinstance(action, Send)}
        sends: dict[int, list[Send]] = {}
        for value, step in sorted(last.items(), key=lambda item: item[1]):
            for peer in shared[value]:
                if peer != rank:
                    sends.setdefault(max(step, last_send.get(peer, 0)), []).append(Send(value, peer))
        line: list[Action] = []
        for step, action in enumerate(row):
            line += [action, *(sends.get(step, ()) if not rendezvous else ())]
        if not rendezvous:
            line += [Recv(send.value, send.to, add=True) for step in sorted(sends) for send in sends[step]]
        rows.append(line)
    if rendezvous:
        for value in sorted(shared, key=lambda value: value.index):
            root, *peers = shared[value]
            for peer in peers:
                rows[peer].append(Send(value, root))
                rows[root].append(Recv(value, peer, add=True))
            for peer in peers:
                rows[root].append(Send(value, peer))
                rows[peer].append(Recv(value, root))
    return replace(program, actions=tuple(map(tuple, rows)))


def _ranks_by_gradient(program: Program) -> dict[Value, list[int]]:
    """Return the value of each stage's final gradient -> the ranks that accumulate it."""
    reduced = {a.stage for row in program.actions for a in row if isinstance(a, Manage) and a.op is ManageOp.REDUCE_GRAD}
    holders: dict[Value, list[int]] = {}
    for rank, row in enumerate(program.actions):
        stages = {a.stage for a in row if isinstance(a, Compute) and a.op in (ComputeOp.B, ComputeOp.W)}
        for stage in sorted(stages):
            holders.setdefault(Value("grad" if stage in reduced else "dw", (stage,)), []).append(rank)
    return holders
