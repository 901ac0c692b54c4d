"""The command line `shardwise VERB ...`: one module for each verb. Here: the list of verbs, error reports and exit codes.

A verb's function reads its arguments, calls the library, and writes with `output`. torch is imported only inside the verbs that
need it, so that `shardwise --help` is quick. Exit codes: 0 done, 2 wrong use or configuration, 3 infeasible, 4 a run or a check
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

from shardwise.cli import (
    audit,
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
    export,
    import_configuration,
    launch,
    plan,
    probe,
    prove,
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
from shardwise.errors import RunError, ShardwiseError, UsageError, first_error
from shardwise.world.terminal import open_durable_stream

INTERRUPTED = 130
MAX_MESSAGE_CHARS = 20_000  # characters of a message
PLAN_ONCE = ("plan", "explain", "estimate", "simulate", "report")  # verbs that search at most once and never train

app = typer.Typer(
    name="shardwise",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # here: the command starts fast

        print(f"shardwise {version('shardwise')}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", envvar="SHARDWISE_DEBUG", hidden=True)] = False,
) -> None:
    """Train any PyTorch model in parallel: plan, predict, run and prove it.

    \b
    First steps:
      shardwise probe                                    measure this machine
      shardwise plan gpt-10m --batch 16                  choose a layout, and show why
      shardwise train examples/gpt_text.toml             plan, launch and train
    """


app.command("train")(train.train)
app.command("launch")(launch.launch)
app.command("plan")(plan.plan)
app.command("explain")(explain.explain)
app.command("whatif")(whatif.whatif)
app.command("compare")(compare.compare)
app.command("scaling")(scaling.scaling)
app.command("estimate")(estimate.estimate)
app.command("export")(export.export_plan)
app.command("import")(import_configuration.import_configuration)
app.command("verify")(verify.verify)
app.command("audit")(audit.audit_scripts)
app.command("prove")(prove.prove)
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
    debug = "--debug" in arguments or bool(os.environ.get("SHARDWISE_DEBUG"))
    try:
        app(args=list(arguments), prog_name="shardwise")
        return 0
    except SystemExit as system_exit:
        status = system_exit.code
        code = status if isinstance(status, int) else 0 if status is None else RunError.exit_code
        if code == INTERRUPTED:
            print("shardwise: interrupted; no committed state is lost, and the same command resumes from it", file=sys.stderr)
        return code
    except KeyboardInterrupt:
        print("shardwise: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return _report_error(first_error(error), debug)


def _report_error(error: BaseException, debug: bool) -> int:
    """Print the error that ended the command, and return its exit code."""
    if debug:
        traceback.print_exception(error)
    match error:
        case KeyboardInterrupt():
            text, code = "interrupted", INTERRUPTED
        case ShardwiseError():
            text, code = str(error), error.exit_code
        case OSError(filename=str(path), strerror=str(reason)):
            remedy = "make room there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "give another path, or change its permissions"
            text, code = f"cannot use {path}: {reason}; {remedy}", UsageError.exit_code
        case _:
            fault = "this is a fault in shardwise, not in what you gave it; SHARDWISE_DEBUG=1 shows where. Please report it:"
            if not debug:
                print(f"shardwise: {fault}", file=sys.stderr)
            text, code = f"{type(error).__name__}: {error}", RunError.exit_code
    print(
        f"shardwise: {text if len(text) <= MAX_MESSAGE_CHARS else f'{text[:MAX_MESSAGE_CHARS]}... ({len(text):,} characters)'}",
        file=sys.stderr,
    )
    return code


def main() -> None:
    """Run the entry point `shardwise`.

    A verb that plans once allocates a million objects that live until it ends. The garbage collector would traverse all of them
    repeatedly, and once more at exit: a quarter of the time of `shardwise plan`. So it is disabled.
    """
    if sys.argv[1:2] and sys.argv[1] in PLAN_ONCE:
        gc.disable()
    if sys.stdout.isatty() and sys.stderr.isatty():
        sys.stdout, sys.stderr = open_durable_stream(1), open_durable_stream(2)
    code = run(sys.argv[1:])
    gc.freeze()
    sys.exit(code)
