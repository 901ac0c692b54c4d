"""docs/validation.md: the table of errors, and what to think of it."""

from __future__ import annotations

from pathlib import Path

from bench.planning.alpa import load, summary
from bench.validate.rows import Row

HEAD = """# How true the predictions are

Written by `scripts/validate`. Errors are of the predicted against the measured time, in percent of the measured: mean and largest
absolute error over n points. *frozen*: the constants in `src/shardwise/cluster/catalogue.toml`, with which `shardwise plan` prices; they
were
fitted to the same rows. The other protocols fit again without the rows that they then predict. The tables themselves are not part of
this project (`--data DIR` says where they are).

"""

NOTES = """
## What was fitted, and to what

- **Collectives** (`protocol.*`): start, hop and rate of each algorithm and protocol of NCCL, and the share of each link's bandwidth
  that large messages reach. The time is the least of them, as NCCL chooses. Where NCCL itself chose badly (64 to 128 KiB on 64 and 128
  GPUs: a larger message took half the time), the error is the largest of the table. With 16 H100 alone, the cost of a further node
  cannot be fitted: it keeps the A100's proportion.
- **a100-megatron-deepspeed** (`stack.*`): eleven constants of kernels, launches and the step, fitted to 240 of the 1,440 rows. Layers,
  heads, tensor, data and pipeline sizes, microbatches and their number come from the captured graph and the layout. The rows are smooth
  to 0.01 % in layers and microbatches, so they carry about eighty independent numbers. The largest errors are those of shapes that no
  smooth model follows: some that are bound by launches take 15 to 30 % less than smaller ones (hidden size 2048, 4 tensor ranks,
  microbatches of 1 and 2).
- **a100-megatron**: four constants, fitted to one layer of 22B; everything else is taken from the set above, or assumed, as its source
  says. `accumulate_bytes` (what fused accumulation moves) and `spread` (the repeat noise of the single-node table) were set after
  predictions had been compared with utilisations that Megatron-LM's papers state for 175 B to 1 T parameters (such as 52 % on 3,072
  GPUs with recomputation counted, 56.3 % on 512 without). Nothing was fitted to those, but they are no blind test of this set.
- **torch** (`stack.torch`), the default of the catalogue's GPUs. Matrix products and attention's forward come by device from [tables of
  single kernels](benchmarks/devices.md). What those do not show was fitted to sixteen FSDP runs of one 7 B model on A100 and H100: the
  rate of products under a step's load (`sustained`: all of it on A100, 0.89 on H100), the rate of attention on H100 and of its backward
  on both, the bytes that other kernels move, and how much of a hidden collective's time the compute loses (`contention`). The rows of
  other sizes were held out: no fitted constant was changed after they were seen. Six of them were then priced as ZeRO-2, which they
  are, and NVLink 4's efficiency outside of its curves was put back to 0.8 for another table. PyTorch of 2023 ran them. cuDNN's
  attention, which torch 2.11 and later use on H100 and Blackwell where the library has it, is faster, so long contexts are predicted
  too slow there. H200 has its own attention and `sustained`, of two models that [shardwise ran there](benchmarks/gpu.md); Blackwell has no
  such runs, and H100's are assumed.
- **eager** (`stack.eager`), what shardwise runs where nothing is compiled, and what a card that was measured here is priced with: autocast
  over float32 weights, torch's operators one by one. Rates by kind of kernel and the host's time are of seven models' steps on an H200,
  which are no blind test of it ([figures](benchmarks/gpu.md)).
- **h100-megatron-core**: no compute was fitted; the A100's constants at assumed efficiencies. A cluster's name asks for it
  (`dgx-h100@h100-megatron-core`).
- **Bubbles**: nothing is fitted; the published stage times run through shardwise's own schedule and clock.

## What was not measured here

Sums of gradients over more than 128 GPUs, transfers between stages of different nodes, stragglers (the slowest of n ranks is taken to
be sqrt(2 ln n) times 0.05 % slower), offload and experts are formulas with stated or assumed constants. Matrix products and attention
of V100, MI250X, MI300X and TPUs reach an assumed share of the peak. `precision=bfloat16-mixed` is counted as it runs,
with weights and activations in 16 bits, as FSDP's mixed precision has them. `precision=bfloat16` is autocast over float32 weights, which
keeps sums along the residual stream in float32: by the same count a 3 B GPT with 5 samples of 4,096 positions a rank holds 87 GiB so and
69 GiB as FSDP has it, 13 B with full recomputation and 10 samples 81 and 65 GiB. Memory is checked against published formulas
(`tests/pure/cost/test_cost_memory.py`), not against measured GPUs. A layout by hand has stages of equally many layers on GPUs, as in the
tables; plans that shardwise chooses itself balance their stages.

What stages hand on is priced at the link where the border lies: inside a node or between two. GPT 39 B on 64 V100 with two stages a node
(`data=2 tensor=2 pipeline=16 chunks=3`) takes 61.3 s where every border counts as inside, and 85.0 s where it lies; the planner takes
`data=1 tensor=4 pipeline=16 microbatches=512 schedule=zb-h1 offload=optimizer`, 64.3 s. Of a stage that lies on both sides of a node's end
all ranks are taken to send between nodes, which is too much.
"""


