"""Custom all-reduces: the program of a layout with `all_reduce=FILE`, from the file's name and its text, proven before it is used.

A layout carries the text itself, as that of a custom schedule. It is priced as the library's own all-reduce: its cost is not modelled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from shardwise.errors import LayoutError, ProgramError
from shardwise.plan.ir.check import check
from shardwise.plan.ir.choice import AUTO, NAMES, SYNONYMS
from shardwise.plan.ir.custom_schedule import is_schedule_file, read_actions
from shardwise.plan.ir.program import Program
from shardwise.plan.ir.text import initial_and_wanted


def collective_text_of(all_reduce: str, files: Mapping[str, str] | None = None) -> str:
    """Return the text of the file that an all-reduce names, from `files` if it is there; empty for a named algorithm.

    Raises:
        UsageError: the file cannot be read.
    """
    if all_reduce in (AUTO, *NAMES, *SYNONYMS, "") or not is_collective_file(all_reduce):
        return ""
    return files[all_reduce] if files is not None and all_reduce in files else read_actions(all_reduce)


def is_collective_file(name: str) -> bool:
    """Return whether the name of an all-reduce is that of a file of actions."""
    return name not in (AUTO, *NAMES, *SYNONYMS) and is_schedule_file(name)


@lru_cache(maxsize=64)
def custom_all_reduce(name: str, text: str) -> Program:
    """Parse and prove the all-reduce of a file called `name`.

    >>> custom_all_reduce("swap.txt", "all_reduce\\nchunk(0)>1 chunk(0)+<1\\nchunk(0)>0 chunk(0)+<0").num_ranks
    2

    Raises:
        ProgramError: text that is no program, or is refuted; names the line, or the rank and the step. LayoutError: it is no all-reduce.
    """
    try:
        program = Program.parse(text)
        check(program)
    except ProgramError as error:
        raise type(error)(f"{name}: {error}") from None
    count = len({value for held in program.wants for value in held})
    if program.num_stages or not count or (program.initial, program.wants) != initial_and_wanted("all_reduce", program.num_ranks, count, 0):
        raise LayoutError(f"all_reduce={name}: it is no all-reduce; write a line `all_reduce` and a line of actions for each rank")
    return replace(program, name=name)


def refuse_custom_all_reduce(name: str, text: str, ranks: int) -> str:
    """Return why an all-reduce is not for so many ranks; empty where it is."""
    program = custom_all_reduce(name, text)
    if program.num_ranks == ranks:
        return ""
    return (
        f"all_reduce={name} has actions of {program.num_ranks} ranks, and gradients are summed over {ranks}; use data={program.num_ranks}, "
        f"or give it a line for each of {ranks} ranks"
    )
