"""`weft doctor`: what works on this machine. In: nothing. Out: a line for each check; exit 4 where one that weft needs fails."""

from __future__ import annotations

import typer

from weft.cli import options
from weft.cli.output import output
from weft.errors import RunError
from weft.report.tables import Table


def doctor(as_json: options.Json = False) -> None:
    """Say what works on this machine.

    And what to do about what does not.

    \b
    Example:
      weft doctor
    """
    with output(as_json) as out:
        from weft.cluster.probe import doctor as examine

        with out.working("looking at this machine"):
            checks = examine()
        marks = {True: "yes", False: "NO", None: "-"}
        rows = tuple((check.name, marks[check.ok], check.detail) for check in checks)
        out.table(Table("What works here", ("", "", ""), rows))
        failed = [check for check in checks if check.ok is False]
        out.answer({"ok": not failed, "checks": [{"name": c.name, "ok": c.ok, "detail": c.detail} for c in checks]})
        if failed:
            out.message(f"{len(failed)} of {len(checks)} checks failed: {', '.join(check.name for check in failed)}")
            raise typer.Exit(RunError.exit_code)
