"""The command line as a program sees it: exit codes, one JSON object on standard output, help with examples that parse."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from shardwise import cli
from shardwise.cli import app, run
from shardwise.plan.layout import Layout
from shardwise.plan.plan import LayoutCandidate, MemoryBreakdown, Plan, Prediction
from shardwise.plan.plan_file import write_plan
from tests.support import cli_examples

MEMORY = MemoryBreakdown(parameters=4e6, gradients=4e6, optimizer=8e6, activations=2e7)
PREDICTION = Prediction(0.5, 0.4, 1e12, MEMORY, (("compute", 0.4), ("gradients", 0.1)))


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    layout = Layout(data=2)
    candidates = (LayoutCandidate(layout, PREDICTION), LayoutCandidate(Layout(data=4), None, "4 ranks on 2 cores"))
    plan = Plan(layout, "[red]<b>net</b>[/red]", "here", 8, prediction=PREDICTION, reasons=(("data", "2 > 1"),), candidates=candidates)
    path = tmp_path / "plan.toml"
    write_plan(plan, path)
    return path


def verbs() -> list[list[str]]:
    found = []
    for name, command in typer.main.get_command(app).commands.items():
        inner = getattr(command, "commands", None)
        if not command.hidden:
            found += [[name, sub] for sub in inner] if inner else [[name]]
    return found


@pytest.mark.parametrize("verb", verbs(), ids=" ".join)
def test_help_shows_an_example_that_parses(verb: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run([*verb, "--help"]) == 0
    shown = cli_examples.find(capfd.readouterr().out)
    assert shown, f"shardwise {' '.join(verb)} --help shows no example"
    for words in shown:
        assert words[: len(verb)] == verb
        cli_examples.require_understood(words)


@pytest.mark.parametrize("verb", verbs(), ids=" ".join)
def test_every_verb_speaks_json(verb: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run([*verb, "--help"]) == 0
    assert "--json" in capfd.readouterr().out


def test_json_is_one_object_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["schedule", "1f1b", "--stages", "4", "--microbatches", "8", "--times", "f=1,b=2", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    # The bubble of 1F1B: (P - 1) / (M + P - 1) of the time.
    assert found["proven"]
    assert found["time"] == 3 * (8 + 3)
    assert found["bubble"] == pytest.approx(3 / 11)
    assert found["peak_in_flight"] == [4, 3, 2, 1]


def test_an_error_is_the_json_object_too(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["schedule", "1f2b", "--stages", "4", "--microbatches", "8", "--json"]) == 2
    captured = capfd.readouterr()
    found = json.loads(captured.out)
    assert (found["exit_code"], found["kind"]) == (2, "UsageError")
    assert "1f1b" in found["error"]
    assert found["error"] in captured.err


def test_what_else_prints_goes_to_standard_error(tmp_path: Path, plan_file: Path) -> None:
    """Also what a child process or C code prints: it holds file descriptor 1."""
    code = (
        "import os, sys\n"
        "from shardwise.cli.output import open_output\n"
        "with open_output(True) as out:\n"
        "    print('from python'); os.system('echo from a child'); out.text('for a person'); out.answer({'x': float('inf')})\n"
        "print('after')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == '{"version": 1, "x": null}\nafter\n'
    assert "from python" in done.stderr
    assert "from a child" in done.stderr


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["plam"], "plan"),
        (["schedule", "1f1b", "--stagez", "2"], "--stages"),
        (["schedule", "1f1b", "--stages", "two", "--microbatches", "2"], "--stages"),
        (["schedule"], "NAME"),
    ],
)
def test_wrong_use_ends_with_2_and_names_the_nearest(words: list[str], fragment: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 2
    captured = capfd.readouterr()
    assert fragment in captured.err
    assert not captured.out


def test_a_fault_of_our_own_is_said_to_be_one(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("gone")

    monkeypatch.setattr("shardwise.schedules.build", broken)
    monkeypatch.delenv("SHARDWISE_DEBUG", raising=False)
    words = ["schedule", "1f1b", "--stages", "2", "--microbatches", "2"]
    assert run(words) == 4
    assert "Traceback" not in (shown := capfd.readouterr().err)
    assert "KeyError" in shown
    monkeypatch.setenv("SHARDWISE_DEBUG", "1")
    assert run(words) == 4
    assert "Traceback" in capfd.readouterr().err


def test_an_interrupt_ends_cleanly(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardwise.schedules.build", interrupted)
    assert run(["schedule", "1f1b", "--stages", "2", "--microbatches", "2"]) == 130
    assert "Traceback" not in capfd.readouterr().err


def test_help_does_not_load_torch() -> None:
    code = "import sys; from shardwise.cli import run; run(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_page_about_a_plan(plan_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "page.html"
    assert run(["report", str(plan_file), "-o", str(target), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["size_bytes"] == target.stat().st_size
    text = target.read_text()
    assert "&lt;b&gt;net&lt;/b&gt;" in text
    assert "<b>net" not in text


def test_names_with_markup_are_shown_as_they_are(plan_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from shardwise.cli.output import open_output
    from shardwise.plan.plan_file import read_plan
    from shardwise.report.tables import plan_tables

    with open_output(False) as out:
        for table in plan_tables(read_plan(plan_file)):
            out.table(table)
    shown = capfd.readouterr().out
    assert "[red]<b>net</b>[/red]" in shown
    assert "4 ranks on 2" in shown


def test_a_folder_that_cannot_be_written_is_named(plan_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(plan_file), "-o", str(plan_file / "page.html")]) == 2
    assert str(plan_file / "page.html") in capfd.readouterr().err


@pytest.mark.parametrize("command", [[str(Path(sys.executable).with_name("shardwise"))], [sys.executable, "-m", "shardwise"]])
def test_the_entry_point_is_installed(command: list[str]) -> None:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, env={**os.environ})
    assert re.fullmatch(r"shardwise \d+\.\d+\.\d+\n", done.stdout)


@pytest.mark.parametrize(("verb", "collects"), [("plan", False), ("train", True)])
def test_a_process_that_plans_once_leaves_the_collector_off(verb: str, collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(sys, "argv", ["shardwise", verb])
    monkeypatch.setattr(cli, "run", lambda words: seen.append(gc.isenabled()) or 0)
    monkeypatch.setattr(gc, "freeze", lambda: seen.append("what is left at the end is not looked through"))
    try:
        with pytest.raises(SystemExit) as left:
            cli.main()
    finally:
        gc.enable()
    assert (seen[0], len(seen), left.value.code) == (collects, 2, 0)
