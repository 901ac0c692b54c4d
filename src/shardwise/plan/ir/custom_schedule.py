"""Custom pipeline schedules: the program of a layout with `schedule=FILE`, from the file's name and its text.

A layout carries the text itself, so that it means the same after the file has been edited or removed, and on machines that do not have it.
Its cost and execution follow from its program, as for a named schedule (`shardwise.schedules.schedule`). Not here: transfers and the proof,
which depend on the model's own links (`shardwise.schedules.custom`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from shardwise.errors import LayoutError, ProgramError, UsageError
from shardwise.plan.ir.action import Action, Compute, ComputeOp, Recv, Send
from shardwise.plan.ir.program import Program
from shardwise.plan.ir.schedule_sizes import SCHEDULES
from shardwise.plan.ir.text import default_wants

MAX_BYTES = 256 << 20


def is_schedule_file(name: str) -> bool:
    """Return whether the name of a schedule is that of a file of actions."""
    return "." in name or "/" in name or Path(name).is_file()


def read_actions(file: str | Path) -> str:
    """Read a file of actions.

    Raises:
        UsageError: it cannot be read, or is no text.
    """
    file = Path(file)
    try:
        if file.stat().st_size > MAX_BYTES:
            raise UsageError(f"{file} is longer than {MAX_BYTES >> 20} MiB; a program of a million actions has 20")
        return file.read_text(encoding="utf-8-sig")  # with a byte order mark, which some editors write, or without
    except OSError as error:
        raise UsageError(
            f"cannot read {file}: {error.strerror}; give the file that shardwise schedule NAME -o writes, or your own"
        ) from None
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not text; write a line of actions for each rank") from None


def actions_of(schedule: str, files: Mapping[str, str] | None = None) -> str:
    """Return the text of the file that a schedule names, from `files` if it is there; empty for a named schedule.

    Raises:
        UsageError: the file cannot be read.
    """
    if schedule in SCHEDULES or not schedule:
        return ""
    if files is not None and schedule in files:
        return files[schedule]
    return read_actions(schedule) if is_schedule_file(schedule) else ""


@lru_cache(maxsize=64)
def custom_program(name: str, text: str) -> Program:
    """Parse the program of a file called `name`.

    Raises:
        ProgramError: text that is no program of a training step; names the line, the rank or the stage.
    """
    try:
        program = Program.parse(text)
    except ProgramError as error:
        raise ProgramError(f"{name}: {error}") from None
    if reason := refuse_program(program):
        raise ProgramError(f"{name}: {reason}")
    return replace(program, name=name)


def with_fewer_microbatches(program: Program, microbatches: int) -> Program:
    """Return the program of the first so many microbatches, in the same order: what is legal for all is legal for some.

    >>> print(with_fewer_microbatches(custom_program("mine.txt", "0F0 0F1 0B0 0B1"), 1).actions[0])
    (Compute(op=<ComputeOp.F: 'F'>, stage=0, microbatch=0), Compute(op=<ComputeOp.B: 'B'>, stage=0, microbatch=0))
    """

    def is_kept(action: Action) -> bool:
        if isinstance(action, (Send, Recv)):
            return len(action.value.index) < 3 or action.value.index[2] < microbatches
        return action.microbatch is None or action.microbatch < microbatches

    rows = tuple(tuple(filter(is_kept, row)) for row in program.actions)
    return replace(program, actions=rows, wants=default_wants(rows))


def refuse_program(program: Program) -> str:
    """Return why a program is no schedule of a training step; empty where it may be one."""
    computes = [a for row in program.actions for a in row if isinstance(a, Compute)]
    if not computes:
        return "it has no computes, so it is no schedule; shardwise check proves collectives"
    for rank, row in enumerate(program.stages_of):
        if not row:
            return f"rank {rank} computes nothing; leave it out, or give it a stage"
    forwards, backwards = (
        {(a.stage, a.microbatch) for a in computes if a.op in ops} for ops in ((ComputeOp.F,), (ComputeOp.B, ComputeOp.W))
    )
    microbatches = program.microbatches
    if microbatches != tuple(range(len(microbatches))):
        named = ", ".join(map(str, microbatches[:8]))
        return f"its microbatches are {named}{', ...' if len(microbatches) > 8 else ''}; number them from 0 without gaps"
    for stage in range(program.num_stages):
        for words, done, example in (("forward", forwards, "F"), ("backward", backwards, "B")):
            missing = [m for m in microbatches if (stage, m) not in done]
            if missing:
                all_of = len(missing) == len(microbatches)
                where = "" if all_of else f" on microbatch{'es' * (len(missing) > 1)} {', '.join(map(str, missing[:8]))}"
                return f"stage {stage} has no {words}{where}; write {stage}{example}{missing[0]} on one rank"
    if any(program.initial):
        return "a step begins with nothing held; leave the lines `given` out"
    if program.wants != default_wants(program.actions):
        return "a step wants every gradient with each microbatch once; leave the lines `wants` out"
    return ""


def refuse_custom(name: str, program: Program, pipeline: int, microbatches: int) -> str:
    """Return why a schedule is not for so many ranks and microbatches; empty where it is.

    >>> refuse_custom("mine.txt", custom_program("mine.txt", "0F0 0B0"), 2, 1)
    'schedule=mine.txt has actions of 1 rank, and pipeline=2; use pipeline=1, or give it a line for each of 2 ranks'
    """
    ranks, runs = program.num_ranks, len(program.microbatches)
    if ranks != pipeline:
        return (
            f"schedule={name} has actions of {ranks} rank{'s' * (ranks > 1)}, and pipeline={pipeline}; use pipeline={ranks}, or give it a "
            f"line for each of {pipeline} ranks"
        )
    if runs != microbatches:
        return (
            f"schedule={name} runs {runs} microbatch{'es' * (runs > 1)}, and microbatches={microbatches}; use microbatches={runs}, or "
            f"write the actions of {microbatches}"
        )
    return ""


def check_schedule_name(name: str, names: tuple[str, ...]) -> None:
    """Raise `LayoutError` for a file whose name cannot be in a layout, next to the `names` of schedules."""
    if name in names:
        raise LayoutError(f"a file called {name} would pass for the schedule of that name; rename it, for example to {name}.txt")
    if not name or re.search(r"[\s,]", name):
        raise LayoutError(f"schedule={name}: a layout is words, so the file's name has no spaces and no commas; rename it")
