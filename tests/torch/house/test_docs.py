"""What the documents show works: their Python runs, their command lines parse, their links lead somewhere."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cluster.catalogue import parse_cluster
from shardwise.cluster.cluster_file import implausible_figures
from shardwise.plan.layout import Layout
from shardwise.plan.plan_file import format_plan, parse_plan
from shardwise.serve.placement.workflow_files import read_workflow
from shardwise.train.config import TrainingConfig
from shardwise.zoo.names import find
from tests.support import cli_examples, doc_blocks
from tests.support.command_pages import commands

ROOT = Path(__file__).parents[3]
FOLDERS = (ROOT / "docs", ROOT / "docs" / "howto", ROOT / "docs" / "migrate")
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "README.md", *(p for folder in FOLDERS for p in folder.glob("*.md"))))


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)


def _pages(language: str, *kinds: str) -> list[str]:
    """Pages with a block of this language and of one of these kinds."""
    return [page for page in PAGES if any(b.language == language and b.kind in kinds for b in doc_blocks.blocks(page))]


@pytest.mark.parametrize("page", _pages("python", "quick"))
def test_the_python_of_a_page_runs(page: str, tmp_path: Path) -> None:
    """Its quick blocks in one process, in order, as a notebook runs them: without a file that ranks could import."""
    code = "\n".join(b.text for b in doc_blocks.blocks(page) if b.language == "python" and b.kind == "quick")
    done = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True, cwd=tmp_path, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", _pages("sh", "quick"))
def test_commands_run_as_printed(page: str, tmp_path: Path) -> None:
    for command, status, said in doc_blocks.run_page(page, tmp_path, ("quick",)):
        assert status == 0, f"{page}: {command} ended with {status}\n{said}"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", _pages("sh", "long"))
def test_all_commands_run_as_printed(page: str, tmp_path: Path) -> None:
    for command, status, said in doc_blocks.run_page(page, tmp_path, ("quick", "long")):
        assert status == 0, f"{page}: {command} ended with {status}\n{said}"


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    marked = [block for page in PAGES for block in doc_blocks.blocks(page) if block.mark]
    for block in marked:
        assert block.kind in ("long", "not run") or (block.kind in ("migration", "stay") and block.page.startswith("docs/migrate/")), block
        assert block.mark.partition(": ")[2], f"{block.page} marks a block without a reason: {block.text}"
    assert sum(block.kind == "not run" for block in marked) <= 6


def test_no_block_is_of_a_kind_that_nothing_runs() -> None:
    """Python runs by itself or by a command below it, text is a file of a command below it, and TOML is a plan's: see the test of it."""
    for page in PAGES:
        every = doc_blocks.blocks(page)
        for i, block in enumerate(every):
            below = [b for b in every[i:] if b.section == block.section and b.language == "sh" and b.kind != "not run"]
            ending = doc_blocks.ENDINGS.get(block.language, "?")
            readers = [words for b in below for words in b.commands if any(word.endswith(ending) for word in words)]
            match block.language:
                case "sh" | "toml":
                    continue
                case "console":  # test_what_the_readme_prints_is_printed, and tests/ranks/run/test_migrations.py
                    assert page == "README.md", page
                case "diff" | "py":  # tests/ranks/run/test_migrations.py applies the one to the other and runs both
                    assert page.startswith("docs/migrate/") or page == "README.md", page
                case "python":
                    assert block.kind == "quick" or readers, f"{page}: nothing runs {block.text}"
                case "text":
                    assert readers, f"{page}: no command below reads {block.text}"
                case other:
                    pytest.fail(f"{page} has a block of kind {other!r}, which nothing runs: {block.text}")


