"""`scripts/bench audit`: audits of right and wrong training scripts of many frameworks, each with the verdict that it should get.

`--repeats N`: every right script N times with other weights and samples, all of them once before any of them again; none may be called
wrong. `--minutes M` begins no further run after that time, and the table says how many there were. Scripts run in forks of one process that
has imported torch. A framework that is not installed is named and left out.
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


def start_row(case: AuditCase) -> dict[str, Any]:
    """Return a case's row of the table before any run."""
    row: dict[str, Any] = {"name": case.name, "script": f"{case.script} {case.parallel}".strip(), "expected": case.verdict}
    if case.needs and importlib.util.find_spec(case.needs) is None:
        row["skipped"] = f"{case.needs} is not installed"
    return {**row, "runs": 0, "wrong": [], "seconds": 0.0}


def add_run(auditor: CaseAuditor, case: AuditCase, row: dict[str, Any], seed: int) -> None:
    """Audit a case with a seed, and add what it says to the row."""
    began, complaint = time.perf_counter(), ""
    try:
        result = auditor.audit(case, seed)
        complaint = judge_case(case, result)
        first = result.differences[0].text if result.differences else ""
        row.setdefault("verdict", result.verdict)
        row.setdefault("text", first)
        row["noise"] = max(row.get("noise", 0.0), result.noise.gradients)
        row["accepted"] = max(row.get("accepted", 0.0), result.noise.largest_accepted)
    except RunError as error:
        complaint = str(error)
    row["wrong"] += [f"seed {seed}: {complaint}"] if complaint else []
    row |= {"runs": row["runs"] + 1, "seconds": round(row["seconds"] + time.perf_counter() - began, 1)}


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of the page: right scripts with their runs, wrong ones with their diagnosis."""
    lines = ["| right script | runs | called wrong | most noise | largest accepted difference |", "|---|---|---|---|---|"]
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


def table_of_costs(figures: Sequence[dict[str, Any]]) -> str:
    """Return what the recorder costs on one rank, by the width of the model."""
    lines = ["| hidden | parameters | CPU, plain | CPU, recorded | memory, plain | memory, recorded | record | comparison, CPU |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for row in figures:
        plain, recorded, record = (row[key] / 2**20 for key in ("plain_peak_bytes", "recorded_peak_bytes", "record_bytes"))
        cpu = f"{row['plain_cpu_s']:.1f} s | {row['recorded_cpu_s']:.1f} s"
        memory = f"{plain:.0f} MiB | {recorded:.0f} MiB | {record:.0f} MiB"
        lines.append(f"| {row['width']} | {row['parameters'] / 1e6:.1f} M | {cpu} | {memory} | {row['comparison_cpu_s']:.1f} s |")
    return "\n".join(lines) + "\n"


def write_tables(rows: Sequence[dict[str, Any]], costs: Sequence[dict[str, Any]], page: Path) -> None:
    """Replace the tables of a page, which stand between two marks."""
    head, _, rest = page.read_text().partition(f"{MARK}\n")
    tables = table_of(rows) + (f"\n{table_of_costs(costs)}" if costs else "")
    page.write_text(f"{head}{MARK}\n\n{tables}\n{MARK}{rest.partition(MARK)[2]}")


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
    figures["parameters"] = sum(shard.tensor.numel() for shard in read_pages(folder)[0][0].weights.values() if shard is not None)
    figures["record_bytes"] = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    began = time.process_time()
    record = read_pages(folder)
    compare_records(record, [record], record)
    figures["comparison_cpu_s"] = time.process_time() - began
    return figures


def audit_cases(cases: Sequence[AuditCase], repeats: int, minutes: float, file: Path | None) -> list[dict[str, Any]]:
    """Audit the cases, right ones several times, and print each run; returns the rows of the table."""
    rows = [start_row(case) for case in cases]
    began = time.monotonic()
    preload_modules()
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        auditor = CaseAuditor(Path(folder), AuditOptions())
        for seed in range(repeats):
            for case, row in zip(cases, rows, strict=True):
                is_late = seed and minutes and time.monotonic() - began > 60 * minutes
                if is_late or "skipped" in row or (seed and case.verdict != "equal"):
                    continue
                known = len(row["wrong"])
                add_run(auditor, case, row, seed)
                state = "WRONG" if len(row["wrong"]) > known else "ok"
                print(
                    f"{state:6} {seed:2} {case.name}: {row.get('verdict', '')} {'' if seed else row.get('text', '')}".rstrip(), flush=True
                )
                for complaint in row["wrong"][known:]:
                    print(f"         {complaint}", flush=True)
                if file:
                    file.write_text(json.dumps(rows, indent=1) + "\n")
            auditor.forget_serial()
    return rows


def main(arguments: Sequence[str]) -> int:
    """Audit all cases and print a row of each."""
    parser = argparse.ArgumentParser(prog="scripts/bench audit", description=__doc__)
    parser.add_argument("--repeats", type=int, default=1, help="runs of each right script, with other weights and samples each")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no further repeat after that many minutes")
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose name or script has one of these words")
    parser.add_argument(
        "--overhead", type=int, nargs="*", default=[], metavar="WIDTH", help="measure the recorder on a GPT of these widths"
    )
    parser.add_argument("--page", type=Path, help="write the tables into this page, docs/audit.md")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    options = parser.parse_args(arguments)
    costs = []
    for width in options.overhead:
        with tempfile.TemporaryDirectory(prefix="audit-") as folder:
            costs.append(measure_overhead(width, 3, Path(folder)))
        print(json.dumps(costs[-1]), flush=True)
    cases = [c for c in (*RIGHT, *WRONG) if any(word in f"{c.name} {c.script} {c.parallel}" for word in options.only)]
    rows = audit_cases(cases, options.repeats, options.minutes, options.json)
    if options.page:
        write_tables(rows, costs, options.page)
    ran = [row for row in rows if "skipped" not in row]
    bad = sum(bool(row["wrong"]) for row in ran)
    runs, absent = sum(row["runs"] for row in ran), len(rows) - len(ran)
    print(f"{len(ran) - bad} of {len(ran)} scripts diagnosed rightly in {runs} runs, {absent} left out")
    return 1 if bad else 0
