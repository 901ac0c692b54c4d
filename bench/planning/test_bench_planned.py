"""`scripts/bench planned`: hosts that are always removed, every plan of a model, and a page that says how near the chosen one is."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.planning import planned
from bench.planning.planned import MODELS, Plans, Row, Run, Work, interface, markdown
from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, MeasuredTable, NetworkLink
from shardwise.plan.layout import Layout
from shardwise.zoo.resolve import resolve
from tests.support import networks
from tests.support.networks import Hosts, NoNetworks

ROOT = Path(__file__).parents[2]


def possible() -> bool:
    try:
        with Hosts(2):
            return True
    except NoNetworks:
        return False


needs_root = pytest.mark.skipif(not possible(), reason="network namespaces need root and iproute2")


def names() -> set[str]:
    said = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in said.splitlines() if line.strip()}


def test_without_root_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert planned.main([]) == 2
    assert "need root" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NoNetworks, match="ip and tc not found"):
        networks.check_possible()


@needs_root
@pytest.mark.parametrize("count", [2, 3])
def test_hosts_reach_one_another_at_the_rate_and_are_gone_afterwards(count: int) -> None:
    with Hosts(count) as hosts:
        assert set(hosts.names) <= names()
        hosts.shape(1e8)
        told = json.loads(
            subprocess.run(["tc", "-j", "-n", hosts.names[0], "qdisc", "show"], capture_output=True, text=True, check=True).stdout
        )
        assert any(one["kind"] == "tbf" and one["options"]["rate"] == 1e8 / 8 for one in told)
        listens = "import socket; s = socket.create_server(('', 4321)); c, _ = s.accept(); c.sendall(b'here')"
        asks = f"import socket; print(socket.create_connection(('{hosts.address(0)}', 4321)).recv(4).decode())"
        with subprocess.Popen(hosts.command(0, [sys.executable, "-c", listens])) as server:
            for _ in range(50):
                asked = subprocess.run(hosts.command(count - 1, [sys.executable, "-c", asks]), capture_output=True, text=True, check=False)
                if asked.returncode == 0:
                    break
                time.sleep(0.1)
            assert asked.stdout.strip() == "here"
            assert server.wait(10) == 0
        mine = set(hosts.names)
    assert not mine & names()


@needs_root
def test_hosts_are_gone_when_what_made_them_is_killed() -> None:
    code = (
        "import subprocess, sys, time; from tests.support.networks import Hosts\n"
        "with Hosts(2) as hosts:\n"
        "    subprocess.Popen(hosts.command(0, ['sleep', '600']))\n"
        "    print(' '.join(hosts.names), flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        made = set(process.stdout.readline().split())
        assert len(made) == 2
        assert made <= names()
        process.send_signal(signal.SIGKILL)
        process.wait()
    for _ in range(100):
        if not made & names():
            break
        time.sleep(0.1)
    assert not made & names()


def test_every_plan_has_the_chosen_one_and_all_axes() -> None:
    core = Device("core", "cpu", (("float32", 1e11),), 8e9, 2e10, 1.0, 2e-6)
    cluster = Cluster(
        "two",
        core,
        (ClusterLevel("node", 2, NetworkLink(1e-4, 1e9, protocol="gloo")),),
        tables=(MeasuredTable("all_reduce", 2, ((64.0, 1e-4),)),),
    )
    plans = Plans.of(Work("tiny", "gpt-tiny", 8), cluster, 2)
    assert plans.chosen in plans.every
    layouts = [Layout.parse(text) for text in plans.every]
    for key in ("data", "tensor", "pipeline"):
        assert {getattr(layout, key) for layout in layouts} == {1, 2}
    assert {layout.num_ranks for layout in layouts} == {1, 2}
    assert {layout.microbatches for layout in layouts} == {1, 2, 4}
    assert {"1f1b", "gpipe", "interleaved"} <= {layout.schedule for layout in layouts}
    best = min(seconds for _, seconds in plans.every.values())
    assert plans.every[plans.chosen][1] <= 1.005 * best


def test_there_are_twelve_models_and_more_of_many_kinds() -> None:
    assert len(MODELS) == len({work.name for work in MODELS}) >= 12
    for work in MODELS:
        resolve(work.model, work.batch, work.sequence).batch(work.batch)


def test_the_page_says_how_many_are_within_five_per_cent() -> None:
    runs = (Run("data=2 tensor=1 pipeline=1", 1.1, 1.0), Run("data=1 tensor=1 pipeline=1", 0.9, 1.2))
    rows = [
        Row("a", "1 Gbit/s", runs[0].layout, 1.0, 1.1, runs[0].layout, 1.0, 1.0, runs),
        Row("b", "1 Gbit/s", runs[1].layout, 1.2, 0.9, runs[0].layout, 1.0, 1.2, runs),
        Row("c", "1 Gbit/s", runs[1].layout, 0.0, 0.9, runs[0].layout, 1.0, 0.0, runs, "it failed"),
    ]
    text = markdown({"machine": "one"}, rows)
    assert "Within 5 % of the best in 1 of 2 cases, over 2 models" in text
    assert "| data=2 | 1000.0 | 1100.0 | the same |" in text
    assert "it were 2 of 2, and 1.000." in text
    assert "it failed" in text
    assert "mean absolute error 18 %" in text
    assert interface(rows[1])["ratio"] == pytest.approx(1 / 1.2)
