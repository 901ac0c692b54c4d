"""Insert sends and receives. In: a program of computes (and of memory actions). Out: the same with transfers."""

from __future__ import annotations

from dataclasses import replace

from shardwise.errors import ProgramError
from shardwise.plan.ir.program import WEIGHTS, Action, Program, Recv, Send, Value, effects_of


def add_transfers(program: Program) -> Program:
    """Put a send after each producer and a receive before each consumer that is on another rank."""
    made_on: dict[Value, int] = {}
    read_on: dict[Value, int] = {}
    row_effects = [[effects_of(action, program) for action in row] for row in program.actions]
    for rank, effects_of_row in enumerate(row_effects):
        for step, e in enumerate(effects_of_row):
            for value in e.writes:
                if value.name != WEIGHTS and made_on.setdefault(value, rank) != rank:
                    action = program.actions[rank][step]
                    raise ProgramError(f"{program.name}: {value} is made on ranks {made_on[value]} and {rank}; {action} is one too many")
            read_on.update({value: rank for value in e.reads if value.name != WEIGHTS})  # each rank gathers its own
    out = []
    for rank, row in enumerate(program.actions):
        line: list[Action] = []
        for action, e in zip(row, row_effects[rank], strict=True):
            wanted = [v for v in e.reads if made_on.get(v, rank) != rank]
            sent = [v for v in e.writes if read_on.get(v, rank) != rank]
            line += [Recv(v, made_on[v]) for v in sorted(wanted, key=_stage_distance, reverse=True)]
            line.append(action)
            line += [Send(v, read_on[v]) for v in sorted(sent, key=_stage_distance)]
        out.append(tuple(line))
    return replace(program, actions=tuple(out))


def _stage_distance(value: Value) -> int:
    """Return the number of stages that a link value crosses: the nearer consumer runs sooner, the farther producer ran earlier."""
    return abs(value.index[0] - value.index[1])
