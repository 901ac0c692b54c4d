"""`scripts/bench audit`: audits of right and wrong training scripts of many frameworks, each with the verdict that it should get.

`--repeats N`: every right script N times with other weights and samples; none may be called wrong. Scripts run in forks of one process
that has imported torch. A framework that is not installed is named and left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.audit.cases import RIGHT, WRONG, AuditCase
from bench.audit.forked import SCRIPTS, preload_modules, record_script
from shardwise.audit.compare import compare_records
from shardwise.audit.difference import AuditResult
from shardwise.audit.pages import read_pages
from shardwise.audit.run import AuditOptions, recorder_environment
from shardwise.errors import RunError

MARK = "<!-- scripts/bench audit --page docs/audit.md -->"


class CaseAuditor:
    """Audits cases in a folder; serial runs are recorded once for all cases that share them."""

    def __init__(self, folder: Path, options: AuditOptions) -> None:
        self.folder, self.options, self._serial = folder, options, dict[str, Any]()

    def audit(self, case: AuditCase, seed: int = 0) -> AuditResult:
        """Audit a case with weights and samples of a seed."""
        command = f"{case.script} {case.serial} --seed {seed}"
        if command not in self._serial:
            self._serial[command] = self._record_serial(command, self.folder / f"serial{len(self._serial)}")
        place = self.folder / "parallel"
        shutil.rmtree(place, ignore_errors=True)
        plain, perturbed = self._serial[command]
        ranks = record_script(f"{case.script} {case.parallel} --seed {seed}", case.ranks, place, self.options)
        return compare_records(plain, perturbed, ranks)

    def _record_serial(self, command: str, place: Path) -> tuple[Any, list[Any]]:
        plain = record_script(command, 1, place / "0", self.options)
        unit = plain[0][0].coarsest
        noise = [record_script(command, 1, place / str(i), self.options, (i, unit)) for i in range(1, self.options.noise_runs + 1)]
        return plain, noise

    def forget_serial(self) -> None:
        """Remove the serial records, which no later case needs."""
        self._serial.clear()
        for place in self.folder.glob("serial*"):
            shutil.rmtree(place, ignore_errors=True)


def judge_case(case: AuditCase, result: AuditResult) -> str:
    """Return what is wrong with a diagnosis; empty where it is right."""
    text = " ".join(d.text for d in result.differences)
    if result.verdict != case.verdict:
        return f"{result.verdict}, not {case.verdict}: {text}"
    absent = [words for words in case.says if words not in text]
    return f"does not say {', '.join(map(repr, absent))}: {text}" if absent else ""


def run_case(auditor: CaseAuditor, case: AuditCase, repeats: int) -> dict[str, Any]:
    """Audit a case; returns a row of the table."""
    row: dict[str, Any] = {"name": case.name, "script": f"{case.script} {case.parallel}".strip(), "expected": case.verdict}
    if case.needs and importlib.util.find_spec(case.needs) is None:
        return {**row, "skipped": f"{case.needs} is not installed"}
    began, wrong = time.perf_counter(), []
    result = AuditResult()
    for seed in range(repeats):
        try:
            result = auditor.audit(case, seed)
        except RunError as error:
            wrong.append(f"seed {seed}: {error}")
            continue
        complaint = judge_case(case, result)
        wrong += [f"seed {seed}: {complaint}"] if complaint else []
        if seed == 0:
            first = result.differences[0].text if result.differences else ""
            row |= {"verdict": result.verdict, "text": first, "noise": result.noise.gradients, "accepted": result.noise.largest_accepted}
    return {**row, "runs": repeats, "wrong": wrong, "seconds": round(time.perf_counter() - began, 1)}


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of the page: right scripts with their runs, wrong ones with their diagnosis."""
    lines = ["| right script | runs | called wrong | usual noise | largest accepted difference |", "|---|---|---|---|---|"]
    right = [row for row in rows if row["expected"] == "equal"]
    for row in right:
        figures = f"{row['runs']} | {len(row['wrong'])} | {row['noise']:.1g} | {row['accepted']:.1g}" if "noise" in row else "not run | | |"
        lines.append(f"| {row['name']}: `{row['script']}` | {figures} |")
    lines += ["", "| wrong script | verdict | what it says |", "|---|---|---|"]
    for row in (row for row in rows if row not in right):
        text = row.get("text") or row.get("skipped") or "not run"
        lines.append(
            f"| {row['name']}: `{row['script']}` | {row.get('verdict', '')}{' (not right)' if row.get('wrong') else ''} | {text} |"
        )
    return "\n".join(lines) + "\n"


