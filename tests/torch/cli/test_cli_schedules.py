"""`shardwise schedule`, `shardwise schedules` and `shardwise check` as a program sees them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import run
from shardwise.plan.ir.schedule_sizes import SCHEDULES
from shardwise.plan.ir.timeline import Timeline
from shardwise.schedules import build

SIZES = ["--stages", "4", "--microbatches", "8"]


def answer(capfd: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert run([*words, "--json"]) == code
    found = json.loads(capfd.readouterr().out)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_drawn_and_proven(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    microbatches = "2" if name == "gems-mast" else "8"
    words = ["schedule", name, "--stages", "4", "--microbatches", microbatches, "--times", "f=1,b=1,w=1"]
    found = answer(capfd, *words)
    assert found["proven"]
    assert found["reason"] == ""
    assert len(found["peak_in_flight"]) == 4
    assert run([*words, "-o", str(tmp_path / "picture.svg")]) == 0
    shown = capfd.readouterr()
    assert "rank 3 |" in shown.out
    assert "proven: every gradient holds each of" in shown.out
    assert "written to" in shown.err
    picture = (tmp_path / "picture.svg").read_text()
    ElementTree.fromstring(picture)
    assert "in flight" in picture


@pytest.mark.parametrize(
    ("name", "times", "time", "bubble"),
    [
        ("sequential", "f=1,b=2", 96, 3 / 4),
        ("gpipe", "f=1,b=2", 33, 3 / 11),
        ("1f1b", "f=1,b=2", 33, 3 / 11),
        ("interleaved", "f=1,b=2", 24 * (1 + 3 / 16), 3 / 19),
        ("zb-h1", "f=1,b=1,w=1", 24 + 3, 3 / 27),
        ("zb-h2", "f=1,b=1,w=1", 24 + 3, 0),
        ("zb-v", "f=1,b=1,w=1", 24 + 1.5, 0),
        ("chimera", "f=1,b=1", 18, 2 / 18),
        ("gems-master", "f=1,b=2", 12 + 7 * 9, 1 - 24 / 75),
    ],
)
def test_times_and_bubbles_are_those_of_the_closed_forms(
    name: str, times: str, time: float, bubble: float, capfd: pytest.CaptureFixture[str]
) -> None:
    found = answer(capfd, "schedule", name, *SIZES, "--times", times)
    assert found["time"] == pytest.approx(time)
    assert found["bubble_in_window"] == pytest.approx(bubble)
    busy = 24 if "w=1" in times or times == "f=1,b=2" else 16  # 8 microbatches of each rank's work
    assert found["bubble"] == pytest.approx(1 - busy / time)  # one meaning in every verb: the idle share of all ranks' time
    assert found["utilisation"] == pytest.approx(1 - found["bubble"])


def test_schedules_and_simulate_mean_the_same_by_a_bubble(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A schedule's timeline, compared with itself, has the bubble that the table of schedules shows."""
    rows = {row["schedule"]: row for row in answer(capfd, "schedules", *SIZES, "--times", "f=1,b=1,w=1")["schedules"]}
    for name in ("1f1b", "zb-h2", "zb-v"):
        file = str(tmp_path / f"{name}.json")
        answer(capfd, "schedule", name, *SIZES, "--times", "f=1,b=1,w=1", "-o", file)
        assert answer(capfd, "compare", file, file)["bubble"] == pytest.approx([rows[name]["bubble"]] * 2)


