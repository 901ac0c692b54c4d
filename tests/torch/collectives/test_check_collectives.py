"""Collectives as text: what a header line stands for, and that `shardwise check` proves the example and refutes each broken twin of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import run
from shardwise.collectives import ALGORITHMS, build
from shardwise.errors import ProgramError
from shardwise.plan.ir.check import check
from shardwise.plan.ir.program import Program
from shardwise.plan.ir.text import COLLECTIVE_NAMES, initial_and_wanted

EXAMPLE = Path(__file__).parents[3] / "examples" / "two_rings.txt"
PAIR = "all_reduce\nrank 0: chunk(0)>1 chunk(0)+<1\nrank 1: chunk(0)>0 chunk(0)+<0\n"


def answer(capfd: pytest.CaptureFixture[str], file: Path, *words: str, code: int = 0) -> dict[str, Any]:
    capfd.readouterr()
    assert run(["check", str(file), *words, "--json"]) == code
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


@pytest.mark.parametrize("name", COLLECTIVE_NAMES)
def test_a_header_stands_for_what_the_generators_give_and_want(name: str) -> None:
    """A line with the collective's name in place of all that is given and wanted: the same program for every algorithm."""
    for algorithm in ALGORITHMS[name]:
        for n in (2, 3, 4, 6, 8):
            sizes = {"hierarchical": (2, n // 2), "two_level": (2, n // 2)}.get(algorithm, n)
            if (algorithm in ("halving", "doubling") and n & (n - 1)) or (isinstance(sizes, tuple) and n % 2):
                continue
            whole = build(name, algorithm, sizes)
            lines = [line for line in str(whole).splitlines() if not line.startswith(("given", "wants"))]
            assert Program.parse("\n".join([name, *lines])) == whole, (algorithm, n)


def test_a_broadcast_may_start_anywhere() -> None:
    text = "broadcast 1\nrank 0: chunk(0)<1\nrank 1: chunk(0)>0 chunk(0)>2\nrank 2: chunk(0)<1\n"
    check(Program.parse(text))
    with pytest.raises(ProgramError, match=r"rank 1 step 0: chunk\(0\)>0 reads chunk\(0\), which is not held"):
        check(Program.parse(text.replace("broadcast 1", "broadcast")))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PAIR + "broadcast\n", "line 4: 'broadcast', and all_reduce before"),
        (PAIR + "wants 0: chunk(0)=0\n", "leave out the lines given and wants"),
        (PAIR.replace("all_reduce", "all_reduce 1"), "only broadcast has a rank that it starts from"),
        (PAIR.replace("all_reduce", "broadcast 2"), "there are ranks 0 to 1"),
        (PAIR.replace("all_reduce", "all_gather"), "divide the tensor into a multiple of 2 chunks"),
        (PAIR.replace("rank 1: ", "rank 1: 0F0 "), "rank 1 step 0: 0F0 is no transfer"),
        (PAIR.replace("all_reduce", "all_reduse"), "a collective's name"),
        (PAIR.replace("chunk(0)>", "chunk(999999999)>"), "rank 0 step 0: chunk(999999999)>1 transfers a chunk, but chunk(1) is missing"),
    ],
)
def test_headers_that_are_wrong(text: str, said: str) -> None:
    with pytest.raises(ProgramError) as refused:
        Program.parse(text)
    assert said in str(refused.value)
    with pytest.raises(ProgramError, match="is not a collective"):
        initial_and_wanted("all_reduse", 2, 1)


def test_the_example_is_proven(capfd: pytest.CaptureFixture[str]) -> None:
    found = answer(capfd, EXAMPLE)
    assert (found["proven"], found["name"], found["ranks"]) == (True, "two_rings", 4)
    assert run(["check", str(EXAMPLE)]) == 0
    assert "a rank sends at most 1.50 of the tensor" in capfd.readouterr().out


def lines(change: Callable[[list[list[str]]], None]) -> str:
    """The example with its actions changed: `change` gets [rank][step]."""
    kept = [line for line in EXAMPLE.read_text().splitlines() if not line.startswith("rank")]
    rows = [line.partition(": ")[2].split() for line in EXAMPLE.read_text().splitlines() if line.startswith("rank")]
    change(rows)
    return "\n".join([*kept, *(f"rank {rank}: {' '.join(row)}" for rank, row in enumerate(rows))])


def twice(rows: list[list[str]]) -> None:
    """Rank 1 sends rank 2 what it sent already, and rank 2 adds it again, where both are about to take finished pieces."""
    rows[1].insert(4, "chunk(0)>2")
    at = rows[2].index("chunk(0)+<1") + 1
    rows[2].insert(at, "chunk(0)+<1")


def less(rows: list[list[str]]) -> None:
    """A receive that should add takes what came in place of the rank's own summand."""
    at = rows[3].index("chunk(1)+<2")
    rows[3][at] = "chunk(1)<2"


def crossed(rows: list[list[str]]) -> None:
    """Ranks 0 and 1 wait for one another before they send."""
    for rank in (0, 1):
        first = next(i for i, action in enumerate(rows[rank]) if "<" in action and action.endswith(str(1 - rank)))
        rows[rank].insert(0, rows[rank].pop(first))


def unheard(rows: list[list[str]]) -> None:
    """A message that nobody takes."""
    rows[0].append("chunk(0)>1")


def taken(rows: list[list[str]]) -> None:
    """A piece is taken before it is summed: its sender's last addition comes later."""
    for row in rows:
        row[:] = [action.replace("+<", "<") for action in row]


@pytest.mark.parametrize(
    ("defect", "said"),
    [
        (twice, ("wanted chunk(0) has contribution", "twice", "rank 2 step", "chunk(0)+<1 brings contribution")),
        (less, ("wanted chunk(1)", "lacks contribution 3", "(its end)")),
        (crossed, ("no rank can move", "rank 0 step 0: chunk(6)+<1 waits for rank 1 to send it", "rank 1 step 0")),
        (unheard, ("rank 0 step 24: chunk(0)>1 is never received", "rank 1 needs chunk(0)<0")),
        (taken, ("lacks contribution",)),
    ],
)
def test_broken_twins_are_refuted_with_rank_and_step(
    defect: Callable[[list[list[str]]], None], said: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.txt"
    file.write_text(lines(defect))
    found = answer(capfd, file, code=ProgramError.exit_code)
    assert not found["proven"]
    for part in said:
        assert part in found["reason"], found["reason"]


def test_a_collective_that_says_nothing_of_its_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mute.txt"
    file.write_text(PAIR.replace("all_reduce\n", "given 0: chunk(0)=0\ngiven 1: chunk(0)=1\n"))
    assert "write a line `all_reduce`" in answer(capfd, file, code=ProgramError.exit_code)["reason"]
