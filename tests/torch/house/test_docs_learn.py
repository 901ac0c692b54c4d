"""Questions of the page for students: each command runs, and prints the figure that the page has in bold."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from shardwise.cli import run

ROOT = Path(__file__).parents[3]
ROW = re.compile(r"^\| (?P<question>[^|]*\?) \| (?P<answer>[^|]*) \| `shardwise (?P<command>[^`]*)` \|[^|]*\|$", re.M)
ROWS = [(m["question"], m["answer"], m["command"]) for m in ROW.finditer((ROOT / "docs" / "learn.md").read_text())]
BOLD = re.compile(r"\*\*([^*]+)\*\*")
SLOW = ("bert-large", "gpt-1.3b")  # models whose capture takes seconds


def answered(answer: str, command: str, capfd: pytest.CaptureFixture[str]) -> bool:
    """Whether the command ends well and prints all that is bold."""
    capfd.readouterr()
    code = run(shlex.split(command))
    said = " ".join(capfd.readouterr().out.split())
    return code == 0 and all(figure in said for figure in BOLD.findall(answer))


def marked(row: tuple[str, str, str]) -> object:
    return pytest.param(*row, id=row[0], marks=[pytest.mark.long] if any(name in row[2] for name in SLOW) else [])


def test_more_than_twenty_questions_are_answered() -> None:
    assert len(ROWS) >= 25
    assert all(len(BOLD.findall(answer)) == 1 for _, answer, _ in ROWS)


@pytest.mark.parametrize(("question", "answer", "command"), [marked(row) for row in ROWS])
def test_the_command_prints_the_figure(
    question: str, answer: str, command: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "170")
    monkeypatch.chdir(ROOT)
    assert answered(answer, command, capfd), question


def test_another_figure_is_noticed(capfd: pytest.CaptureFixture[str]) -> None:
    assert not answered("**15 steps**", "collectives draw ring --ranks 8", capfd)
    assert not answered("**14 steps**", "collectives draw rng --ranks 8", capfd)
