"""`scripts/validate blind`: published training steps that nothing was fitted to, beside what `shardwise plan` predicts of their layouts.

In: `blind_2023_2025.csv` (source, model, batch, layout, published tokens a second and GPU, and memory where published). Out:
docs/benchmarks/blind.md. Each row is priced by the function behind `shardwise plan --layout`, with the efficiency set that stands for the
software of its source by name, chosen in `SOURCES` before any error was seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from bench.validate.rows import table
from bench.validate.training import Run, Source
from shardwise.plan.layout import Layout

HERE = Path(__file__).parent
TABLE = "blind_2023_2025.csv"
MEGATRON = "Megatron-Core, TransformerEngine"
SOURCES = {
    each.name: each
    for each in (
        Source("torchtitan 2025-06 vanilla", "hgx-h100-96", "@torchtitan-vanilla", "PyTorch FSDP2 and tensor parallelism, compiled"),
        Source("torchtitan 2025-06 async", "hgx-h100-96", "@torchtitan", "the same with async tensor parallelism"),
        Source("torchtitan 2025-06 H200", "hgx-h200", "@torchtitan", "PyTorch FSDP2, compiled"),
        Source("fms-fsdp A100", "p4de.24xlarge", "@torch-compiled", "PyTorch FSDP, compiled"),
        Source("fms-fsdp H100", "dgx-h100", "@torch-compiled", "PyTorch FSDP, compiled; 800 Gbit/s a machine", 100e9),
        Source("NeMo 24.07 further", "dgx-h100", "@h100-megatron-core", MEGATRON),
        Source("NeMo 24.03 long sequences", "dgx-h100", "@h100-megatron-core", MEGATRON),
        Source("Megatron-Bridge 25.09 to 26.06", "dgx-h100", "@h100-megatron-core", MEGATRON),
        Source("llm-foundry A100-40", "dgx-a100-40", "", "PyTorch FSDP of 2023, 16-bit sums of gradients"),
        Source("llm-foundry A100-80", "dgx-a100-80", "", "PyTorch FSDP of 2023"),
        Source("llm-foundry H100 fp8", "dgx-h100", "", "PyTorch FSDP of 2023, TransformerEngine's linear layers"),
    )
}


def read_runs() -> list[Run]:
    """Read the rows of the table."""
    return [_run_of(row) for row in table(HERE, TABLE)]


def _run_of(row: Mapping[str, str]) -> Run:
    source, devices, batch = SOURCES[row["source"]], int(row["devices"]), int(row["batch"])
    sequence = int(row["model"].partition("sequence=")[2].partition(",")[0])
    seconds = batch * sequence / (devices * float(row["tokens_per_s_per_gpu"]))
    memory = float(row["gib"]) * 2**30 if row["gib"] else math.nan
    return Run(source, row["title"], row["model"], batch, devices, source.node, Layout.parse(row["layout"]), seconds, memory)