def test_the_published_bubble_of_zb_h2(capfd: pytest.CaptureFixture[str]) -> None:
    """Qi et al., ICLR 2024, tables 5 and 6: 6.2 B parameters, 8 stages, 24 microbatches."""
    words = ["schedule", "zb-h2", "--stages", "8", "--microbatches", "24", "--times", "f=29.718,b=29.444,w=19.927,c=0.527"]
    assert round(answer(capfd, *words)["bubble_in_window"], 4) == 0.0698


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "chimera"])
def test_what_is_written_is_checked_and_drawn_again(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, spans = tmp_path / "mine.txt", tmp_path / "mine.json"
    drawn = answer(capfd, "schedule", name, *SIZES, "-o", str(file))
    checked = answer(capfd, "check", str(file))
    assert (checked["proven"], checked["ranks"], checked["actions"], checked["completed"]) == (True, 4, drawn["actions"], True)
    again = answer(capfd, "schedule", str(file), "-o", str(spans))
    assert (again["time"], again["peak_in_flight"]) == (drawn["time"], drawn["peak_in_flight"])
    assert Timeline.from_json(spans.read_text()).total_s == drawn["time"]


def test_computes_alone_are_completed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n")
    found = answer(capfd, "check", str(file))
    assert (found["proven"], found["completed"]) == (True, True)
    assert run(["check", str(file)]) == 0
    assert "proven: 2 ranks, 16 actions; every gradient holds each of 2 microbatches once; transfers were added" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0F0 0F1 0B0\n1F0 1B0 1F1 1B1", "stage 0 has no backward on microbatch 1; write 0B1 on rank 0, after 0F1"),
        ("0F0 0B0\n1B0 1F0", "rank 1 step 0: 1B0 reads saved(1,0), which only 1F0 at step 1 makes; write 1F0 before it"),
        ("0B0 0F0\n1F0 1B0", "write 0F0 of rank 0, at step 1, before 0B0 at step 0: it can run"),
        ("0F0\n1F0 1B0", "stage 0 has no backward on microbatch 0; write 0B0 on rank 0, after 0F0"),
        ("rank 0: 0F0 0B0 0B0", "rank 0 step 2: 0B0, and rank 0 has 0B0 at step 1; leave one of them out"),
        ("rank 0: chunk(0)>1\nrank 1: chunk(0)<0\ngiven 0: chunk(0)=0", "does not say what must hold at the end"),
    ],
)
def test_what_is_wrong_is_refuted_with_its_place(text: str, reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(text)
    found = answer(capfd, "check", str(file), code=4)
    assert found["proven"] is False
    assert reason in found["reason"]
    assert run(["check", str(file)]) == 4
    assert f"refuted: {file}: " in capfd.readouterr().err


@pytest.mark.parametrize(("text", "reason"), [("rank 0: 0F0 0X0", "line 1: action '0X0'"), ("rank 1: 0F0 0B0", "no line for rank 0")])
def test_text_that_cannot_be_read_is_wrong_use_of_a_file_that_is_named(
    text: str, reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(text)
    assert answer(capfd, "check", str(file), code=2)["reason"].startswith(f"{file}: {reason}")
    assert run(["check", str(file)]) == 2
    said = capfd.readouterr().err
    assert f"shardwise: {file}: {reason}" in said
    assert "refuted" not in said


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0F0 0F2 0B0 0B2\n1F0 1B0 1F2 1B2", "its microbatches are 0, 2; number them from 0 without gaps"),
        ("0F0 0F1\n1F0 1F1", "stage 0 has no backward; write 0B0 on one rank"),
        ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", ""),
    ],
)
def test_what_is_proven_and_does_not_train_is_told(text: str, reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(text)
    found = answer(capfd, "check", str(file))
    assert (found["proven"], found["untrainable"]) == (True, reason)
    assert run(["check", str(file)]) == 0
    assert ("it is no schedule to train with" in capfd.readouterr().out) is bool(reason)


def test_a_deadlock_where_sends_wait_is_refuted_only_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(str(build("1f1b", 4, 8)))
    assert answer(capfd, "check", str(file))["proven"]
    found = answer(capfd, "check", str(file), "--rendezvous", code=4)
    assert "where a send waits for its receive" in found["reason"]
    assert "rank 0 step" in found["reason"]


def test_a_collective_is_checked_from_its_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sum.txt"
    file.write_text(
        "rank 0: a(0)>1 a(0)+<1\nrank 1: a(0)>0 a(0)+<0\ngiven 0: a(0)=0\ngiven 1: a(0)=1\nwants 0: a(0)=0,1\nwants 1: a(0)=0,1"
    )
    assert answer(capfd, "check", str(file))["proven"]


def test_a_collective_is_not_drawn_as_a_schedule(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sum.txt"
    file.write_text("rank 0: a(0)>1\nrank 1: a(0)+<0\ngiven 0: a(0)=0\ngiven 1: a(0)=1\nwants 1: a(0)=0,1")
    assert run(["schedule", str(file)]) == 2
    assert "no computes, so it is no schedule" in capfd.readouterr().err


def test_all_are_compared_in_one_table(capfd: pytest.CaptureFixture[str]) -> None:
    found = answer(capfd, "schedules", *SIZES, "--times", "f=1,b=1,w=1")
    rows = {row["schedule"]: row for row in found["schedules"]}
    assert tuple(rows) == SCHEDULES
    assert "gems-mast has 2 microbatches" in rows["gems-mast"]["reason"]
    assert all(row["proven"] for name, row in rows.items() if name != "gems-mast")
    assert rows["zb-v"]["time"] == min(row["time"] for row in rows.values() if row["proven"])
    assert max(rows["gems-master"]["peak_in_flight"]) == 1
    assert max(rows["gems-master"]["weights_held"]) == 2
    assert run(["schedules", *SIZES]) == 0
    shown = capfd.readouterr().out
    assert all(name in shown for name in SCHEDULES)


def test_what_takes_long_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("shardwise.cli.schedules.SLOW_FORWARDS", 1)
    found = answer(capfd, "schedules", *SIZES)
    assert len(found["schedules"]) == len(SCHEDULES)
    assert run(["schedules", *SIZES]) == 0
    said = capfd.readouterr().err.splitlines()
    assert said == [f"shardwise: {name}, {i} of {len(SCHEDULES)}" for i, name in enumerate(SCHEDULES, 1)]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["schedule", "1f1b", "--stages", "4"], "1f1b needs --microbatches"),
        (["schedule", "1f1b", "--microbatches", "4"], "1f1b needs --stages"),
        (["schedule", "gems-mast", *SIZES], "use gems-master for 8"),
        (["schedule", "chimera", "--stages", "4", "--microbatches", "3"], "use an even number"),
        (["schedule", "1f1b", *SIZES, "-o", "picture.png"], "end it in .svg, .txt, .json"),
        (["schedule", "1f1b", *SIZES, "-o", "no/such/folder.svg"], "cannot write"),
        (["schedule", "1f1b", *SIZES, "--times", "f=1"], "lacks b"),
        (["schedule", "none.txt"], "cannot read none.txt"),
        (["check", "none.txt"], "cannot read none.txt"),
        (["check", "."], "cannot read"),
        (["schedules", "--stages", "0", "--microbatches", "1"], "at least 1 of each"),
    ],
)
def test_wrong_use_is_named(words: list[str], reason: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 2
    assert reason in capfd.readouterr().err


def test_what_is_no_text_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.txt"
    file.write_bytes(b"\xff\xfe\x00")
    assert run(["check", str(file)]) == 2
    assert "is not text" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("model", "layout", "text"),
    [
        ("gpt-tiny", "pipeline=2 microbatches=3", "0F0 0F1 0F2 0B2 0B0 0B1\n1F0 1F2 1F1 1B2 1B1 1B0"),
        ("unet-tiny", "pipeline=2 microbatches=2", "0F0 0F1 0I0 0I1 0W1 0W0\n1F1 1I1 1F0 1I0 1W1 1W0"),
        ("gpt-tiny", "pipeline=2 chunks=2 microbatches=1 schedule=interleaved", "0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0"),
    ],
)
def test_a_schedule_of_ones_own_equals_the_serial_model(
    model: str, layout: str, text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text(text)
    found = answer(capfd, "verify", model, "--layout", layout, "--schedule", str(tmp_path / "mine.txt"), "--steps", "1")
    assert found["ok"]
    assert found["worst"]["gradients"] < 1e-9


@pytest.mark.parametrize(
    ("text", "reason", "code"),
    [
        ("0F0 0F1 0B0 0B1\n1B0 1F0 1F1 1B1", "rank 1 step 0: 1B0 reads saved(1,0), which only 1F0 at step 1 makes", 4),
        ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1", "stage 1 has no backward on microbatch 1; write 1B1 on one rank", 4),
        ("0F0 0B0\n1F0 1B0", "runs 1 microbatch, and microbatches=2; use microbatches=1", 2),
        ("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1", "has actions of 1 rank, and pipeline=2; use pipeline=1", 2),
    ],
)
def test_a_schedule_of_ones_own_that_is_wrong_does_not_run(
    text: str, reason: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text(text)
    layout = "pipeline=2 microbatches=2"
    assert reason in answer(capfd, "verify", "gpt-tiny", "--layout", layout, "--schedule", "mine.txt", code=code)["error"]
    for verb in ("verify", "plan", "simulate"):
        words = [verb, "gpt-tiny", "--layout", f"{layout} schedule=mine.txt"]
        assert reason in answer(capfd, *words, *([] if verb == "verify" else ["--cluster", "1xcpu-2"]), code=code)["error"]
