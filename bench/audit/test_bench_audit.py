"""The audit of real scripts: a few of the cases here, all of them in the long run; and that a wrong expectation is a failure."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.audit.audit import CaseAuditor, judge_case, main
from bench.audit.cases import RIGHT, WRONG
from bench.audit.forked import SCRIPTS, preload_modules
from shardwise.audit.difference import KINDS
from shardwise.audit.run import AuditOptions
from shardwise.cli import run

CASES = {case.name: case for case in (*RIGHT, *WRONG)}
# These share one serial run.
FEW = (
    "DDP",
    "FSDP1, original parameters",
    "no DDP: gradients never averaged",
    "learning rate scaled by the ranks",
    "sharded optimizer without its broadcast",
)


@pytest.fixture(scope="module")
def auditor(tmp_path_factory: pytest.TempPathFactory) -> CaseAuditor:
    preload_modules(("torch.utils.data", "torch.distributed.optim"))
    return CaseAuditor(tmp_path_factory.mktemp("audit"), AuditOptions(num_steps=2, noise_runs=1))


@pytest.mark.parametrize("name", FEW)
def test_a_script_gets_its_diagnosis(name: str, auditor: CaseAuditor) -> None:
    # --bug that the serial run does not have is not given to it, so that all share one.
    case = replace(CASES[name], serial="")
    result = auditor.audit(case)
    assert judge_case(case, result) == ""
    assert "not" in judge_case(replace(case, verdict="data"), result)  # the twin: another expectation is a failure


def test_there_are_as_many_scripts_as_the_page_says() -> None:
    assert len(RIGHT) >= 10
    assert len(WRONG) >= 12
    assert {case.verdict for case in WRONG} <= KINDS.keys()
    assert all((SCRIPTS / case.script).exists() for case in CASES.values())
    assert len(CASES) == len(RIGHT) + len(WRONG)
    assert {case.script for case in WRONG} <= {case.script for case in RIGHT}


@pytest.mark.long
def test_all_scripts(tmp_path: Path) -> None:
    assert main(["--json", str(tmp_path / "rows.json")]) == 0
    assert len(json.loads((tmp_path / "rows.json").read_text())) == len(CASES)


@pytest.mark.long
@pytest.mark.parametrize(("bug", "code"), [("", 0), ("lr", 4)])
def test_the_command_runs_scripts_as_they_are(bug: str, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    script = f"{sys.executable} {SCRIPTS / 'ddp.py'}"
    launched = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 {SCRIPTS / 'ddp.py'} --batch 4"
    assert run(["audit", "--serial", script, "--parallel", f"{launched}{f' --bug {bug}' if bug else ''}", "--json"]) == code
    answer = json.loads(capfd.readouterr().out)
    assert answer["equal"] is (code == 0)
