"""What the documents show works: their Python runs, their command lines parse, their links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import cli_examples
import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_the_python_of_a_page_runs(page: str, tmp_path: Path) -> None:
    """All blocks of a page in one process, in order, as a notebook runs them: without a file that ranks could import."""
    code = "\n".join(blocks(page, "python"))
    done = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True, cwd=tmp_path, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_command_lines_of_a_page_parse(page: str) -> None:
    for block in blocks(page, "sh"):
        for words in cli_examples.find(block):
            cli_examples.require_understood(words)
        for script in re.findall(r"^ *((?:scripts|\.ci)/\w+)", block, re.M):
            assert (ROOT / script).stat().st_mode & 0o111, f"{page} names {script}, which cannot be run"


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    linked = [target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target]
    named = re.findall(r"`((?:docs|examples|scripts|src)/[\w./-]+)`", text)
    missing = [name for name in linked if not (ROOT / page).parent.joinpath(name).exists()] + [n for n in named if not (ROOT / n).exists()]
    assert not missing, f"{page} names {missing}"


def test_a_command_line_that_does_not_exist_is_seen() -> None:
    for words in (["paln", "gpt-10m"], ["plan", "gpt-10m", "--layuot", "x"], ["schedule"]):
        with pytest.raises(BaseException, match=r"."):
            cli_examples.require_understood(words)
