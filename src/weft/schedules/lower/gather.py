"""Weights that are there only while they are used (ZeRO-3). In: a program. Out: the same with UNSHARD and RESHARD."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from weft.plan.program import Action, Compute, Manage, ManageOp, Program


def gather_weights(program: Program, ahead: int = 1, stages: Collection[int] | None = None) -> Program:
    """Gather a stage's weights `ahead` computes before each run of computes of it on a rank, and let go of them after the run.

    Args:
        ahead: 0 gathers when they are needed; 1 while the compute before goes on. Of a rank with one stage they stay all the time.
        stages: only of these; by default of all.

    >>> print(*gather_weights(Program.parse("links\\nrank 0: 0F0 1F0 1B0 0B0")).actions[0])
    0UNSHARD 1UNSHARD 0F0 0RESHARD 1F0 0UNSHARD 1B0 1RESHARD 0B0 0RESHARD
    """
    return replace(program, actions=tuple(tuple(_row(row, ahead, stages)) for row in program.actions))


def _row(row: tuple[Action, ...], ahead: int, stages: Collection[int] | None) -> list[Action]:
    places = [i for i, action in enumerate(row) if isinstance(action, Compute)]
    runs: list[tuple[int, int, int]] = []  # (stage, its first compute, its last), counted in computes
    for n, place in enumerate(places):
        action = row[place]
        assert isinstance(action, Compute)
        if runs and runs[-1][0] == action.stage:
            runs[-1] = (action.stage, runs[-1][1], n)
        else:
            runs.append((action.stage, n, n))
    before: dict[int, list[Action]] = {}
    after: dict[int, list[Action]] = {}
    let_go: dict[int, int] = {}  # stage -> the compute after which it was last let go
    for stage, first, last in runs:
        if stages is not None and stage not in stages:
            continue
        at = max(0, first - ahead, let_go.get(stage, -1) + 1)
        before.setdefault(places[at], []).append(Manage(ManageOp.UNSHARD, stage))
        after.setdefault(places[last], []).append(Manage(ManageOp.RESHARD, stage))
        let_go[stage] = last
    out: list[Action] = []
    for i, action in enumerate(row):
        out += [*before.get(i, ()), action, *after.get(i, ())]
    return out
