"""The documentation site's map: every page is in the navigation once, definition lists and flow charts are drawn, titles fit."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
LONGEST_TITLE = 110  # two lines of a phone's window, one of a desktop's
GROUPS = ["Start", "Migrate", "How-to", "Plan", "Learn", "Reference", "FAQ and troubleshooting", "Evidence", "Inside"]


def pages_in_navigation(index: Path) -> list[str]:
    """Pages below the tables of contents of a page, as often as they stand there; a pattern leaves out what is named."""
    tables = re.findall(r"^```\{toctree\}\n(.*?)^```", index.read_text(), re.S | re.M)
    entries = [line for table in tables for line in table.splitlines() if line and not line.startswith(":")]
    named = [entry for entry in entries if "*" not in entry]
    matched = [p.relative_to(index.parent).with_suffix("").as_posix() for e in entries if "*" in e for p in index.parent.glob(f"{e}.md")]
    return named + [page for page in matched if page not in named]


def all_pages(folder: Path) -> set[str]:
    return {
        name
        for path in folder.rglob("*.md")
        if (name := path.relative_to(folder).with_suffix("").as_posix()) != "index" and "_build" not in name
    }


def map_problems(folder: Path) -> list[str]:
    found = pages_in_navigation(folder / "index.md")
    return (
        [f"{page} is in no table of contents" for page in sorted(all_pages(folder) - set(found))]
        + [f"{page} does not exist" for page in sorted(set(found) - all_pages(folder))]
        + [f"{page} stands twice" for page in sorted({page for page in found if found.count(page) > 1})]
    )


def test_every_page_is_in_the_navigation_once() -> None:
    assert map_problems(DOCS) == []
    assert re.findall(r"^:caption: (.*)$", (DOCS / "index.md").read_text(), re.M) == GROUPS


def test_broken_twin_a_page_outside_of_the_navigation_is_found(tmp_path: Path) -> None:
    (tmp_path / "index.md").write_text("```{toctree}\n:caption: Start\n\nfirst\ngone\nfirst\n```\n")
    for name in ("first", "second"):
        (tmp_path / f"{name}.md").write_text(f"# {name}\n")
    assert map_problems(tmp_path) == ["second is in no table of contents", "gone does not exist", "first stands twice"]


def test_titles_are_not_cut_off() -> None:
    pages = [ROOT / "README.md", ROOT / "DESIGN.md", *DOCS.rglob("*.md")]
    titles = [re.search(r"^# (.*)$", page.read_text(), re.M) for page in pages]
    assert [t[1] for t in titles if t is not None and len(t[1]) > LONGEST_TITLE] == []


@pytest.fixture
def flowchart(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("sphinx")
    spec = importlib.util.spec_from_file_location("flowchart", DOCS / "_extensions" / "flowchart.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "flowchart", module)
    spec.loader.exec_module(module)
    return module


def test_every_flow_chart_is_drawn_with_its_nodes_and_arrows(flowchart: ModuleType) -> None:
    drawn = 0
    for page in (ROOT / "DESIGN.md", *DOCS.rglob("*.md")):
        for text in re.findall(r"^```mermaid\n(.*?)^```", page.read_text(), re.S | re.M):
            picture = flowchart.draw_flowchart(text)
            targets = [line.split("> ")[-1] for line in text.splitlines() if ">" in line]
            assert picture.count("marker-end=") == sum(t.count("&") + 1 for t in targets)
            names = set(re.findall(r"\b[a-z_]+\b", re.sub(r'"[^"]*"|flowchart \w+', "", text)))
            assert picture.count("<rect") == len(names)
            drawn += 1
    assert drawn >= 1


@pytest.mark.parametrize("text", ["flowchart LR\n  a --> b\n  b --> a", "flowchart LR\n  a b c"])
def test_broken_twin_a_flow_chart_that_is_not_understood_is_an_error(flowchart: ModuleType, text: str) -> None:
    with pytest.raises(ValueError, match=r"circle|no arrow"):
        flowchart.draw_flowchart(text)


def test_definition_lists_and_flow_charts_are_rendered() -> None:
    """`scripts/docs` with the extensions of `docs/conf.py`, on a page of two lines."""
    pytest.importorskip("myst_parser")
    from docutils.core import publish_string
    from myst_parser.parsers.docutils_ import Parser

    conf = (DOCS / "conf.py").read_text()
    extensions = re.search(r"^myst_enable_extensions = (\[.*?\])", conf, re.M)
    assert extensions is not None
    assert "deflist" in extensions[1]
    text = "`data=N`\n: N replicas.\n"
    settings = {"myst_enable_extensions": ["deflist"], "output_encoding": "unicode"}
    assert "<dt>" in publish_string(text, parser=Parser(), writer="html5", settings_overrides=settings)
    broken = publish_string(text, parser=Parser(), writer="html5", settings_overrides={"output_encoding": "unicode"})
    assert "<dt>" not in broken
