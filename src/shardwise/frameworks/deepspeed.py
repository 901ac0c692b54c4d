"""DeepSpeed JSON (0.19.8), and gpt-neox YAML, which has the same keys beside its own sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.frameworks.mapping import ConfigurationKeys, ExportRequest, Framework, KeyRow, Words, write_rows
from shardwise.frameworks.texts import write_json

ROWS = (
    KeyRow("micro_batch", "train_micro_batch_size_per_gpu", 0, always=True),
    KeyRow("microbatches", "gradient_accumulation_steps", 0, always=True),
    KeyRow("global_batch", "train_batch_size", 0, always=True),
    KeyRow("tensor", "tensor_parallel.autotp_size", 1, aliases=("model_parallel_size",)),
    KeyRow("context", "sequence_parallel_size", 1, aliases=("context_parallel_size",)),
    KeyRow("expert", "expert_parallel.autoep_size", 1),
    KeyRow("zero", "zero_optimization.stage", 0, aliases=("zero_stage",), always=True),
    KeyRow("offload", "zero_optimization.offload_optimizer.device", "none", {"optimizer": "cpu", "none": "none"}),
    KeyRow("compile", "compile.deepcompile", "off", {"on": True, "off": False}),
)
_UNPRICED = {
    "offload_param.device": "weights stay on the device",
    "communication_data_type": "gradients are reduced in 32 bits",
    "zero_hpz_partition_size": "weights are shared over all replicas, not inside hosts",
    "zero_quantized_weights": "weights are gathered in 16 bits",
    "zero_quantized_gradients": "gradients are reduced whole",
    "reduce_bucket_size": "buckets are of 25 MiB",
    "overlap_comm": "overlap is as shardwise runs it",
    "cpu_checkpointing": "see offload=activations",
}


def read_deepspeed(keys: ConfigurationKeys, words: Words) -> None:
    """Read what is no single key."""
    words["pipeline"] = keys.take_number("pipe_parallel_size", "pipeline.stages", default=1) or 1
    words["tensor"] = words["tensor"] or 1
    is_bf16 = keys.take_flag("bf16.enabled", "bfloat16.enabled") or str(keys.take("precision", default="")).startswith("bf")
    is_fp16 = keys.take_flag("fp16.enabled") or keys.take("precision") == "fp16"
    keys.take("fp16.fp16")
    autocast = keys.take_flag("torch_autocast.enabled")
    kind = str(keys.take("torch_autocast.dtype", default="bfloat16"))
    words["precision"] = "bfloat16" if is_bf16 or (autocast and "bf" in kind) else "float16" if is_fp16 or autocast else "float32"
    words["recompute"] = "full" if keys.find("activation_checkpointing.partition_activations") else "none"
    keys.take("activation_checkpointing.partition_activations")
    if keys.has("checkpoint_activations"):
        words["recompute"] = "full" if keys.take_flag("checkpoint_activations") else "none"
        words["segment"] = keys.take_number("checkpoint_num_layers", default=1) if words["recompute"] == "full" else 1
    keys.take("expert_parallel.enabled", "expert_parallel.expert_tensor_parallel_size")
    if words["context"] > 1:
        words["attention"] = "ulysses"
    if (shard := keys.take_number("zero_optimization.mics_shard_size")) > 1 and words["zero"] == 3:
        words["shard"] = shard
    words["sequence"] = keys.take_number("seq_length") or words.get("sequence")
    for word, name in (("layers", "num_layers"), ("hidden", "hidden_size"), ("heads", "num_attention_heads")):
        words[word] = keys.take_number(name) or words.get(word)
    _read_sizes(keys, words)


def _read_sizes(keys: ConfigurationKeys, words: Words) -> None:
    micro, count, total = words["micro_batch"], words["microbatches"], words["global_batch"]
    replica = words["tensor"] * words["pipeline"] * words["context"]
    if micro and total and (count or words["pipeline"] == 1):
        data, rest = divmod(total, micro * (count or 1))
        if data and not rest and not words.get("devices"):
            words["data"] = data
    devices = keys.take_number("num_gpus", "nproc_per_node") * (keys.take_number("num_nodes", "nnodes") or 1)
    if devices and not words.get("devices") and not words.get("data") and devices % replica == 0:
        words["devices"] = devices
    if count:
        words["global_batch"] = 0 if micro else total


def values_of_layout(request: ExportRequest) -> dict[str, Any]:
    """Return the keys of a layout."""
    layout, words = request.layout, request.words
    values = {**write_rows(ROWS, words), "gradient_clipping": 0.0}
    if layout.precision == "bfloat16":
        values |= {"torch_autocast.enabled": True, "torch_autocast.dtype": "bfloat16"}
    elif layout.precision == "float16":
        values["fp16.enabled"] = True
    if layout.zero:
        values |= {"zero_optimization.overlap_comm": True, "zero_optimization.contiguous_gradients": True}
    if layout.expert > 1:
        values |= {"expert_parallel.enabled": True, "expert_parallel.expert_tensor_parallel_size": 1}
    if layout.recompute == "full":
        values |= {"activation_checkpointing.partition_activations": False, "activation_checkpointing.cpu_checkpointing": False}
    return values


def _write(request: ExportRequest) -> Mapping[str, str]:
    return {"deepspeed.json": write_json(values_of_layout(request))}


def _check(request: ExportRequest) -> str:
    layout = request.layout
    if layout.expert > 1 and (layout.context > 1 or layout.offload != "none"):
        return f"expert={layout.expert} goes with neither context nor offload; use context=1 and offload=none"
    if layout.offload == "optimizer" and not layout.zero:
        return "offload=optimizer needs ZeRO; use zero=1 or more"
    return ""


def _notes_of_request(request: ExportRequest) -> list[str]:
    notes = ["the optimizer is the script's own: hand it to deepspeed.initialize"]
    notes.append("gradient_clipping = 0 is set, since it clips at a norm of 1.0 by default: write your own there")
    if request.layout.recompute == "full":
        notes.append(
            "activations are recomputed only where the model calls deepspeed.checkpointing, or is built with its own checkpointing on"
        )
    if request.layout.context > 1:
        notes.append("Ulysses needs its attention registered in the model (UlyssesSPAttentionHF)")
    return notes


DEEPSPEED = Framework(
    name="deepspeed", title="DeepSpeed", file_name="deepspeed.json",
    signs=("zero_optimization.stage", "train_micro_batch_size_per_gpu", "zero_optimization", "pipe_parallel_size"), rows=ROWS,
    says={
        "data": None, "tensor": None, "microbatches": None, "context": None, "expert": None, "zero": (0, 1, 2, 3),
        "precision": ("float32", "bfloat16", "float16"), "recompute": ("none", "full"), "offload": ("none", "optimizer"),
        "attention": ("ulysses",), "compile": ("off", "on"),
    },
    loses={
        "sequence_parallel": ("off", "AutoTP keeps whole sequences between layers"),
        "segment": (1, "its models checkpoint layer by layer"),
    },
    read=read_deepspeed, write=_write, check=_check, notes=_notes_of_request, unpriced=_UNPRICED,
    stacks={"A": "a100-megatron-deepspeed"},
)  # fmt: skip