GEMS = """
## GEMS on 1,024 GPUs

Jain et al. (SC'20) report that ResNet-1k trains with GEMS on 1,024 V100 at 97.32 % of what as many times one pipeline would reach. They do
not say with which batch and image in what is at hand here, so this is a prediction of one case, not an error. Nothing was fitted to it.

<!-- long: plans a network of 333 layers four times -->
```sh
shardwise scaling resnet-1k --cluster examples/clusters/lassen.toml --devices 8,1024 --weak --batch 32 --layout "pipeline=8 microbatches=8 \
schedule=gems-master batch_norm=local neighbours=pipeline"
```

| statistics of batch norm | stages of a replica | step on 8 GPUs | step on 1,024 | efficiency |
|---|---|---|---|---|
| `exact`: of all 4,096 samples | 128 ranks apart | 4.11 s | 6.53 s | 62.9 % |
| `local`: of each replica's | 128 ranks apart | 4.11 s | 5.08 s | 80.8 % |
| `local` | side by side, `neighbours=pipeline` | 4.16 s | 4.19 s | 99.4 % |

Stages that are 128 ranks apart hand on between nodes, all of a node through its two ports; side by side only the fourth does.
With `pipeline=8 data=128 schedule=gems-master batch_norm=local` the planner turns the pipeline so by itself. What is left of our 99.4 %
are sums of gradients; published are 97.32 %.
"""

ALPA = """
## Alpa's 21 configurations

Plans are compared with plans, all priced by the same simulator; nothing here is measured. The figures say how many times as fast
shardwise's
plan is, as [the page with the plans](alpa.md) explains (~: the nearest equal stages; *: does not fit by shardwise's count of bytes, though
Alpa ran it).

"""

RULES = """
## Factor rules, against brute force

`scripts/validate rules` tries every cut that a rule offers, and enumerates those that none offers, over PyTorch's samples of its operators:
[counts and cuts](benchmarks/rules.md).
"""

PUBLISHED = """
## Published runs of Megatron-LM, 22 B to 1 T

`scripts/validate published` prices the layouts of Megatron-LM's, MT-NLG's and MegaScale's papers on 8 to 12,288 A100, blind: [each row
and its error](benchmarks/published.md).

`scripts/validate silicon` predicts language models served on one to eight H100, 351 rows that NVIDIA publishes with aiconfigurator, blind:
[the errors, and where they come from](benchmarks/silicon.md).
"""

