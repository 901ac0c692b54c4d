"""The fault benchmark's checks: each can fail, and does where it is given what it is to find."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.common.document import lines_of
from bench.faults import (
    fault_runs,
    faults,
)
from bench.faults.fault_cases import ENDINGS, EVERYONE, FAULTS, Ending, Fault, placed, runs
from bench.faults.fault_host import Host, end, members
from bench.faults.fault_peers import Case, Command, _followed
from bench.faults.fault_rank import CALLS, ENTRY, MOMENTS
from bench.faults.fault_runs import BAD, Felt, Running, Seen, calm, first_said, judged, next_step_after
from bench.faults.fault_solo import BETWEEN_RUNS, MENDS, Launcher, alone

WELL = Seen(told=True, hung=False, orphans=0, code=0, wanted=0, whole=True)

ROOT = Path(__file__).resolve().parents[2]


def test_each_way_to_come_out_badly_is_found_and_nothing_else_is() -> None:
    assert judged(WELL) == "went on"
    assert judged(replace(WELL, code=75, wanted=75)) == "ended"
    bad = {
        "silent": replace(WELL, told=False, whole=False),
        "orphans": replace(WELL, orphans=1),
        "hang": replace(WELL, hung=True),
        "unclear": replace(WELL, code=1, wanted=4),
        "lost": replace(WELL, whole=False),
    }
    assert {judged(seen): seen for seen in bad.values()} == bad
    assert judged(replace(WELL, told=False)) == "unclear"
    assert set(bad) | {"not reached"} == set(BAD)


ORPHAN = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"


@pytest.mark.parametrize(("code", "left"), [(ORPHAN, 1), ("pass", 0)])
def test_who_outlives_a_command_is_counted_and_ended(tmp_path: Path, code: str, left: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    process.wait()
    assert len(members(process.pid)) == left
    end(process.pid)
    until = time.monotonic() + 5
    while members(process.pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not members(process.pid)
    command = Command([sys.executable, "-c", code], tmp_path)  # found by its environment, whatever its session
    command.process.wait()
    assert len(command.members()) == left
    command.end()
    assert not command.members()


class Sleeper:
    """A host whose run does nothing."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, words: list[str], plan: Path | None, out: int) -> int:
        self.process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        return self.process.pid

    def code(self, pid: int) -> int | None:
        assert self.process is not None
        return self.process.poll()


def test_a_run_without_a_step_hangs_and_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_runs, "HANG_S", 0.1)
    running = Running(Sleeper(), [], tmp_path, None)  # type: ignore[arg-type]
    assert running.wait()
    assert running.code == -9


def test_steps_that_are_made_again_are_counted() -> None:
    began = [(float(n), n, 0) for n in range(5)]
    told = [(n + 0.5, n, 1) for n in range(5)]
    back = [(10.0 + n + 0.5 * kind, 2 + n, kind) for n in range(4) for kind in (0, 1)]
    assert next_step_after(sorted(began + told), 2.6) == (3.5, 0)
    assert next_step_after(sorted(began + told) + back, 4.6) == (13.5, 3)
    assert math.isnan(next_step_after(sorted(began + told), 4.6)[0])


def test_a_sentence_must_name_the_rank_and_come_after_the_fault() -> None:
    fault = Fault("x", "SIGKILL", 1)
    said = [(1.0, "rank 1 was killed by SIGKILL"), (3.0, "rank 0 was killed by SIGKILL"), (4.0, "rank 1 was killed by SIGKILL")]
    assert first_said(said, fault, 2.0, math.inf)[0] == 4.0
    assert math.isnan(first_said(said, fault, 2.0, 3.5)[0])
    assert math.isnan(first_said([(3.0, "a rank was killed by SIGKILL")], fault, 2.0, math.inf)[0])


def test_the_cases_are_enough_and_each_can_be_done() -> None:
    names = [fault.name for fault in FAULTS] + [ending.name for ending in ENDINGS]
    assert len(set(names)) == len(names) >= 60
    for rank in (0, 1):
        assert len([f for f in FAULTS if f.kill and f.rank == rank and f.where != "at a random time"]) >= 14
    assert all(f.where in (*MOMENTS, "at a random time", "before its first step") for f in FAULTS)
    for case in ENDINGS:
        kind, _, name = case.how.partition(":")
        assert name in BETWEEN_RUNS if kind == "between" else hasattr(Launcher, kind) or case.where in MOMENTS
        assert case.mend in MENDS
    for where, name, _ in (call for calls in CALLS.values() for call in calls):
        assert callable(getattr(where, name)), "a moment is the call of something that is there"


