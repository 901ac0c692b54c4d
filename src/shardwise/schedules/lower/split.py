"""Split backward: every B becomes an I, which other ranks wait for, and later a W. In: the actions of one rank, in order. Out: the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from shardwise.plan.ir.program import Action, Compute, ComputeOp, Recv


def split_backward(row: Sequence[Action], lag: int = 0) -> list[Action]:
    """Return the row with its backwards split; up to `lag` weight parts (W) are deferred, the last ones to the end.

    A weight part comes after the sends that follow its input part (I), since other ranks wait for these.

    >>> from shardwise.plan.ir.action import parse_action
    >>> row = [parse_action(word) for word in "1F0 1B0 g(1,0,0)>0 1F1 1B1 g(1,0,1)>0".split()]
    >>> " ".join(map(str, split_backward(row))), " ".join(map(str, split_backward(row, lag=1)))
    ('1F0 1I0 g(1,0,0)>0 1W0 1F1 1I1 g(1,0,1)>0 1W1', '1F0 1I0 g(1,0,0)>0 1F1 1I1 g(1,0,1)>0 1W0 1W1')
    """
    out: list[Action] = []
    deferred: deque[Compute] = deque()
    for action in row:
        if isinstance(action, (Compute, Recv)):
            while len(deferred) > lag:
                out.append(deferred.popleft())
        if isinstance(action, Compute) and action.op is ComputeOp.B:
            out.append(Compute(ComputeOp.I, action.stage, action.microbatch))
            deferred.append(Compute(ComputeOp.W, action.stage, action.microbatch))
        else:
            out.append(action)
    return [*out, *deferred]
