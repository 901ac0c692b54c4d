"""`scripts/bench tensor-plans`: shardwise's cuts over two tensor ranks beside the plans that transformers ships, model by model.

In: every configuration class with a `base_model_tp_plan`, made tiny (`bench.common.tiny_models`). Out: for each the weights that both cut
    and
where, bytes and collectives of a step as shardwise counts them under shardwise's own cuts and under the library's, the steps that
shardwise predicts;
with `--clock` both by the clock on two ranks. In the terminal, in `--json FILE` and in docs/benchmarks/tensor-plans.md.

The library's plan says nothing of many weights (embeddings); there both have shardwise's cuts. Not compared: weights of experts, which are
tensors of three dimensions, and entries that cut no weight by a dimension.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.common.document import command, header, versions
from bench.common.measure import in_turns
from bench.common.processes import ROOT
from bench.common.tiny_models import model_of, planned, resolved
from shardwise.api import plan as make_plan
from shardwise.cost.devices.kernel_memory import ProcessorMemory
from shardwise.cost.memory.memory import Inventory
from shardwise.cost.operators.build_inventory import OperatorFacts, build_sharded_inventory
from shardwise.model.graph import Graph
from shardwise.model.sharding.sharding import Sharding
from shardwise.plan.ir.patterns import expand_shards
from shardwise.plan.ir.placement import P, R, Shard
from shardwise.plan.ir.transition import sent_fraction
from shardwise.plan.plan import Plan
from shardwise.run.engine import Engine
from shardwise.run.rank_model.model_source import CachedModelSource, shard_graph
from shardwise.world.launch.launch import launch
from shardwise.world.world import World

PAGE = ROOT / "docs" / "benchmarks" / "tensor-plans.md"
LAYOUT, CLUSTER = "tensor=2", "1xcpu-2"
SCALE, BATCH, SEQUENCE = 4, 8, 64  # 256 features
DIMS: dict[str, tuple[int, int | None]] = {  # of a weight, and of its bias
    "colwise": (0, 0), "colwise_gather_output": (0, 0), "rowwise": (1, None), "rowwise_split_input": (1, None),
    "embedding_rowwise": (0, None), "embedding_colwise": (1, None),
}  # fmt: skip
INTRO = """transformers ships a hand-written tensor plan with many configuration classes (`base_model_tp_plan`). Each of these models is
made small by its configuration alone (256 features, two layers or one of each kind, 8 samples of 64 tokens) and planned for
`tensor=2`; the weights that the library's plan cuts are compared, but for those of experts. `equal`: shardwise cuts every one of them along
the same dimension. `cheaper`: it does not, and sends no more bytes a step by its own count, or is predicted to be no slower where it
sends more. `dearer`: neither. The figures are shardwise's cuts first, the library's second; what the library's plan leaves open is cut as
shardwise does.

Where they differ it is mostly this: with shardwise's cuts the residual stream lies in pieces of features, norms work on pieces, and only
their sums of squares are summed over ranks. Then a product in front of the stream may be cut by its outputs (its input is gathered) as
well as by its inputs (its output is reduced and scattered): the same bytes. And what stands between norm and product is
computed once in all instead of once a rank."""


@dataclass(frozen=True)
class Row:
    """One model. `differ`: weight (layers as `*`), what the library says, the dimension that shardwise cuts or None. Bytes a rank sends
    in a
    step; a pair is (shardwise's, the library's). `ratio`: the library's time over shardwise's by the clock, 0 where it was not taken."""

    model: str
    status: str
    note: str = ""
    compared: int = 0
    differ: tuple[tuple[str, str, int | None], ...] = ()
    sent_bytes: tuple[float, float] = (0.0, 0.0)
    collectives: tuple[int, int] = (0, 0)
    predicted_s: tuple[float, float] = (0.0, 0.0)
    ratio: float = 0.0


def library_cuts(model: Any, cls: Any, kind: Any, names: Sequence[str]) -> dict[str, tuple[str, int | None]]:
    """By parameter that the library's plan names: its word, and the dimension that is cut."""
    base = getattr(kind, "base_model_prefix", "")
    prefix = f"{base}." if base and hasattr(model, base) else ""
    words = {prefix + name: word for name, word in cls.base_model_tp_plan.items()} | dict(getattr(kind, "_tp_plan", None) or {})
    patterns = [(re.compile(re.escape(name).replace(r"\*", r"\d+") + "$"), word) for name, word in words.items() if word in DIMS]
    found: dict[str, tuple[str, int | None]] = {}
    for name in names:
        module, _, leaf = name.rpartition(".")
        for pattern, word in patterns:
            if leaf in ("weight", "bias") and pattern.match(module):
                found[name] = word, DIMS[word][leaf == "bias"]
    return found


