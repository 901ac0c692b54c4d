"""Bubbles of 1F1B: the published stage times and transfers through shardwise's own schedule and clock.

Qi et al. 2023, Tables 5 and 6: a bubble is the part of the pipeline's time in which a stage does not compute. Nothing is fitted. GPipe's
throughputs (Huang et al. 2019, Table 2) have no stage times: what is compared is the speedup over 2 partitions that its schedule gives
for equal stages and free transfers, (m + 1)/2 against (m + p - 1)/p, for the evenly cut transformer with 32 microbatches. With fewer
the published batches differ with the partitions, and AmoebaNet's stages are uneven.
"""

from __future__ import annotations

from pathlib import Path

from bench.validate.rows import Row, table
from shardwise.plan.ir.program import ComputeOp
from shardwise.schedules import build
from shardwise.simulate.clock import simulate

NAME = "1F1B bubbles, zero-bubble paper"


def bubble(p: int, m: int, forward: float, backward: float, transfer: float) -> float:
    """The part of the time in which a stage is idle, for equal stages."""
    timeline = simulate(build("1f1b", p, m), lambda action: forward if action.op is ComputeOp.F else backward, lambda *_: transfer)
    return 1 - m * (forward + backward) / timeline.total_s


def bubbles(folder: Path) -> list[tuple[str, float, float]]:
    """(which, published, simulated) of every row."""
    found = []
    for row in table(folder, "zero_bubble_stage_times_and_bubbles.csv"):
        forward, back, weights, transfer = (float(row[key]) for key in ("T_F_ms", "T_B_ms", "T_W_ms", "T_comm_ms"))
        p, m = int(row["p"]), int(row["m"])
        found.append((f"{row['model']} p={p} m={m}", float(row["bubble_1F1B"]), bubble(p, m, forward, back + weights, transfer)))
    return found


def rows(folder: Path) -> list[Row]:
    found = bubbles(folder)
    same = sum(f"{a:.4f}" == f"{b:.4f}" for _, a, b in found)
    return [
        Row.of(NAME, "nothing fitted", [b / a - 1 for _, a, b in found], f"{same} of {len(found)} the same to four decimals"),
        Row.of("GPipe speedups, Transformer-48 on TPU, 32 microbatches", "nothing fitted", speedups(folder)),
    ]


def speedups(folder: Path) -> list[float]:
    """Relative errors of the speedup over two partitions, of the evenly cut transformer."""
    table_rows = [r for r in table(folder, "gpipe_throughput.csv") if r["model"].startswith("Transformer") and r["hw"] == "TPU"]
    errors = []
    for row in table_rows:
        p, m = int(row["K_partitions"]), int(row["M_microbatches"])
        if p == 2 or m < 32:
            continue
        base = next(r for r in table_rows if r["K_partitions"] == "2" and r["M_microbatches"] == row["M_microbatches"])
        measured = float(row["normalized_throughput"]) / float(base["normalized_throughput"])
        errors.append(_gpipe(2, m) / _gpipe(p, m) / measured - 1)
    return errors


def _gpipe(p: int, m: int) -> float:
    """Time of m microbatches of a model of one second forward and two backward, in p stages."""
    timeline = simulate(build("gpipe", p, m), lambda action: (1.0 if action.op is ComputeOp.F else 2.0) / p, lambda *_: 0.0)
    return timeline.total_s
