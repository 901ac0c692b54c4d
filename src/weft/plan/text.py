"""The text form of a `Program`, one line per rank, for people to read, edit and write.

    program 1f1b            # a name; everything after a # is a comment
    stages 2                # by default as many as are computed
    links 0>1               # by default each stage feeds the next
    rank 0: 0F0 x(0,1,0)>1 g(1,0,0)<1 0B0
    rank 1: x(0,1,0)<0 1F0 1B0 g(1,0,0)>0
    given 0: chunk(0)=0     # value=contributions, held at first; by default nothing
    wants 0: dw(0)=0        # by default dw of each stage, on the ranks that compute it, of every microbatch; grad where it is reduced

A collective may say what it is instead: a line `all_reduce` (reduce_scatter, all_gather, all_to_all, `broadcast 2` from rank 2) stands for
what is given and wanted then, of as many pieces `chunk(c)` as are sent; see `weft.plan.collective`.

    all_reduce
    rank 0: chunk(0)>1 chunk(0)+<1
    rank 1: chunk(0)>0 chunk(0)+<0

Lines without a `rank N:` before them are those of the ranks 0, 1, 2, ...: `0F0 0F1 0B0 0B1`, with spaces or commas between actions, as
others write schedules. A program with computes alone says nothing of transfers: `weft.schedules.lower.complete` puts them in.

In: text. Out: a `Program`, and back. A contribution that is in a value twice is written twice: `dw(0)=0,1,1`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from weft.errors import ProgramError
from weft.plan import collective
from weft.plan.action import Action, Compute, Manage, ManageOp, Op, Value, parse_action, parse_value
from weft.plan.program import Held, Links, Program, chain

_BARE = re.compile(r"\d+[A-Z]|\w+\([\d,]*\)")
_LINE = re.compile(r"(rank|given|wants)\s+(\d{1,9})\s*:\s*(.*)|(program|stages|links)\s+(.*)|links")
_COLLECTIVE = re.compile(rf"({'|'.join(collective.NAMES)})(?:\s+(\d{{1,9}}))?")


def default_wants(actions: Sequence[Sequence[Action]]) -> tuple[Held, ...]:
    """[rank] -> dw of every stage that it computes, with each microbatch of the program once; grad where it is reduced.

    Nothing of a program without any backward.
    """
    computes = [[a for a in row if isinstance(a, Compute)] for row in actions]
    if all(a.op is Op.F for row in computes for a in row):
        return ({},) * len(actions)
    every = sorted({a.microbatch for row in computes for a in row})
    reduced = {a.stage for row in actions for a in row if isinstance(a, Manage) and a.op is ManageOp.REDUCE_GRAD}
    stages = [sorted({a.stage for a in row}) for row in computes]
    return tuple({Value("grad" if s in reduced else "dw", (s,)): dict.fromkeys(every, 1) for s in here} for here in stages)


def format_program(program: Program) -> str:
    """The text of a program; what equals its default is left out."""
    lines = [f"program {program.name}"]
    if program.num_stages != _count_stages(program.actions):
        lines.append(f"stages {program.num_stages}")
    if program.links != chain(program.num_stages):
        lines.append("links " + " ".join(f"{p}>{q}" for p, q in program.links))
    lines += [f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(program.actions)]
    if any(program.given):
        lines += [f"given {rank}: {_format_held(held)}" for rank, held in enumerate(program.given)]
    if program.wants != default_wants(program.actions):
        lines += [f"wants {rank}: {_format_held(held)}" for rank, held in enumerate(program.wants)]
    return "\n".join(line.rstrip() for line in lines)


def parse_program(text: str) -> Program:
    """Read the text form.

    Raises:
        ProgramError: a line, action, value or link that cannot be read; names the line.
    """
    name, num_stages, links = "program", None, None
    rows: dict[str, dict[int, str]] = {"rank": {}, "given": {}, "wants": {}}
    actions: dict[int, tuple[Action, ...]] = {}
    held: dict[str, dict[int, Held]] = {"given": {}, "wants": {}}
    unnumbered: list[tuple[Action, ...]] = []
    meant: tuple[str, int] | None = None
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        found, named = _LINE.fullmatch(line), _COLLECTIVE.fullmatch(line)
        try:
            if named:
                if meant is not None:
                    raise ProgramError(f"{line!r}, and {meant[0]} before; a program is one collective")
                if named[2] and named[1] != "broadcast":
                    raise ProgramError(f"{line!r}: only broadcast has a rank that it starts from")
                meant = named[1], int(named[2] or 0)
            elif not found:
                bare = line.replace(",", " ").split() if "(" not in line else line.split()
                if not bare or not _BARE.match(bare[0]):
                    known = "program, stages, links, rank N:, given N:, wants N:, a collective's name, or an action"
                    raise ProgramError(f"{line!r} starts with none of {known}")
                unnumbered.append(tuple(parse_action(word) for word in bare))
            elif found[1]:
                key, rank = found[1], int(found[2])
                if rank in rows[key]:
                    raise ProgramError(f"{key} {rank} is given twice")
                rows[key][rank] = found[3]
                if key == "rank":
                    actions[rank] = tuple(parse_action(word) for word in found[3].split())
                else:
                    held[key][rank] = _parse_held(found[3])
            elif found[4] == "program":
                name = found[5]
            elif found[4] == "stages":
                num_stages = _parse_count(found[5])
            else:
                links = _parse_links(found[5] or "")
        except ProgramError as error:
            raise ProgramError(f"line {number}: {error}") from None
    if unnumbered and actions:
        raise ProgramError(f"{len(actions)} lines begin with `rank N:` and {len(unnumbered)} lines of actions do not; number all or none")
    if unnumbered:
        actions = dict(enumerate(unnumbered))
        rows["rank"] = dict.fromkeys(actions, "")
    num_ranks = 1 + max((rank for row in rows.values() for rank in row), default=-1)
    missing = next((rank for rank in range(num_ranks or 1) if rank not in actions), None)
    if missing is not None:
        raise ProgramError(f"no line for rank {missing}; write one line per rank, `rank {missing}:` where it does nothing")
    all_actions = tuple(actions[rank] for rank in range(num_ranks))
    stages = _count_stages(all_actions) if num_stages is None else num_stages
    num_computes = sum(isinstance(a, Compute) for row in all_actions for a in row)
    if stages > num_computes:
        raise ProgramError(f"{stages} stages, but only {num_computes} computes; stages are numbered from 0 without gaps")
    given = tuple(held["given"].get(rank, {}) for rank in range(num_ranks))
    wants = tuple(held["wants"].get(rank, {}) for rank in range(num_ranks)) if held["wants"] else default_wants(all_actions)
    if meant is not None:
        if held["given"] or held["wants"]:
            raise ProgramError(f"the line {meant[0]} says what is given and wanted; leave out the lines given and wants, or that one")
        given, wants = collective.ends(meant[0], num_ranks, collective.num_pieces(all_actions), meant[1])
        name = meant[0] if name == "program" else name
    return Program(
        name,
        stages,
        given,
        all_actions,
        wants,
        chain(stages) if links is None else links,
    )


def _count_stages(actions: Sequence[Sequence[Action]]) -> int:
    return 1 + max((a.stage for row in actions for a in row if isinstance(a, Compute)), default=-1)


def _format_held(held: Held) -> str:
    return " ".join(f"{value}={','.join(str(c) for c, n in content.items() for _ in range(n))}" for value, content in held.items())


def _parse_held(text: str) -> Held:
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
        found = re.fullmatch(r"(\d{1,9})>(\d{1,9})", word)
        if not found:
            raise ProgramError(f"link {word!r} is not producer>consumer, for example 0>1")
        pairs.append((int(found[1]), int(found[2])))
    return tuple(pairs)


def _parse_count(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise ProgramError(f"stages {text!r} is not a whole number")
    return int(text)
