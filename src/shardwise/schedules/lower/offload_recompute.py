"""Activation offloading and recomputation: saved tensors are copied to the host and back, or dropped and recomputed.

In: a program, and the chosen (stage, microbatch) pairs. Out: the same with OFFLOAD and LOAD, or DROP and R. Not modelled: which are
worth it, which the planner decides (see `shardwise.solve`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from shardwise.errors import UsageError
from shardwise.plan.ir.program import Action, Compute, ComputeOp, Manage, ManageOp, Program, Recv, Send

Chosen = Collection[tuple[int, int]]  # (stage, microbatch)


def offload(program: Program, chosen: Chosen, ahead: int = 1) -> Program:
    """Offload the chosen pairs' saved tensors to the host after their forward, and load them `ahead` computes before their backward.

    Does nothing if the backward comes right after the forward. With `ahead` 0 the backward waits for the copy; with 1 the copy
    overlaps the previous compute.

    >>> print(*offload(Program.parse("links\\nrank 0: 0F0 1F0 1B0 0B0"), {(0, 0)}).actions[0])
    0F0 0OFFLOAD0 1F0 0LOAD0 1B0 0B0

    Raises:
        UsageError: a chosen pair has no forward or no backward.
    """
    return _release_and_restore(program, chosen, ahead, ManageOp.OFFLOAD, lambda s, m: Manage(ManageOp.LOAD, s, m))


def recompute(program: Program, chosen: Chosen, ahead: int = 0) -> Program:
    """Drop the chosen pairs' saved tensors after their forward, and recompute them `ahead` computes before their backward.

    Does nothing if the backward comes right after the forward. The recompute comes before its backward's receives, so that it runs
    while the rank would wait for them.

    >>> print(*recompute(Program.parse("links\\nrank 0: 0F0 1F0 1B0 0B0"), {(0, 0)}).actions[0])
    0F0 0DROP0 1F0 1B0 0R0 0B0

    Raises:
        UsageError: a chosen pair has no forward or no backward.
    """
    return _release_and_restore(program, chosen, ahead, ManageOp.DROP, lambda s, m: Compute(ComputeOp.R, s, m))


def _release_and_restore(program: Program, chosen: Chosen, ahead: int, release: ManageOp, restore: Callable[[int, int], Action]) -> Program:
    found: set[tuple[int, int]] = set()
    rows = []
    for row in program.actions:
        places = [i for i, action in enumerate(row) if isinstance(action, Compute)]
        forward: dict[tuple[int, int], int] = {}  # -> which compute of the rank
        before: dict[int, list[Action]] = {}
        after: dict[int, list[Action]] = {}
        for n, place in enumerate(places):
            action = row[place]
            if not isinstance(action, Compute) or (key := (action.stage, action.microbatch)) not in chosen:
                continue
            if action.op is ComputeOp.F:
                forward[key] = n
            elif action.op in (ComputeOp.B, ComputeOp.I) and key in forward:
                found.add(key)
                if n > forward[key] + 1:  # otherwise it is needed at once
                    after.setdefault(_after_sends(row, places[forward[key]]), []).append(Manage(release, *key))
                    before.setdefault(_before_receives(row, places[max(n - ahead, forward[key] + 1)]), []).append(restore(*key))
        rows.append(tuple(a for i, action in enumerate(row) for a in (*before.get(i, ()), action, *after.get(i, ()))))
    if missing := sorted({*chosen} - found):
        stage, microbatch = missing[0]
        raise UsageError(f"{program.name} has no forward and backward of stage {stage} on microbatch {microbatch}")
    return replace(program, actions=tuple(rows))


def _after_sends(row: tuple[Action, ...], i: int) -> int:
    """Return the index of the last send that directly follows action `i`: other ranks wait for these."""
    while i + 1 < len(row) and isinstance(row[i + 1], Send):
        i += 1
    return i


def _before_receives(row: tuple[Action, ...], i: int) -> int:
    """Return the index of the first receive directly before action `i`: a copy or a forward runs while the rank would wait for them."""
    while i and isinstance(row[i - 1], Recv):
        i -= 1
    return i
