"""Axes are data: a row each says what it may cut. No other file asks which axis one is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from shardwise.errors import LayoutError
from shardwise.plan.ir.axis import AXIS_TABLE, DATA, EXPERT, FEATURES, axis_of, parse_spatial, spatial_ranks

ROOT = Path(__file__).parents[3] / "src" / "shardwise"
DEFINE = {"plan/ir/axis.py", "plan/ir/grid.py", "plan/layout.py"}  # where axes, grids and their keys are defined
NAMES = {*AXIS_TABLE} - {"depth"}


def asks(text: str) -> list[int]:
    """Lines that compare what is called an axis with the name of one."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        words = {c.value for side in sides for c in ast.walk(side) if isinstance(c, ast.Constant) and isinstance(c.value, str)}
        named = {getattr(side, "id", getattr(side, "attr", "")) for side in sides}
        if words & NAMES and named & {"axis", "a", "axes"}:
            found.append(node.lineno)
    return found


def test_no_file_asks_for_an_axis_by_its_name() -> None:
    said = {str(path.relative_to(ROOT)): asks(path.read_text()) for path in ROOT.rglob("*.py")}
    assert {file: lines for file, lines in said.items() if lines and file not in DEFINE} == {}


def test_broken_twin_a_question_by_name_is_found() -> None:
    assert asks('if axis == "data" or move.axis in ("tensor", "rows"):\n    pass') == [1, 1]
    assert asks('key == "data"') == []


def test_rows_say_what_an_axis_may_cut() -> None:
    assert axis_of(DATA).shards_samples
    assert axis_of(DATA).always_shards
    assert [name for name, row in AXIS_TABLE.items() if row.shards_weights] == ["channel", "tensor", "rows", "columns", "depth"]
    assert [name for name, row in AXIS_TABLE.items() if row.shards_positions] == ["context", "spatial", "planes", "height", "width"]
    assert [name for name, row in AXIS_TABLE.items() if row.may_reshard] == ["expert", "branch", "depth"]
    assert [name for name, row in AXIS_TABLE.items() if row.shards_experts] == ["expert"]
    assert [name for name, row in AXIS_TABLE.items() if row.owns_operators] == ["branch"]
    assert [name for name, row in AXIS_TABLE.items() if row.has_replicas] == ["data", "expert"]
    assert axis_of(EXPERT).shards_samples
    assert axis_of("one of a test's own").shards == {FEATURES}


def test_words_for_pieces_of_images() -> None:
    assert parse_spatial("2x2x2") == (("planes", 2), ("height", 2), ("width", 2))
    assert spatial_ranks("3x5") == 15
    with pytest.raises(LayoutError, match="spatial=2x: '' is not the number of ranks"):
        parse_spatial("2x")
