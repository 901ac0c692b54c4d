"""All-gather weights: before use, and freed afterwards (ZeRO-3), or once, after the update of the step before (ZeRO-1 and 2).

In: a program. Out: the same with UNSHARD, and RESHARD where they are freed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shardwise.plan.ir.program import Action, Compute, ComputeOp, Manage, ManageOp, Program
from shardwise.plan.ir.text import default_wants
from shardwise.schedules.lower.reduce import reduce_gradients


def gather_weights(program: Program, ahead: int = 1, stages: Collection[int] | None = None) -> Program:
    """Gather a stage's weights `ahead` computes before each run of consecutive computes of it on a rank, and free them after the run.

    Args:
        ahead: 0 gathers when they are needed; 1 overlaps with the previous compute. A rank with one stage keeps its weights gathered.
        stages: stages to gather; by default all.

    >>> print(*gather_weights(Program.parse("links\\nrank 0: 0F0 1F0 1B0 0B0")).actions[0])
    0UNSHARD 1UNSHARD 0F0 0RESHARD 1F0 0UNSHARD 1B0 1RESHARD 0B0 0RESHARD
    """
    return replace(program, actions=tuple(tuple(_gather_in_row(row, ahead, stages)) for row in program.actions))


def gather_layers(num_layers: int, ahead: int = 1) -> Program:
    """Return the program of one microbatch through the layers of a ZeRO-3 stage, each a stage of it, and last the loss, without weights.

    A layer's weights are one message, which is on its way `ahead` computes before its forward and its backward, and are freed after each:
    at most `1 + ahead` layers are whole at a time.

    >>> print(*gather_layers(2).actions[0])
    0UNSHARD 1UNSHARD 0F0 0RESHARD 1F0 1RESHARD 2F0 1UNSHARD 2B0 0UNSHARD 1B0 1RESHARD 0B0 0RESHARD
    """
    order = range(num_layers + 1)
    row = (*(Compute(ComputeOp.F, n, 0) for n in order), *(Compute(ComputeOp.B, n, 0) for n in reversed(order)))
    program = Program(f"ZeRO-3 gathers of {num_layers} layers", num_layers + 1, ({},), (row,), default_wants((row,)))
    return gather_weights(program, ahead, range(num_layers))


def overlap_zero(program: Program, zero: int) -> Program:
    """Gather updated weights behind the forward and reduce gradients behind the backward, as ZeRO-1 and 2 do.

    Gathers of all stages are under way when the step begins, in the order of use; a stage's first forward waits for its own.
    Gradients are reduced after the last backward, or (`zero=2`) after every one.

    >>> print(*overlap_zero(Program.parse("links\\nrank 0: 1F0 0F0 0B0 1B0"), 1).actions[0])
    1UNSHARD 0UNSHARD 1F0 0F0 0B0 0REDUCE_GRAD 1B0 1REDUCE_GRAD
    """
    reduced = reduce_gradients(program, every_microbatch=zero == 2)
    rows = []
    for row in reduced.actions:
        stages = dict.fromkeys(action.stage for action in row if isinstance(action, Compute))
        rows.append((*(Manage(ManageOp.UNSHARD, stage) for stage in stages), *row))
    return replace(reduced, actions=tuple(rows))


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
