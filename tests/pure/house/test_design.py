"""DESIGN.md and the pages of decisions: short, of one form, and true of the code: the picture of the rooms, the files that are named."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from test_dependency_rule import ALLOWED, BASE, EXTRA, part_of

ROOT = Path(__file__).parents[3]
DESIGN = (ROOT / "DESIGN.md").read_text()
DECISIONS = ROOT / "docs" / "decisions"
PAGES = sorted(path.name for path in DECISIONS.glob("*.md") if path.name != "README.md")
MOST_LINES, MOST_COLUMNS, MOST_LINES_OF_A_DECISION = 180, 159, 40
EVERYWHERE = BASE | {"callable", "serve"}  # what the picture leaves out
FORMS = (["Question", "Measured", "Chosen"], ["Question", "Measured", "Chosen", "What would change it"])


def arrows(text: str, kind: str) -> dict[str, set[str]]:
    """Of a page's Mermaid picture: [room] -> the rooms that its arrows of this kind lead to."""
    picture = text.partition("```mermaid\n")[2].partition("```")[0]
    found: dict[str, set[str]] = {}
    for sources, targets in re.findall(rf"^ *(\w+)(?:\[.*?\])? {kind} ([\w &]+)$", picture, re.M):
        found.setdefault(sources.replace("serve_", "serve/"), set()).update(targets.replace("serve_", "serve/").split(" & "))
    return found


def reached(start: str, edges: dict[str, set[str]]) -> set[str]:
    todo, found = [start], set()
    while todo:
        for room in edges.get(todo.pop(), set()) - found:
            found.add(room)
            todo.append(room)
    return found


def missing_files(text: str) -> list[str]:
    """Names in backquotes that look like files of `src/shardwise`, or of the repository, and are none."""
    named = re.findall(r"`(\w+(?:/\w+)+(?:\.py)?)`", text)
    places = [(ROOT / "src" / "shardwise" / name, ROOT / name) for name in named]
    return [
        name
        for name, both in zip(named, places, strict=True)
        if not any(place.exists() or place.with_name(f"{place.name}.py").exists() for place in both)
    ]


def test_the_design_is_short() -> None:
    lines = DESIGN.splitlines()
    assert len(lines) <= MOST_LINES
    assert not [line for line in lines if len(line) > MOST_COLUMNS]


def test_the_picture_of_the_rooms_is_the_dependency_rule() -> None:
    edges = arrows(DESIGN, "-->")
    rooms = set(ALLOWED) - EVERYWHERE
    for room in sorted(rooms):
        assert reached(room, edges) == ALLOWED[room] - EVERYWHERE - {room}, room
    assert reached("interface", edges) == rooms
    beside: dict[str, set[str]] = {}
    for file, targets in EXTRA.items():
        beside.setdefault(part_of(file), set()).update(targets)
    assert arrows(DESIGN, r'-\. ".*" \.->') == beside


def test_every_room_is_described() -> None:
    table = DESIGN.partition("| room |")[2].partition("\n\n")[0]
    first = {name for line in table.splitlines() for name in re.findall(r"`([\w/]+)`", line.split("|")[1] if "|" in line else "")}
    assert set(ALLOWED) - EVERYWHERE <= first


def test_another_picture_is_refused() -> None:
    edges = arrows(DESIGN.replace("zoo --> capture", "zoo --> solve"), "-->")
    assert reached("zoo", edges) != ALLOWED["zoo"] - EVERYWHERE


@pytest.mark.parametrize("page", PAGES)
def test_a_decision_has_the_form(page: str) -> None:
    text = (DECISIONS / page).read_text()
    lines = text.splitlines()
    assert lines[0].startswith("# ")
    assert len(lines) <= MOST_LINES_OF_A_DECISION
    assert re.findall(r"^\*\*([A-Z][^*]*)\.\*\*", text, re.M) in FORMS
    assert text.count("\nCode: ") == 1


def test_the_index_has_every_decision_by_its_title() -> None:
    listed = {name: title for title, name in re.findall(r"^- \[(.*)\]\((.*)\)$", (DECISIONS / "README.md").read_text(), re.M)}
    assert listed == {page: (DECISIONS / page).read_text().splitlines()[0].removeprefix("# ") for page in PAGES}


@pytest.mark.parametrize("page", ["DESIGN.md", *(f"docs/decisions/{page}" for page in ["README.md", *PAGES])])
def test_files_and_pages_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    links = [target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target]
    gone = [target for target in links if not (ROOT / page).parent.joinpath(target).exists()]
    assert not gone + missing_files(text), f"{page} names {gone + missing_files(text)}"


def test_a_file_that_is_gone_is_seen() -> None:
    assert missing_files("`capture/capture`, `model/captures`, `tests/support/networks`") == ["model/captures"]


def test_every_term_of_the_field_leads_to_its_file() -> None:
    table = DESIGN.partition("## Where is")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "`" in line]
    places = [(row[i], row[i + 1].strip("`")) for row in cells for i in (0, 2, 4) if i + 1 < len(row) and row[i]]
    assert len(places) >= 30
    for term, file in places:
        said = ast.get_docstring(ast.parse((ROOT / "src" / "shardwise" / file).read_text())) or ""
        assert term.lower() in " ".join(said.lower().split()), (term, file)
