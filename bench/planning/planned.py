"""`scripts/bench planned`: is the plan that shardwise chooses the fastest of all plans? Models times emulated networks, every plan run.

Each rank runs on a host of its own (a network namespace) with cores of its own, joined to the others by links of a shaped rate. The
cluster that shardwise plans for is this machine as `shardwise probe` measured it, with collectives and messages measured over those
links. Then every
layout that runs is run: a few steps each, those near the best again in turn. Needs root. Out: a table, docs/benchmarks/planned.md,
`--json FILE`.

Not emulated: latency (the kernel's links have tens of microseconds), and memory and caches that hosts would not share.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from rich.console import Console

from bench.common.document import command, header, versions
from bench.common.processes import ROOT, end
from shardwise.cluster.cluster import Cluster, MeasuredTable
from tests.support.networks import INTERFACE, Hosts, NoNetworks

PAGE = ROOT / "docs" / "benchmarks" / "planned.md"
PORT = 29511
BUILD_S = 120.0
NETWORKS: dict[str, float | None] = {"200 Mbit/s": 2e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10, "unshaped": None}
SIZES = (64, 4096, 65536, 262144, 1 << 20, 4 << 20, 16 << 20)
# Threads: the cores of a host. Nothing is lent: this machine's cores are of several hosts here.
LIMITS = "precision=float32 recompute=none offload=none zero<=1 microbatches<=4 chunks<=2 lend=off threads={}"
HOPELESS = 1.6  # times the best so far: after one step a plan that takes longer is not run again
NEAR = 1.15  # times the best: plans that are measured again, in turn
WITHIN = 1.05  # what the chosen plan may take against the best
TRIALS = 3  # plans of which `shardwise plan --trials` would take the fastest by the clock


@dataclass(frozen=True, slots=True)
class Work:
    """A model and its batch."""

    name: str
    model: str
    batch: int
    sequence: int | None = None


MODELS = (
    Work("GPT", "gpt:layers=4,hidden=256,heads=4,sequence=64,vocabulary=1000", 8),
    Work("GPT, wide and short", "gpt:layers=2,hidden=768,heads=8,sequence=16,vocabulary=512", 8),
    Work("GPT, long and narrow", "gpt:layers=8,hidden=96,heads=4,sequence=128,vocabulary=100", 8),
    Work("Llama", "llama:layers=4,hidden=256,heads=8,kv_heads=4,inner=768,sequence=64,vocabulary=1000", 8),
    Work("BERT", "bert:layers=4,hidden=256,heads=4,sequence=64,vocabulary=1000,mask_id=4", 8),
    Work("T5", "t5:layers=2,hidden=256,heads=4,head_dim=64,inner=1024,sequence=32,vocabulary=1000", 8),
    Work("ViT", "vit:image=32,patch=4,classes=100,hidden=192,layers=4,heads=6", 8),
    Work("ResNet-18", "resnet-18:image=32,classes=100", 16),
    Work("Wide-ResNet", "wide-resnet-tiny:base=32,image=64,classes=100", 8),
    Work("ResNet-v2", "resnet-v2-tiny:blocks=3,image=32", 8),
    Work("U-Net", "unet:base=16,depth=3,image=64,classes=4", 4),
    Work("LSTM", "lstm:vocabulary=1000,sequence=32,hidden=256,layers=2", 16),
    Work("mixture of experts", "moe-tiny:hidden=128,inner=512,sequence=64,layers=4", 8),
    Work("mixer of convolutions and tokens", "examples/mixer.py:make", 16),
    Work("GPT-2 of Hugging Face", "hf:tests/torch/hf/gpt2.json", 8, 32),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One plan: seconds a step, predicted and measured (the median)."""

    layout: str
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One model on one network. `ratio`: the chosen plan's time over the best one's; `runs`: the fastest first."""

    case: str
    network: str
    chosen: str
    chosen_s: float
    predicted_s: float
    best: str
    best_s: float
    ratio: float
    runs: tuple[Run, ...] = ()
    note: str = ""


class Ranks:
    """The processes on the hosts. A context manager; the guard of the hosts ends them where this process cannot."""

    def __init__(self, hosts: Hosts, threads: int) -> None:
        from shardwise.world import matmul_backend
        from shardwise.world.launch.launch import ALLOCATOR

        self._folder = tempfile.mkdtemp(prefix="shardwise-planned-")
        path = os.path.join(self._folder, "orders")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._listener.settimeout(BUILD_S)
        self._processes = []
        for i in range(hosts.count):
            env = {
                **os.environ, **ALLOCATOR, **matmul_backend.matmul_environment(os.environ, "cpu"), "RANK": str(i), "WORLD_SIZE": str(hosts.count),  # noqa: E501
                "LOCAL_RANK": "0", "MASTER_PORT": str(PORT), "MASTER_ADDR": hosts.address(0), "GLOO_SOCKET_IFNAME": INTERFACE,
                "SHARDWISE_TRANSPORT": "gloo", "OMP_NUM_THREADS": str(threads),
            }  # fmt: skip
            words = hosts.command(i, [sys.executable, "-m", "bench.planning.planned_rank", path])
            self._processes.append(subprocess.Popen(words, env=env, cwd=ROOT, stdin=subprocess.DEVNULL))
        lines: dict[int, Any] = {}
        for _ in range(hosts.count):
            connection, _ = self._listener.accept()
            connection.settimeout(BUILD_S)
            reader = connection.makefile("r")
            lines[json.loads(reader.readline())["rank"]] = (connection, reader)
        self._lines = [lines[i] for i in range(hosts.count)]

    def tell(self, ranks: int, **order: Any) -> list[dict[str, Any]]:
        """Give the first `ranks` an order; their answers.

        Raises:
            RuntimeError: a rank failed, with its words.
        """
        for connection, _ in self._lines[:ranks]:
            connection.sendall((json.dumps(order) + "\n").encode())
        answers = []
        for rank, (_, reader) in enumerate(self._lines[:ranks]):
            line = reader.readline()
            answers.append(json.loads(line) if line else {"ok": False, "error": f"rank {rank} ended"})
        failed = [a["error"] for a in answers if not a["ok"]]
        if failed:
            raise RuntimeError(failed[0])
        return answers

    def close(self) -> None:
        for connection, _ in self._lines:
            connection.close()
        end(self._processes)
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def emulated(machine: Cluster, ranks: Ranks, hosts: Hosts, name: str, bits_per_s: float | None) -> Cluster:
    """The machine with the links of this network, measured now."""
    hosts.shape(bits_per_s)
    most = (bits_per_s or 1e11) / 8 * 0.7  # bytes of at most about a second
    found = ranks.tell(hosts.count, do="links", sizes=[s for s in SIZES if s <= most])[0]["tables"]
    tables = [
        MeasuredTable(t["collective"], 2 if t["collective"] == "send" else hosts.count, tuple((s, x) for s, x in t["points"]))
        for t in found
    ]
    node = machine.levels[0]
    return replace(machine, name=name, tables=tuple(tables), levels=(replace(node, link=replace(node.link, protocol="gloo")),))


@dataclass
class Plans:
    """Every plan of one model on one cluster."""

    work: Work
    cluster: Cluster
    limits: str
    graph: Any = None
    every: dict[str, tuple[str, float]] = field(default_factory=dict)  # [layout] -> (plan as text, predicted seconds)
    chosen: str = ""

    @classmethod
    def of(cls, work: Work, cluster: Cluster, count: int, graph: Any = None) -> Plans:
        """What the search chooses, and every layout of one rank and of `count` ranks that it could have chosen."""
        from shardwise.cost.step_time.heterogeneous import build_pricer
        from shardwise.errors import ShardwiseError
        from shardwise.plan.layout import Layout
        from shardwise.plan.plan_file import format_plan
        from shardwise.run.rank_model.model_source import ModelSource
        from shardwise.solve.constraints import parse_constraints
        from shardwise.solve.search import search
        from shardwise.solve.space import iterate_layouts
        from shardwise.zoo.resolve import resolve

        limits = LIMITS.format(max(1, cluster.num_devices // count))
        found = cls(work, cluster, limits)
        if graph is None:
            subject = resolve(work.model, work.batch, work.sequence)
            graph = ModelSource.from_model(subject.make).capture(subject.batch(work.batch), subject.loss, work.batch).graph
        found.graph = graph
        pricer = build_pricer(graph, cluster, work.batch, 2)
        # Cores that a host does not have are not planned with: 1 rank, or one a host.
        plan = search(graph, cluster, work.batch, work.model, limits)
        found.chosen = str(plan.layout)
        assert plan.prediction is not None
        found.every[found.chosen] = (format_plan(plan), plan.prediction.step_time_s)
        for layout in iterate_layouts(cluster, work.batch, parse_constraints(limits), len(pricer.cuts) + 1):
            if layout.num_ranks not in (1, count) or str(layout) in found.every:
                continue
            try:
                one = search(graph, cluster, work.batch, work.model, layout=Layout.parse(str(layout)))
            except ShardwiseError:
                continue
            if one.prediction is not None:
                found.every[str(layout)] = (format_plan(one), one.prediction.step_time_s)
        return found


def measure(plans: Plans, ranks: Ranks, count: int, threads: int, rounds: int, say: Any) -> Row:
    """Run every plan, the promising first; those near the best again, in turn."""
    seconds: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    kept: list[str] = []
    work = plans.work

    def size(layout: str) -> int:
        return 1 if "data=1 tensor=1 pipeline=1" in layout else count

    def run(layout: str, steps: int) -> list[float]:
        answers = ranks.tell(size(layout), do="run", key=layout, steps=steps)
        return [max(times) for times in zip(*(a["seconds"] for a in answers), strict=True)]

    def drop(layout: str) -> None:
        ranks.tell(size(layout), do="drop", key=layout)

    for layout, (text, _) in sorted(plans.every.items(), key=lambda item: (item[0] != plans.chosen, item[1][1])):
        n = size(layout)
        try:
            ranks.tell(n, do="build", key=layout, model=work.model, batch=work.batch, sequence=work.sequence, plan=text, threads=threads)
            first = run(layout, 2)
        except RuntimeError as error:
            failed[layout] = str(error)
            ranks.tell(count, do="drop", key=layout)
            continue
        best = min((median(times) for times in seconds.values()), default=float("inf"))
        seconds[layout] = first[1:]
        if first[1] < HOPELESS * best:
            seconds[layout] += run(layout, 3)
        if median(seconds[layout]) <= NEAR * best or layout == plans.chosen:
            kept.append(layout)
        else:
            drop(layout)
    best = min(median(times) for times in seconds.values())
    final = [k for k in kept if k == plans.chosen or median(seconds[k]) <= NEAR * best]
    for k in set(kept) - set(final):
        drop(k)
    again: dict[str, list[float]] = {k: [] for k in final}
    for turn in range(rounds):
        for k in final[turn % len(final) :] + final[: turn % len(final)]:
            again[k] += run(k, 5)[2:]  # what another plan used meanwhile is to come back first
    for k in final:
        seconds[k] = again[k]
        drop(k)
    runs = sorted((Run(k, plans.every[k][1], median(v)) for k, v in seconds.items()), key=lambda r: r.measured_s)
    chosen = next((r for r in runs if r.layout == plans.chosen), None)
    note = "; ".join(f"{k}: {why}" for k, why in failed.items())
    if chosen is None:
        return Row(work.name, plans.cluster.name, plans.chosen, 0.0, plans.every[plans.chosen][1], runs[0].layout, runs[0].measured_s, 0.0,
                   tuple(runs), note)  # fmt: skip
    best_run = runs[0]
    say(f"{work.name}, {plans.cluster.name}: {chosen.measured_s / best_run.measured_s:.3f}  chosen {chosen.layout} "
        f"{1e3 * chosen.measured_s:.1f} ms (predicted {1e3 * chosen.predicted_s:.1f}), best {best_run.layout} "
        f"{1e3 * best_run.measured_s:.1f}; {len(runs)} plans{f'; failed: {note}' if note else ''}")  # fmt: skip
    return Row(work.name, plans.cluster.name, chosen.layout, chosen.measured_s, chosen.predicted_s, best_run.layout, best_run.measured_s,
               chosen.measured_s / best_run.measured_s, tuple(runs), note)  # fmt: skip


COLUMNS = ("model", "network", "chosen", "ms a step", "predicted", "best of all", "ms a step", "chosen / best", "plans run")


def tried(row: Row) -> float:
    """What the choice of `shardwise plan --trials` by the times that were measured here comes to, over the best."""
    from shardwise.plan.layout import Layout
    from shardwise.plan.plan import LayoutCandidate, MemoryBreakdown, Prediction
    from shardwise.train.trials import index_of_first_fastest, select_distinct_candidates

    measured = {Layout.parse(r.layout): r.measured_s for r in row.runs}
    runs = sorted(row.runs, key=lambda r: (r.layout != row.chosen, r.predicted_s))
    every = [LayoutCandidate(Layout.parse(r.layout), Prediction(r.predicted_s, 0.0, 0.0, MemoryBreakdown())) for r in runs]
    seconds = [measured[one.layout] for one in select_distinct_candidates(every, TRIALS)]
    return seconds[index_of_first_fastest(seconds)] / row.best_s


def markdown(about: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """The page."""
    done = [r for r in rows if r.ratio]
    close = [r for r in done if r.ratio <= WITHIN]
    models = {r.case for r in done}
    lines = ["# The plan chosen, against the best of all plans run", "", INTRO, "", "| | |", "|---|---|"]
    lines += [f"| {key} | {value if isinstance(value, str) else json.dumps(value)} |" for key, value in about.items()]
    lines += ["", f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for r in rows:
        cells = (
            r.case, r.network, _short(r.chosen), _ms(r.chosen_s), _ms(r.predicted_s), "the same" if r.best == r.chosen else _short(r.best),
            _ms(r.best_s), f"{r.ratio:.2f}" if r.ratio else r.note, str(len(r.runs)),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    if done:
        mean = geometric_mean([r.ratio for r in done])
        lines += ["", f"Within 5 % of the best in {len(close)} of {len(done)} cases, over {len(models)} models; "
                  f"the geometric mean of chosen / best is {mean:.3f}."]  # fmt: skip
        after = [tried(r) for r in done]
        near = sum(ratio <= WITHIN for ratio in after)
        lines.append(f"Were the fastest of {TRIALS} plans taken by the clock, as `shardwise plan --trials {TRIALS}` does on a machine (here by "  # noqa: E501
                     f"the times that were measured anyhow), it were {near} of {len(done)}, and {geometric_mean(after):.3f}.")  # fmt: skip
    errors = [abs(run.predicted_s / run.measured_s - 1) for r in done for run in r.runs]
    if errors:
        mean = sum(errors) / len(errors)
        lines.append(f"Predicted against measured over all {len(errors)} plans run: mean absolute error {100 * mean:.0f} %, "
                     f"median {100 * median(errors):.0f} %.")  # fmt: skip
    return "\n".join([*lines, ""])


INTRO = f"""Written by `scripts/bench planned`. Every rank runs on a host of its own, emulated by a network namespace with cores of its
own, and hosts are joined by links of the rate that is named (token buckets; what the kernel's own links do is called unshaped). shardwise
plans for this machine as `shardwise probe` measured it, with collectives measured over these links; then all layouts that run are run,
under
`{LIMITS.format("(cores of a host)")}`: one rank alone on its host,
and one rank a host with data, tensor and pipeline ranks, microbatches and schedules. Times are medians; plans within
{100 * (NEAR - 1):.0f} % of the best were measured again in turn."""


def _short(layout: str) -> str:
    return " ".join(word for word in layout.split() if not word.endswith("=1") or word.startswith("zero")) or "one rank"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def main(arguments: Sequence[str]) -> int:
    """Read the options, measure, tell. Exit 4 where a chosen plan is over 5 % slower than the best; 2 where networks cannot be made."""
    p = argparse.ArgumentParser(prog="scripts/bench planned", description="the plan chosen, against all run", allow_abbrev=False)
    p.add_argument("--json", metavar="FILE", type=Path, help="write header and rows to FILE")
    p.add_argument("--models", nargs="+", metavar="WORD", default=[""], help="models whose name has one of these words")
    p.add_argument("--networks", nargs="+", choices=NETWORKS, default=["200 Mbit/s", "1 Gbit/s", "10 Gbit/s"])
    p.add_argument("--ranks", type=int, default=2, help="hosts, one rank on each")
    p.add_argument("--rounds", type=int, default=3, help="times that the plans near the best are measured again, three steps each")
    p.add_argument("--fresh", action="store_true", help="probe this machine again first")
    p.add_argument("--seconds", type=float, default=1100.0, help="begin no further case after so long")
    given = p.parse_args(list(arguments))
    console = Console(soft_wrap=True)
    rows: list[Row] = []
    try:
        with Hosts(given.ranks) as hosts:
            cases(given, hosts, console, rows)
    except NoNetworks as error:
        print(f"shardwise: {error}", file=sys.stderr)
        return 2
    about = header(command("planned", arguments), versions(("torch",)),
                   load=f"{os.getloadavg()[0]:.1f} processes at the end, those measured included")  # fmt: skip
    console.print(markdown(about, rows), markup=False)
    if given.json:
        given.json.write_text(json.dumps({"header": about, "rows": [interface(r) | asdict(r) for r in rows]}, indent=1) + "\n")
    if given.models == [""] and len(rows) >= 12:
        PAGE.write_text(markdown(about, rows))
    return 0 if rows and all(r.ratio and r.ratio <= WITHIN for r in rows) else 4


def interface(row: Row) -> dict[str, Any]:
    """The keys that all benchmarks have."""
    return {"case": f"{row.case}, {row.network}", "shardwise": row.chosen_s, "peer": row.best_s, "peer_name": "the best of all plans run",
            "ratio": row.best_s / row.chosen_s if row.chosen_s else None, "unit": "s"}  # fmt: skip


def cases(given: argparse.Namespace, hosts: Hosts, console: Console, rows: list[Row]) -> None:
    """Add to `rows` all models on all networks. One that cannot be planned or run has its reason for a note; one whose ranks are gone ends
    the run, with the rows that there are."""
    from shardwise.cluster.probe import probe
    from shardwise.errors import ShardwiseError

    machine = probe(fresh=given.fresh)
    threads = max(1, machine.num_devices // given.ranks)
    wanted = [w for w in MODELS if any(word.lower() in w.name.lower() for word in given.models)]
    graphs: dict[str, Any] = {}
    began = time.monotonic()
    with Ranks(hosts, threads) as ranks:
        for network in given.networks:
            cluster = emulated(machine, ranks, hosts, network, NETWORKS[network])
            for work in wanted:
                if time.monotonic() - began > given.seconds:
                    console.print(f"{work.name}, {network}: left out, {given.seconds:.0f} s are over", markup=False)
                    continue
                try:
                    plans = Plans.of(work, cluster, given.ranks, graphs.get(work.name))
                    graphs[work.name] = plans.graph
                    rows.append(measure(plans, ranks, given.ranks, threads, given.rounds, lambda text: console.print(text, markup=False)))
                except (ShardwiseError, RuntimeError, OSError) as error:
                    console.print(f"{work.name}, {network}: {type(error).__name__}: {error}", markup=False)
                    rows.append(Row(work.name, network, "", 0.0, 0.0, "", 0.0, 0.0, (), f"{type(error).__name__}: {error}"))
                    if isinstance(error, OSError):
                        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
