"""`scripts/validate blind`: published training steps that nothing was fitted to, beside what `shardwise plan` predicts of their layouts.

In: `blind_2023_2025.csv` (source, model, batch, layout, published tokens a second and GPU, memory where published, and what was predicted
first). Out: docs/benchmarks/blind.md. Each row is priced by the function behind `shardwise plan --layout`, with the efficiency set that
stands for the software of its source by name, chosen in `SOURCES` before any error was seen.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.validate.rows import table
from bench.validate.training import ROOT, Outcome, Run, Source, price_runs
from shardwise.plan.layout import Layout

HERE = Path(__file__).parent
GIB = 2**30
PAGE = ROOT / "docs" / "benchmarks" / "blind.md"
TABLE = "blind_2023_2025.csv"
MEGATRON = "Megatron-Core, TransformerEngine"
SOURCES = {
    each.name: each
    for each in (
        Source("torchtitan 2025-06 vanilla", "hgx-h100-96", "@torchtitan-vanilla", "PyTorch FSDP2 and tensor parallelism, compiled"),
        Source("torchtitan 2025-06 async", "hgx-h100-96", "@torchtitan", "the same with async tensor parallelism"),
        Source("torchtitan 2025-06 H200", "hgx-h200", "@torchtitan", "PyTorch FSDP2, compiled"),
        Source("torchtitan 2024-12 further", "hgx-h100-96", "@torchtitan", "PyTorch FSDP2, compiled"),
        Source("torchtitan 2024-12 2D vanilla", "hgx-h100-96", "@torchtitan-vanilla", "PyTorch FSDP2 and tensor parallelism, compiled"),
        Source("torchtitan 2024-12 2D async", "hgx-h100-96", "@torchtitan", "the same with async tensor parallelism"),
        Source("fms-fsdp A100", "p4de.24xlarge", "@torch-compiled", "PyTorch FSDP, compiled"),
        Source("fms-fsdp H100", "dgx-h100", "@torch-compiled", "PyTorch FSDP, compiled; 800 Gbit/s a machine", 100e9),
        Source("NeMo 24.07 further", "dgx-h100", "@h100-megatron-core", MEGATRON),
        Source("NeMo 24.03 long sequences", "dgx-h100", "@h100-megatron-core", MEGATRON),
        Source("Megatron-Bridge 25.09 to 26.06", "dgx-h100", "@h100-megatron-core", MEGATRON),
        Source("llm-foundry A100-40", "dgx-a100-40", "@llm-foundry", "PyTorch FSDP of 2023, 16-bit sums of gradients"),
        Source("llm-foundry A100-80", "dgx-a100-80", "@llm-foundry", "PyTorch FSDP of 2023"),
        Source("llm-foundry H100 fp8", "dgx-h100", "@llm-foundry", "PyTorch FSDP of 2023, TransformerEngine's linear layers"),
    )
}
HEAD = """# A blind test: published training steps that nothing was fitted to

Written by `scripts/validate blind` from `bench/validate/blind_2023_2025.csv`, whose head names every source. The rows and the set of the
catalogue that stands for each source were committed before any of them was priced (2026-11-29, 23:02 UTC); *first* is what was predicted
then, committed at 23:10, *now* what is predicted after the changes below. **Only *first* is blind.** Rows of torchtitan 2024-12 were first
priced at 23:39, after most of the changes: their *first* is of then. llm-foundry was first priced with the set `torch`, and the layouts of
NeMo and Megatron-Bridge without `gradients=bfloat16`. All runs fitted in memory, so a refused one is an error.

| source | machine and set of the catalogue | what it ran |
|---|---|---|"""
CHANGES = """\
Not blind in full are: the share of fused products of the set `torch-symmetric`, which was taken from one pair of these rows and prices none
of them; the constants of `torch`, fitted to 7 B of llm-foundry on A100-80 and H100; the sets of NeMo and torchtitan, chosen with other
versions of their pages in view.