def counted(graph: Graph, sharding: Sharding) -> tuple[float, int]:
    """(bytes that a rank sends in a step, collectives on the way), forward and backward."""
    n = sharding.sizes["tensor"]
    parts = build_sharded_inventory(OperatorFacts(Inventory.of(graph, ProcessorMemory), frozenset()), sharding)
    share = {
        "all_reduce": sent_fraction(P, R, n),
        "all_gather": sent_fraction(Shard(0), R, n),
        "reduce_scatter": sent_fraction(P, Shard(0), n),
    }
    share["all_to_all"] = sent_fraction(Shard(0), Shard(1), n)
    entries = [*parts.forward[1], *parts.backward[1]]
    late = sum(share["all_reduce"] * graph.tensors[v].size_bytes for v, axes in sharding.gradient_axes.items() if "tensor" in axes)
    sent = sum(share.get(parts.collectives[i].name, 0.0) * parts.collectives[i].size_bytes for i in entries)
    return float(sent + late), len(entries)


def compare(name: str, cls: Any, clock: int = 0) -> Row:
    """The row of one model; `clock`: rounds by the clock where cuts differ."""
    try:
        kind, _ = model_of(cls)
        subject = resolved(name, cls, SCALE, SEQUENCE)
        source, batch = CachedModelSource.from_model(subject.make), subject.batch(BATCH)
        graph = source.capture(batch, subject.loss, BATCH).graph
        planned_ = make_plan(subject.make, batch, loss=subject.loss, cluster=CLUSTER, layout=LAYOUT, source=source)
    except Exception as error:  # whatever the library raises at sizes that it was not meant for
        return Row(name, "not compared", f"{type(error).__name__}: {' '.join(str(error).split())[:150]}")
    names = [v.name for v in (*graph.parameters, *graph.buffers)]
    ours = dict(expand_shards(planned_.shards, names)["tensor"])
    theirs = library_cuts(source.model, cls, kind, [v.name for v in graph.parameters if v.value in graph.last_reader_index])
    if not theirs:
        return Row(name, "not compared", "the plan names no weight of two dimensions that a text alone reads")
    differ = {name: word for name, (word, dim) in theirs.items() if ours.get(name) != dim}
    if not differ:
        return Row(name, "equal", compared=len(theirs))
    cut = {k: d for k, d in ours.items() if k not in theirs} | {k: dim for k, (_, dim) in theirs.items() if dim is not None}
    plans = [replace(planned_, shards=(("tensor", tuple((k, c[k]) for k in names if k in c)),)) for c in (ours, cut)]
    sent, collectives = zip(*(counted(graph, shard_graph(one, graph)) for one in plans), strict=True)
    again = make_plan(subject.make, batch, loss=subject.loss, cluster=CLUSTER, like=plans[1], source=source)
    assert planned_.prediction is not None
    assert again.prediction is not None
    steps = planned_.prediction.step_time_s, again.prediction.step_time_s
    cheaper = sent[0] <= sent[1] * 1.001 or steps[0] <= steps[1] * 1.001
    rows = dict.fromkeys((re.sub(r"\.\d+\.", ".*.", k), word, ours.get(k)) for k, word in differ.items())
    ratio = clocked(plans, batch, subject.loss, source, clock) if clock else 0.0
    return Row(name, "cheaper" if cheaper else "dearer", "", len(theirs), tuple(rows), sent, collectives, steps, ratio)


