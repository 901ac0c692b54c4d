"""`shardwise serve run`: deploy a plan of `shardwise serve plan -o` as a server, or measure it under a load and end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli import options
from shardwise.cli.output import CommandOutput, open_output
from shardwise.errors import RunError, UsageError
from shardwise.report.tables import TextTable
from shardwise.units import format_seconds

if TYPE_CHECKING:
    from shardwise.serve.deploy.load_trial import LoadTrial
    from shardwise.serve.deploy.server import PlanChange, Server

_EMULATE = "Let every worker take as long as the plan says, times this: a plan for many machines runs on one."
_LOAD = "Send requests for so many seconds, say what was measured beside what was planned, and end."
_KILL = "With --load: end a process of this worker after a third of it."
_ADDRESS = "A Ray cluster whose nodes have resources worker:NAME; by default one is started here."


def run_plan(  # noqa: PLR0913
    plan: Annotated[Path, typer.Argument(metavar="PLAN.toml", help="What `shardwise serve plan -o` wrote.", show_default=False)],
    port: Annotated[int, typer.Option("--port", help="Where requests come in, on loopback.")] = 8000,
    page_port: Annotated[int, typer.Option("--page", metavar="PORT", help="A page, and /metrics for Prometheus; 0: any port.")] = 8001,
    emulate: Annotated[float | None, typer.Option("--emulate", metavar="X", min=0.01, help=_EMULATE, show_default=False)] = None,
    load: Annotated[float | None, typer.Option("--load", metavar="S", min=0.1, help=_LOAD, show_default=False)] = None,
    rate: Annotated[float | None, typer.Option("--rate", metavar="R", help="Of --load; by default the plan's.", show_default=False)] = None,
    kill: Annotated[str, typer.Option("--kill", metavar="WORKER", help=_KILL, show_default=False)] = "",
    queue: Annotated[int, typer.Option("--queue", min=1, help="Requests that may wait at a replica, and for a place; more get 503.")] = 100,
    address: Annotated[str, typer.Option("--address", metavar="HOST:PORT", help=_ADDRESS, show_default=False)] = "",
    fixed: Annotated[bool, typer.Option("--fixed", help="Never plan anew when a worker goes or the rate changes.")] = False,
    as_json: options.Json = False,
) -> None:
    """Deploy a plan on Ray Serve: replicas by the plan, bounded queues, a new plan when a worker goes or the rate changes.

    POST a request to the port: arrays by source as safetensors, or JSON with lists. It ends at Ctrl-C, with everything that it started.

    \b
    Example:
      shardwise serve run plan.toml --emulate 2 --load 20 --kill cpu-5
    """
    with open_output(as_json) as out:
        from shardwise.serve.deploy.server import ServeOptions, Server  # here: the command starts fast
        from shardwise.serve.deploy.status_page import figures_of, serve_page

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        workflow, machines, placed = read_plan(plan)
        requests, labels = _load_requests(workflow) if load is not None else ([], None)
        server = Server(workflow, machines, placed, ServeOptions(port, emulate or 0.0, queue, address, not fixed))
        if kill and kill not in {s.worker for c in placed.choices for s in c.shares}:
            raise UsageError(f"--kill {kill}: the plan uses no such worker")
        with out.working(f"starting {workflow.name}"):
            server.start()
        try:
            stop = _make_stop_event(at_once=load is not None)
            page = serve_page(lambda: figures_of(server), page_port)
            out.text(f"requests to {server.url}, page and metrics at http://127.0.0.1:{page.server_address[1]}/")
            if load is None:
                stop.wait()
                out.answer(figures_of(server))
            else:
                _run_trial(out, server, load, rate or placed.demand.rate, requests, labels, kill)
            page.shutdown()
        finally:
            with out.working("ending"):
                server.stop()


def read_plan(plan: Path) -> tuple[Any, Any, Any]:
    """Return (workflow, machines, placement) of a plan file; its workflow file is at the path in it, or next to the plan."""
    from shardwise.plan.ir.toml_text import read_user_file  # here: the command starts fast
    from shardwise.serve.placement.service_plan_file import parse_service_plan
    from shardwise.serve.placement.workflow_files import read_machines, read_workflow

    placed, of, cluster = parse_service_plan(read_user_file(plan, "plan"), str(plan))

    def find_file(name: str) -> Path:
        return Path(name) if Path(name).exists() else plan.parent / Path(name).name

    workflow, machines, _ = read_workflow(find_file(of))
    machines = read_machines(find_file(cluster)) if cluster else machines
    if machines is None:
        raise UsageError(f"{of} has no [worker.NAME] tables, and {plan} names no cluster; plan again")
    return workflow, machines, placed


def _load_requests(workflow: Any) -> tuple[Any, Any]:
    from shardwise.serve.deploy.profile import labelled_requests  # here: the command starts fast

    return labelled_requests(workflow) if workflow.measure.labelled else ([], None)


def _make_stop_event(at_once: bool) -> threading.Event:
    """Return an event that Ctrl-C and SIGTERM set, in place of Ray's handlers; `at_once`: they also raise KeyboardInterrupt."""
    stop = threading.Event()

    def end(*_: object) -> None:
        stop.set()
        if at_once:
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    return stop


