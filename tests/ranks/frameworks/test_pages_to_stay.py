"""The lines of `docs/migrate` for those who stay with their framework: they run as they are printed."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from contextlib import chdir
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardwise.cli import run

ROOT = Path(__file__).parents[3]
PAGES = ROOT / "docs" / "migrate"
NAMES = sorted(page.stem for page in PAGES.glob("*.md"))
AUDITED = ("ddp", "fsdp2", "accelerate")


def lines_of(page: str) -> list[str]:
    """The commands of a page's marked blocks."""
    text = (PAGES / f"{page}.md").read_text()
    blocks = re.findall(r"^<!-- stay: .*? -->\n```sh\n(.*?)^```", text, re.S | re.M)
    return [line for block in blocks for line in block.splitlines()]


def answer_of(line: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    with chdir(folder):
        assert run([*shlex.split(line)[1:], "--json"]) == 0
    answer: dict[str, Any] = json.loads(capfd.readouterr().out)
    return answer


@pytest.mark.parametrize(
    "page", [page if page in ("accelerate", "megatron") else pytest.param(page, marks=pytest.mark.long) for page in NAMES]
)
def test_plans_go_out_and_come_back(page: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    planned, exported, imported = (answer_of(line, tmp_path, capfd) for line in lines_of(page)[:3])
    assert not exported["lost"]
    assert planned["layout"] == exported["layout"] == imported["layout"]
    assert imported["framework"] == exported["framework"]


@pytest.mark.long
@pytest.mark.parametrize("page", AUDITED)
def test_originals_are_audited(page: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (original,) = re.findall(r"^```py\n(.*?)^```", (PAGES / f"{page}.md").read_text(), re.S | re.M)
    (tmp_path / "train.py").write_text(original)
    (line,) = [line for line in lines_of(page) if " audit " in line]
    line = line.replace("torchrun", f"{sys.executable} -m torch.distributed.run")  # without a venv's scripts on the path
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        assert answer_of(line, tmp_path, capfd)["equal"]
