"""The scripts of `scripts/bench audit`: right ones, and wrong ones with the diagnosis that they should get."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AuditCase:
    """A script with the arguments of its serial and of its parallel run. `verdict`: the right one; `says`: words of the right diagnosis;
    `needs`: a package that is no dependency."""

    name: str
    script: str
    serial: str
    parallel: str
    verdict: str = "equal"
    says: tuple[str, ...] = ()
    needs: str = ""
    ranks: int = 2


def _right(name: str, script: str, both: str = "", parallel: str = "--batch 4", needs: str = "", ranks: int = 2) -> AuditCase:
    return AuditCase(name, script, both, f"{both} {parallel}", needs=needs, ranks=ranks)


def _wrong(name: str, call: str, verdict: str, *says: str, parallel: str = "--batch 4", needs: str = "") -> AuditCase:
    script, _, both = call.partition(" ")
    return AuditCase(name, script, both, f"{both} {parallel}", verdict, says, needs)


RIGHT = (
    _right("DDP", "ddp.py"),
    _right("DDP, accumulation under no_sync", "ddp.py", "--accum 2"),
    _right("DDP, answers of unequal lengths, weighted", "ddp.py", "--bug tokens_fixed"),
    _right("DDP, compiled", "ddp.py", "--compile 1"),
    _right("DDP, tied weights, clipped", "ddp.py", "--tied 1 --clip 0.1"),
    _right("ZeroRedundancyOptimizer", "ddp.py", "--zero 1"),
    _right("gradients averaged by hand", "ddp.py", "--bug by_hand"),
    _right("FSDP1", "ddp.py", "--fsdp1 1"),
    _right("FSDP1, original parameters", "ddp.py", "--fsdp1 2"),
    _right("FSDP2, clipped", "fsdp2.py", "--clip 0.1"),
    _right("FSDP2 over tensor parallelism", "fsdp2.py", "", "--batch 4 --mesh 2", ranks=4),
    _right("DTensor, tensor and sequence parallel", "tensor.py", "", ""),
    _right("tensor and sequence parallel by hand, dropout", "by_hand.py", "--dropout 0.1", ""),
    _right("torch pipelining, GPipe", "pipeline.py", "", ""),
    _right("torch pipelining, tied embedding", "pipeline.py", "--tied 1", ""),
    _right("lazy modules", "awkward.py", "--case lazy"),
    _right("two optimizers", "awkward.py", "--case two"),
    _right("bfloat16 autocast", "awkward.py", "--case amp"),
    _right("recomputation", "awkward.py", "--case recompute"),
    _right("GradScaler", "awkward.py", "--case scaler"),
    _right("Accelerate", "with_accelerate.py", "", "--batch 4", "accelerate"),
    _right("Lightning", "with_lightning.py", "--own 1", "--batch 4 --devices 2", "lightning"),
    _right("DeepSpeed ZeRO-1", "with_deepspeed.py", "--stage 1", "--batch 4", "deepspeed"),
    _right("DeepSpeed ZeRO-2", "with_deepspeed.py", "--stage 2", "--batch 4", "deepspeed"),
    _right("DeepSpeed ZeRO-3", "with_deepspeed.py", "--stage 3", "--batch 4", "deepspeed"),
    _right("Megatron-Core, column and row parallel", "with_megatron.py", "", "", "megatron"),
    _right("shardwise auto_parallelize, data=2", "shardwise_loop.py", "", "--layout data=2"),
    _right("shardwise auto_parallelize, tensor=2", "shardwise_loop.py", "", "--layout tensor=2"),
    _right("shardwise auto_parallelize, data=2 zero=3", "shardwise_loop.py", "", '--layout "data=2 zero=3"'),
    _right("shardwise engine, data=2 zero=1", "shardwise_engine.py", "", '--layout "data=2 zero=1"'),
    _right("shardwise engine, tensor=2", "shardwise_engine.py", "", "--layout tensor=2"),
    _right("shardwise engine, pipeline=2", "shardwise_engine.py", "", '--layout "pipeline=2 microbatches=2"'),
)

WRONG = (
    _wrong("no DDP: gradients never averaged", "ddp.py --bug nowrap", "not reduced", "mean"),
    _wrong("gradients summed, not averaged", "ddp.py --bug sum", "factor", "2.0000 x", "number of ranks"),
    _wrong("mean of means over unequal targets", "ddp.py --bug tokens", "unequal counts", "weighted"),
    _wrong("accumulation over unequal targets", "ddp.py --bug accum_tokens --accum 2", "unequal counts", "micro-batch"),
    _wrong("accumulated losses not divided", "ddp.py --bug accum --accum 2", "factor", "2.0000 x", "micro-batches"),
    _wrong("accumulation divided twice", "with_accelerate.py --accum 2 --bug accum", "factor", "0.5000 x", needs="accelerate"),
    _wrong("no_sync for every micro-batch", "ddp.py --bug no_sync --accum 2", "not reduced", "mean"),
    _wrong("every rank reads the same samples", "ddp.py --bug samedata", "data", "ranks 0 and 1 read the same"),
    _wrong("sampler without set_epoch", "ddp.py --rows 16 --bug setepoch", "data", "set_epoch"),
    _wrong("one rank has other targets", "ddp.py --bug targets", "data", "targets"),
    _wrong("a framework shuffles", "with_lightning.py", "data", "on no rank", parallel="--batch 4 --devices 2", needs="lightning"),
    _wrong("batch norm not synchronised", "ddp.py --bn 1", "statistics", "norm (BatchNorm2d)"),
    _wrong("batch norm with another momentum", "ddp.py --bn 1 --bug momentum", "statistics", "buffers", parallel="--batch 8"),
    _wrong("a layer outside DDP", "ddp.py --bug outside", "not reduced", "weight"),
    _wrong("layer norms not reduced in sequence parallelism", "by_hand.py --bug ln", "not reduced", "sum", "ln1", parallel=""),
    _wrong("clipped by the norm of own shards", "fsdp2.py --clip 0.1 --bug localclip", "rank factor", "rank 1"),
    _wrong("clipped before averaging", "ddp.py --clip 0.1 --bug clip_first", "clipping", "each rank clips"),
    _wrong("clipped in the framework's configuration", "with_deepspeed.py --stage 2 --bug clip", "factor", needs="deepspeed"),
    _wrong("learning rate scaled by the ranks", "ddp.py --bug lr", "optimizer", "2.0000 x", "lr 0.001 / 0.002"),
    _wrong("schedule stepped once a rank", "ddp.py --bug schedule", "optimizer", "lr 0.0005 / 0.00025"),
    _wrong("another weight decay", "ddp.py --bug decay", "optimizer", "weight_decay 0.1 / 0.3"),
    _wrong("another weight decay under FSDP2", "fsdp2.py --bug decay", "optimizer", "weight_decay 0.1 / 0.3"),
    _wrong("optimizer made before wrapping", "fsdp2.py --bug optfirst", "optimizer", "do not move"),
    _wrong("sharded optimizer without its broadcast", "ddp.py --bug zero_broadcast", "optimizer", "do not move on rank 0", "not broadcast"),
    _wrong("ranks start with their own weights", "ddp.py --bug seed", "start", "initial weights differ"),
    _wrong("zero_grad forgotten", "ddp.py --bug zero_grad", "not cleared", "zero_grad"),
    _wrong("dropout masks equal on tensor ranks", "by_hand.py --dropout 0.1 --bug mask", "dropout", "same mask", parallel=""),
    _wrong(
        "row-parallel bias added on every rank",
        "by_hand.py --bug bias",
        "factor",
        "2 of 35 (layers.0.down_bias, layers.1.down_bias)",
        "2.0000 x",
        parallel="",
    ),
    _wrong("row-parallel bias added twice", "with_megatron.py --bug bias", "gradients", "first output", parallel="", needs="megatron"),
    _wrong("micro-batches of a pipeline not averaged", "pipeline.py --bug scale", "factor", "4.0000 x", "micro-batches", parallel=""),
    _wrong("a tied embedding not reduced", "pipeline.py --tied 1 --bug tied", "not reduced", "tied", parallel=""),
    _wrong("gradients scaled under autocast", "awkward.py --case amp --bug amp", "factor", "1.5"),
    _wrong("a parameter left out of one rank's optimizer", "ddp.py --bug left_out", "optimizer", "head.weight on rank 1 only", "left out"),
    _wrong("a buffer kept by one rank", "ddp.py --bug stale", "statistics", "first mean", "rank 1 only"),
    _wrong("gradients reduced in 16 bits", "ddp.py --bug half", "gradients", "bfloat16"),
    _wrong("another decay of Adam's averages", "ddp.py --bug betas", "optimizer", "betas"),
    _wrong("another loss", "ddp.py --bug smoothing", "gradients", "it is the loss"),
    _wrong("dropout masks differ on replicas", "by_hand.py --dropout 0.1 --bug replicas", "dropout", "replicas drift apart", parallel=""),
    _wrong("learning rate in shardwise's loop", "shardwise_loop.py --bug lr", "optimizer", "2.0000 x", parallel='--layout "data=2 zero=3"'),
)