def test_every_fault_is_in_one_run_apart_from_the_others() -> None:
    groups = runs(FAULTS)
    assert sorted(f.name for group in groups for f in group) == sorted(f.name for f in FAULTS)
    for group in groups:
        cases, steps = placed(group)
        at = sorted(one.step for one in cases)
        assert all(b - a >= 8 for a, b in itertools.pairwise(at) if a)
        assert steps >= at[-1]


def test_a_page_names_what_came_out_badly() -> None:
    good = Felt("kill -9 of rank 1", "data=2", 0.01, 0.15, 0, True, "went on", kill=True)
    bad = Felt("a flip", "tensor=2", math.nan, math.nan, 0, False, "silent")
    (line,) = (line for line in lines_of(faults.summary([good, bad])) if line.startswith("| silent"))
    assert line == "| silent | 1 | a flip (tensor=2) |"
    assert "| silent | 0 |  |" in lines_of(faults.summary([good]))
    (line,) = (line for line in lines_of(faults.by_layout([good, bad])) if line.startswith("| data=2"))
    assert line == "| data=2 | 1 | 0.010 | 0.010 | 0.150 | 0.150 | 1 of 1 | 0 | kill -9 of rank 1 |"
    assert "0 of 1 | silent |" in next(line for line in lines_of(faults.table([good, bad])) if "flip" in line)


def test_what_torchrun_did_is_blamed_on_the_fault_that_came_last_before_it(tmp_path: Path) -> None:
    steps = [(t, step, kind) for t, step, kind in ((8.0, 0, 0), (9.0, 0, 1), (13.0, 1, 0), (14.0, 1, 1), (105.0, 2, 0), (106.0, 2, 1))]
    (tmp_path / "steps.bin").write_bytes(b"".join(ENTRY.pack(*entry) for entry in [*steps, (114.0, 3, 0), (115.0, 3, 1)]))

    def command(began_s: float, code: int) -> Any:
        said = [(began_s + 10.5, "exitcode: -9")]
        return SimpleNamespace(began_s=began_s, said=said, log=tmp_path / "steps.bin", process=SimpleNamespace(returncode=code))

    commands = [(command(0.0, -9), True, 0), (command(100.0, 0), False, 0)]
    case, times = Case("kill", "SIGKILL", 1, says="exitcode: -9"), [10.0, 20.0, 110.0, math.nan]
    found = [_followed(case, t, [other for other in times if other > t], commands, True) for t in times]
    assert [one.outcome for one in found] == ["went on", "hang", "went on", "not reached"]
    assert [round(one.next_step_s, 3) for one in found[:3]] == [4.0, 86.0, 5.0]
    assert found[0].noticed_s == 0.5


def test_real_runs_are_judged_by_what_was_seen_of_them(tmp_path: Path) -> None:
    """One that goes on, one that ends, and twins whose faults are not as the cases have them."""
    layout = "data=2 zero=1"
    with Host() as host:
        cases, steps = placed([Fault("kill", "SIGKILL", 1, "in forward")])
        quiet = calm(host, layout, steps, tmp_path / "calm")
        (found,) = fault_runs.measure(host, layout, 2, cases, steps, tmp_path / "kill", quiet)
        assert (found.outcome, found.same, found.lost) == ("went on", True, 0)
        assert 0 < found.noticed_s < found.next_step_s
        cases, _ = placed([Fault("other losses, and nobody says why", "jump", EVERYONE, says="never said")])
        other = replace(quiet, losses=quiet.losses[:-1])
        (found,) = fault_runs.measure(host, layout, 2, cases, steps, tmp_path / "jump", other)
        assert found.outcome == "silent"
        cases, _ = placed([Fault("an exception, said to be a kill", "raise", 1)])
        (found,) = fault_runs.measure(host, layout, 2, cases, steps, tmp_path / "raise", quiet)
        assert found.outcome in ("unclear", "lost")
        assert not found.same
        wrong = Ending("an exception with another code", "raise", 75, ("rank 1 failed: ValueError",), step=12)
        quiet = calm(host, layout, fault_runs.SOLO_STEPS, tmp_path / "calm alone", quiet.plan)
        assert alone(host, layout, 2, wrong, tmp_path / "wrong", quiet).outcome == "unclear"
        right = alone(host, layout, 2, replace(wrong, code=4), tmp_path / "right", quiet)
        assert (right.outcome, right.same) == ("ended", True)


def test_the_command_tells_and_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--layouts", "data=2", "--only", "kill -9 of the launcher", "--no-peers", "--json", str(tmp_path / "x.json")]
    assert faults.main(given) == 0
    (row,) = json.loads((tmp_path / "x.json").read_text())["found"]
    assert (row["outcome"], row["same"], row["layout"]) == ("ended", True, "data=2")
    assert "kill -9 of the launcher" in capsys.readouterr().out
    assert os.path.getmtime(faults.PAGE) < time.time() - 1
