"""`scripts/bench collectives`: the all-reduce of ranks on one host through shared memory, beside gloo, MPI and plain copying.

Out: a table for each number of ranks, targets, `--json FILE`, and docs/benchmarks/collectives.md. shardwise's transports take turns size by
size within one run of processes, MPI's processes run between; round after round, in an order that turns. A call is timed on rank 0; the
figures are medians over all calls, and the fastest tenth, which other work on the machine disturbs least. Exit status 0 also where a
target is missed. `--algorithms` and `--hosts` are `bench.collectives.collectives_programs` and `bench.collectives.collectives_hosts`. Not
measured: other
collectives, and what an all-reduce costs the computation beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.collectives import collectives_hosts, collectives_programs
from bench.common.arithmetic import Verdict
from bench.common.document import command, header, versions
from bench.common.processes import ROOT, ContenderFailed, free_port, missing, peers_python
from shardwise.world.launch.launch import Launcher
from shardwise.world.launch.watch import LaunchOptions
from shardwise.world.world import World

PAGE = ROOT / "docs" / "benchmarks" / "collectives.md"
SIZES = tuple(4**i << 10 for i in range(1, 9))  # 4 KiB to 64 MiB
LARGEST = 256 << 20
BUILD_S = 300.0  # DeepSpeed compiles its operator when it is first used
GLOO, BUFFER, PRIVATE, MPI, COPY = "gloo", "shared buffer", "shared memory", "MPI", "copy"
DEEPSPEED = "DeepSpeed"
TRANSPORTS = {GLOO: "gloo", BUFFER: "shared_memory", PRIVATE: "shared_memory"}
Times = dict[tuple[int, str], list[float]]

INTRO = """\
All-reduce of float32, one thread a rank. `shared buffer`: the tensor lies in memory from `Group.shared_buffer`, where gradients can lie,
and is summed in place; `shared memory`: any tensor, through slots. gloo and these go through
`Group`, its record included; MPI is called directly, by mpi4py, and DeepSpeed's shared-memory operator (`inference_all_reduce`, float32) by
its own name. `copy`: every rank copies as many bytes within its own memory, all at
once, until the last has. Bus bandwidth is 2 (n - 1) / n times the bytes over the time, as nccl-tests count it. Each cell: median (fastest
tenth)."""


def rank_calls(world: World, sizes: list[int], contenders: list[str], calls: int, budget_s: float) -> list[list[Any]]:
    """[bytes, contender, seconds of each call on this rank] for every size and contender; runs in every rank."""
    found = []
    store = world._store
    worlds = {
        kind: World(world.rank, world.num_ranks, store, generation=100 + i, transport=kind, timeout_s=120.0)
        for i, kind in enumerate(sorted(set(TRANSPORTS.values())))
    }
    for size in sizes:
        count = size // 4
        source, target = torch.ones(count), torch.ones(count)
        run: dict[str, Callable[[], object]] = {}
        for name in contenders:
            group = worlds[TRANSPORTS[name]].world_group
            group.connect()
            x = group.shared_buffer(count, torch.float32) if name == BUFFER else torch.zeros(count)
            x.fill_(0.0)

            def reduced(group: Any = group, x: Any = x) -> None:
                group.all_reduce(x)

            run[name] = reduced
        run[COPY] = lambda target=target, source=source: target.copy_(source)
        seconds: dict[str, list[float]] = {name: [] for name in run}
        repeats = max(2, min(calls, int(budget_s / (20e-6 + size / 4e8))))
        quick = worlds["shared_memory"].world_group
        for name, call in run.items():
            call()
            for _ in range(repeats):
                if name == COPY:
                    quick.barrier()
                began = time.perf_counter()
                call()
                if name == COPY:
                    quick.barrier()  # all have copied, also those that had to wait for a core
                seconds[name].append(time.perf_counter() - began)
            quick.barrier()
        found += [[size, name, times] for name, times in seconds.items()]
    return found


MPI_RANK = """
import json, sys, time
import numpy
from mpi4py import MPI
everyone, sizes, calls, budget = MPI.COMM_WORLD, *json.loads(sys.argv[1])
found = []
for size in sizes:
    x = numpy.zeros(size // 4, dtype=numpy.float32)
    everyone.Allreduce(MPI.IN_PLACE, x, MPI.SUM)
    times = []
    for _ in range(max(2, min(calls, int(budget / (20e-6 + size / 4e8))))):
        began = time.perf_counter()
        everyone.Allreduce(MPI.IN_PLACE, x, MPI.SUM)
        times.append(time.perf_counter() - began)
    found.append([size, times])
if everyone.rank == 0:
    print(json.dumps([" ".join(map(str, MPI.get_vendor())), found]))
"""


def mpi_calls(num_ranks: int, sizes: Sequence[int], calls: int, budget_s: float) -> list[list[Any]]:
    """As `rank_calls`, of MPI alone."""
    python = peers_python()
    command = [str(Path(python).with_name("mpiexec")), "-n", str(num_ranks), python, "-c", MPI_RANK, json.dumps([sizes, calls, budget_s])]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    _, found = json.loads(done.stdout.splitlines()[-1])
    return [[size, MPI, times] for size, times in found]


DEEPSPEED_RANK = """
import json, os, sys, time
import torch
import deepspeed
from deepspeed import comm
sizes, calls, budget = json.loads(sys.argv[1])
deepspeed.init_distributed(dist_backend="gloo", verbose=False)
backend = comm.comm.cdb
if getattr(backend, "shm_comm_op", None) is None or not hasattr(torch.ops.deepspeed, "inference_all_reduce_"):
    sys.exit("its operator was not built")
if getattr(backend, "shm_vector_kernel_level", 1) < 1:
    sys.exit("this processor has no AVX2, without which it falls back to gloo")
found = []
for size in sizes:
    x = torch.ones(size // 4)
    comm.inference_all_reduce(x)
    if float(x[-1]) != comm.get_world_size():
        sys.exit(f"its sum of {size} bytes is {float(x[-1])}, not {comm.get_world_size()}")
    x.zero_()
    times = []
    for _ in range(max(2, min(calls, int(budget / (20e-6 + size / 4e8))))):
        began = time.perf_counter()
        comm.inference_all_reduce(x)
        times.append(time.perf_counter() - began)
    found.append([size, times])
    torch.distributed.barrier()
if comm.get_rank() == 0:
    print(json.dumps(found))
"""


def deepspeed_calls(num_ranks: int, sizes: Sequence[int], calls: int, budget_s: float) -> list[list[Any]]:
    """As `rank_calls`, of DeepSpeed's operator alone. Raises ContenderFailed with the reason where it cannot be built or run."""
    python = peers_python()
    known = {
        **os.environ, "WORLD_SIZE": str(num_ranks), "LOCAL_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu",
        "PATH": os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")]),
    }  # fmt: skip
    command = [python, "-c", DEEPSPEED_RANK, json.dumps([list(sizes), calls, budget_s])]
    with contextlib.ExitStack() as files:
        running = []
        for rank in range(num_ranks):
            out, err = (files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
            env = {**known, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            running.append((subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err), out, err))
        try:
            for process, _, err in running:
                if process.wait(BUILD_S):
                    err.seek(0)
                    raise ContenderFailed((err.read().strip().splitlines() or ["it ended without a word"])[-1])
            running[0][1].seek(0)
            found = json.loads(running[0][1].read().splitlines()[-1])
        except subprocess.TimeoutExpired:
            raise ContenderFailed(f"it was not built, or did not end, within {BUILD_S:.0f} s") from None
        finally:
            for process, _, _ in running:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    return [[size, DEEPSPEED, times] for size, times in found]


def measured(
    num_ranks: int, sizes: Sequence[int], rounds: int, budget_s: float, with_mpi: bool, why_not: dict[str, str], say: Callable[[str], None]
) -> Times:
    """Seconds of all calls by (bytes, contender). `why_not`: reasons of contenders that are left out; one that fails gets its own."""
    times: Times = {}
    names = [GLOO, BUFFER, PRIVATE]
    with Launcher() as launcher:
        for number in range(rounds):
            order = [*names[number % len(names) :], *names[: number % len(names)]]
            found = launcher.launch(
                rank_calls, num_ranks, list(sizes), order, 200, budget_s, options=LaunchOptions(threads=1, timeout_s=300.0)
            )[0]
            if with_mpi:
                found = found + mpi_calls(num_ranks, sizes, 200, budget_s)
            if DEEPSPEED not in why_not:
                try:
                    found = found + deepspeed_calls(num_ranks, sizes, 200, budget_s)
                except ContenderFailed as error:
                    why_not[DEEPSPEED] = str(error)
                    say(f"{DEEPSPEED} is not measured: {error}")
            for size, name, seconds in found:
                times.setdefault((size, name), []).extend(seconds)
            say(f"{num_ranks} ranks: round {number + 1} of {rounds}")
    return times


def at(times: Sequence[float], part: float) -> float:
    """The value below which `part` of the times lie.

    >>> at([3.0, 1.0, 2.0], 0.5)
    2.0
    """
    return sorted(times)[int(part * (len(times) - 1))]


def judged(num_ranks: int, times: Times, part: float) -> list[Verdict]:
    """The targets, at the size where each is worst. `part`: 0.5 for medians."""
    sizes = sorted({size for size, _ in times})
    label = f"{num_ranks} ranks, {'median' if part == 0.5 else 'fastest tenth'}"

    def worst(name: str, least: float, ours: str, theirs: str, chosen: Sequence[int], factor: float = 1.0) -> Verdict | None:
        ratios = {s: at(times[s, theirs], part) * factor / at(times[s, ours], part) for s in chosen if (s, theirs) in times}
        if not ratios:
            return None
        size = min(ratios, key=lambda s: ratios[s])
        both = f"{micro(at(times[size, ours], part))} and {micro(at(times[size, theirs], part))}"
        return Verdict(name, least, ratios[size] >= least, ratios[size], f"{label}, {bytes_word(size)}", both)

    found = []
    for ours in (BUFFER, PRIVATE):
        found += [
            worst(f"{ours}, beside gloo", 5.0, ours, GLOO, sizes),
            worst(f"{ours}, beside gloo at 4 KiB", 20.0, ours, GLOO, sizes[:1]),
            worst(f"{ours}, beside MPI", 1.0, ours, MPI, sizes),
            worst(f"{ours}, beside DeepSpeed", 1.0, ours, DEEPSPEED, sizes),
            worst(f"{ours}, beside 3 copies, from 1 MiB", 1.0, ours, COPY, [s for s in sizes if s >= 1 << 20], 3.0),
        ]
    return [verdict for verdict in found if verdict is not None]


def bytes_word(size: int) -> str:
    """4 KiB, 1 MiB."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def micro(seconds: float) -> str:
    """Microseconds, or milliseconds from ten on."""
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-2 else f"{seconds * 1e3:.1f} ms"


def lines_of(num_ranks: int, times: Times) -> tuple[list[str], list[list[str]]]:
    """(column names, rows) of one number of ranks."""
    names = [name for name in (GLOO, MPI, DEEPSPEED, PRIVATE, BUFFER, COPY) if any(n == name for _, n in times)]
    columns = ["bytes", *names, "gloo / shared memory", "gloo / shared buffer", "bus GB/s of the buffer", "copied GB/s"]
    rows = []
    for size in sorted({s for s, _ in times}):
        half = {name: at(times[size, name], 0.5) for name in names if (size, name) in times}
        row = [bytes_word(size)]
        row += [f"{micro(half[name])} ({micro(at(times[size, name], 0.1))})" if name in half else "" for name in names]
        row += [f"{half[GLOO] / half[name]:.1f}" for name in (PRIVATE, BUFFER)]
        row += [f"{2 * (num_ranks - 1) / num_ranks * size / half[BUFFER] / 1e9:.1f}", f"{size / half[COPY] / 1e9:.1f}"]
        rows.append(row)
    return columns, rows


def verdict_lines(verdicts: Sequence[Verdict]) -> tuple[list[str], list[list[str]]]:
    """(column names, rows) of the targets."""
    rows = [[v.target, f"{v.at_least:g}", f"{v.ratio:.2f}", v.word, v.case, v.why] for v in verdicts]
    return ["target", "at least", "ratio", "", "worst at", "shardwise's and the other's time"], rows


def page(about: Mapping[str, Any], found: Mapping[int, Times], verdicts: Sequence[Verdict], why_not: Mapping[str, str]) -> str:
    """docs/benchmarks/collectives.md."""

    def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
        return ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns), *("| " + " | ".join(row) + " |" for row in rows), ""]

    parts = ["# Benchmark: collectives on one host", "", "Written by the run itself.", ""]
    parts += table(["", ""], [[key, f"`{value}`" if key == "command" else str(value)] for key, value in about.items()])
    parts += [INTRO, ""]
    if why_not:
        parts += ["Not measured: " + "; ".join(f"{name} ({reason})" for name, reason in why_not.items()) + ".", ""]
    parts += ["## Targets", "", *table(*verdict_lines(verdicts))]
    for num_ranks, times in found.items():
        parts += [f"## {num_ranks} ranks", "", *table(*lines_of(num_ranks, times))]
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="scripts/bench collectives", description="all-reduce on one host beside gloo and MPI", allow_abbrev=False
    )
    p.add_argument("--json", metavar="FILE", type=Path, help="write header, times and targets to FILE")
    p.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    p.add_argument("--rounds", type=int, default=4)
    p.add_argument("--quick", action="store_true", help="2 ranks, three sizes, one round; does not write the page")
    p.add_argument(
        "--algorithms", action="store_true", help="every algorithm as a program, measured beside predicted, and auto beside the best"
    )
    p.add_argument("--hosts", action="store_true", help="emulated hosts: hierarchical beside flat rings (needs root)")
    given = p.parse_args(arguments)
    console = Console()
    counts = [2] if given.quick else given.ranks
    if given.algorithms:
        return collectives_programs.measure(arguments, counts, given.quick, given.json, console.print)
    if given.hosts:
        return collectives_hosts.measure(arguments, given.quick, given.json, console.print)
    load = os.getloadavg()[0]
    why_not = {
        name: reason for name, package in ((MPI, "mpi4py"), (DEEPSPEED, "deepspeed")) if (reason := missing(peers_python(), (package,)))
    }
    for name, reason in why_not.items():
        console.print(f"{name} is not measured: {reason}; scripts/bench train --install-peers installs it")
    sizes = (4 << 10, 1 << 20, 16 << 20) if given.quick else (*SIZES, LARGEST)
    found = {
        num_ranks: measured(num_ranks, sizes, 1 if given.quick else given.rounds, 0.1, MPI not in why_not, why_not, console.print)
        for num_ranks in counts
    }
    verdicts = [v for num_ranks, times in found.items() for part in (0.5, 0.1) for v in judged(num_ranks, times, part)]
    about = header(command("collectives", arguments), versions(("torch", "mpi4py", "mpich", "deepspeed")))
    about["other work"] = f"load average {load:.1f} before the run; what is above 0 took cores and memory bandwidth from all contenders"
    about["versions"] = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    for title, (columns, rows) in [
        *((f"{num_ranks} ranks", lines_of(num_ranks, times)) for num_ranks, times in found.items()),
        ("Targets", verdict_lines(verdicts)),
    ]:
        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if given.json:
        times_json = [[n, size, name, seconds] for n, times in found.items() for (size, name), seconds in times.items()]
        given.json.write_text(json.dumps({"about": about, "times": times_json, "targets": verdict_lines(verdicts)[1]}))
    if not given.quick:
        PAGE.write_text(page(about, found, verdicts, why_not))
        console.print(f"written: {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
