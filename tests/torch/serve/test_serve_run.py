"""What runs a plan, without Ray: shares, batches, simulated latencies, when it is planned anew, pages; each against something else."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardwise.cli import run
from shardwise.errors import UsageError
from shardwise.serve.deploy.dataflow import WeightedRouter
from shardwise.serve.deploy.latency_simulation import random_arrivals, simulate_latencies
from shardwise.serve.deploy.replica import profiled_batch_s
from shardwise.serve.deploy.routing_table import Deployment, deployments_of, routing_table_of
from shardwise.serve.deploy.server import RequestRates, ServeOptions, refuse_remote_workers, remaining_machines, updated_demand
from shardwise.serve.deploy.status_page import format_page, format_prometheus
from shardwise.serve.placement.assignment_milp import (
    GIB,
    Demand,
    ServicePlan,
    VariantChoice,
    WorkerShare,
    find_cheapest_plan,
    percentile_latency_s,
)
from shardwise.serve.placement.service_plan_file import format_service_plan, parse_service_plan
from shardwise.serve.placement.workflow import Machines, OperatorVariant, RequestSource, TierLink, WorkerGroup, Workflow, WorkflowOperator
from shardwise.serve.placement.workflow_files import read_workflow

VQA = Path(__file__).parents[3] / "examples" / "serve" / "vqa.toml"


def one(seconds: float, batch: int = 1, machines: int = 1, load: float = 1.0) -> tuple[Workflow, tuple[Deployment, ...]]:
    """An operator on machines of one worker."""
    variant = OperatorVariant("v", (("w", ((1, seconds), (batch, seconds)) if batch > 1 else ((1, seconds),)),))
    flow = Workflow("w", (RequestSource("x"),), (WorkflowOperator("op", (("x", 1.0),), (variant,)),))
    return flow, (Deployment("op.v@w", "op", "v", "w", 0, machines, batch, (batch - 1) * machines / load if batch > 1 else 0.0, load, 0.0),)


@pytest.mark.parametrize("busy", [0.3, 0.6, 0.8])
def test_a_single_queue_waits_as_the_formula_says(busy: float) -> None:
    """M/D/1: the mean wait is u / (2 (1 - u)) of the service (Pollaczek-Khinchine)."""
    flow, places = one(0.1, load=busy / 0.1)
    seconds = simulate_latencies(flow, places, {}, random_arrivals(busy / 0.1, 40_000))
    assert np.mean(seconds) == pytest.approx(0.1 + 0.1 * busy / (2 * (1 - busy)), rel=0.05)
    assert np.quantile(seconds, 0.95) <= 1.05 * percentile_latency_s(1, 0.1, busy, 0.95)


def test_machines_without_a_queue_answer_in_their_seconds() -> None:
    flow, places = one(0.1, machines=50, load=2.0)
    assert np.allclose(simulate_latencies(flow, places, {}, random_arrivals(2.0, 500)), 0.1)
    flow, places = one(0.1, batch=4, machines=1, load=1.0)  # who comes first waits for the others, or as long as is allowed
    assert max(simulate_latencies(flow, places, {}, random_arrivals(1.0, 500))) <= 3.0 + 0.1 + 0.1 + 1e-9


def test_a_path_is_the_sum_of_its_parts_and_its_links() -> None:
    variants = tuple(OperatorVariant("v", ((w, ((1, s),)),), 1000.0) for w, s in (("a", 0.1), ("b", 0.2)))
    ops = (WorkflowOperator("p", (("x", 1.0),), variants[:1]), WorkflowOperator("q", (("p", 4.0),), variants[1:]))
    flow = Workflow("w", (RequestSource("x", 500.0),), ops)
    places = tuple(Deployment(f"{op}@{w}", op, "v", w, tier, 100, 1, 0.0, 1.0, 1000.0) for op, w, tier in (("p", "a", 0), ("q", "b", 1)))
    links = {"p@a": {"q@b": (0.0, 0.5, 1e-3)}}
    assert np.allclose(simulate_latencies(flow, places, links, random_arrivals(0.5, 200)), 0.1 + 0.5 + 1.0 + 0.2)


def test_shares_come_out_and_the_nearest_is_taken_among_those_behind() -> None:
    rng = random.Random(0)
    shares, names = WeightedRouter({"a": 0.5, "b": 0.3, "c": 0.2}), Counter[str]()
    for _ in range(3000):
        names[shares.choose({"a": rng.random(), "b": rng.random(), "c": rng.random()})] += 1
    assert [names[n] / 3000 for n in "abc"] == pytest.approx([0.5, 0.3, 0.2], abs=0.01)
    assert all(shares.choose({}, {"a", "c"}) == "b" for _ in range(5))
    assert shares.choose({}, {"a", "b", "c"}) in "abc"  # all are down: one of them starts again
    # Of half of the requests that are on the upper tier already, none goes down, and none more goes up.
    half, up = WeightedRouter({"low": 0.5, "high": 0.5}), 0
    for i in range(1000):
        start = "high" if i % 2 else "low"
        up += start == "low" and half.choose({"high": 1.0}) == "high"
        if start == "high":
            assert half.choose({"low": float("inf")}) == "high"
    assert up <= 5


def test_a_plan_becomes_places_with_the_links_prices() -> None:
    workflow, machines, rate = read_workflow(VQA)
    assert machines is not None
    placed = find_cheapest_plan(workflow, machines, Demand(rate, 56.0))
    assert placed is not None
    places = deployments_of(workflow, machines, placed)
    assert sum(p.load for p in places if p.operator == "VQA") == pytest.approx(rate)
    assert sum(p.replicas * machines.worker(p.worker).price_per_hour for p in places) == pytest.approx(placed.compute_per_hour)
    table = routing_table_of(workflow, machines, placed)
    up = [p for p in places if p.tier == 1 and p.operator == "ExtractImageFeature"]
    for p in up:
        assert table["links"]["ReadImage"][p.name][0] == pytest.approx(0.1 / GIB)
    (vqa,) = (c for c in placed.choices if c.operator == "VQA")
    halves = tuple(replace(s, load=s.load / 2) for s in vqa.shares for _ in range(2))  # alike, and places of their own all the same
    twice = replace(placed, choices=(*(c for c in placed.choices if c != vqa), replace(vqa, shares=halves)))
    assert len({p.name for p in deployments_of(workflow, machines, twice)}) == len(places) + len(vqa.shares)
    assert parse_service_plan(format_service_plan(twice, "w"))[0] == twice
    with pytest.raises(UsageError, match="shared workers cannot be run"):
        deployments_of(workflow, machines, replace(placed, demand=replace(placed.demand, allows_shared_workers=True)))
    with pytest.raises(UsageError, match="plan again"):
        deployments_of(workflow, Machines(machines.workers[:1], ()), placed)


def test_it_is_planned_anew_when_the_rate_has_left_the_plan_or_a_machine_went() -> None:
    ask = Demand(10.0)
    assert updated_demand(ask, None, None) == updated_demand(ask, 10.5, 7.0) == updated_demand(ask, 2.0, 7.0) == ask
    assert updated_demand(ask, 20.0, 7.0).rate == pytest.approx(21.0)
    assert updated_demand(ask, 9.0, 2.0).rate == pytest.approx(2.1)
    rates = RequestRates()
    for second in range(300):
        rates = rates.with_count(float(second), max(0, 30 * (second - 100)))
    assert rates.rate_over(20.0) == pytest.approx(30.0)
    assert len(rates.samples) < 130
    assert RequestRates().with_count(0.0, 1).with_count(5.0, 500).rate_over(20.0) is None  # too short to know
    assert RequestRates().with_count(0.0, 1).with_count(20.0, 3).rate_over(20.0) is None  # too few
    quiet = RequestRates().with_count(0.0, 0).with_count(100.0, 0).with_count(101.0, 500)
    assert quiet.rate_over(20.0) is None  # what came before the first request is no rate
    machines = Machines((WorkerGroup("a", 0, 1.0, 2), WorkerGroup("b", 1, 1.0)), (TierLink("a", "b"), TierLink("0", "1")))
    left = remaining_machines(machines, {"x": "a", "y": "b"})
    assert [(w.name, w.count) for w in left.workers] == [("a", 1)]
    assert left.links == (TierLink("0", "1"),)


def test_seconds_of_a_batch_are_those_of_the_profile() -> None:
    assert profiled_batch_s(((1, 0.1), (4, 0.4)), 4) == pytest.approx(0.4)
    assert profiled_batch_s(((2, 0.1),), 1) == pytest.approx(0.1)


def test_metrics_are_prometheus_text_and_the_page_escapes() -> None:
    figures = {
        "name": "<b>", "planned": {"rate": 1.0, "latency_s": 0.5, "percentile": 0.95, "price_per_hour": 2.0, "accuracy": 50.0},
        "places": [["op", "v", "w", 1, 2.0, 1, 0.5]], "changes": [["w went", 0.1, 2.0]], "trouble": "",
        "stats": {"counts": {"arrived": 7, "sent again": 1}, "loads": {'op"v': 3}, "latency_s": {"0.5": 0.01}, "dollars": 0.25,
                  "lost": {"a": "w"}},
    }  # fmt: skip
    text = format_prometheus(figures)
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert samples['shardwise_serve_requests_total{state="arrived"}'] == "7"
    assert samples['shardwise_serve_computed_total{place="op\\"v"}'] == "3"
    assert samples['shardwise_serve_latency_seconds{quantile="0.5"}'] == "0.01"
    typed = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert {name.partition("{")[0] for name in samples} == typed
    assert "&lt;b&gt;" in format_page(figures)
    assert "<b>" not in format_page(figures).replace("<b></b>", "")


def test_machines_that_are_not_here_are_refused_by_name() -> None:
    placed = ServicePlan(Demand(1.0), 1.0, (VariantChoice("op", "v", (WorkerShare("gpu", 1, 1.0, 1, 0.1),)),), 0.0, 0.0)
    machines = Machines((WorkerGroup("gpu", 0, 1.0, device="p3.16xlarge"),), ())
    with pytest.raises(UsageError, match=r"gpu \(p3\.16xlarge\), not this machine"):
        refuse_remote_workers(machines, placed, ServeOptions())
    refuse_remote_workers(machines, placed, ServeOptions(time_scale=1.0))


def test_without_ray_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    import sys

    plan = tmp_path / "plan.toml"
    assert run(["serve", "plan", str(VQA), "--accuracy", "54", "--brief", "-o", str(plan)]) == 0
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(["serve", "run", str(plan), "--emulate", "1"]) == 2
    assert "pip install 'shardwise[serve]'" in capfd.readouterr().err
    assert run(["serve", "run", str(plan), "--kill", "gpu-9"]) == 2
    assert "uses no such worker" in capfd.readouterr().err
