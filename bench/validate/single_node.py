"""Iterations of GPTs on one A100 node: the efficiency set "a100-megatron-deepspeed", fitted, and held out by fold, hidden size and GPUs.

What is priced is shardwise's own captured graph under each row's layout, stages of equally many layers, fp16. Fits see `SEEN` rows
of those that are not held out, drawn at random, and begin at round figures; each constant is drawn towards its figure a little, so that
those that the rows do not tell apart stay physical. The table's tensor-parallel rows have a padded vocabulary, the others GPT's own
50,257 rows, whose odd number keeps the products with it off the matrix units: that fits them, the table does not say it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.validate.fit import fit
from bench.validate.models import even, gpt, padded
from bench.validate.rows import Row, lines
from shardwise.cluster.cluster import Cluster
from shardwise.cost.calibration.efficiency import EfficiencySet, stack_of
from shardwise.cost.step import Pricer
from shardwise.plan.layout import Layout

NAME = "single node, 1,440 GPT iterations"
VOCABULARY = 50257
SEEN = 90
# Constants to begin with, and how far (as a logarithm) each may go before it costs as much as a row that is 10 % off.
START = {
    "matmul": (0.8, 0.1), "operands": (0.7, 0.5), "traffic": (1.2, 0.25), "loss_traffic": (2.0, 0.4), "score_traffic": (1.0, 0.3),
    "unaligned": (0.4, 1.0), "launch_s": (5e-5, 1.0), "tensor": (1.3, 0.4), "accumulate_bytes": (6.0, 0.3), "microbatch_s": (5e-4, 1.0),
    "step_s": (3e-4, 1.0),
}  # fmt: skip
BOUNDS = {"matmul": (0.3, 0.95), "unaligned": (0.1, 1.0), "launch_s": (1e-5, 1e-4), "step_s": (1e-6, 1e-2)}


@dataclass(frozen=True, slots=True)
class Iteration:
    """One row of the table."""

    gpus: int
    batch: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    layout: Layout
    seconds: float


def read(folder: Path) -> list[Iteration]:
    found = []
    for line in lines(folder, "single_node_a100_iteration_ms.csv"):
        *numbers, ms = line.split(",")
        gpus, batch, micro, hidden, heads, layers, sequence, tensor, data, pipeline = map(int, numbers)
        layout = Layout(data=data, tensor=tensor, pipeline=pipeline, microbatches=batch // micro // data, precision="float16")
        found.append(Iteration(gpus, batch, hidden, heads, layers, sequence, layout, 1e-3 * float(ms)))
    return found


class Pricers:
    """A pricer for each graph, batch and efficiency set."""

    def __init__(self) -> None:
        self.cluster = Cluster.parse("dgx-a100-40")
        self.graphs: dict[tuple[int, ...], Pricer] = {}
        self.batches: dict[tuple[int, ...], Pricer] = {}

    def of(self, row: Iteration) -> Pricer:
        vocabulary = VOCABULARY if row.layout.tensor == 1 else padded(VOCABULARY, 8)
        key = (row.hidden, row.layers, row.heads, row.sequence, vocabulary)
        if key not in self.graphs:
            graph = gpt(row.hidden, row.layers, row.heads, row.sequence, vocabulary)
            self.graphs[key] = Pricer(graph, self.cluster, row.batch)
        if (*key, row.batch) not in self.batches:
            self.batches[*key, row.batch] = self.graphs[key].with_changes(batch_size=row.batch)
        return self.batches[*key, row.batch]

    def seconds(self, stack: EfficiencySet, rows: list[Iteration]) -> list[float]:
        made: dict[int, Pricer] = {}
        found = []
        for row in rows:
            base = self.of(row)
            pricer = made.setdefault(id(base), base.with_changes(stack))
            sites = even(row.layers, row.layout.pipeline)
            costs = pricer.stages(row.layout, sites)
            borders = [
                pricer.transfer_s(row.layout, pricer.boundary_bytes(row.layout, s.receives[0][1])) for s in pricer.stages_at(sites)[1:]
            ]
            found.append(pricer.predict(row.layout, costs, borders).step_time_s)
        return found


def fitted(pricers: Pricers, stack: EfficiencySet, rows: list[Iteration], rounds: int = 6, most: int = SEEN) -> EfficiencySet:
    """The efficiency set with the constants of `START` fitted to some of the rows."""
    order = np.random.default_rng(0).permutation(len(rows))[:most]
    seen = [rows[i] for i in sorted(order.tolist())]
    measured = np.array([row.seconds for row in seen])

    def residuals(found: dict[str, float]) -> np.ndarray:  # type: ignore[type-arg]
        errors = np.log(np.array(pricers.seconds(replace(stack, **found), seen)) / measured)
        drawn = [0.1 * np.log(found[k] / begin) / width for k, (begin, width) in START.items()]
        return np.concatenate([errors, drawn])

    start = {k: begin for k, (begin, _) in START.items()}
    return replace(stack, **fit(residuals, start, limit=0.12, rounds=rounds, bounds=BOUNDS))


def rows(folder: Path) -> list[Row]:
    table = read(folder)
    pricers = Pricers()
    frozen = stack_of(pricers.cluster.device, "a100-megatron-deepspeed")

    def errors(stack: EfficiencySet, some: list[Iteration]) -> list[float]:
        return [p / row.seconds - 1 for p, row in zip(pricers.seconds(stack, some), some, strict=True)]

    fold = np.random.default_rng(1).permutation(len(table)) % 5

    def held_out(group: Callable[[int], object]) -> list[float]:
        found: list[float] = []
        for one in sorted({group(i) for i in range(len(table))}, key=str):
            rest = [row for i, row in enumerate(table) if group(i) != one]
            found += errors(fitted(pricers, frozen, rest), [row for i, row in enumerate(table) if group(i) == one])
        return found

    return [
        Row.of(NAME, "frozen", errors(frozen, table)),
        Row.of(NAME, "5-fold", held_out(lambda i: int(fold[i]))),
        Row.of(NAME, "leave one hidden size out", held_out(lambda i: table[i].hidden)),
        Row.of(NAME, "leave one GPU count out", held_out(lambda i: table[i].gpus)),
    ]


def refit(folder: Path) -> str:
    """The fitted constants, to be written into the catalogue by hand."""
    pricers = Pricers()
    found = fitted(pricers, stack_of(pricers.cluster.device, "a100-megatron-deepspeed"), read(folder), rounds=10, most=240)
    return "\n".join(f"megatron-deepspeed {key} = {getattr(found, key):.4g}" for key in START)
