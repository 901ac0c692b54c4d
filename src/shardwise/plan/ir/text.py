"""The text form of a `Program`, one line per rank, for people to read, edit and write.

    program 1f1b            # a name; everything after a # is a comment
    stages 2                # by default as many as are computed
    links 0>1               # by default each stage feeds the next
    rank 0: 0F0 x(0,1,0)>1 g(1,0,0)<1 0B0
    rank 1: x(0,1,0)<0 1F0 1B0 g(1,0,0)>0
    given 0: chunk(0)=0     # value=contributions, held at first; by default nothing
    wants 0: dw(0)=0        # by default dw of each stage, on the ranks that compute it, of every microbatch; grad where it is reduced

A collective may be named instead: a line `all_reduce` (reduce_scatter, all_gather, all_to_all, `broadcast 2` from rank 2) implies the
given and wanted values, for as many chunks `chunk(c)` as are sent; see `initial_and_wanted`.

    all_reduce
    rank 0: chunk(0)>1 chunk(0)+<1
    rank 1: chunk(0)>0 chunk(0)+<0

Lines that do not start with `rank N:` are those of the ranks 0, 1, 2, ...: `0F0 0F1 0B0 0B1`, with spaces or commas between actions, as
others write schedules. A program of computes alone has no transfers yet: `shardwise.schedules.lower.complete_with_transfers` adds them.

A contribution that is in a value twice is written twice: `dw(0)=0,1,1`. In a collective `chunk(c)` is chunk c of the tensor that all ranks
have, `block(s,t)` what rank s has for rank t; a contribution is a rank's summand, or the rank that had the chunk. Where ranks keep chunks,
rank r has the r-th of equally many.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, TypedDict

from shardwise.errors import ProgramError, ProgramTextError
from shardwise.plan.ir.action import (
    Action,
    Compute,
    ComputeOp,
    HeldValues,
    Links,
    Manage,
    ManageOp,
    Recv,
    Send,
    Value,
    chain_links,
    parse_action,
    parse_value,
)

if TYPE_CHECKING:
    from shardwise.plan.ir.program import Program

COLLECTIVE_NAMES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
_BARE = re.compile(r"\d+[A-Z]|\w+\([\d,]*\)")
_LINE = re.compile(r"(rank|given|wants)\s+(\d{1,9})\s*:\s*(.*)|(program|stages|links)\s+(.*)|links")
_COLLECTIVE = re.compile(rf"({'|'.join(COLLECTIVE_NAMES)})(?:\s+(\d{{1,9}}))?")


class ProgramFields(TypedDict):
    """Fields of a `Program` by name."""

    name: str
    num_stages: int
    initial: tuple[HeldValues, ...]
    actions: tuple[tuple[Action, ...], ...]
    wants: tuple[HeldValues, ...]
    links: Links


def default_wants(actions: Sequence[Sequence[Action]]) -> tuple[HeldValues, ...]:
    """Return [rank] -> dw of every stage that it computes, with each microbatch of the program once; grad where it is reduced.

    Nothing of a program without any backward.
    """
    computes = [[a for a in row if isinstance(a, Compute)] for row in actions]
    if all(a.op is ComputeOp.F for row in computes for a in row):
        return ({},) * len(actions)
    microbatches = sorted({a.microbatch for row in computes for a in row})
    reduced = {a.stage for row in actions for a in row if isinstance(a, Manage) and a.op is ManageOp.REDUCE_GRAD}
    stages = [sorted({a.stage for a in row}) for row in computes]
    return tuple({Value("grad" if s in reduced else "dw", (s,)): dict.fromkeys(microbatches, 1) for s in here} for here in stages)


def format_program(program: Program) -> str:
    """Format a program as text; what equals its default is omitted."""
    lines = [f"program {program.name}"]
    if program.num_stages != _count_stages(program.actions):
        lines.append(f"stages {program.num_stages}")
    if program.links != chain_links(program.num_stages):
        lines.append("links " + " ".join(f"{p}>{q}" for p, q in program.links))
    lines += [f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(program.actions)]
    if any(program.initial):
        lines += [f"given {rank}: {_format_held(values)}" for rank, values in enumerate(program.initial)]
    if program.wants != default_wants(program.actions):
        lines += [f"wants {rank}: {_format_held(values)}" for rank, values in enumerate(program.wants)]
    return "\n".join(line.rstrip() for line in lines)


def parse_program_fields(text: str) -> ProgramFields:
    """Parse the text form; `Program.parse` makes a program of the result.

    Raises:
        ProgramTextError: a line, action, value or link that cannot be read; names the line.
    """
    lines = _ProgramParser()
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].strip()
        try:
            if line:
                lines.read_line(line)
        except ProgramError as error:
            raise ProgramTextError(f"line {number}: {error}") from None
    try:
        return lines.fields()
    except ProgramError as error:
        raise ProgramTextError(str(error)) from None


@dataclass
class _ProgramParser:
    """Contents of the lines parsed so far. `actions`, `given` and `wants`: by rank. `collective`: its name and first rank."""

    name: str = "program"
    num_stages: int | None = None
    links: Links | None = None
    actions: dict[int, tuple[Action, ...]] = field(default_factory=dict)
    given_and_wanted: dict[str, dict[int, HeldValues]] = field(default_factory=lambda: {"given": {}, "wants": {}})
    unnumbered: list[tuple[Action, ...]] = field(default_factory=list)
    collective: tuple[str, int] | None = None

    def read_line(self, line: str) -> None:
        match, named = _LINE.fullmatch(line), _COLLECTIVE.fullmatch(line)
        if named:
            self._read_collective_line(line, named[1], named[2])
        elif not match:
            self._read_unnumbered_line(line)
        elif match[1]:
            self._read_rank_line(match[1], int(match[2]), match[3])
        elif match[4] == "program":
            self.name = match[5]
        elif match[4] == "stages":
            self.num_stages = _parse_count(match[5])
        else:
            self.links = _parse_links(match[5] or "")

    def _read_collective_line(self, line: str, name: str, first: str | None) -> None:
        if self.collective is not None:
            raise ProgramError(f"{line!r}, and {self.collective[0]} before; a program is one collective")
        if first and name != "broadcast":
            raise ProgramError(f"{line!r}: only broadcast has a rank that it starts from")
        self.collective = name, int(first or 0)

    def _read_unnumbered_line(self, line: str) -> None:
        bare = line.replace(",", " ").split() if "(" not in line else line.split()
        if not bare or not _BARE.match(bare[0]):
            forms = "program, stages, links, rank N:, given N:, wants N:, a collective's name, or an action"
            raise ProgramError(f"{line!r} starts with none of {forms}")
        self.unnumbered.append(tuple(parse_action(word) for word in bare))

    def _read_rank_line(self, key: str, rank: int, text: str) -> None:
        if rank in (self.actions if key == "rank" else self.given_and_wanted[key]):
            raise ProgramError(f"{key} {rank} is given twice")
        if key == "rank":
            self.actions[rank] = tuple(parse_action(word) for word in text.split())
        else:
            self.given_and_wanted[key][rank] = _parse_held(text)

    def fields(self) -> ProgramFields:
        """Return the fields of the program. Raises ProgramError where the lines are none."""
        actions = self._all_actions()
        stages = _count_stages(actions) if self.num_stages is None else self.num_stages
        num_computes = sum(isinstance(a, Compute) for row in actions for a in row)
        if stages > num_computes:
            raise ProgramError(f"{stages} stages, but only {num_computes} computes; stages are numbered from 0 without gaps")
        initial, wants = (tuple(self.given_and_wanted[key].get(rank, {}) for rank in range(len(actions))) for key in ("given", "wants"))
        if not self.given_and_wanted["wants"]:
            wants = default_wants(actions)
        name = self.name
        if self.collective is not None:
            collective_name, first = self.collective
            if self.given_and_wanted["given"] or self.given_and_wanted["wants"]:
                raise ProgramError(
                    f"the line {collective_name} says what is given and wanted; leave out the lines given and wants, or that one"
                )
            initial, wants = initial_and_wanted(collective_name, len(actions), count_chunks(actions), first)
            name = collective_name if name == "program" else name
        links = chain_links(stages) if self.links is None else self.links
        return {"name": name, "num_stages": stages, "initial": initial, "actions": actions, "wants": wants, "links": links}

    def _all_actions(self) -> tuple[tuple[Action, ...], ...]:
        """Return [rank] -> its actions."""
        if self.unnumbered and self.actions:
            raise ProgramError(
                f"{len(self.actions)} lines begin with `rank N:` and {len(self.unnumbered)} lines of actions do not; number all or none"
            )
        actions = dict(enumerate(self.unnumbered)) if self.unnumbered else self.actions
        num_ranks = 1 + max((*actions, *self.given_and_wanted["given"], *self.given_and_wanted["wants"]), default=-1)
        missing = next((rank for rank in range(num_ranks or 1) if rank not in actions), None)
        if missing is not None:
            raise ProgramError(f"no line for rank {missing}; write one line per rank, `rank {missing}:` where it does nothing")
        return tuple(actions[rank] for rank in range(num_ranks))


def _count_stages(actions: Sequence[Sequence[Action]]) -> int:
    return 1 + max((a.stage for row in actions for a in row if isinstance(a, Compute)), default=-1)


def _format_held(held: HeldValues) -> str:
    return " ".join(f"{value}={','.join(str(c) for c, n in content.items() for _ in range(n))}" for value, content in held.items())


def _parse_held(text: str) -> HeldValues:
    result: dict[Value, dict[int, int]] = {}
    for word in text.split():
        value, equals, content = word.partition("=")
        if not equals or not re.fullmatch(r"(\d{1,9}(,\d{1,9})*)?", content):
            raise ProgramError(f"{word!r} is not value=contributions, for example dw(0)=0,1,2")
        result[parse_value(value)] = dict(Counter(int(part) for part in content.split(",") if content))
    return result


def _parse_links(text: str) -> Links:
    pairs = []
    for word in text.split():
        match = re.fullmatch(r"(\d{1,9})>(\d{1,9})", word)
        if not match:
            raise ProgramError(f"link {word!r} is not producer>consumer, for example 0>1")
        pairs.append((int(match[1]), int(match[2])))
    return tuple(pairs)


def _parse_count(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise ProgramError(f"stages {text!r} is not a whole number")
    return int(text)


def initial_and_wanted(name: str, num_ranks: int, num_chunks: int, root: int = 0) -> tuple[tuple[HeldValues, ...], tuple[HeldValues, ...]]:
    """Return (given, wants) by rank. `root`: the rank that has what a broadcast sends.

    >>> given, wants = initial_and_wanted("all_reduce", 2, 1)
    >>> given[1], wants[1]
    ({Value(name='chunk', index=(0,)): {1: 1}}, {Value(name='chunk', index=(0,)): {0: 1, 1: 1}})

    Raises:
        ProgramError: an unknown name, a root that is no rank, chunks that do not divide among ranks.
    """
    ranks = range(num_ranks)
    if name not in COLLECTIVE_NAMES:
        raise ProgramError(f"{name} is not a collective; use {', '.join(COLLECTIVE_NAMES)}")
    if root not in ranks:
        raise ProgramError(f"{name} {root}: there are ranks 0 to {num_ranks - 1}")
    if name == "all_to_all":
        initial = tuple({Value("block", (s, t)): {s: 1} for t in ranks} for s in ranks)
        return initial, tuple({Value("block", (s, t)): {s: 1} for s in ranks} for t in ranks)
    one_each = tuple({_chunk_value(c): {r: 1} for c in range(num_chunks)} for r in ranks)
    if name == "broadcast":
        everything: HeldValues = one_each[root]
        return tuple(everything if r == root else {} for r in ranks), (everything,) * num_ranks
    total: HeldValues = {_chunk_value(c): dict.fromkeys(ranks, 1) for c in range(num_chunks)}
    if name == "all_reduce":
        return one_each, (total,) * num_ranks
    if num_chunks % num_ranks:
        raise ProgramError(f"{name} of {num_chunks} chunks over {num_ranks} ranks; divide the tensor into a multiple of {num_ranks} chunks")
    chunks_each = num_chunks // num_ranks
    chunks = [[_chunk_value(c) for c in range(r * chunks_each, (r + 1) * chunks_each)] for r in ranks]
    if name == "reduce_scatter":
        return one_each, tuple({value: total[value] for value in values} for values in chunks)
    everything = {value: {r: 1} for r in ranks for value in chunks[r]}
    return tuple({value: {r: 1} for value in chunks[r]} for r in ranks), (everything,) * num_ranks


def count_chunks(actions: Iterable[Iterable[Action]]) -> int:
    """Count the chunks that the tensor is divided into: one more than the highest `chunk` that is sent or received.

    Raises:
        ProgramError: an action that is no transfer, since a collective has no other; a chunk that is never transferred.
    """
    first_transfer: dict[int, str] = {}  # chunk -> its first transfer
    for rank, row in enumerate(actions):
        for step, action in enumerate(row):
            if not isinstance(action, (Send, Recv)):
                raise ProgramError(f"rank {rank} step {step}: {action} is no transfer, and a collective has nothing else")
            if action.value.name == "chunk" and action.value.index:
                first_transfer.setdefault(action.value.index[0], f"rank {rank} step {step}: {action}")
    gap = next(c for c in count() if c not in first_transfer)
    if first_transfer and max(first_transfer) > gap:
        raise ProgramError(f"{first_transfer[max(first_transfer)]} transfers a chunk, but chunk({gap}) is missing; chunks have no gaps")
    return max(1, len(first_transfer))


def _chunk_value(index: int) -> Value:
    return Value("chunk", (index,))
