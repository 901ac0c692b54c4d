"""Load trial of a running server: measured rate, latencies, price and accuracy compared with the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weft.deploy.load import Answers, Load, body_of, send
from weft.deploy.server import Server
from weft.deploy.simulated import latencies
from weft.deploy.table import places_of, table_of
from weft.serve.assign import Placed
from weft.serve.workflow import Machines, Workflow

HOUR_S = 3600.0
AHEAD_S = 3.0  # seconds of requests before those that count


@dataclass(frozen=True, slots=True)
class Row:
    """A quantity as planned (latencies: simulated) and as measured, in the plan's time scale."""

    what: str
    planned: float
    measured: float
    unit: str

    @property
    def error(self) -> float:
        return self.measured / self.planned - 1 if self.planned else float("nan")


@dataclass(frozen=True)
class Trial:
    """`num_unanswered`: requests without an answer that no full queue refused. `latency_bound_s`: the plan's sum of percentiles."""

    rows: tuple[Row, ...]
    answers: Answers
    lost: int
    bound_s: float


def tried(server: Server, load: Load, requests: Sequence[Mapping[str, Any]], labels: Any, kill: str = "") -> Trial:
    """Send a load to a server, slowed down by its time scale; `worker_to_kill`: a worker that is killed after a third of it.

    Measurements are converted to the plan's time, which is `time_scale` times as fast. Latencies are compared with a simulation of the same
    arrivals.
    """
    time_scale = server.how.slower or 1.0
    bodies = [body_of(values) for values in requests] or [b""]
    real = replace(load, rate=load.rate / time_scale)
    send(server.url, bodies, Load(real.rate, AHEAD_S * time_scale, load.at_once, load.seed + 1))
    plan, before = server.placed, server.stats()
    answers = send(server.url, bodies, real, [(load.seconds / 3, lambda: server.kill(kill))] if kill else [])
    after = server.stats()
    answers.latency_s = [s / time_scale for s in answers.latency_s]
    workflow = server.workflow
    expected = expected_s(workflow, server.machines, plan, [at / time_scale for at in real.times()])
    rows = [Row("requests/s", load.rate, len(answers.latency_s) * time_scale / load.seconds, "1/s")]
    for q in sorted({0.5, plan.ask.percentile, 0.99}):
        rows.append(Row(f"latency p{q * 100:g}", float(np.quantile(expected, q)), answers.percentile_s(q), "s"))
    answered = max(1, after["counts"].get("answered", 0) - before["counts"].get("answered", 0))
    traffic = (after["dollars"] - before["dollars"]) / answered * HOUR_S * plan.ask.rate
    paid = sum(p.replicas * server.machines.worker(p.worker).price_per_hour for p in server.places)
    rows.append(Row("price", plan.price_per_hour, paid + traffic, "$/h"))
    if len(labels or ()) and answers.values:
        from weft.deploy.profile import scored

        values = [_as_arrays(value) for _, value in answers.values]
        rows.append(Row("accuracy", plan.accuracy, scored(workflow, values, [labels[i] for i, _ in answers.values]), ""))
    num_unanswered = answers.sent - len(answers.latency_s) - answers.refused
    return Trial(tuple(rows), answers, num_unanswered, plan.latency_s)


def expected_s(workflow: Workflow, machines: Machines, placed: Placed, arrivals: Sequence[float]) -> list[float]:
    """Simulate the latencies of a plan for requests that arrive at these times."""
    links = table_of(workflow, machines, placed, 1.0)["links"]
    return latencies(workflow, places_of(workflow, machines, placed), links, arrivals)


def _as_arrays(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, list) else value
