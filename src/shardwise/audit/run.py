"""Run of the commands of an audit, each with the recorder, and comparison of what they recorded."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwise.audit.compare import compare_records
from shardwise.audit.difference import AuditResult
from shardwise.audit.pages import Pages, read_pages
from shardwise.errors import RunError, UsageError

_HOOK = Path(__file__).parent / "hook"
_SHOWN_LINES = 15


@dataclass(frozen=True)
class AuditOptions:
    """`num_steps`: optimizer steps to compare; `noise_runs`: perturbed serial runs that measure the tolerance; `folder`: keeps the records,
    and serial ones that lie there are used again; `stops`: end the scripts after the last step, rather than let them run to their end."""

    num_steps: int = 3
    noise_runs: int = 2
    applies_dropout: bool = False
    stops: bool = True
    timeout_s: float = 1800.0
    folder: Path | None = None


def audit_commands(
    serial: str, parallel: str, options: AuditOptions, environment: Mapping[str, str], notify: Callable[[], None] = lambda: None
) -> AuditResult:
    """Run a serial and a parallel command and compare what they compute.

    Raises:
        UsageError: a command cannot be started. RunError: it failed, or nothing in it trained a module of torch.
    """
    folder = options.folder or Path(tempfile.mkdtemp(prefix="shardwise-audit-"))
    try:
        plain = _record_once(serial, folder / "serial", options, environment)
        notify()
        unit, perturbed = plain[min(plain)][0].coarsest, []
        for seed in range(1, options.noise_runs + 1):
            noise = {"SHARDWISE_AUDIT_NOISE": str(seed), "SHARDWISE_AUDIT_UNIT": unit}
            perturbed.append(_record_once(serial, folder / f"noise{seed}", options, {**environment, **noise}))
            notify()
        shutil.rmtree(folder / "parallel", ignore_errors=True)
        ranks = _record_once(parallel, folder / "parallel", options, environment)
        notify()
        return compare_records(plain, perturbed, ranks)
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


def recorder_environment(folder: Path, options: AuditOptions, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which Python starts the recorder."""
    path = os.pathsep.join(p for p in (str(_HOOK), environment.get("PYTHONPATH", "")) if p)
    return {
        **environment,
        "PYTHONPATH": path,
        "SHARDWISE_AUDIT_FOLDER": str(folder.absolute()),
        "SHARDWISE_AUDIT_STEPS": str(options.num_steps),
        "SHARDWISE_AUDIT_DROPOUT": "keep" if options.applies_dropout else "off",
        "SHARDWISE_AUDIT_STOP": "yes" if options.stops else "no",
    }


def _record_once(command: str, folder: Path, options: AuditOptions, environment: Mapping[str, str]) -> Pages:
    """Run a command with the recorder, unless its record lies in the folder already."""
    if (pages := read_pages(folder)) and all(pages.values()):
        return pages
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(
                shlex.split(command), env=recorder_environment(folder, options, environment), stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except (OSError, ValueError, IndexError) as error:
            raise UsageError(f"cannot start {command!r}: {error}") from None
        try:
            code = process.wait(options.timeout_s)
        except BaseException as error:
            _end_group(process)
            if isinstance(error, subprocess.TimeoutExpired):
                raise RunError(f"{command}: no end after {options.timeout_s:g} s (--timeout)\n{_last_lines(log)}") from None
            raise
    pages = read_pages(folder)
    if code:
        raise RunError(f"{command}: ended with exit code {code}\n{_last_lines(log)}")
    if not pages:
        raise RunError(
            f"{command}: nothing was recorded; no module of torch with parameters was called, or Python ignores PYTHONPATH (-I, -E, -S)\n"
            f"{_last_lines(log)}"
        )
    return pages


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a command with all processes that it started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(5.0)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _last_lines(log: Path) -> str:
    """Return the lines of a command's output that name an error, or its last ones."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [x for x in lines if "Error" in x and "ChildFailedError" not in x and "torch/distributed/" not in x]
    return "\n".join(errors[:3] or lines[-_SHOWN_LINES:])
