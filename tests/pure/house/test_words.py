"""Names say what they name: words that say nothing name no file, class, function, field, parameter or variable.

DESIGN.md "Words" has the field's own words. `found`, `made`, `given` and `kept` may be part of a name; alone they are none for a variable.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3] / "src" / "shardwise"
EMPTY = frozenset(
    "alike own cores lane lanes late keeping rests same steady whole plain divided undivided divisible watched known unknown instead "
    "picked paired unlike thrift frame frames framed".split()
)
VAGUE = frozenset(("found", "made", "given", "kept"))
# What others rely on, by file; and what the field calls so. Neither list gets longer without a reason beside it.
PUBLIC = {
    "cluster/doctor.py": {"found"},  # a key of `shardwise doctor --json`
    "run/engine.py": {"whole"},  # an argument of `Engine.step` and `Engine.evaluate`
    "run/verify/verification.py": {"divided", "whole_batch"},  # keys of `shardwise verify --json`
    "run/verify/verify.py": {"whole_batch"},
}
OF_THE_FIELD = {
    "num_cores": "of a processor",
    "TENSOR_CORES": "of a GPU",
    "frame": "of a stack, in a traceback",
    "lane": "of a `Timeline`, whose fields are public",
    "lanes": "of a `Timeline`",
    "LANES": "of a `Timeline`",
    "COMPUTE_LANE": "of a `Timeline`",
    "STEP_LANE": "of a `Timeline`",
    "by_lane": "of a `Timeline`",
}
Functions = ast.FunctionDef | ast.AsyncFunctionDef


def _parts(name: str) -> set[str]:
    """The words of a name in snake or camel case."""
    return {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def _variables(tree: ast.AST) -> Iterator[str]:
    """Names that are written to: parameters, fields, attributes of `self`, constants, local variables."""
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.ExceptHandler(name=str(name)):
                yield name


def empty_names(path: str, text: str) -> Iterator[str]:
    """Names of a file, and in it, that use one of the words."""
    tree = ast.parse(text)
    if EMPTY & _parts(Path(path).stem):
        yield path
    yield from (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | Functions) and EMPTY & _parts(node.name))
    yield from (name for name in _variables(tree) if EMPTY & _parts(name) or name.strip("_") in VAGUE)


def test_no_name_says_nothing() -> None:
    files = ((str(path.relative_to(ROOT)), path.read_text()) for path in sorted(ROOT.rglob("*.py")))
    names = {(path, name) for path, text in files for name in empty_names(path, text)}
    allowed = {(path, name) for path, name in names if name in OF_THE_FIELD or name in PUBLIC.get(path, ())}
    assert names - allowed == set(), "name each for what it is, in the words of DESIGN.md"
    unused = {*OF_THE_FIELD, *((path, name) for path, row in PUBLIC.items() for name in row)} - {name for _, name in names} - names
    assert unused == set(), "no longer there: take them off the list"


def test_broken_twin_names_that_say_nothing_are_found() -> None:
    text = "class Late: pass\nclass Template: pass\ndef read_whole(): pass\nasync def _own(): pass\ndef knowledge(): pass"
    assert sorted(empty_names("world/lane.py", text)) == ["Late", "_own", "read_whole", "world/lane.py"]
    assert list(empty_names("world/planes.py", "known_to = planes.own = 1")) == ["known_to"]


def test_broken_twin_fields_parameters_attributes_and_variables_that_say_nothing_are_found() -> None:
    text = """
WHOLE = TOTAL = 1

class Weights:
    alike: bool = False
    likely: bool = False

    def __init__(self, own, /, *late, plain=0, **unknown):
        self._kept, self.kept_bytes = own, late

def read(rows, given):
    found: list[int] = []
    for made, founder in rows:
        founded = [known for known in made]
    with rows as rests, (lambda picked: picked):
        pass
    if (steady := given):
        other.own = found.whole
    match rows:
        case [*_, {"a": unlike}]:
            pass
"""
    assert sorted(empty_names("world/weights.py", text)) == sorted(
        "WHOLE alike own late plain unknown _kept given found made known rests picked steady unlike".split()
    )
