"""Cases whose prices, plans and programs are recorded: (model, batch, cluster, layout), an empty layout to be chosen by the search.

Dense, mixture-of-experts, convolution, recurrent and long-sequence models on every kind of device. `here` is left out: it is measured.
"""

from __future__ import annotations

PLANS: list[tuple[str, int, str, str]] = [
    ("gpt-tiny", 8, "1xcpu-2", "data=2"),
    ("gpt-tiny", 8, "1xcpu-2", ""),
    ("gpt-10m", 16, "2xcpu-2", "data=2 pipeline=2 microbatches=4 zero=1"),
    ("gpt-125m", 64, "p4d.24xlarge", "data=8 zero=2 precision=bfloat16"),
    ("gpt-125m", 64, "p4d.24xlarge", ""),
    ("gpt-1.3b", 64, "p3.16xlarge", "data=2 tensor=4 microbatches=8 zero=1 recompute=selective precision=float16"),
    ("gpt-2.6b", 128, "2xp3.16xlarge", "tensor=2 pipeline=8 microbatches=16 recompute=full precision=float16"),
    ("gpt-6.7b", 512, "4xdgx-a100-80", "data=4 tensor=8 microbatches=32 sequence_parallel=on recompute=selective precision=bfloat16"),
    ("gpt-39b", 1024, "8xp3.16xlarge", "tensor=8 pipeline=8 microbatches=256 recompute=full zero=1 precision=float16"),
    ("gpt-15b", 256, "4xp4d.24xlarge", ""),
    ("megatron-22b", 4, "dgx-a100-80", "tensor=8 sequence_parallel=on recompute=selective precision=bfloat16"),
    ("megatron-145b", 2304, "192xdgx-a100-80", "data=24 tensor=8 pipeline=8 microbatches=96 recompute=full precision=bfloat16"),
    ("megatron-530b", 280, "35xdgx-a100-80",
     "tensor=8 pipeline=35 microbatches=280 schedule=interleaved chunks=3 recompute=full precision=bfloat16"),
    ("llama-8b", 64, "dgx-h100", "data=8 zero=3 microbatches=8 recompute=full precision=bfloat16"),
    ("llama-8b", 64, "dgx-h100", ""),
    ("llama-8b:sequence=131072", 8, "2xdgx-h100", "context=16 attention=ring microbatches=8 zero=3 recompute=full precision=bfloat16"),
    ("llama-8b:sequence=65536", 8, "1xhgx-h200", "context=8 attention=ulysses microbatches=8 zero=3 recompute=full precision=bfloat16"),
    ("llama-70b", 256, "8xdgx-h100",
    "data=2 tensor=8 pipeline=4 microbatches=128 sequence_parallel=on recompute=selective precision=bfloat16"),
    ("llama-405b", 2048, "128xdgx-h100",
     "data=8 tensor=8 pipeline=16 microbatches=256 sequence_parallel=on zero=1 recompute=full precision=bfloat16"),
    ("llama-70b", 256, "1xgb200-nvl72", "data=8 tensor=8 microbatches=16 zero=1 recompute=full precision=bfloat16"),
    ("bert-large", 256, "p3.16xlarge", "data=8 microbatches=4 compress=int8"),
    ("bert-large", 256, "2xperlmutter", ""),
    ("t5-3b", 64, "p4d.24xlarge", "tensor=4 pipeline=2 microbatches=8 recompute=full precision=bfloat16"),
    ("moe-2.4b", 64, "p4d.24xlarge", "data=8 expert=8 precision=bfloat16"),
    ("moe-10b", 128, "2xdgx-h100", "data=8 tensor=2 expert=8 zero=1 precision=bfloat16"),
    ("moe-10b", 128, "2xp4d.24xlarge", ""),
    ("moe-27b", 256, "4xdgx-a100-80", "data=8 expert=8 pipeline=4 microbatches=8 recompute=full precision=bfloat16"),
    ("vit-l", 256, "p4d.24xlarge", "data=8 zero=1 precision=bfloat16"),
    ("resnet-50", 256, "p3.16xlarge", "data=8 precision=float16"),
    ("resnet-50", 256, "p3.16xlarge", ""),
    ("resnet-1k", 16, "2xp3.16xlarge", "data=4 spatial=2x2"),
    ("wide-resnet-1b", 128, "2xp3.16xlarge", "data=4 channel=4"),
    ("amoebanet-d-318m", 64, "p3.16xlarge", "pipeline=4 data=2 microbatches=8 schedule=gems-master"),
    ("unet-31m", 16, "p4d.24xlarge", "data=2 spatial=4"),
    ("unet3d-19m", 8, "p4d.24xlarge", "spatial=2x2x2"),
    ("lstm-medium", 64, "2xcpu-2", "data=4"),
    ("dlrm-540m", 2048, "p4d.24xlarge", "data=8"),
    ("inception-v1", 128, "p3.16xlarge", "data=4 branch=2"),
    ("gpt-1.3b", 32, "frontier", "data=8 zero=3 offload=optimizer precision=bfloat16"),
    ("gpt-2.6b", 64, "2xdgx-h100+4xdgx-a100-80", ""),
]  # fmt: skip

# (schedule, stages, microbatches, chunks): for schedules with several stages a rank, `stages` counts those of all chunks.
PROGRAMS: list[tuple[str, int, int, int]] = [
    ("sequential", 3, 2, 1),
    ("gpipe", 4, 6, 1),
    ("1f1b", 4, 6, 1),
    ("1f1b", 2, 2, 1),
    ("interleaved", 8, 8, 2),
    ("breadth-first", 8, 8, 2),
    ("zb-h1", 4, 8, 1),
    ("zb-h2", 4, 8, 1),
    ("zb-v", 8, 8, 2),
    ("chimera", 4, 8, 1),
    ("gems-mast", 4, 2, 1),
    ("gems-master", 4, 8, 1),
]
