"""`scripts/bench tiers`: plans at work between network namespaces: an edge box and servers behind a link of given bandwidth and delay.

Each tier is a namespace with a Ray node of its own (`bench/common/namespaces`); vehicle tracking's clips come in at the edge. Two plans:
all
detection on servers, so that clips cross the link, and detection on the edge, so that what was detected does. Then ranks that train in a
third namespace publish new weights to the servers' replicas, with a token and without. Out: docs/benchmarks/tiers.md. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.common.document import header, load, versions
from bench.common.namespaces import HUB, Link, Network, refused
from bench.common.processes import ROOT

PAGE = ROOT / "docs" / "benchmarks" / "tiers.md"
SLOWER, RATE, LOAD_S = 10.0, 30.0, 60.0
PLANS = {"clips cross": 95.0, "detections cross": 92.0}
UP = Link(100e6, 0.01)  # of the plan; here both are SLOWER times as slow
TOKEN = "namespaces have no secrets"
# Ray hands on what is larger than 100 kB by its object store: several messages to and fro, each of which takes the link's delay.
INLINE = {"RAY_max_direct_call_object_size": "16777216", "RAY_task_rpc_inlined_bytes_limit": "67108864"}
STORE = 80_000_000
HEAD = """# Plans between tiers: measured beside planned

Written by `scripts/bench tiers`: {header}. An edge box and servers, each a network namespace with a Ray node of its own; between them a
link of {bandwidth:g} MB/s (the kernel's token bucket) and {latency:g} ms (a process that passes packets on later; this kernel has no
`netem`), {slower:g} times as slow as the plan says, as the workers are. Planned latencies are a simulation of the same arrivals.

"""


FOOT = """
## What is off

Where clips cross, answers take 30 ms longer at the median, three of the link's delays. The plan counts one delay and the bytes over the
bandwidth, 126 ms here for a clip of 262 kB. Plain TCP over the same link took 441, 252 and 165 ms for the first three such messages after a
pause of two seconds each (103 ms for 4 kB): its windows have to grow, a delay of the link at a time, and HTTP/2's, which Ray's calls use,
begin at 64 kB. Where 4 kB cross, what is left is some 100 ms of this machine's time for calls of three operators while other work ran.
"""


def workflow_text() -> str:
    """Vehicle tracking whose edge box only detects, coarsely."""
    text = (ROOT / "examples" / "serve" / "tracking.toml").read_text()
    lines, edge_may = [], True
    for line in text.splitlines():
        if line.startswith("["):
            edge_may = line in ("[operator.detector.variant.coarse]", "[operator.detector.variant.half]")
        if line.startswith("latency_s = { edge") and not edge_may:
            line = "latency_s = {" + line.partition("},")[2]
        line = line.replace("bandwidth_bytes_per_s = 20e6", f"bandwidth_bytes_per_s = {UP.bandwidth_bytes_per_s:g}")
        lines.append(line.replace("count = 2", "count = 8"))
    return "\n".join(lines) + "\n"


@contextmanager
def _nodes(network: Network) -> Iterator[str]:
    """Ray's head on the hub, with the edge's workers, and a node on the servers. The address of the head."""
    folder = tempfile.mkdtemp(prefix="wr")
    environment = {**os.environ, "SHARDWISE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", **INLINE}
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats", f"--object-store-memory={STORE}"]
    head = [*ray, "--head", "--port=6379", f"--node-ip-address={HUB}", "--include-dashboard=false", "--num-cpus=2", f"--temp-dir={folder}"]
    node = [*ray, f"--address={HUB}:6379", f"--node-ip-address={network.address('server')}", "--num-cpus=2"]
    commands = [
        network.inside("", *head, '--resources={"worker:edge": 8}'),
        network.inside("server", *node, '--resources={"worker:server": 8, "worker:gpu": 1}'),
    ]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for one in commands:
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            running.append(subprocess.Popen(one, env=environment, start_new_session=True, **quiet))
            time.sleep(8.0)
        _wait_for(f"{HUB}:6379")
        yield f"{HUB}:6379"
    finally:
        for process in reversed(running):
            _end(process)
        subprocess.run(["rm", "-rf", folder], check=False)


def _wait_for(address: str) -> None:
    """Until both nodes are there."""
    import ray

    until = time.monotonic() + 120.0
    while True:
        try:
            ray.init(address=address, configure_logging=False, log_to_driver=False, logging_level="ERROR")
            if "worker:server" in ray.cluster_resources():
                return
        except ConnectionError:
            if time.monotonic() > until:
                raise
        finally:
            ray.shutdown()
        time.sleep(2.0)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a node and what it has started: its own session."""
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def hub(network: Network, load_s: float) -> dict[str, Any]:
    """Both plans at work, and weights published; run on the hub."""
    from shardwise.serve.deploy.load_generator import RequestLoad
    from shardwise.serve.deploy.load_trial import run_load_trial
    from shardwise.serve.deploy.profile import labelled_requests
    from shardwise.serve.deploy.server import ServeOptions, Server
    from shardwise.serve.placement.assignment_milp import Demand
    from shardwise.serve.placement.service_planner import plan_service
    from shardwise.serve.placement.workflow_files import read_workflow

    found: dict[str, Any] = {}
    # Of nodes, drivers and workers alike.
    os.environ |= INLINE | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    with tempfile.TemporaryDirectory() as folder, _nodes(network) as address:
        path = Path(folder, "tracking.toml")
        path.write_text(workflow_text())
        shutil.copy(ROOT / "examples" / "serve" / "tracking.py", folder)
        workflow, machines, _ = read_workflow(path)
        requests, labels = labelled_requests(workflow)
        for name, accuracy in PLANS.items():
            placed = plan_service(workflow, machines, Demand(accuracy=accuracy, rate=RATE), 20.0)
            assert placed is not None
            server = Server(workflow, machines, placed, ServeOptions(8000, SLOWER, 100, address, replans=False, emulates_links=False))
            server.start()
            try:
                trial = run_load_trial(server, RequestLoad(RATE, load_s), requests, labels)
                found[name] = {
                    "plan": [f"{c.operator} {c.variant} on {', '.join(s.worker for s in c.shares)}" for c in placed.choices],
                    "rows": [(r.quantity, r.planned, r.measured, r.unit) for r in trial.rows], "sent": trial.result.num_sent,
                    "lost": trial.num_unanswered,
                }  # fmt: skip
                if name == "clips cross":
                    found["published"] = [_published(network, server.addresses("identity"), token) for token in (TOKEN, "")]
            finally:
                server.stop()
    return found


