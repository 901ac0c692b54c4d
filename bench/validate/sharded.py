"""Training under sharded data parallelism (ZeRO-2 and 3 of FSDP) on A100 and H100: the efficiency set "torch".

Sixteen runs of one 7 B model calibrate what no table of single kernels says: what a step's load leaves of the rate of products, the
backward of attention, what moves bytes, and what the gathering of weights hides behind. Every other size, from 350 M to 70 B on 8 to 512
GPUs, is held out. PyTorch of 2023 with its flash attention on both devices; a run's time follows from its published utilisation. 16-bit
weights are gathered, gradients are scattered in 32 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from bench.validate.fit import fit
from bench.validate.models import gpt
from bench.validate.rows import Row, table
from shardwise.cluster.cluster import Cluster
from shardwise.cost.calibration.efficiency import EfficiencySet, stack_of
from shardwise.cost.step import Pricer
from shardwise.plan.layout import Layout

HELD = Path(__file__).with_name("fsdp_llm_foundry.csv")
MACHINES = {"a100_80gb": "dgx-a100-80", "h100_80gb": "dgx-h100"}
VOCABULARY = 50368
HELD_OUT = "frozen, size held out"
STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}
SEVEN = {"layers": 32, "hidden": 4096, "heads": 32}  # the model that calibrates
# Constants to begin with, and how far (as a logarithm) each may go before it costs as much as a row that is 10 % off. A device's own have
# its name before them.
START = {
    "a100_80gb.sustained": (0.95, 0.3), "h100_80gb.sustained": (0.8, 0.3), "h100_80gb.attention_peak": (0.5, 0.5),
    "attention_backward": (0.7, 0.5), "traffic": (1.0, 0.5), "contention": (0.5, 0.5),
}  # fmt: skip
BOUNDS = {"a100_80gb.sustained": (0.5, 1.0), "h100_80gb.sustained": (0.5, 1.0), "attention_backward": (0.3, 1.0), "contention": (0.01, 1.0)}


@dataclass(frozen=True, slots=True)
class Run:
    """One row of the tables."""

    model: str
    layers: int
    hidden: int
    heads: int
    sequence: int
    gpu: str
    batch: int
    layout: Layout
    seconds: float

    @classmethod
    def of(cls, row: Mapping[str, str]) -> Run:
        sizes = {key: int(row.get(key, SEVEN[key])) for key in SEVEN}
        sequence, gpus, batch = (int(row[key]) for key in ("sequence", "gpus", "global_batch"))
        gpu, again = row["gpu"], row["activation_checkpointing"] == "True"
        peak = Cluster.parse(MACHINES[gpu]).device.peak("bfloat16")
        flops = 6.0 * int(row["parameters"]) + 12.0 * sizes["layers"] * sizes["hidden"] * sequence
        layout = Layout(
            data=gpus, zero=STAGES[row["sharding"]], microbatches=int(row["accumulation"]), precision="bfloat16-mixed",
            recompute="full" if again else "none",
        )  # fmt: skip
        seconds = batch * sequence * flops / (gpus * peak * 0.01 * float(row["mfu_pct"]))
        return cls(row.get("model", "7b"), **sizes, sequence=sequence, gpu=gpu, batch=batch, layout=layout, seconds=seconds)


def seen(folder: Path) -> list[Run]:
    """The runs that calibrate."""
    return [Run.of(row) for row in table(folder, "fsdp_7b_h100_a100.csv")]


def unseen() -> list[Run]:
    """The runs that are held out."""
    return [Run.of(row) for row in table(HELD.parent, HELD.name)]


@cache
def pricer(run: Run) -> Pricer:
    gpus = run.layout.data
    graph = gpt(run.hidden, run.layers, run.heads, run.sequence, VOCABULARY, 2)
    return Pricer(graph, Cluster.parse(f"{max(1, gpus // 8)}x{MACHINES[run.gpu]}"), run.batch)


def stacks(found: Mapping[str, float]) -> dict[str, EfficiencySet]:
    """The set of each device with the constants `found`, those of both or its own."""
    made = {}
    for gpu, machine in MACHINES.items():
        mine = {key.rpartition(".")[2]: value for key, value in found.items() if key.startswith(gpu) or "." not in key}
        made[gpu] = replace(stack_of(Cluster.parse(machine).device), **mine)
    return made


def predicted(run: Run, stack: EfficiencySet) -> float:
    priced = pricer(run).with_changes(stack)
    return priced.predict(run.layout, priced.stages(run.layout), []).step_time_s


def errors(runs: Sequence[Run], found: Mapping[str, float]) -> list[float]:
    made = stacks(found)
    return [predicted(run, made[run.gpu]) / run.seconds - 1 for run in runs]


def fitted(runs: Sequence[Run]) -> dict[str, float]:
    def residuals(found: dict[str, float]) -> np.ndarray:  # type: ignore[type-arg]
        drawn = [0.1 * np.log(found[key] / begin) / width for key, (begin, width) in START.items()]
        return np.concatenate([np.log1p(np.array(errors(runs, found))), drawn])

    return fit(residuals, {key: begin for key, (begin, _) in START.items()}, limit=0.1, rounds=20, bounds=BOUNDS)


def rows(folder: Path) -> list[Row]:
    calibrating, others = seen(folder), unseen()
    held: list[float] = []
    for sequence in sorted({run.sequence for run in calibrating}):
        rest, out = ([run for run in calibrating if (run.sequence == sequence) is which] for which in (False, True))
        held += errors(out, fitted(rest))
    found = [
        Row.of("ZeRO-3, 7 B on A100 and H100", "frozen", errors(calibrating, {})),
        Row.of("ZeRO-3, 7 B on A100 and H100", "leave one sequence length out", held),
    ]
    for gpu, name in (("a100_80gb", "A100"), ("h100_80gb", "H100")):
        for zero in (3, 2):
            mine = [run for run in others if run.gpu == gpu and run.layout.zero == zero]
            for model in dict.fromkeys(run.model for run in mine):
                found.append(Row.of(f"ZeRO-{zero}, {model} on {name}", HELD_OUT, errors([run for run in mine if run.model == model], {})))
            if mine:
                found.append(Row.of(f"ZeRO-{zero}, all sizes on {name}", HELD_OUT, errors(mine, {})))
    return found


def refit(folder: Path) -> str:
    return "\n".join(f"torch {key} = {value:.4g}" for key, value in fitted(seen(folder)).items())
