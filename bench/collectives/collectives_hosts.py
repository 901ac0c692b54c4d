"""`scripts/bench collectives --hosts`: hosts whose ranks share memory, slow links between them: hierarchical all-reduce beside flat ones.

In: nothing but this machine. Two hosts of two ranks are network namespaces, joined by a link of a shaped rate; ranks of one host share
memory, as `boxes=2` lets them. What each algorithm takes is measured and predicted: from what `shardwise probe` measured of the machine,
the
rate of the link, and its latency, which is measured. Out: a table a network, docs/benchmarks/collectives-hosts.md, `--json FILE`. Needs
root. Not emulated: cores that hosts would not share, and a network's own latency (the kernel's links have tens of microseconds).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.collectives.collectives_programs import Case, bytes_word, lines_of, verdict
from bench.common.document import command, header, versions
from bench.common.processes import ROOT
from bench.common.rank import Line
from shardwise.cluster.cluster import Cluster, ClusterLevel, NetworkLink
from shardwise.cluster.probe import probe
from shardwise.collectives import build
from shardwise.cost.network.collectives import algorithm_times, choose_algorithms
from shardwise.cost.network.network import RankGroup as GroupShape
from shardwise.plan.ir.choice import NATIVE
from shardwise.world.comm.levels import HIERARCHICAL, HierarchicalReducer
from shardwise.world.comm.runner import runner_of
from shardwise.world.comm.running import ProgramRunner
from shardwise.world.launch.join import join
from shardwise.world.world import World
from tests.support.networks import INTERFACE, Hosts, NoNetworks

PAGE = ROOT / "docs" / "benchmarks" / "collectives-hosts.md"
HOSTS, INSIDE = 2, 2
NETWORKS = {"200 Mbit/s": 2e8, "1 Gbit/s": 1e9, "4 Gbit/s": 4e9}
SIZES = (16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
NAMES = (NATIVE, "ring", "tree", "recursive_doubling", "halving_doubling", HIERARCHICAL)
PORT = 29533
WAIT_S = 180.0

INTRO = f"""\
{HOSTS} emulated hosts of {INSIDE} ranks, joined by one link of the rate that is named (token buckets on both ends); ranks of a host share
memory. `hierarchical` scatters sums inside the hosts, sums across, gathers inside; the flat ones (gloo's own, `native`, among them) send
every message over gloo. A bucket holds 1/250 s of the rate, 128 KiB at least: what is smaller passes unshaped. Each cell: measured (the
median), and by how much the prediction misses it. All {HOSTS * INSIDE} ranks share this machine's cores."""


def rank_times(world: World, name: str, sizes: Sequence[int], budget_s: float) -> list[tuple[int, list[float]]]:
    """(bytes, seconds of each call on this rank) of one algorithm."""
    group = world.world_group
    call: Callable[[torch.Tensor], object] = group.all_reduce
    if name == HIERARCHICAL:
        call = HierarchicalReducer(runner_of(group)).all_reduce
    elif name != NATIVE:
        programs, program = ProgramRunner(runner_of(group)), build("all_reduce", name, group.size)

        def call(x: torch.Tensor) -> object:
            return programs.all_reduce(program, x)

    found = []
    for size in sorted(sizes, reverse=True):
        x = torch.zeros(size // 4)
        call(x)
        times: list[float] = []
        spent = torch.zeros(1)
        while len(times) < 20 and (len(times) < 3 or float(spent) < budget_s):
            group.barrier()
            began = time.perf_counter()
            call(x)
            times.append(time.perf_counter() - began)
            spent += times[-1]
            group.all_reduce(spent, op="max")
        found.append((size, times))
    return found


def latency_s(world: World) -> float:
    """Half of a small message's way to the other host and back."""
    group, times = world.world_group, []
    x = torch.zeros(1)
    for _ in range(30):
        group.barrier()
        began = time.perf_counter()
        if group.index == 0:
            group.isend(x, INSIDE).wait()
            group.irecv(x, INSIDE).wait()
        elif group.index == INSIDE:
            group.irecv(x, 0).wait()
            group.isend(x, 0).wait()
        times.append((time.perf_counter() - began) / 2)
    return median(times)


class Ranks:
    """The processes on the hosts. A context manager; the guard of the hosts ends them where this process cannot."""

    def __init__(self, hosts: Hosts) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="shardwise-hosts-")
        path = os.path.join(self._folder.name, "orders")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        listener.settimeout(WAIT_S)
        self._processes = []
        count = HOSTS * INSIDE
        for rank in range(count):
            env = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank % INSIDE), "MASTER_PORT": str(PORT),
                "MASTER_ADDR": hosts.address(0), "GLOO_SOCKET_IFNAME": INTERFACE, "SHARDWISE_TRANSPORT": f"boxes={INSIDE}",
                "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            words = hosts.command(rank // INSIDE, [sys.executable, "-m", "bench.collectives.collectives_hosts", path])
            self._processes.append(subprocess.Popen(words, env=env, cwd=ROOT, stdin=subprocess.DEVNULL))
        lines: dict[int, Any] = {}
        try:
            for _ in range(count):
                connection, _ = listener.accept()
                connection.settimeout(WAIT_S)
                reader = connection.makefile("r")
                lines[json.loads(reader.readline())["rank"]] = (connection, reader)
        finally:
            listener.close()
            if len(lines) < count:
                self._end()
        self._lines = [lines[rank] for rank in range(count)]

    def tell(self, **order: Any) -> list[Any]:
        """Give all ranks an order; their answers. Raises RuntimeError where a rank failed, with its words."""
        for connection, _ in self._lines:
            connection.sendall((json.dumps(order) + "\n").encode())
        answers = []
        for rank, (_, reader) in enumerate(self._lines):
            line = reader.readline()
            answers.append(json.loads(line) if line else {"error": f"rank {rank} ended"})
        failed = [one["error"] for one in answers if "error" in one]
        if failed:
            raise RuntimeError(failed[0])
        return [one["found"] for one in answers]

    def _end(self) -> None:
        for process in self._processes:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for connection, reader in self._lines:
            reader.close()
            connection.close()
        self._end()