TRAINING = """
## Published training runs, 2022 to 2025

`scripts/validate training` prices published layouts on 8 to 1,024 V100, A100 and H100 by the function behind `shardwise plan`, each with
the set of the catalogue that stands for the software of its source, and compares seconds and whether memory suffices: [each row, the sets,
what was chosen after errors had been seen, and what is off without a cause that was found](benchmarks/training.md).
`scripts/validate blind` does the same with 100 rows that nothing was fitted to, the first 96 priced before anything was changed for them:
[first 6.3 % in the mean, and what that led to](benchmarks/blind.md). By source:

"""

OTHERS = """
## Other published runs

- **AxoNN** (Singh et al., SC'24, abstract): 620.1 PFLOP/s on 4,096 A100 of Perlmutter, 49 % of the peak. A GPT of 40 B, 8,192 samples:
  predicted are 50.1 % with a pipeline and 23.1 % with a grid alone. AxoNN has no pipeline, and hides a grid's collectives behind
  compute, which shardwise does not ([grids](decisions/tensor-grids.md)).
- **Dash et al.** (ISC'24, abstract), Frontier: 175 B on 1,024 MI250X at 36.14 % and 1 T on 3,072 at 31.96 % of the peak. Shardwise's own
plans
  on as many are predicted at 43.9 % (`data=16 tensor=4 pipeline=16 zero=1 schedule=zb-v`, 1,024 samples) and 46.4 % (`data=24 tensor=8
  pipeline=16 chunks=8 zero=1`, 3,072 samples): `shardwise plan gpt-175b --cluster 128xfrontier --batch 1024 --constrain
precision=bfloat16-mixed`,
  `shardwise plan megatron-1t --cluster 384xfrontier --batch 3072 --constrain precision=bfloat16-mixed`. They are other layouts, and the
  rates of MI250X are assumed.
- **SUPER** (Jain et al.): four branches at T5-Large's sizes on 1,024 V100, up to 3.05 times as fast as data parallelism; predicted 2.5
  times ([branches](decisions/branch-axis.md)).
- **GEMS** (Jain et al., SC'20): 97.32 %; predicted 99.4 %, above.
- **FORGE** (Yin et al., SC'23): up to 26 B on Frontier; its abstract has no time or rate to compare.
"""

PLANNED = """
## The plan chosen, against all plans run

`scripts/bench planned` runs every plan of at least twelve models on this machine over emulated networks, shardwise's choice among them:
[the
results](benchmarks/planned.md).
"""

MEMORY = """
## Memory predicted, against memory measured

`scripts/bench memory` plans 40 architectures that are none of shardwise's in eight layouts on two cores, and compares the fullest rank's
predicted memory with what its step took: [error by model and layout](benchmarks/memory.md). `--models swin gat` and `--layouts
"tensor=2"` run some of them.
"""


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = ["| table | protocol | mean abs. error % | largest % | n | |", "|---|---|---|---|---|---|"]
    lines += [f"| {r.table} | {r.protocol} | {r.mean_abs_error_pct:.2f} | {r.max_abs_error_pct:.1f} | {r.n} | {r.note} |" for r in rows]
    return "\n".join(lines)


def write(path: Path, rows: list[Row]) -> None:
    known = list(load().values())
    ran = {name: (path.parent / "benchmarks" / f"{name}.md").exists() for name in ("planned", "published", "rules", "memory", "training")}
    alpa = ALPA + summary(known) if known else ""
    published = PUBLISHED * ran["published"] + (training_summary(path.parent) if ran["training"] else "")
    pages = (published, PLANNED * ran["planned"], RULES * ran["rules"], MEMORY * ran["memory"])
    path.write_text(HEAD + table(rows) + "\n" + NOTES + GEMS + OTHERS + alpa + "".join(pages))


def training_summary(folder: Path) -> str:
    """Return the section of published training runs, with the table by source of their page."""
    text = (folder / "benchmarks" / "training.md").read_text()
    return TRAINING + text.partition("## By source")[2].partition("## All rows")[0].strip() + "\n"
