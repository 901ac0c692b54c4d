"""`shardwise scaling`: every size is what `shardwise plan` says of it, speed-ups follow from throughput, the picture is drawn."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from shardwise.cli import run
from shardwise.plan.layout import Layout
from shardwise.plan.plan import MemoryBreakdown, Prediction
from shardwise.report.scaling import ScalingPoint, scaling_picture, scaling_table, speedups_and_efficiencies

WORDS = ["gpt-tiny", "--cluster", "2xp4d.24xlarge"]


def answer(words: list[str], capfd: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    capfd.readouterr()
    assert run([*words, "--json"]) == code
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def size(devices: int, step_s: float | None) -> ScalingPoint:
    return ScalingPoint(
        devices, 64, Layout(data=devices), None if step_s is None else Prediction(step_s, 0.5, 1e15, MemoryBreakdown()), note=""
    )


def test_each_size_is_the_plan_for_it_and_a_batch_that_stays_is_strong(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "scaling.html"
    search = ["--batch", "64", "--constrain", "pipeline=1 tensor=1 recompute=none offload=none"]
    found = answer(["scaling", *WORDS, "--devices", "4,2", *search, "-o", str(target)], capfd)
    assert [row["devices"] for row in found["sizes"]] == [2, 4]
    assert [row["batch_size"] for row in found["sizes"]] == [64, 64]
    two, four = found["sizes"]
    assert two["efficiency"] == 1.0
    assert four["speedup"] == pytest.approx(two["step_time_s"] / four["step_time_s"])
    assert four["efficiency"] == pytest.approx(four["speedup"] / 2)
    one = answer(["plan", "gpt-tiny", "--cluster", "2 devices of p4d.24xlarge", *search], capfd)
    assert (one["layout"], one["step_time_s"]) == (two["layout"], two["step_time_s"])
    assert all(part in target.read_text() for part in ("<svg", "</table>"))


def test_weak_scaling_gives_every_device_as_many_samples(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "scaling.svg"
    words = ["scaling", *WORDS, "--weak", "--batch", "8", "--devices", "2,4,16", "--layout", "zero=1 microbatches=2", "-o", str(target)]
    rows = answer(words, capfd)["sizes"]
    assert [row["batch_size"] for row in rows] == [8, 16, 64]
    assert [row["layout"].split()[0] for row in rows] == ["data=2", "data=4", "data=16"]
    assert all("microbatches=2" in row["layout"] for row in rows)
    assert [row["efficiency"] for row in rows] == pytest.approx([rows[0]["step_time_s"] / row["step_time_s"] for row in rows])
    drawn = ElementTree.fromstring(target.read_text())
    lines = drawn.iter("{http://www.w3.org/2000/svg}polyline")
    assert sum("stroke-dasharray" in line.attrib for line in lines) == 2  # the ideal line, and its legend


def test_sizes_that_have_no_plan_say_why(capfd: pytest.CaptureFixture[str]) -> None:
    none = answer(["scaling", *WORDS, "--devices", "3,5", "--batch", "64", "--layout", "tensor=2"], capfd, code=3)["sizes"]
    assert all(row["step_time_s"] is None and "do not divide" in row["note"] for row in none)


@pytest.mark.parametrize("words", ["--devices 8,x", "--devices 0", "-o scaling.gif", "--devices 3,4 --weak --batch 8"])
def test_wrong_use_is_refused(words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert answer(["scaling", *WORDS, *words.split()], capfd, code=2)["kind"] == "UsageError"


def test_speed_ups_are_against_the_first_size_that_has_a_plan() -> None:
    sizes = [size(4, None), size(8, 4.0), size(32, 1.25)]
    assert speedups_and_efficiencies(sizes) == [None, (1.0, 1.0), (3.2, 0.8)]
    assert speedups_and_efficiencies([size(4, None)]) == [None]
    rows = scaling_table("t", sizes, "epoch").rows
    assert rows[2][4:6] == ("3.20x", "80.0 %")
    assert rows[0][2:] == ("",) * 8


def test_ideal_scaling_lies_on_the_ideal_line() -> None:
    picture = scaling_picture("t", [size(8, 4.0), size(16, 2.0), size(64, 0.5)])
    lines = re.findall(r'<polyline points="([^"]+)"[^>]*stroke="(#\w+)" stroke-width="(?:1\.5|2)"', picture.svg())
    ideal, _, _, drawn = (points.split() for points, _ in lines)
    assert (drawn[0], drawn[-1]) == (ideal[0], ideal[-1])
    (ax, ay), (bx, by), (cx, cy) = (map(float, point.split(",")) for point in drawn)
    assert (by - ay) / (bx - ax) == pytest.approx((cy - ay) / (cx - ax), rel=1e-2)  # one straight line in powers
    assert picture.svg().count("100.0 %") == 3