def write_table(rows: Sequence[dict[str, Any]], page: Path) -> None:
    """Replace the table of a page, which stands between two marks."""
    head, _, rest = page.read_text().partition(f"{MARK}\n")
    page.write_text(f"{head}{MARK}\n\n{table_of(rows)}\n{MARK}{rest.partition(MARK)[2]}")


def measure_overhead(width: int, steps: int, folder: Path) -> dict[str, Any]:
    """Run a script of its own on one rank with and without the recorder; returns CPU seconds, peak memory and the size of the record."""
    command = f"{sys.executable} {SCRIPTS / 'ddp.py'} --steps {steps}"
    options = AuditOptions(num_steps=steps, stops=False)
    environment = {**os.environ, "AUDIT_DIM": str(width), "OMP_NUM_THREADS": "1"}
    figures: dict[str, Any] = {"width": width, "steps": steps}
    for name, variables in (("plain", environment), ("recorded", recorder_environment(folder, options, environment))):
        process = subprocess.Popen(shlex.split(command), env=variables)
        _, status, used = os.wait4(process.pid, 0)
        if status:
            raise RunError(f"{command}: ended with status {status}")
        figures |= {f"{name}_cpu_s": used.ru_utime + used.ru_stime, f"{name}_peak_bytes": used.ru_maxrss * 1024}
    figures["record_bytes"] = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    began = time.process_time()
    record = read_pages(folder)
    compare_records(record, [record], record)
    figures["comparison_cpu_s"] = time.process_time() - began
    return figures


def main(arguments: Sequence[str]) -> int:
    """Audit all cases and print a row of each."""
    parser = argparse.ArgumentParser(prog="scripts/bench audit", description=__doc__)
    parser.add_argument("--repeats", type=int, default=1, help="runs of each right script, with other weights and samples each")
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose name or script has one of these words")
    parser.add_argument(
        "--overhead", type=int, metavar="WIDTH", help="measure the recorder on a GPT of two layers of this width, and no case"
    )
    parser.add_argument("--page", type=Path, help="write the table into this page, docs/audit.md")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    options = parser.parse_args(arguments)
    if options.overhead:
        with tempfile.TemporaryDirectory(prefix="audit-") as folder:
            print(json.dumps(measure_overhead(options.overhead, 3, Path(folder)), indent=1))
        return 0
    rows = []
    preload_modules()
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        auditor = CaseAuditor(Path(folder), AuditOptions())
        for case in (*RIGHT, *WRONG):
            if not any(word in f"{case.name} {case.script} {case.parallel}" for word in options.only):
                continue
            row = run_case(auditor, case, options.repeats if case.verdict == "equal" else 1)
            rows.append(row)
            state = row.get("skipped") or ("WRONG" if row["wrong"] else "ok")
            print(f"{state:8} {case.name}: {row.get('verdict', '')} {row.get('text', '')}".rstrip(), flush=True)
            for complaint in row.get("wrong", ()):
                print(f"         {complaint}", flush=True)
            if options.repeats > 1:
                auditor.forget_serial()
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.page:
        write_table(rows, options.page)
    ran = [row for row in rows if "skipped" not in row]
    bad = sum(bool(row["wrong"]) for row in ran)
    print(f"{len(ran) - bad} of {len(ran)} scripts diagnosed rightly, {len(rows) - len(ran)} left out")
    return 1 if bad else 0