def emulated(machine: Cluster, name: str, bits_per_s: float, way_s: float) -> Cluster:
    """Two of this machine's hosts, joined by such a link."""
    near = machine.levels[0].link
    link = NetworkLink(
        way_s, bits_per_s / 8, efficiency=0.95, protocol="gloo", source="shaped; efficiency: Ethernet's and TCP's headers, and tokens"
    )
    levels = (ClusterLevel("node", INSIDE, near), ClusterLevel("cluster", HOSTS, link))
    return replace(machine, name=f"{HOSTS} hosts of {INSIDE}, {name}", levels=levels)


def measure(arguments: Sequence[str], quick: bool, target: Path | None, say: Callable[[str], None]) -> int:
    """Every network, every algorithm. Exit 2 where networks cannot be made. `quick`: one network, three sizes, no page."""
    machine = probe()
    found: list[tuple[str, Case]] = []
    sizes = SIZES[1:4] if quick else SIZES
    try:
        with Hosts(HOSTS) as hosts, Ranks(hosts) as ranks:
            for name, rate in [("1 Gbit/s", NETWORKS["1 Gbit/s"])] if quick else NETWORKS.items():
                hosts.shape(rate)
                way = ranks.tell(do="latency")[0]
                cluster = emulated(machine, name, rate, way)
                seconds: dict[tuple[int, str], list[float]] = {}
                for turn in range(1 if quick else 3):
                    for algorithm in (*NAMES[turn:], *NAMES[:turn]):
                        answers = ranks.tell(do="times", name=algorithm, sizes=sizes, budget_s=1.0)
                        for alike in zip(*answers, strict=True):
                            slowest = [max(call) for call in zip(*(calls for _, calls in alike), strict=True)]
                            seconds.setdefault((alike[0][0], algorithm), []).extend(slowest)
                shape = GroupShape(HOSTS * INSIDE)
                times, chosen = algorithm_times(cluster, shape), choose_algorithms(cluster, shape)
                measured = {key: median(values) for key, values in seconds.items()}
                predicted = {(size, algorithm): times[algorithm](size) for size, algorithm in measured}
                auto = {size: chosen.algorithm_for(size) if chosen.algorithm_for(size) in NAMES else NATIVE for size in sizes}
                case = Case(HOSTS * INSIDE, name, measured, predicted, auto)
                found.append((name, case))
                gains = [f"{bytes_word(size)} {measured[size, 'ring'] / measured[size, HIERARCHICAL]:.2f}" for size in sizes]
                expected = [f"{predicted[size, 'ring'] / predicted[size, HIERARCHICAL]:.2f}" for size in sizes]
                say(f"{name} (a message {1e6 * way:.0f} us): {verdict(case)}")
                say(f"  flat ring / hierarchical: {', '.join(gains)}; predicted {', '.join(expected)}")
    except NoNetworks as error:
        say(f"hosts are not measured: {error}")
        return 2
    about = header(command("collectives", arguments), versions(("torch",)))
    about["versions"] = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    if target is not None:
        rows = [
            {"network": name, "bytes": size, "algorithm": algorithm, "measured_s": s, "predicted_s": case.predicted[size, algorithm]}
            for name, case in found for (size, algorithm), s in case.measured.items()
        ]  # fmt: skip
        target.write_text(json.dumps({"about": about, "rows": rows}))
    if quick:
        say("\n".join(line for _, case in found for line in lines_of(case)))
        return 0
    parts = ["# Benchmark: all-reduce between emulated hosts", "", "Written by the run itself.", "", "| | |", "| --- | --- |"]
    parts += [f"| {key} | {f'`{value}`' if key == 'command' else value} |" for key, value in about.items()]
    parts += ["", INTRO, ""]
    for name, case in found:
        gains = [f"{bytes_word(size)} {case.measured[size, 'ring'] / case.measured[size, HIERARCHICAL]:.2f} "
                 f"(predicted {case.predicted[size, 'ring'] / case.predicted[size, HIERARCHICAL]:.2f})" for size in case.sizes]  # fmt: skip
        parts += [f"## {name}", "", f"Flat ring over hierarchical: {', '.join(gains)}. {verdict(case)}.", "", *lines_of(case), ""]
    PAGE.write_text("\n".join(parts))
    say(f"written: {PAGE.relative_to(ROOT)}")
    return 0


def serve(path: str) -> None:
    """One rank: does what it is told over lines of JSON, until they end."""
    world = join(os.environ, "cpu")
    torch.set_num_threads(1)
    line = Line(path, world.rank, world.num_ranks)
    while (order := line.receive())["do"] != "stop":
        try:
            found: Any = (
                latency_s(world) if order["do"] == "latency" else rank_times(world, order["name"], order["sizes"], order["budget_s"])
            )
            line.send({"found": found})
        except Exception as error:
            line.send({"error": f"{type(error).__name__}: {error}"})
    os._exit(0)  # groups may wait for each other at exit; nothing is left to save


if __name__ == "__main__":
    serve(sys.argv[1])
