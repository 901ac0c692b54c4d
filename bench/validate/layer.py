"""One layer of the 22B model on 8 A100 (Korthikanti et al. 2022, Table 4): the efficiency set "a100-megatron".

Forward and backward of a layer in the middle of shardwise's own captured graph, tensor=8, microbatch 4, with and without sequence
parallelism and recomputation. Ten numbers, few constants: what they do not tell apart is taken from "a100-megatron-deepspeed".
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.validate.fit import fit
from bench.validate.models import gpt
from bench.validate.rows import Row, table
from shardwise.cluster.cluster import Cluster
from shardwise.cost.calibration.efficiency import EfficiencySet, stack_of
from shardwise.cost.step import Pricer
from shardwise.plan.layout import Layout

NAME = "a100-megatron"
HIDDEN, HEADS, SEQUENCE, BATCH, TENSOR = 6144, 64, 2048, 4, 8
PLAIN = Layout(tensor=TENSOR, precision="float16")
LAYOUTS = {
    "Baseline no recompute": PLAIN,
    "Sequence Parallelism": replace(PLAIN, sequence_parallel="on"),
    "Baseline with recompute": replace(PLAIN, recompute="full"),
    "Selective Recompute": replace(PLAIN, recompute="selective"),
    "Selective + Sequence": replace(PLAIN, recompute="selective", sequence_parallel="on"),
}
START = {"matmul": (0.75, 0.1), "traffic": (1.3, 0.3), "score_traffic": (1.1, 0.3), "tensor_overlap": (0.5, 1.0)}
BOUNDS = {"matmul": (0.3, 0.95), "tensor_overlap": (0.01, 1.0)}


def pricer() -> Pricer:
    graph = gpt(HIDDEN, 4, HEADS, SEQUENCE, 51200, BATCH)
    return Pricer(graph, Cluster.parse("dgx-a100-80"), BATCH)


def seconds(pricer: Pricer, layout: Layout) -> tuple[float, float]:
    """(forward, backward) of one layer: what a stage of three has beyond a stage of two."""
    sites = ["layers.1.attention_norm/layer_norm", "layers.3.attention_norm/layer_norm"]
    wide = replace(layout, pipeline=3)
    costs = pricer.stages(wide, sites)
    return costs[1].forward_s / 2, costs[1].backward_s / 2


def measured(folder: Path) -> dict[str, tuple[float, float]]:
    return {
        r["experiment"]: (1e-3 * float(r["forward_ms"]), 1e-3 * float(r["backward_ms"])) for r in table(folder, "layer_22b_a100_ms.csv")
    }


def errors(base: Pricer, stack: EfficiencySet, wanted: dict[str, tuple[float, float]]) -> list[float]:
    """Forward and backward of every experiment in turn, relative."""
    priced = base.with_changes(stack)
    found = {name: seconds(priced, LAYOUTS[name]) for name in wanted}
    return [p / m - 1 for name in wanted for p, m in zip(found[name], wanted[name], strict=True)]


def fitted(base: Pricer, stack: EfficiencySet, wanted: dict[str, tuple[float, float]]) -> EfficiencySet:
    def residuals(found: dict[str, float]) -> np.ndarray:  # type: ignore[type-arg]
        own = np.log1p(np.array(errors(base, replace(stack, **found), wanted)))
        return np.concatenate([own, [0.02 * np.log(found[k] / begin) / width for k, (begin, width) in START.items()]])

    return replace(stack, **fit(residuals, {k: begin for k, (begin, _) in START.items()}, limit=0.12, bounds=BOUNDS))


def rows(folder: Path) -> list[Row]:
    base, wanted = pricer(), measured(folder)
    stack = stack_of(base.cluster.device, NAME)
    held: list[float] = []
    for name in wanted:
        rest = {k: v for k, v in wanted.items() if k != name}
        held += errors(base, fitted(base, stack, rest), {name: wanted[name]})
    name = "one layer of 22B, forward and backward"
    return [Row.of(name, "frozen", errors(base, stack, wanted)), Row.of(name, "leave one experiment out", held)]


def refit(folder: Path) -> str:
    base = pricer()
    found = fitted(base, stack_of(base.cluster.device, NAME), measured(folder))
    return "\n".join(f"megatron {key} = {getattr(found, key):.4g}" for key in START)
