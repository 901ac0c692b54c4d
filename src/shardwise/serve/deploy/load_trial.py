"""Load trial of a running server: measured rate, latencies, price and accuracy compared with the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.serve.deploy.latency_simulation import simulate_latencies
from shardwise.serve.deploy.load_generator import LoadResult, RequestLoad, encode_request, send
from shardwise.serve.deploy.routing_table import deployments_of, routing_table_of
from shardwise.serve.deploy.server import Server
from shardwise.serve.placement.assignment_milp import ServicePlan
from shardwise.serve.placement.workflow import Machines, Workflow

HOUR_S = 3600.0
WARMUP_S = 3.0  # seconds of requests before those that count


@dataclass(frozen=True, slots=True)
class TrialRow:
    """A quantity as planned (latencies: simulated) and as measured, in the plan's time scale."""

    quantity: str
    planned: float
    measured: float
    unit: str

    @property
    def error(self) -> float:
        return self.measured / self.planned - 1 if self.planned else float("nan")


@dataclass(frozen=True)
class LoadTrial:
    """`num_unanswered`: requests without an answer that no full queue refused. `latency_bound_s`: the plan's sum of percentiles."""

    rows: tuple[TrialRow, ...]
    result: LoadResult
    num_unanswered: int
    latency_bound_s: float


def run_load_trial(
    server: Server, load: RequestLoad, requests: Sequence[Mapping[str, Any]], labels: Any, worker_to_kill: str = ""
) -> LoadTrial:
    """Send a load to a server, slowed down by its time scale; `worker_to_kill`: a worker that is killed after a third of it.

    Measurements are converted to the plan's time, which is `time_scale` times as fast. Latencies are compared with a simulation of the same
    arrivals.
    """
    time_scale = server.options.time_scale or 1.0
    bodies = [encode_request(values) for values in requests] or [b""]
    real = replace(load, rate=load.rate / time_scale)
    send(server.url, bodies, RequestLoad(real.rate, WARMUP_S * time_scale, load.max_in_flight, load.seed + 1))
    plan, before = server.plan, server.stats()
    answers = send(server.url, bodies, real, [(load.duration_s / 3, lambda: server.kill(worker_to_kill))] if worker_to_kill else [])
    after = server.stats()
    answers.latency_s = [s / time_scale for s in answers.latency_s]
    workflow = server.workflow
    expected = expected_latencies_s(workflow, server.machines, plan, [at / time_scale for at in real.send_times_s()])
    rows = [TrialRow("requests/s", load.rate, len(answers.latency_s) * time_scale / load.duration_s, "1/s")]
    for q in sorted({0.5, plan.demand.percentile, 0.99}):
        rows.append(TrialRow(f"latency p{q * 100:g}", float(np.quantile(expected, q)), answers.percentile_s(q), "s"))
    answered = max(1, after["counts"].get("answered", 0) - before["counts"].get("answered", 0))
    traffic = (after["dollars"] - before["dollars"]) / answered * HOUR_S * plan.demand.rate
    paid = sum(p.replicas * server.machines.worker(p.worker).price_per_hour for p in server.deployments)
    rows.append(TrialRow("price", plan.price_per_hour, paid + traffic, "$/h"))
    if len(labels or ()) and answers.answers:
        from shardwise.serve.deploy.profile import score_answers  # here: it needs torch

        values = [_as_arrays(value) for _, value in answers.answers]
        rows.append(TrialRow("accuracy", plan.accuracy, score_answers(workflow, values, [labels[i] for i, _ in answers.answers]), ""))
    num_unanswered = answers.num_sent - len(answers.latency_s) - answers.num_refused
    return LoadTrial(tuple(rows), answers, num_unanswered, plan.latency_s)


def expected_latencies_s(workflow: Workflow, machines: Machines, plan: ServicePlan, arrivals: Sequence[float]) -> list[float]:
    """Simulate the latencies of a plan for requests that arrive at these times."""
    links = routing_table_of(workflow, machines, plan, 1.0)["links"]
    return simulate_latencies(workflow, deployments_of(workflow, machines, plan), links, arrivals)


def _as_arrays(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, list) else value
