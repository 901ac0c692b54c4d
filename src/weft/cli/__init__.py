"""The command line `weft VERB ...`: one module for each verb. Here: the list of verbs, error reports and exit codes.

A verb's function reads its arguments, calls the library, and writes with `output`. torch is imported only inside the verbs that
need it, so that `weft --help` is quick. Exit codes: 0 done, 2 wrong use or configuration, 3 infeasible, 4 a run or a check
failed, 130 interrupted. A user error is one message, never a traceback.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from weft.cli import (
    cache,
    check,
    checkpoint,
    cluster,
    collectives,
    compare,
    demo,
    doctor,
    estimate,
    explain,
    launch,
    plan,
    probe,
    report,
    scaling,
    schedule,
    schedules,
    serve,
    simulate,
    train,
    verify,
    whatif,
)
from weft.errors import RunError, UsageError, WeftError, first_of
from weft.world.terminal import lasting

INTERRUPTED = 130
LONGEST = 20_000  # characters of a message
PLAN_ONCE = ("plan", "explain", "estimate", "simulate", "report")  # verbs that search at most once and never train

app = typer.Typer(
    name="weft",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"weft {version('weft')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", envvar="WEFT_DEBUG", hidden=True)] = False,
) -> None:
    """Train any PyTorch model in parallel: plan, predict, run and prove it.

    \b
    First steps:
      weft probe                                    measure this machine
      weft plan gpt-10m --batch 16                  choose a layout, and show why
      weft train examples/gpt_text.toml             plan, launch and train
    """


app.command("train")(train.train)
app.command("launch")(launch.launch)
app.command("plan")(plan.plan)
app.command("explain")(explain.explain)
app.command("whatif")(whatif.whatif)
app.command("compare")(compare.compare)
app.command("scaling")(scaling.scaling)
app.command("estimate")(estimate.estimate)
app.command("verify")(verify.verify)
app.command("simulate")(simulate.simulate)
app.command("schedule")(schedule.schedule)
app.command("schedules")(schedules.schedules)
app.command("check")(check.check)
app.command("probe")(probe.probe)
app.command("doctor")(doctor.doctor)
app.command("report")(report.report)
app.command("cache")(cache.cache)
app.command("demo", hidden=True)(demo.demo)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(cluster.app, name="cluster")
app.add_typer(serve.app, name="serve")
app.add_typer(collectives.app, name="collectives")


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Nothing is raised: errors are printed to standard error."""
    debug = "--debug" in arguments or bool(os.environ.get("WEFT_DEBUG"))
    try:
        app(args=list(arguments), prog_name="weft")
        return 0
    except SystemExit as system_exit:
        status = system_exit.code
        code = status if isinstance(status, int) else 0 if status is None else RunError.exit_code
        if code == INTERRUPTED:
            print("weft: interrupted; no committed state is lost, and the same command resumes from it", file=sys.stderr)
        return code
    except KeyboardInterrupt:
        print("weft: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return _told(first_of(error), debug)


def _told(error: BaseException, debug: bool) -> int:
    """Print the error that ended the command, and return its exit code."""
    if debug:
        traceback.print_exception(error)
    match error:
        case KeyboardInterrupt():
            text, code = "interrupted", INTERRUPTED
        case WeftError():
            text, code = str(error), error.exit_code
        case OSError(filename=str(path), strerror=str(reason)):
            remedy = "make room there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "give another path, or change its permissions"
            text, code = f"cannot use {path}: {reason}; {remedy}", UsageError.exit_code
        case _:
            fault = "this is a fault in weft, not in what you gave it; WEFT_DEBUG=1 shows where. Please report it:"
            if not debug:
                print(f"weft: {fault}", file=sys.stderr)
            text, code = f"{type(error).__name__}: {error}", RunError.exit_code
    print(f"weft: {text if len(text) <= LONGEST else f'{text[:LONGEST]}... ({len(text):,} characters)'}", file=sys.stderr)
    return code


def main() -> None:
    """Run the entry point `weft`.

    A verb that plans once allocates a million objects that live until it ends. The garbage collector would traverse all of them
    repeatedly, and once more at exit: a quarter of the time of `weft plan`. So it is disabled.
    """
    if sys.argv[1:2] and sys.argv[1] in PLAN_ONCE:
        gc.disable()
    if sys.stdout.isatty() and sys.stderr.isatty():
        sys.stdout, sys.stderr = lasting(1), lasting(2)
    code = run(sys.argv[1:])
    gc.freeze()
    sys.exit(code)
