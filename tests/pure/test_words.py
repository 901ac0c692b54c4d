"""Names say what they name: words that say nothing name no file, class or function (DESIGN.md "Words" has those of the field)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "weft"
EMPTY = frozenset(
    "alike own cores lane lanes late keeping rests same steady whole plain divided undivided divisible watched known unknown instead "
    "picked paired unlike thrift frame frames framed".split()
)
# `num_cores`: of a processor; `lanes`: of a `Timeline`, which is public. The rest are to be renamed: this list only gets shorter.
ALLOWED = {"num_cores", "lanes", "watched", "run/loop/watched.py"}


def _parts(name: str) -> set[str]:
    """The words of a name in snake or camel case."""
    return {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def empty_names(path: str, text: str) -> Iterator[str]:
    """Names of a file, its classes and functions that use one of the words."""
    if EMPTY & _parts(Path(path).stem):
        yield path
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and EMPTY & _parts(node.name):
            yield node.name


def test_no_name_says_nothing() -> None:
    files = ((str(path.relative_to(ROOT)), path.read_text()) for path in sorted(ROOT.rglob("*.py")))
    found = {(path, name) for path, text in files for name in empty_names(path, text)}
    assert {(path, name) for path, name in found if name not in ALLOWED} == set()
    assert ALLOWED - {name for _, name in found} == set(), "no longer there: take them off the list"


def test_broken_twin_names_that_say_nothing_are_found() -> None:
    text = "class Late: pass\nclass Template: pass\ndef read_whole(): pass\nasync def _own(): pass\ndef knowledge(): pass"
    assert sorted(empty_names("world/lane.py", text)) == ["Late", "_own", "read_whole", "world/lane.py"]
    assert list(empty_names("world/planes.py", "own = 1")) == []
