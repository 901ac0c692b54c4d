"""A plan on Ray Serve, embedded: answers, shares, bounded queues, a worker that dies under load, a clean end. Takes long to start."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from shardwise.errors import UsageError
from shardwise.serve.deploy.load_generator import RequestLoad, encode_request, send
from shardwise.serve.deploy.load_trial import run_load_trial
from shardwise.serve.deploy.profile import labelled_requests
from shardwise.serve.deploy.server import ServeOptions, Server
from shardwise.serve.deploy.status_page import figures_of, serve_page
from shardwise.serve.placement.assignment_milp import Demand
from shardwise.serve.placement.service_planner import plan_service
from shardwise.serve.placement.workflow_files import read_workflow

pytest.importorskip("ray.serve")
CODE = """
import numpy as np

def halves(row):
    return np.stack((row[:2], row[2:]))

def total(row):
    return float(row.sum())

def both(parts):
    return parts[0] > parts[1]

def labelled():
    rows = np.random.default_rng(0).standard_normal((20, 4)).astype(np.float32)
    labels = [bool(r[:2].sum() > r[2:].sum()) for r in rows]
    labels[0] = not labels[0]  # one of twenty is wrong
    return [{"x": r} for r in rows], labels
"""
FLOW = """
name = "halves"
rate = 8
[measure]
labelled = "code.py:labelled"
[source.x]
output_bytes = 16
[operator.halves]
inputs = ["x"]
[operator.halves.variant.v]
call = "code.py:halves"
latency_s = { edge = 0.05 }
output_bytes = 16
[operator.total]
inputs = { halves = 2 }
[operator.total.variant.v]
call = "code.py:total"
latency_s = { cheap = 0.03, spare = 0.03 }
output_bytes = 8
[operator.both]
inputs = { total = 0.5 }
[operator.both.variant.v]
call = "code.py:both"
latency_s = { edge = 0.02 }
[accuracy]
operators = ["halves"]
table = [["v", 95.0]]
[worker.edge]
tier = 0
price_per_hour = 0.1
count = 3
[worker.cheap]
tier = 0
price_per_hour = 0.1
[worker.spare]
tier = 0
price_per_hour = 0.5
"""


def processes_of_ray() -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if b"raylet" in words or b"gcs_server" in words or words.startswith(b"ray::"):
            found.add(int(path.parent.name))
    return found


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_plan_is_served_and_a_worker_that_dies_under_load_loses_no_request(tmp_path: Path) -> None:
    before = processes_of_ray()
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "flow.toml").write_text(FLOW)
    workflow, machines, rate = read_workflow(tmp_path / "flow.toml")
    assert machines is not None
    placed = plan_service(workflow, machines, Demand(rate))
    assert placed is not None
    assert [s.worker for s in placed.choice("total").shares] == ["cheap"]
    server = Server(workflow, machines, placed, ServeOptions(port=free_port(), time_scale=2.0, queue_size=150))
    requests, labels = labelled_requests(workflow)
    server.start()
    try:
        # What a request says is what the functions say.
        for i in (0, 3):
            with urllib.request.urlopen(
                urllib.request.Request(server.url, encode_request(requests[i]), method="POST"), timeout=60
            ) as response:
                assert json.load(response)["answer"] == (labels[i] != (i == 0))
        asked = urllib.request.Request(server.url, json.dumps({"x": [1, 1, 0, 0]}).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as response:
            assert json.load(response)["answer"] is True
        with pytest.raises(urllib.error.HTTPError, match="500"):  # a request that no function takes is an error of its own
            urllib.request.urlopen(
                urllib.request.Request(server.url, encode_request({"x": np.zeros(3, np.float32)}), method="POST"), timeout=60
            )
        trial = run_load_trial(server, RequestLoad(rate, 30.0), requests, labels, worker_to_kill="cheap")
        assert trial.num_unanswered == 0, trial.result.failures
        assert trial.result.num_refused == 0
        assert len(trial.result.latency_s) == trial.result.num_sent
        assert [c.reason for c in server.changes] == ["cheap failed"]
        assert [s.worker for s in server.plan.choice("total").shares] == ["spare"]
        rows = {r.quantity: r for r in trial.rows}
        assert rows["accuracy"].measured == pytest.approx(95.0, abs=3)
        # Beyond what can wait, requests are refused at once, and counted.
        flood = send(server.url, [encode_request(requests[0])], RequestLoad(550.0, 1.0))
        assert flood.num_refused > 0
        assert not flood.failures
        page = serve_page(lambda: figures_of(server), 0)
        root = f"http://127.0.0.1:{page.server_address[1]}/"
        metrics = urllib.request.urlopen(root + "metrics", timeout=60).read().decode()
        assert "shardwise_serve_workers_lost_total 1" in metrics
        assert "halves" in urllib.request.urlopen(root, timeout=60).read().decode()
        page.shutdown()
    finally:
        server.stop()
    assert processes_of_ray() <= before


def test_a_port_that_is_taken_is_named() -> None:
    workflow, machines, _ = read_workflow(Path(__file__).parents[3] / "examples" / "serve" / "vqa.toml")
    assert machines is not None
    placed = plan_service(workflow, machines, Demand(40.0, 54.0))
    assert placed is not None
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        with pytest.raises(UsageError, match="port"):
            Server(workflow, machines, placed, ServeOptions(port=one.getsockname()[1], time_scale=1.0)).start()
