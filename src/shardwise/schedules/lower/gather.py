"""All-gather weights before use and free them afterwards (ZeRO-3). In: a program. Out: the same with UNSHARD and RESHARD."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shardwise.plan.ir.program import Action, Compute, Manage, ManageOp, Program


def gather_weights(program: Program, ahead: int = 1, stages: Collection[int] | None = None) -> Program:
    """Gather a stage's weights `ahead` computes before each run of consecutive computes of it on a rank, and free them after the run.

    Args:
        ahead: 0 gathers when they are needed; 1 overlaps with the previous compute. A rank with one stage keeps its weights gathered.
        stages: stages to gather; by default all.

    >>> print(*gather_weights(Program.parse("links\\nrank 0: 0F0 1F0 1B0 0B0")).actions[0])
    0UNSHARD 1UNSHARD 0F0 0RESHARD 1F0 0UNSHARD 1B0 1RESHARD 0B0 0RESHARD
    """
    return replace(program, actions=tuple(tuple(_gather_in_row(row, ahead, stages)) for row in program.actions))


def _gather_in_row(row: tuple[Action, ...], ahead: int, stages: Collection[int] | None) -> list[Action]:
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
    last_reshard: dict[int, int] = {}  # stage -> the compute after which it was last resharded
    for stage, first, last in runs:
        if stages is not None and stage not in stages:
            continue
        gather_at = max(0, first - ahead, last_reshard.get(stage, -1) + 1)
        before.setdefault(places[gather_at], []).append(Manage(ManageOp.UNSHARD, stage))
        after.setdefault(places[last], []).append(Manage(ManageOp.RESHARD, stage))
        last_reshard[stage] = last
    out: list[Action] = []
    for i, action in enumerate(row):
        out += [*before.get(i, ()), action, *after.get(i, ())]
    return out