## What was changed after errors had been seen

Each is a term that was missing, from the code or the scripts of the source; no optimisation ran over rows, but which terms to look for, and
to keep, was decided with errors in view. Two figures rest on no code: that the backward of attention reaches 0.6 of its forward's rate in
torchtitan too, and that copies run inside of fused operators as outside. Those marked * change shardwise's own predictions.

| off first | what was missing | where it is known from |
|---|---|---|
| torchtitan, H200: -30 %, memory +60 %; 8 B with tensor ranks: -5 to -18 % | per-operator checkpointing saves every second product's \
result and no 8-bit one; gathers run again | `_save_list`, `_custom_policy` of torchtitan e7c0cae9 |
| H200 | the kernel of attention is the software's, not the device's: FlashAttention-2 on Hopper | `_init_backend` there |
| torchtitan | clocks at 500 W slow attention as they slow products*; backward of attention at 0.6, as fms-fsdp's set has it | the rule of \
`H100-96`, applied to one figure of two |
| torchtitan with tensor ranks | samples come before positions, so what is gathered or scattered is copied; scatters of sums of several \
products' results cannot fuse with a product; 8-bit operands are gathered in 8 bits | DTensor, torch's `micro_pipeline_tp` |
| fms-fsdp: +7 to +18 % | full recomputation ends before a layer's last product, whose result backward does not read, and backward \
gathers a layer's weights once | torch's compiler; FSDP wraps the checkpoint |
| fms-fsdp, 70 B refused | a compiler saves no norm or activation that it can make again from what is saved | torch's partitioner |
| NeMo and Megatron-Bridge: 10 of 26 refused, up to +17 % of the memory | TransformerEngine saves 8-bit operands and fused activations; \
gradients are summed in 16 bits, which the rows' layouts lacked | `grad_sync_dtype=bf16`, `grad_reduce_in_fp32=False` in their scripts |
| llm-foundry: 13 of 55 refused | the loss keeps logits in 16 bits and writes their gradient over them | MPT's `fused_crossentropy` |
| memory of torchtitan | gradients of the loss are of float32 logits; pipelines hold whole gradients until the last microbatch, and \
reduce behind nothing | `pred.float()`; torch's pipeline stages |
| 405 B over positions: memory that grows with their ranks | what stages send each other was counted whole on every rank* | our own error |