def clocked(plans: Sequence[Plan], batch: Any, loss: Any, source: CachedModelSource, rounds: int) -> float:
    """The median over rounds of the second plan's time over the first's, on two ranks that take turns."""
    return float(launch(lambda world: _take_turns(world, plans, batch, loss, source, rounds), 2)[0])


def _take_turns(world: World, plans: Sequence[Plan], batch: Any, loss: Any, source: CachedModelSource, rounds: int) -> float:
    torch.set_num_threads(1)
    ours, theirs = (Engine(one, source, batch, loss, world, "adamw", seed=0) for one in plans)
    ways = {"ours": partial(ours.step, batch), "theirs": partial(theirs.step, batch)}
    return median(took["theirs"] / took["ours"] for took in in_turns(ways, rounds, 3, world.world_group.barrier))


def run(words: Sequence[str] = (), clock: int = 0) -> Iterator[Row]:
    """Rows of the models whose names are given; of all by default."""
    for name, cls in planned(*words).items():
        yield compare(name, cls, clock)


def said(row: Row) -> str:
    """A row as Markdown."""
    if row.status in ("equal", "not compared"):
        return f"| {row.model} | {row.status} | {row.compared or ''} | {row.note.replace('|', '/')} | | | | |"
    words = "; ".join(f"`{name}` {word}, shardwise {'whole' if dim is None else f'dim {dim}'}" for name, word, dim in row.differ)
    sent = " / ".join(f"{one / 1e6:.2f}" for one in row.sent_bytes)
    steps = " / ".join(f"{one * 1e3:.1f}" for one in row.predicted_s)
    clock = f"{row.ratio:.2f}" if row.ratio else ""
    collectives = " / ".join(map(str, row.collectives))
    return f"| {row.model} | {row.status} | {row.compared} | {words} | {sent} | {collectives} | {steps} | {clock} |"


def document(rows: Sequence[Row], top: Mapping[str, Any]) -> str:
    """The page."""
    counts = {status: sum(row.status == status for row in rows) for status in ("equal", "cheaper", "dearer", "not compared")}
    lines = [
        "# Tensor plans beside those that transformers ships",
        "",
        INTRO,
        "",
        f"`{top['command']}` on {top['machine']}, {top['date']}, ",
    ]
    lines[-1] += ", ".join(f"{name} {version}" for name, version in top["versions"].items()) + "."
    lines += ["", f"{len(rows)} classes: " + ", ".join(f"{n} {status}" for status, n in counts.items()) + ".", ""]
    lines += ["| model | | weights compared | where they differ | MB sent | collectives | ms predicted | time of theirs / ours |"]
    lines += ["|---|---|---|---|---|---|---|---|", *map(said, rows)]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Run what the arguments choose; 4 where shardwise's cuts are dearer than the library's anywhere."""
    parser = argparse.ArgumentParser(prog="scripts/bench tensor-plans", description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("models", nargs="*", help="model types, as llama; all by default")
    parser.add_argument("--clock", type=int, default=0, metavar="N", help="N rounds by the clock on two ranks where cuts differ")
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    given = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = []
    for row in run(given.models, given.clock):
        rows.append(row)
        print(said(row), flush=True)
    top = header(command("tensor-plans", arguments), versions(("torch", "transformers")))
    if given.json:
        Path(given.json).write_text(json.dumps({**top, "rows": [asdict(row) for row in rows]}, indent=1) + "\n", encoding="utf-8")
    if not given.models:
        PAGE.write_text(document(rows, top), encoding="utf-8")
    return 4 if any(row.status == "dearer" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
