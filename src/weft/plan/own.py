"""A pipeline schedule of the user's own: what a layout with `schedule=FILE` says. In: the file's name and its text. Out: `Own`.

A layout carries the text itself, so that it means the same after the file has been edited or removed, and on machines that do not have it.
What it costs and how it runs follows from its program, as from that of a named schedule. Not here: transfers and the proof, which hang on
the model's own links (`weft.schedules`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

from weft.errors import LayoutError, ProgramError, UsageError
from weft.plan.action import Compute, Manage, ManageOp, Op, Recv, Send
from weft.plan.program import Program
from weft.plan.text import default_wants, parse_program

MOST_BYTES = 256 << 20
KEPT = ("saved", "half")  # what a rank keeps of a microbatch; what waits for its weights part counts in full


def is_file(name: str) -> bool:
    """Whether the name of a schedule is rather that of a file of actions."""
    return "." in name or "/" in name or Path(name).is_file()


def read_actions(file: str | Path) -> str:
    """What a file of actions says.

    Raises:
        UsageError: it cannot be read, or is no text.
    """
    file = Path(file)
    try:
        if file.stat().st_size > MOST_BYTES:
            raise UsageError(f"{file} is longer than {MOST_BYTES >> 20} MiB; a program of a million actions has 20")
        return file.read_text(encoding="utf-8-sig")  # with a byte order mark or without, which some editors write
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}; give the file that weft schedule NAME -o writes, or your own") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not text; write a line of actions for each rank") from None


@dataclass(frozen=True)
class Own:
    """A schedule by its own program. `own_of` makes it."""

    program: Program

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.program.num_stages

    @property
    def chunks(self) -> int:
        """Stages for each rank, where each is on one of them, rounded up."""
        return -(-self.num_stages // self.program.num_ranks)

    @property
    def has_transfers(self) -> bool:
        """Whether it says itself what is sent and received; otherwise that is put in along the model's links."""
        return any(isinstance(action, (Send, Recv)) for row in self.program.actions for action in row)

    @cached_property
    def ranks_of(self) -> tuple[tuple[int, ...], ...]:
        """[stage] -> the ranks that compute it, that of the first microbatch first: stages follow one another on these."""
        return tuple(tuple(sorted(of_rank, key=lambda rank: of_rank[rank])) for of_rank in self._first)

    @cached_property
    def _first(self) -> tuple[dict[int, int], ...]:
        """[stage] -> by rank its first microbatch."""
        found: list[dict[int, int]] = [{} for _ in range(self.num_stages)]
        for rank, row in enumerate(self.program.actions):
            for a in row:
                if isinstance(a, Compute) and a.op is Op.F:
                    found[a.stage][rank] = min(a.microbatch, found[a.stage].get(rank, a.microbatch))
        return tuple(found)

    @cached_property
    def splits(self) -> bool:
        """Whether some backward is in two parts."""
        return any(isinstance(a, Compute) and a.op is Op.W for row in self.program.actions for a in row)

    @cached_property
    def keeps(self) -> bool:
        """Whether it says itself what is moved to the host or computed again."""
        again = (ManageOp.OFFLOAD, ManageOp.DROP)
        return any(isinstance(a, Manage) and a.op in again for row in self.program.actions for a in row)

    @cached_property
    def shares(self) -> tuple[dict[int, float], ...]:
        """[rank] -> by stage the part of the microbatches that it computes of it."""
        found: list[dict[int, float]] = []
        for row in self.program.actions:
            forwards = [a.stage for a in row if isinstance(a, Compute) and a.op is Op.F]
            found.append({s: forwards.count(s) / len(self.program.microbatches) for s in set(forwards)})
        return tuple(found)

    @cached_property
    def _held(self) -> tuple[tuple[int, dict[int, int], bool], ...]:
        """[rank] -> the most microbatches that it keeps over its stages, of each of them, and whether ever of several at once."""
        return tuple(self._held_by(rank) for rank in range(self.program.num_ranks))

    def _held_by(self, rank: int) -> tuple[int, dict[int, int], bool]:
        held: dict[int, int] = dict.fromkeys(self.program.stages_of[rank], 0)
        most, each, several = 0, dict(held), False
        for e in self.program.effects[rank]:
            for value, change in (*((v, 1) for v in e.writes), *((v, -1) for v in e.frees)):
                if value.name in KEPT:
                    held[value.index[0]] += change
            most = max(most, sum(held.values()))
            each = {s: max(each[s], n) for s, n in held.items()}
            several = several or sum(map(bool, held.values())) > 1
        return most, each, several

    def in_flight(self, rank: int, stage: int) -> float:
        """The most microbatches that a rank keeps of one of its stages; of stages of which it keeps some at once, their mean.

        >>> own_of("mine.txt", "0F0 1F0 0F1 1F1 1B0 1B1 0B0 0B1").in_flight(0, 0)
        2.0
        """
        most, each, several = self._held[rank]
        return most / len(each) if several else float(each[stage])

    def fewer(self, microbatches: int) -> Program:
        """The same order of the first so many microbatches: what an order of all allows, it allows of some.

        >>> print(own_of("mine.txt", "0F0 0F1 0B0 0B1").fewer(1).actions[0])
        (Compute(op=<Op.F: 'F'>, stage=0, microbatch=0), Compute(op=<Op.B: 'B'>, stage=0, microbatch=0))
        """

        def kept(row: tuple[object, ...]) -> Iterator[object]:
            for action in row:
                if isinstance(action, (Send, Recv)):
                    if len(action.value.index) < 3 or action.value.index[2] < microbatches:
                        yield action
                elif isinstance(action, (Compute, Manage)) and (action.microbatch is None or action.microbatch < microbatches):
                    yield action

        rows = tuple(tuple(kept(row)) for row in self.program.actions)
        return replace(self.program, actions=rows, wants=default_wants(rows))  # type: ignore[arg-type]

    @cached_property
    def fewest(self) -> int:
        """The fewest microbatches with which every rank still computes each of its stages."""
        return 1 + max(first for of_rank in self._first for first in of_rank.values())


