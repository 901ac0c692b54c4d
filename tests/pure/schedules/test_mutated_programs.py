"""Programs with mistakes in them: `check` and a simulator of its own (`explicit`) agree on every one, and on the rank and the step."""

from __future__ import annotations

import random
import re

import pytest

from shardwise.errors import ProgramError
from shardwise.plan.ir.check import check
from shardwise.plan.ir.program import Program
from shardwise.schedules import NAMES, build
from shardwise.schedules.lower import complete_with_transfers, gather_weights, offload, recompute, reduce_gradients
from tests.support.explicit import run
from tests.support.schedule_sizes import fit

_OPS = re.compile(r"[FBIWR](?=\d)")


def spoiled(rows: list[list[str]], draw: random.Random) -> list[list[str]]:
    """One to three actions dropped, doubled, swapped, moved along a rank or to another, or with another number or op."""
    rows = [list(row) for row in rows]
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        some = [row for row in rows if row]
        if not some:
            break
        row = draw.choice(some)
        i, j = draw.randrange(len(row)), draw.randrange(len(row))
        match draw.randrange(7):
            case 0:
                row.pop(i)
            case 1:
                row.insert(j, row[i])
            case 2:
                row[i], row[j] = row[j], row[i]
            case 3:
                row.insert(j, row.pop(i))
            case 4:
                other = draw.choice(rows)
                other.insert(draw.randint(0, len(other)), row[i])
                row.remove(row[i])
            case 5:
                numbers = list(re.finditer(r"\d+", row[i]))
                at = draw.choice(numbers)
                row[i] = row[i][: at.start()] + str(max(0, int(at[0]) + draw.choice([-1, 1]))) + row[i][at.end() :]
            case _:
                row[i] = _OPS.sub(draw.choice("FBIWR"), row[i]) if "(" not in row[i] else row[i]
    return rows


def drawn(draw: random.Random) -> Program:
    name = draw.choice(NAMES)
    stages, m = fit(name, draw.randint(1, 5), draw.randint(1, 6))
    program = build(name, stages, m, rendezvous=draw.random() < 0.5)
    every = [(s, k) for s in range(stages) for k in range(m)]
    some = set(draw.sample(every, draw.randint(1, len(every))))
    return draw.choice(
        [lambda: program, lambda: program, lambda: gather_weights(program), lambda: reduce_gradients(program),
         lambda: offload(program, some), lambda: recompute(program, some)]
    )()  # fmt: skip


def unread(text: str) -> str:
    """Why a text is no program; empty where it is one."""
    try:
        Program.parse(text)
    except ProgramError as error:
        return str(error)
    return ""


def told(program: Program, rendezvous: bool) -> str:
    try:
        check(program, rendezvous)
    except ProgramError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("rendezvous", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_every_verdict_names_what_is_wrong(seed: int, rendezvous: bool) -> None:
    draw = random.Random(seed)
    proven = 0
    for _ in range(60):
        rows = spoiled([list(map(str, row)) for row in drawn(draw).actions], draw)
        text = "\n".join(f"rank {rank}: {' '.join(row)}" for rank, row in enumerate(rows))
        if refused := unread(text):
            assert re.search(r"rank \d+ step \d+|stages", refused)  # a rank or a stage that is not there
            continue
        program = Program.parse(text)
        said, end = told(program, rendezvous), run(rows, rendezvous)
        assert (said == "") is end.proven, (rows, said)
        proven += said == ""
        places = [(int(rank), int(step)) for rank, step in re.findall(r"rank (\d+) step (\d+)", said)]
        if end.mistakes:
            assert end.mistakes.get(places[0][0]) == places[0][1], (rows, said)
        elif end.stuck:
            assert "no rank can move" in said
            assert all(end.at[rank] == step for rank, step in places), (rows, said)
        elif end.unread:
            assert places[0] in end.unread, (rows, said)
        elif end.unmet:
            assert places[0][0] in end.unmet, (rows, said)
    assert 2 <= proven < 60


@pytest.mark.parametrize("seed", range(10))
def test_computes_alone_are_completed_where_that_can_be(seed: int) -> None:
    """What is completed and proven runs in the simulator too, both ways; what runs where sends do not wait can be ordered so that it runs
    where they do."""
    draw = random.Random(100 + seed)
    proven = 0
    for _ in range(60):
        bare = [[str(a) for a in row if "(" not in str(a)] for row in drawn(draw).actions]
        rows = spoiled(bare, draw) if draw.random() < 0.9 else bare
        said = []
        for rendezvous in (False, True):
            try:
                program = complete_with_transfers(
                    Program.parse("\n".join(f"rank {r}: {' '.join(row)}" for r, row in enumerate(rows))), rendezvous
                )
            except ProgramError as error:
                said.append(str(error))
                continue
            said.append(told(program, rendezvous))
            assert (said[-1] == "") is run([list(map(str, row)) for row in program.actions], rendezvous).proven, (rows, said)
        assert (said[0] == "") is (said[1] == ""), (rows, said)
        proven += said == ["", ""]
    assert proven