@pytest.mark.parametrize("page", _pages("toml", "quick"))
def test_toml_is_a_workflow_a_cluster_a_configuration_or_part_of_a_plan(page: str, tmp_path: Path) -> None:
    head = 'kind = "shardwise plan"\nformat_version = 1\nmodel = "gpt-tiny"\ncluster = "here"\nbatch_size = 8\n\n[layout]\ntensor = 2\n\n'
    family, config = find("gpt-tiny")
    names = {re.sub(r"\d+", "*", name) for name, _ in family.make_model(config).named_parameters()}
    for text in (b.text for b in doc_blocks.blocks(page) if b.language == "toml"):
        if "[operator." in text:
            flow = tmp_path / "flow.toml"
            flow.write_text(text)
            assert read_workflow(flow)[1] is not None
            continue
        if "[[level]]" in text:
            assert not implausible_figures(parse_cluster(text, page))
            continue
        if "[train]" in text:
            assert TrainingConfig.parse(text, page).model.name
            continue
        plan = parse_plan(head + text)
        assert text in format_plan(plan)
        assert {name for _, cuts in plan.shards for name, _ in cuts} <= names


def _without_figures(text: str) -> list[str]:
    """Words of each line, numbers as 0."""
    return [" ".join(re.sub(r"\d[\d.]*(?:e-\d+)?", "0", line).split()) for line in text.splitlines() if line.strip()]


@pytest.mark.long
def test_what_the_readme_prints_is_printed(tmp_path: Path) -> None:
    """Of a `shardwise` command; figures may be others."""
    shown = re.findall(r"^\$ (shardwise .*)\n((?:[^$].*\n)*)", "".join(blocks("README.md", "console")), re.M)
    assert len(shown) == 2
    for command, said in shown:
        status, printed = doc_blocks.run_words(shlex.split(command), tmp_path)
        assert status == 0, printed
        assert [line for line in _without_figures(said) if line not in _without_figures(printed)] == []


def test_the_tables_of_the_readme_have_every_verb_and_key() -> None:
    """Verbs of the parser in the section of the command line, fields of a layout in the section of layouts."""
    text = (ROOT / "README.md").read_text()
    verbs = text.partition("## Command line")[2].partition("## ")[0]
    named = set(re.findall(r"`(?:shardwise )?((?:\w+)(?: \w+)?)[^`]*`", verbs))
    missing = [name for name, _ in commands() if name not in named and name not in {n.split()[0] for n in named}]
    assert missing == []
    keys = text.partition("## A layout is one line")[2].partition("## ")[0]
    private = {"actions", "collective", "begins", "grid"}
    fields = {field.name for field in dataclasses.fields(Layout)} - private
    assert {name for row in re.findall(r"^\| (`[^|]*`) \|", keys, re.M) for name in re.findall(r"`(\w+)`", row)} == fields


def test_blocks_are_found_saved_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One\n\n```python\nx = 3\n```\n\n```sh\npython a.py\n```\n\n"
        "```python\nraise SystemExit(x)\n```\n\n```sh\npython a.py  # fails\n```\n\n"
        "<!-- not run: far -->\n```sh\nfalse\n```\n\n<!-- long: slow -->\n```sh\ntrue\n```\n"
    )
    monkeypatch.setattr(doc_blocks, "blocks", lambda name, found=doc_blocks.blocks: found(str(page)))
    (tmp_path / "quick").mkdir()
    (tmp_path / "long").mkdir()
    assert [run[:2] for run in doc_blocks.run_page("", tmp_path / "quick", ("quick",))] == [("python a.py", 0), ("python a.py", 3)]
    assert [run[0] for run in doc_blocks.run_page("", tmp_path / "long", ("quick", "long"))][2:] == ["true"]


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


def _lines_with_this_path(text: str) -> list[str]:
    return [line for line in text.splitlines() if f"{ROOT}/" in line]


def test_no_page_names_where_this_checkout_lies() -> None:
    """Pages that a benchmark writes quote messages, which name files."""
    pages = [
        ROOT / "README.md",
        ROOT / "DESIGN.md",
        ROOT / "CHANGELOG.md",
        *(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts),
    ]
    assert {page.name: found for page in pages if (found := _lines_with_this_path(page.read_text()))} == {}
    assert _lines_with_this_path(f"could not read {ROOT}/examples/own_model.py") != []