@lru_cache(maxsize=64)
def own_of(name: str, text: str) -> Own:
    """The schedule that a file called `name` says by its text.

    Raises:
        ProgramError: text that is no program, or none that trains: names the line, the rank or the stage.
    """
    try:
        program = parse_program(text)
    except ProgramError as error:
        raise ProgramError(f"{name}: {error}") from None
    if reason := refuse_program(program):
        raise ProgramError(f"{name}: {reason}")
    return Own(replace(program, name=name))


def refuse_program(program: Program) -> str:
    """Why a program is no schedule of a training step; empty where it may be one."""
    computes = [a for row in program.actions for a in row if isinstance(a, Compute)]
    if not computes:
        return "it has no computes, so it is no schedule; weft check proves collectives"
    for rank, row in enumerate(program.stages_of):
        if not row:
            return f"rank {rank} computes nothing; leave it out, or give it a stage"
    forwards, backwards = ({(a.stage, a.microbatch) for a in computes if a.op in ops} for ops in ((Op.F,), (Op.B, Op.W)))
    microbatches = program.microbatches
    if microbatches != tuple(range(len(microbatches))):
        named = ", ".join(map(str, microbatches[:8]))
        return f"its microbatches are {named}{', ...' if len(microbatches) > 8 else ''}; number them from 0 without gaps"
    for stage in range(program.num_stages):
        for words, done, example in (("forward", forwards, "F"), ("backward", backwards, "B")):
            missing = [m for m in microbatches if (stage, m) not in done]
            if missing:
                all_of = len(missing) == len(microbatches)
                of = "" if all_of else f" on microbatch{'es' * (len(missing) > 1)} {', '.join(map(str, missing[:8]))}"
                return f"stage {stage} has no {words}{of}; write {stage}{example}{missing[0]} on one rank"
    if any(program.given):
        return "a step begins with nothing held; leave the lines `given` out"
    if program.wants != default_wants(program.actions):
        return "a step wants every gradient with each microbatch once; leave the lines `wants` out"
    return ""


def refuse_own(name: str, own: Own, pipeline: int, microbatches: int) -> str:
    """Why a schedule is not for so many ranks and microbatches; empty where it is.

    >>> refuse_own("mine.txt", own_of("mine.txt", "0F0 0B0"), 2, 1)
    'schedule=mine.txt has actions of 1 rank, and pipeline=2; use pipeline=1, or give it a line for each of 2 ranks'
    """
    ranks, runs = own.program.num_ranks, len(own.program.microbatches)
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


def check_name(name: str, known: tuple[str, ...]) -> None:
    """Raise `LayoutError` for a file whose name cannot stand in a layout beside the `known` schedules."""
    if name in known:
        raise LayoutError(f"a file called {name} would pass for the schedule of that name; rename it, for example to {name}.txt")
    if not name or re.search(r"[\s,]", name):
        raise LayoutError(f"schedule={name}: a layout is words, so the file's name has no spaces and no commas; rename it")
