"""The page about schedules: its table and its pictures are what the programs give, and its example is proven."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from shardwise.cli import run
from shardwise.cli.schedule import build_program, rank_columns, schedule_headline
from shardwise.plan.ir.schedule_sizes import SCHEDULES, chunks_of
from shardwise.plan.plan_file import read_plan
from shardwise.report.gantt import gantt_svg
from shardwise.simulate.summary import MicrobatchTimes, Summary, summarize_schedule
from shardwise.units import format_percent

PAGE = Path(__file__).parents[3] / "docs" / "schedules.md"
RANKS, MICROBATCHES, TIMES = 4, 8, MicrobatchTimes(1, 1, 1)
SHOWN = [name for name in SCHEDULES if name != "gems-mast"]  # two microbatches only


def summary(name: str) -> Summary:
    chunks = chunks_of(name, 2)
    return summarize_schedule(build_program(name, RANKS, MICROBATCHES, chunks), TIMES, chunks)


def test_the_table_is_what_the_programs_give() -> None:
    text = PAGE.read_text()
    assert f"shardwise schedules --stages {RANKS} --microbatches {MICROBATCHES} --times f=1,b=1,w=1" in text
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (.*) \|$", text, re.M))
    assert [name for name in rows if name in SCHEDULES] == SHOWN
    for name in SHOWN:
        found = summary(name)
        cells = [f"{found.time:g}", format_percent(found.bubble), format_percent(found.bubble_in_window)]
        cells += [f"{max(found.peak_in_flight):g}", f"{max(found.weights_held):g}"]
        assert rows[name].split(" | ") == cells, name


@pytest.mark.parametrize("name", re.findall(r"pictures/schedule-([\w-]+)\.svg", PAGE.read_text()))
def test_pictures_are_what_the_programs_give(name: str) -> None:
    """`shardwise schedule NAME --stages 4 --microbatches 8 --times f=1,b=1,w=1 -o docs/pictures/schedule-NAME.svg` makes them."""
    found = summary(name)
    program = build_program(name, RANKS, MICROBATCHES, chunks_of(name, 2))
    made = (
        gantt_svg(found.timeline, rank_columns=rank_columns(found), headline=schedule_headline(program, found), time_text="{:g}".format)
        + "\n"
    )
    assert (PAGE.parent / "pictures" / f"schedule-{name}.svg").read_text() == made


def test_the_example_of_ones_own_is_proven_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    example = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    assert len(example) == 1
    (tmp_path / "mine.txt").write_text(example[0])
    assert run(["check", str(tmp_path / "mine.txt")]) == 0
    assert run(["check", str(tmp_path / "mine.txt"), "--rendezvous"]) == 0
    assert run(["schedule", str(tmp_path / "mine.txt"), "-o", str(tmp_path / "mine.svg")]) == 0
    monkeypatch.chdir(tmp_path)
    for line in re.findall(r"^shardwise (?:verify|plan) .*mine\.txt.*$", PAGE.read_text(), re.M):
        assert run([*shlex.split(line)[1:], *(["--cluster", "1xcpu-2"] if " plan " in line else [])]) == 0
    assert read_plan("plan.toml").layout.actions == example[0]
    assert "proven" in capfd.readouterr().out