_TRAINER = """
import json, sys, torch, shardwise
from shardwise.errors import ShardwiseError
from shardwise.zoo.resolve import resolve
def rank(world, model, addresses):
    batch = (torch.randn(4, 4, 2), torch.randn(4, 4, 8, 8))
    engine = shardwise.parallelize(resolve(model).make, batch, loss=lambda out, _: out.square().sum(), plan="data=2", world=world)
    try:
        return engine.publish([tuple(a) for a in addresses]), ""
    except ShardwiseError as error:
        return 0, str(error)
if __name__ == "__main__":
    print(json.dumps(shardwise.launch(rank, 2, sys.argv[1], json.loads(sys.argv[2]))))
"""


def _published(network: Network, addresses: list[tuple[str, int]], token: str) -> dict[str, Any]:
    """Bytes that two ranks in a third namespace send to the replicas of re-identification, and what they say."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "trainer.py")
        script.write_text(_TRAINER)
        environment = {**os.environ, "SHARDWISE_TOKEN": token, "PYTHONPATH": f"{ROOT}/src"}
        ran = subprocess.run(
            network.inside("trainer", sys.executable, str(script), f"{ROOT}/examples/serve/tracking.py:few", json.dumps(addresses)),
            env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    ranks = json.loads(ran.stdout.splitlines()[-1]) if ran.returncode == 0 else [[0, ran.stderr[-500:]]]
    return {"token": bool(token), "bytes": sum(r[0] for r in ranks), "said": next((r[1] for r in ranks if r[1]), ""), "to": addresses}


def page(found: dict[str, Any]) -> str:
    """What was measured, in the plan's time."""
    about = header("scripts/bench tiers", versions(["ray"]))
    said = f"{about['machine']}, {about['date']}, Ray {about['versions']['ray']}; {load()}"
    text = HEAD.format(header=said, bandwidth=UP.bandwidth_bytes_per_s / 1e6, latency=1e3 * UP.latency_s, slower=SLOWER)
    for name in PLANS:
        one = found[name]
        text += f"## {name.capitalize()}\n\n{'; '.join(one['plan'])}. {one['sent']} clips, {one['lost']} lost.\n\n"
        text += "| | planned | measured | |\n|---|---|---|---|\n"
        for what, planned, measured, unit in one["rows"]:
            shown = [f"{1e3 * x:.1f} ms" if unit == "s" else f"{x:.4g} {unit}".strip() for x in (planned, measured)]
            text += f"| {what} | {shown[0]} | {shown[1]} | {measured / planned - 1:+.1%} |\n"
        text += "\n"
    good, refusal = found["published"]
    text += f"## Weights published\n\nTwo ranks in a third namespace to {len(good['to'])} replicas on the servers: {good['bytes']:,} bytes"
    text += f'{good["said"] and ": " + good["said"]}.\nWithout `SHARDWISE_TOKEN`: "{refusal["said"]}".\n'
    return text + FOOT


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(prog="scripts/bench tiers", description=__doc__)
    parser.add_argument("--load", type=float, default=LOAD_S, help="seconds of each load, in the time of this machine")
    parser.add_argument("--on-hub", default="", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    links = {"server": Link(UP.bandwidth_bytes_per_s / SLOWER, UP.latency_s * SLOWER), "trainer": Link(1e9, 0.0)}
    if asked.on_hub:
        print("\n" + json.dumps(hub(Network(links, asked.on_hub), asked.load)))
        return 0
    if why := refused():
        print(f"scripts/bench tiers: {why}", file=sys.stderr)
        return 2
    with Network(links) as network:
        inside = network.inside("", sys.executable, "-m", "bench.serving.tiers", "--on-hub", network.prefix, "--load", str(asked.load))
        running = subprocess.Popen(inside, stdout=subprocess.PIPE, text=True)
        try:
            printed, _ = running.communicate()
        finally:
            running.terminate()
            running.wait()
    if running.returncode:
        return running.returncode
    found = json.loads(printed.splitlines()[-1])
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(page(found))
    print(page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
