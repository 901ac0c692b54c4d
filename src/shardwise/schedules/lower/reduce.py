"""Reduce gradients over data replicas as early as they are complete (ZeRO-2). In: a program. Out: the same with REDUCE_GRAD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwise.plan.ir.program import Action, Compute, Manage, ManageOp, Program, Recv, Value, effects_of


def reduce_gradients(program: Program, every_microbatch: bool = False) -> Program:
    """Reduce each stage's gradient after its rank's last backward, or after every one.

    After each, a rank holds a full gradient for one microbatch only, at the cost of a reduction for each. A stage on several ranks,
    whose gradients are exchanged, is reduced once, after the exchange.

    >>> print(*reduce_gradients(Program.parse("0F0 0F1 0B0 0B1")).actions[0])
    0F0 0F1 0B0 0B1 0REDUCE_GRAD
    >>> print(*reduce_gradients(Program.parse("0F0 0F1 0B0 0B1"), every_microbatch=True).actions[0])
    0F0 0F1 0B0 0REDUCE_GRAD 0B1 0REDUCE_GRAD
    """
    rows = []
    for row in program.actions:
        after: dict[int, list[int]] = {}
        for step, value in _last_gradient_use(row, program).items():
            after.setdefault(value, []).append(step)
        exchanged = {action.value.index[0] for action in row if isinstance(action, Recv) and action.value.name == "dw"}
        out: list[Action] = []
        for step, action in enumerate(row):
            out.append(action)
            done = {*after.get(step, ())}
            if every_microbatch and isinstance(action, Compute) and effects_of(action, program).adds:
                done |= {action.stage} - exchanged
            out += [Manage(ManageOp.REDUCE_GRAD, stage) for stage in sorted(done)]
        rows.append(tuple(out))
    wants = tuple({_reduced_value(value): content for value, content in held.items()} for held in program.wants)
    return replace(program, actions=tuple(rows), wants=wants)


def _last_gradient_use(row: tuple[Action, ...], program: Program) -> Mapping[int, int]:
    """Return stage -> the last step at which its gradient is accumulated, sent or received."""
    last: dict[int, int] = {}
    for step, action in enumerate(row):
        e = effects_of(action, program)
        last.update((value.index[0], step) for value in (*e.adds, *e.reads, *e.writes) if value.name == "dw")
    return last


def _reduced_value(value: Value) -> Value:
    return Value("grad", value.index) if value.name == "dw" else value