Not built: the cast before a gather reads only a rank's piece. It brings the six float8 rows with tensor ranks to -5 to +5 %, and the
pipelines of torchtitan (docs/benchmarks/training.md) from -5 and -8 to -9 and -12 %. It was left out by error, not by mechanism: with it
the bias of that source is -8.9 %, for a reason that was not found. Not modelled either: what the allocator reserves beyond what is used,
|x| that torchtitan saved for scales in 2024 (its 8 B in float8: memory -25 to -33 %), and why GPTs of NeMo with several samples a
microbatch (5 B, 8 B, 20 B) take 12 to 17 % longer. One row of llm-foundry (1 B on 32 GPUs, -20 %)
ran a fifth slower than the same model on 16, 64 and 128 GPUs."""


@dataclass(frozen=True, slots=True)
class BlindRow:
    """A run, and what was predicted first: seconds, and bytes of the fullest rank."""

    run: Run
    first_s: float
    first_bytes: float

    @property
    def first_error(self) -> float:
        """Relative error of the first prediction."""
        return self.first_s / self.run.seconds - 1


@dataclass(frozen=True, slots=True)
class BlindOutcome:
    """A row with what is predicted now."""

    row: BlindRow
    now: Outcome

    @property
    def first_fits(self) -> bool:
        """Whether the first prediction fitted in the memory in which the present one is judged."""
        limit = self.row.run.source.cluster(self.row.run.devices).memory_of(self.row.run.layout.num_ranks)
        return self.row.first_bytes <= limit


def read_rows() -> list[BlindRow]:
    """Read the rows of the table."""
    return [BlindRow(_run_of(row), float(row["first_s"]), float(row["first_gib"]) * GIB) for row in table(HERE, TABLE)]


def _run_of(row: Mapping[str, str]) -> Run:
    source, devices, batch = SOURCES[row["source"]], int(row["devices"]), int(row["batch"])
    sequence = int(row["model"].partition("sequence=")[2].partition(",")[0])
    seconds = batch * sequence / (devices * float(row["tokens_per_s_per_gpu"]))
    memory = float(row["gib"]) * GIB if row["gib"] else math.nan
    return Run(source, row["title"], row["model"], batch, devices, source.node, Layout.parse(row["layout"]), seconds, memory)


def format_summary(outcomes: Sequence[BlindOutcome]) -> list[str]:
    """Return the lines of the table of errors by source, first and now."""
    lines = [
        "| source | rows | first: mean abs. error % | bias % | refused | now: mean abs. error % | bias % | refused |",
        "|---" * 8 + "|",
    ]
    groups = {name: [each for each in outcomes if each.now.run.source.name == name] for name in SOURCES}
    groups["all but torchtitan 2024-12"] = [each for each in outcomes if not each.now.run.source.name.startswith("torchtitan 2024-12")]
    for name, mine in groups.items():
        if not mine:
            continue
        cells = []
        for errors, refused in (
            ([each.row.first_error for each in mine], sum(not each.first_fits for each in mine)),
            ([each.now.error for each in mine], sum(not each.now.fits for each in mine)),
        ):
            cells += [f"{_mean(abs(e) for e in errors):.1f}", f"{_mean(errors):+.1f}", str(refused)]
        lines.append(f"| {name} | {len(mine)} | {' | '.join(cells)} |")
    return lines


def _mean(errors: Iterable[float]) -> float:
    found = [100 * e for e in errors]
    return sum(found) / len(found)


def _format_rows(outcomes: Sequence[BlindOutcome]) -> list[str]:
    lines = [
        "| source | model | GPUs | layout | measured, s | first, s | off by | now, s | off by | published GiB | first | now |",
        "|---" * 12 + "|",
    ]
    for each in outcomes:
        run, row, now = each.now.run, each.row, each.now
        gib = "" if math.isnan(run.memory_bytes) else f"{run.memory_bytes / GIB:.1f}"
        fits = [f"{size / GIB:.1f}" if ok else f"**{size / GIB:.1f}**" for size, ok in (
            (row.first_bytes, each.first_fits), (now.memory_bytes, now.fits),
        )]  # fmt: skip
        lines.append(
            f"| {run.source.name} | {run.title} | {run.devices} | `{run.layout}` | {run.seconds:.3f} | {row.first_s:.3f} | "
            f"{row.first_error:+.1%} | {now.step_time_s:.3f} | {now.error:+.1%} | {gib} | {fits[0]} | {fits[1]} |"
        )
    return lines


def format_page(outcomes: Sequence[BlindOutcome]) -> str:
    """Return the page: what the sources ran, errors by source, what was changed, and every row; **bold**: more than the GPU has."""
    sources = dict.fromkeys(each.now.run.source for each in outcomes)
    return "\n".join([
        HEAD, *(f"| {each.name} | `{each.node}{each.stack}` | {each.software} |" for each in sources), "", "## By source", "",
        *format_summary(outcomes), "", *([CHANGES, ""] if CHANGES else []), "## All rows", "",
        "**Bold** where more is counted than the GPU has.", "", *_format_rows(outcomes), "",
    ])  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Price all rows and write the page."""
    argparse.ArgumentParser(prog="scripts/validate blind", description=__doc__).parse_args(list(arguments))
    rows = read_rows()
    outcomes = [BlindOutcome(row, now) for row, now in zip(rows, price_runs(row.run for row in rows), strict=True)]
    PAGE.write_text(format_page(outcomes))
    print("\n".join(format_summary(outcomes)))
    return 0
