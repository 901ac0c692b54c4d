"""The page about collectives: its table is counted on the programs, its pictures are what is drawn, its crossings the model's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwise.cli import run
from shardwise.collectives import ALGORITHMS, build
from shardwise.plan.ir.check import check
from shardwise.plan.ir.program import Program
from shardwise.simulate.messages import Wire, deliver_messages, num_steps

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "collectives.md").read_text()
RANKS, BOX = 16, 4


def test_the_table_is_what_the_programs_move() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]* \| (\d.*) \|$", PAGE, re.M))
    assert set(rows) == set(ALGORITHMS["all_reduce"])
    for name, row in rows.items():
        program = build("all_reduce", name, (BOX, RANKS // BOX) if name == "hierarchical" else RANKS)
        part = 1 / len({value for held in program.wants for value in held})
        found = deliver_messages(program, lambda _, part=part: part, lambda *_: Wire(0.0, 1.0))  # type: ignore[misc]
        total, mean, busiest, steps, messages, balance = map(float, row.split(" | "))
        assert total == pytest.approx(found.total_bytes)
        assert mean == pytest.approx(found.total_bytes / RANKS, rel=1e-3)
        assert busiest == pytest.approx(max(found.sent_bytes))
        assert steps == num_steps(program)
        assert messages == len(found.messages), name
        assert balance == pytest.approx(found.balance, abs=0.006)


def test_the_example_is_proven() -> None:
    text = re.findall(r"^```text\n(all_reduce\n.*?)^```", PAGE, re.S | re.M)[0]
    check(Program.parse(text))


@pytest.mark.parametrize(
    ("picture", "words"),
    [
        ("collectives-times", ["compare", "--ranks", "64", "--cluster", "8xdgx-a100-80"]),
        ("collectives-ring", ["draw", "ring", "--ranks", "4"]),
    ],
)
def test_pictures_are_what_the_verbs_draw(picture: str, words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "made.svg"
    assert run(["collectives", *words, "-o", str(target)]) == 0
    capfd.readouterr()
    assert target.read_text() == (ROOT / "docs" / "pictures" / f"{picture}.svg").read_text()


def test_the_crossings_are_the_model_s() -> None:
    """The model's column needs no measured table."""
    from bench.validate.crossings import changes

    rows = re.findall(r"^\| ([\w-]+) \| (\d+) \| ([\w ]+) \| ([\w ]+) \| ([\d.]+) (KiB|MiB) \|", PAGE, re.M)
    assert len(rows) == 13
    for machine, ranks, before, after, number, unit in rows:
        size = float(number) * (1024 if unit == "KiB" else 1 << 20)
        model = {(a, b): at for a, b, at in changes(machine, int(ranks))}
        assert model[before, after] == pytest.approx(size, rel=0.01)
