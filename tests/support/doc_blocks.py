"""Blocks of the documents as they are printed, and what runs them.

A block is run unless the line before it says otherwise, in a comment that readers do not see:

    <!-- long: why -->      only the long suite runs it
    <!-- not run: why -->   it needs what is not here: many machines, the network, hours
    <!-- migration: ... -->  tests/ranks/run/test_migrations.py runs it, in the place of this module

Blocks of one page are run in order in one folder, which has `examples/`, a Hugging Face configuration and a text. A block of Python, text
or TOML is saved under the name that the commands below it use; Python is all of its section so far, as a reader has it in the file by then.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENDINGS = {"python": ".py", "text": ".txt", "toml": ".toml"}
_BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>[\w{}-]*)\n(?P<text>.*?)^```|^(?P<heading>#+ [^\n]*)$", re.S | re.M)
_LIMIT_S = 900


@dataclass(frozen=True)
class Block:
    """`mark`: what the comment before it says; `section`: the number of its heading on the page."""

    page: str
    language: str
    text: str
    mark: str
    section: int

    @property
    def kind(self) -> str:
        """`quick`, `long` or `not run`."""
        return self.mark.partition(":")[0] or "quick"

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command, `scripts/...` included."""
        joined = self.text.replace("\\\n", " ")
        return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def blocks(page: str) -> list[Block]:
    found, section = [], 0
    for match in _BLOCK.finditer((ROOT / page).read_text()):
        if match["heading"]:
            section += 1
        elif not match["language"].startswith("{"):  # those of the site: a table of contents, a reference
            found.append(Block(page, match["language"], match["text"], match["mark"] or "", section))
    return found


def folder_of(page: str, folder: Path) -> None:
    """What a reader has where the commands of a page are typed."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    shutil.copy(ROOT / "tests" / "torch" / "hf" / "gpt2.json", folder / "config.json")
    (folder / "my.txt").write_text((ROOT / "README.md").read_text())


def run_page(page: str, folder: Path, kinds: tuple[str, ...]) -> Iterator[tuple[str, int, str]]:
    """Run the blocks of these kinds: (command, exit status, the end of what it said), one after the other."""
    folder_of(page, folder)
    before: list[Block] = []
    for block in blocks(page):
        if block.language == "sh" and block.kind in kinds:
            for words in block.commands:
                _save(words, before, block.section, folder)
                yield shlex.join(words), *run_words(words, folder)
        before.append(block)


def _save(words: list[str], before: list[Block], section: int, folder: Path) -> None:
    """Write the file that a command names and nobody has made, from the blocks above it."""
    for language, ending in ENDINGS.items():
        above = [b for b in before if b.language == language and b.section == section]
        named = [word for word in words[1:] if word.endswith(ending) and "/" not in word]
        after_o = {words[i + 1] for i, word in enumerate(words[:-1]) if word in ("-o", "--out")}
        for word in (re.sub(r"^.*=", "", w) for w in named if w not in after_o):
            if above and (language == "python" or not (folder / word).exists()):
                parts = above if language == "python" else above[-1:]
                (folder / word).write_text("\n".join(b.text for b in parts))


def run_words(words: list[str], folder: Path) -> tuple[int, str]:
    bin_ = str(Path(sys.executable).parent)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    return done.returncode, done.stdout[-2000:] + done.stderr[-4000:]
