"""`shardwise doctor`: check this machine, one line a check; exit 4 where a required one fails."""

from __future__ import annotations

from dataclasses import asdict

import typer

from shardwise.cli import options
from shardwise.cli.output import open_output
from shardwise.errors import RunError
from shardwise.report.tables import TextTable


def doctor(as_json: options.Json = False) -> None:
    """Say what works on this machine.

    And what to do about what does not. Exit code 4 where something is missing that shardwise cannot do without.

    \b
    Example:
      shardwise doctor
    """
    with open_output(as_json) as out:
        from shardwise.cluster.doctor import Check  # here: the command starts fast
        from shardwise.cluster.doctor import check_machine as examine

        with out.working("looking at this machine"):
            checks = examine()
            if all(check.ok for check in checks if check.name == "torch"):
                from shardwise.world.matmul_backend import load_or_measure_timings  # here: the command starts fast

                checks = (*checks, Check("float32 products", True, str(load_or_measure_timings()), needed=False))
        failed = [check for check in checks if check.needed and not check.ok]
        marks = {(True, True): "yes", (True, False): "yes", (False, True): "NO", (False, False): "no"}
        rows = tuple((c.name, marks[c.ok, c.needed], c.found, "" if c.ok else c.remedy) for c in checks)
        bad = tuple(i for i, check in enumerate(checks) if not check.ok)
        out.table(TextTable("What works here", ("", "works", "found", "remedy"), rows, marked=bad))
        out.answer({"ok": not failed, "checks": [asdict(check) for check in checks]})
        if failed:
            out.message(f"{len(failed)} of {len(checks)} checks failed that shardwise needs: {', '.join(check.name for check in failed)}")
            raise typer.Exit(RunError.exit_code)
