"""Questions of the page for students: each command runs, and prints the figure that the page has in bold."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from shardwise.cli import run
from shardwise.cli.pricing_context import PricingContext
from shardwise.cluster.cluster import Cluster
from shardwise.plan.layout import Layout

ROOT = Path(__file__).parents[3]
ROW = re.compile(r"^\| (?P<question>[^|]*\?) \| (?P<answer>[^|]*) \| `shardwise (?P<command>[^`]*)` \|[^|]*\|$", re.M)
ROWS = [(m["question"], m["answer"], m["command"]) for m in ROW.finditer((ROOT / "docs" / "learn.md").read_text())]
BOLD = re.compile(r"\*\*([^*]+)\*\*")
LARGE = re.compile(r"^(plan|estimate) (?!gpt-tiny)")  # models whose capture takes seconds
RUN = re.compile(
    r"^\| `(?P<model>megatron-[^`]*)` \| (?P<gpus>\d+) \| (?P<data>\d+) x (?P<tensor>\d+) x (?P<pipeline>\d+) "
    r"\| (?P<batch>\d+) \| (?P<tflops>\d+) \| (?P<theirs>[\d.]+) s \| (?P<ours>[\d.]+) s "
    r"\| (?P<off>[-+][\d.]+) % \| (?P<years>[\d.]+) \| (?P<our_years>[\d.]+) \|$",
    re.M,
)
RUNS = [m.groupdict() for m in RUN.finditer((ROOT / "docs" / "learn.md").read_text())]
LAYERS = (24, 30, 36, 40, 48, 60, 80, 96, 105, 128)
WIDTHS = (2304, 3072, 4096, 6144, 8192, 10240, 12288, 16384, 20480, 25600)


def answered(answer: str, command: str, capfd: pytest.CaptureFixture[str]) -> bool:
    """Whether the command ends well and prints all that is bold."""
    capfd.readouterr()
    code = run(shlex.split(command))
    said = " ".join(capfd.readouterr().out.split())
    return code == 0 and all(figure in said for figure in BOLD.findall(answer))


def marked(row: tuple[str, str, str]) -> object:
    return pytest.param(*row, id=row[0], marks=[pytest.mark.long] if LARGE.match(row[2]) else [])


def test_forty_questions_are_answered() -> None:
    assert len(ROWS) >= 40
    assert all(len(BOLD.findall(answer)) == 1 for _, answer, _ in ROWS)


@pytest.mark.parametrize(("question", "answer", "command"), [marked(row) for row in ROWS])
def test_the_command_prints_the_figure(
    question: str, answer: str, command: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "170")
    monkeypatch.chdir(ROOT)
    assert answered(answer, command, capfd), question


def test_another_figure_is_noticed(capfd: pytest.CaptureFixture[str]) -> None:
    assert not answered("**15 steps**", "collectives draw ring --ranks 8", capfd)
    assert not answered("**14 steps**", "collectives draw rng --ranks 8", capfd)


def test_the_ten_large_runs_are_arithmetic_on_what_was_published() -> None:
    """Seconds by Narayanan et al.'s count: 96 B S l h^2 (1 + S / 6h + V / 16lh), of sequences of 2,048 and 51,200 words."""
    assert len(RUNS) == 10
    for row, layers, width in zip(RUNS, LAYERS, WIDTHS, strict=True):
        gpus, batch, theirs, ours = int(row["gpus"]), int(row["batch"]), float(row["theirs"]), float(row["ours"])
        assert int(row["data"]) * int(row["tensor"]) * int(row["pipeline"]) == gpus
        flop = 96 * batch * 2048 * layers * width**2 * (1 + 2048 / (6 * width) + 51200 / (16 * layers * width))
        assert theirs == pytest.approx(flop / (float(row["tflops"]) * 1e12 * gpus), abs=0.006)
        assert float(row["off"]) == pytest.approx(100 * (ours / theirs - 1), abs=0.3)
        for years, seconds in ((row["years"], theirs), (row["our_years"], ours)):
            assert float(years) == pytest.approx(300e9 / (batch * 2048) * seconds * gpus / (365.25 * 86400), rel=0.01, abs=0.06)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("row", RUNS, ids=lambda row: row["model"])
def test_the_large_runs_are_predicted(row: dict[str, str]) -> None:
    setting = PricingContext(row["model"], Cluster.parse(f"{int(run['gpus']) // 8}xdgx-a100-80"), int(row["batch"]))
    layout = " ".join(f"{axis}={row[axis]}" for axis in ("data", "tensor", "pipeline"))
    microbatches = int(row["batch"]) // int(row["data"])
    priced = setting.price(Layout.parse(f"{layout} microbatches={microbatches} recompute=full precision=bfloat16")).prediction
    assert priced is not None
    assert f"{priced.step_time_s:.2f}" == row["ours"]