def _run_trial(out: CommandOutput, server: Server, seconds: float, rate: float, requests: Any, labels: Any, kill: str) -> None:
    from shardwise.serve.deploy.load_generator import RequestLoad  # here: the command starts fast
    from shardwise.serve.deploy.load_trial import run_load_trial

    with out.working(f"sending {rate:g} requests/s for {seconds:g} s"):
        trial = run_load_trial(server, RequestLoad(rate, seconds), requests, labels, kill)
    _show_trial(out, server, trial, rate)
    out.answer(trial_record(trial, server.changes))
    answers = trial.result
    if trial.num_unanswered:
        first = answers.failures[0] if answers.failures else "no answer"
        out.message(f"{trial.num_unanswered} of {answers.num_sent} requests were lost; the first: {first}")
        raise typer.Exit(RunError.exit_code)


def trial_record(trial: LoadTrial, changes: Sequence[PlanChange]) -> dict[str, Any]:
    """Return the JSON object of `shardwise serve run --load`."""
    answers = trial.result
    return {
        "sent": answers.num_sent,
        "answered": len(answers.latency_s),
        "refused": answers.num_refused,
        "held": answers.num_skipped,
        "lost": trial.num_unanswered,
        "failures": answers.failures[:10],
        "latency_bound_s": trial.latency_bound_s or None,
        "rows": [{"what": r.quantity, "planned": r.planned, "measured": r.measured, "error": r.error, "unit": r.unit} for r in trial.rows],
        "changes": [
            {"why": c.reason, "planned_s": c.planning_s, "seconds": c.total_s, "price_per_hour": c.plan.price_per_hour} for c in changes
        ],
    }


def _show_trial(out: CommandOutput, server: Server, trial: LoadTrial, rate: float) -> None:
    def words(value: float, unit: str) -> str:
        return format_seconds(value) if unit == "s" else f"{value:.4g}"

    rows = tuple((r.quantity, words(r.planned, r.unit), words(r.measured, r.unit), f"{r.error:+.1%}", r.unit) for r in trial.rows)
    a = trial.result
    note = f"{a.num_sent} requests, {len(a.latency_s)} answered, {a.num_refused} refused by full queues, {trial.num_unanswered} lost"
    if trial.latency_bound_s:
        note += f"; the plan's bound of p{server.plan.demand.percentile * 100:g} is {format_seconds(trial.latency_bound_s)}"
    title, columns = f"{server.workflow.name} at {rate:g} requests/s", ("", "planned", "measured", "", "")
    out.table(TextTable(title, columns, rows, right=(1, 2, 3), note=note))
    for c in server.changes:
        price = f"${c.plan.price_per_hour:.4f} an hour"
        out.text(f"{c.reason}: a new plan, {price}, after {c.planning_s:.2f} s, at work after {c.total_s:.2f} s")
    if server.problem:
        out.message(server.problem)
