"""Accelerate YAML (1.15), transformers `TrainingArguments` as JSON or YAML with a `DistributedConfig` (5.23), Axolotl YAML (0.19), and
LLaMA-Factory's YAML, which has the words of all three."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardwise.frameworks.deepspeed import values_of_layout
from shardwise.frameworks.eight_bit import TENSORS, read_format, read_recipe_of_key
from shardwise.frameworks.mapping import ConfigurationKeys, ExportRequest, Framework, KeyRow, Words, shard_within_hosts, write_rows
from shardwise.frameworks.texts import write_json, write_yaml
from shardwise.plan.layout import Layout

_PRECISION = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
_EIGHT_BIT_BACKENDS = {"AO": "tensorwise", "TORCHAO": "tensorwise", "TE": "delayed", "MSAMP": "msamp"}
_STRATEGIES = {
    "full_shard": 3,
    "shard_grad_op": 2,
    "no_shard": 0,
    "hybrid_shard": 3,
    "hybrid_shard_zero2": 2,
    "1": 3,
    "2": 2,
    "3": 0,
    "4": 3,
}
_UNPRICED = {
    "fsdp_offload_params": "offload of weights and gradients is not priced: nothing is offloaded",
    "offload_params": "offload of weights and gradients is not priced: nothing is offloaded",
    "cpu_offload": "offload of weights and gradients is not priced: nothing is offloaded",
    "offload_param_device": "offload of weights is not priced",
    "optimizer": "AdamW with 32-bit states is priced",
    "optim": "AdamW with 32-bit states is priced",
    "sample_packing": "every sample is priced at its full length",
    "packing": "every sample is priced at its full length",
    "adapter": "all weights are priced as trained",
    "load_in_4bit": "weights are priced in 16 bits",
    "load_in_8bit": "weights are priced in 16 bits",
    "enable_fsdp_float8_all_gather": "weights are gathered in 16 bits",
    "fp8_enable_fsdp_float8_all_gather": "weights are gathered in 16 bits",
    "activation_offloading": "see offload=activations",
    "fsdp_activation_checkpointing_offload": "see offload=activations",
    "tiled_mlp": "tiles of the feed-forward are not priced",
}
_SEQUENCE = ("max_length", "cutoff_len", "max_seq_length", "model_max_length")
_DEEPSPEED_NAME = re.compile(r"(?:zero_?(?:stage)?_?|z)([0-3])")


def read_fsdp(keys: ConfigurationKeys, words: Words) -> None:
    """Read keys of FSDP, with and without their prefix, of both its versions; and of a DeepSpeed section or file."""
    names = [key for key in keys.values if (key.startswith("fsdp") or ".fsdp" in key) and not key.endswith("fsdp_size")]
    strategy = keys.take("fsdp_config.fsdp_sharding_strategy", "fsdp_config.sharding_strategy", "fsdp_sharding_strategy", "fsdp")
    reshard = keys.take("fsdp_reshard_after_forward", "fsdp_config.reshard_after_forward")
    version = keys.take("fsdp_version", "fsdp_config.fsdp_version", "fsdp_config.version")
    words.setdefault("zero", 0)
    is_fsdp = (
        any(keys.values[key] not in (None, False, "", []) for key in names) or str(keys.take("dist_config.name", default=""))[:4] == "fsdp"
    )
    if (is_fsdp and str(strategy).lower() != "false") or version is not None:
        text = " ".join(map(str, strategy)) if isinstance(strategy, list) else str(strategy or "full_shard")
        found = [zero for word in re.split(r"[\s,]+", text.lower()) if (zero := _STRATEGIES.get(word)) is not None]
        words["zero"] = found[0] if found else 3
        words["_is_hybrid"] = "hybrid" in text.lower() or text == "4"
        if reshard is not None:
            value = str(reshard).lower()
            words["zero"] = _STRATEGIES.get(value, 2 if value in ("false", "no") else 3)
    if keys.take_flag("fsdp_activation_checkpointing", "fsdp_config.activation_checkpointing", "gradient_checkpointing"):
        words["recompute"] = "full"
    _read_deepspeed_of(keys, words)


def _read_deepspeed_of(keys: ConfigurationKeys, words: Words) -> None:
    section = {key.rpartition("deepspeed_config.")[2]: value for key, value in keys.values.items() if "deepspeed_config." in key}
    section |= {key.partition("deepspeed.")[2]: value for key, value in keys.values.items() if key.startswith("deepspeed.")}
    name = str(keys.take("deepspeed_config_file", "deepspeed", "deepspeed_config") or "").replace("\\", "/").rpartition("/")[2]
    if not section and not name:
        return
    if "." in name:
        stage = _DEEPSPEED_NAME.search(name.lower())
        words["zero"] = int(stage[1]) if stage else words.get("zero") or 0
        keys.notes.append(f"{name} is not beside this file: zero={words['zero']} is by its name")
        return
    words["zero"] = keys.take_number("zero_stage", "zero_optimization.stage", default=words.get("zero") or 0)
    words["tensor"] = max(words.get("tensor", 1), keys.take_number("tensor_parallel.autotp_size", default=1))
    if (ulysses := keys.take_number("deepspeed_config.sequence_parallel_size", default=1)) > 1:
        words["context"], words["attention"] = ulysses, "ulysses"
    if words.get("precision", "float32") == "float32":
        is_bf16, is_fp16 = keys.take_flag("deepspeed_config.bf16.enabled"), keys.take_flag("deepspeed_config.fp16.enabled")
        words["precision"] = "bfloat16" if is_bf16 else "float16" if is_fp16 else "float32"
    if str(keys.take("offload_optimizer_device", "offload_optimizer.device", default="none")) == "cpu":
        words["offload"] = "optimizer"


def _read_sizes(keys: ConfigurationKeys, words: Words, *names: tuple[str, str]) -> None:
    """Read replicate x shard into data, and the number of processes."""
    replicate, shard = (keys.take_number(*name.split(), default=0) for name in names[0])
    if replicate or shard:
        expert = words["expert"] if words.get("_expert_multiplies") else 1
        ranks = max(1, replicate) * max(1, shard) * expert
        known = words.get("devices") or 0
        replica = words["tensor"] * words.get("context", 1) * words.get("pipeline", 1)
        words["data"] = ranks if shard > 0 or not known else max(1, known // replica)
        if replicate > 1 and shard > 1:
            words["shard"] = shard
    machines = keys.take_number("num_machines", "nnodes") or 1
    count = keys.take_number("num_processes") or keys.take_number("nproc_per_node") * machines  # the first counts those of all machines
    words["devices"] = words.get("devices") or count
    if words.get("_is_hybrid") and count:
        shard_within_hosts(words, count // machines)
    if words.get("_is_hybrid") and not words.get("shard"):
        keys.notes.append(
            "ranks of a host, among which HSDP shards, are not in the file, or it is one host: zero over all replicas is priced"
        )


ACCELERATE_ROWS = (
    KeyRow("tensor", "parallelism_config_tp_size", 1, aliases=("tp_size",)),
    KeyRow("context", "parallelism_config_cp_size", 1, aliases=("cp_size",)),
    KeyRow("precision", "mixed_precision", "float32", {**_PRECISION, TENSORS: "fp8"}, always=True),
    KeyRow("compile", "dynamo_config.dynamo_backend", "off", {"on": "INDUCTOR", "off": "no"}),
    KeyRow("microbatches", "gradient_accumulation_steps", 0),
)


def read_accelerate(keys: ConfigurationKeys, words: Words) -> None:
    """Read what is no single key."""
    words["expert"] = 1
    ulysses = keys.take_number("parallelism_config_sp_size", default=1)
    if ulysses > 1:
        words["context"], words["attention"] = ulysses, "ulysses"
    else:
        strategy = str(keys.take("parallelism_config_cp_comm_strategy", "cp_comm_strategy", default="allgather"))
        words["attention"] = "ring" if strategy == "alltoall" else "gather"
    words["microbatches"] = words.get("microbatches") or 1
    if not keys.has("mixed_precision"):  # of a trainer's arguments beside it
        words["precision"] = "bfloat16" if keys.take_flag("bf16") else "float16" if keys.take_flag("fp16") else "float32"
    if words["precision"] == TENSORS:
        _read_eight_bit(keys, words, "mixed_precision")
    words["sequence"] = words.get("sequence") or keys.take_number(*_SEQUENCE)
    words["model"] = words.get("model") or keys.take("model_name_or_path") or ""
    is_fsdp = str(keys.take("distributed_type", default="")).upper() in ("FSDP", "DEEPSPEED")
    if is_fsdp:
        read_fsdp(keys, words)
    else:
        words["zero"] = 0
    _read_sizes(keys, words, ("parallelism_config_dp_replicate_size dp_replicate_size", "parallelism_config_dp_shard_size dp_shard_size"))
    if words["context"] > 1 and not words.get("data"):
        words["data"] = 0
    keys.take("num_machines", "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap")
    words["micro_batch"] = (
        words.get("micro_batch") or keys.take_number("per_device_train_batch_size", "train_micro_batch_size_per_gpu") or 0
    )


def _read_eight_bit(keys: ConfigurationKeys, words: Words, key: str) -> None:
    """Read the backend of Accelerate's 8-bit products, torchao's where none is named, and its options."""
    backend = str(keys.take("fp8_config.backend", "fp8_backend", default="AO")).upper()
    if backend == "TE" and keys.take_flag("fp8_config.use_mxfp8_block_scaling", "use_mxfp8_block_scaling"):
        backend = "mxfp8"
    named = keys.find("fp8_config.backend", "fp8_backend")
    form = str(keys.take("fp8_config.fp8_format", default="HYBRID"))
    if read_recipe_of_key(keys, words, named[0] if named else key, _EIGHT_BIT_BACKENDS.get(backend, backend)):
        read_format(keys, "fp8_config.fp8_format", form)
    keys.take(*(f"fp8_config.{name}" for name in _SCALE_OPTIONS))


_SCALE_OPTIONS = ("amax_history_len", "amax_compute_algo", "margin", "interval", "use_autocast_during_eval", "pad_inner_dim")


def _write_accelerate(request: ExportRequest) -> Mapping[str, str]:
    layout, words = request.layout, request.words
    words["microbatches"] = 0
    values: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "num_machines": max(1, layout.num_ranks // 8)}
    values |= {"num_processes": layout.num_ranks, "machine_rank": 0, "main_training_function": "main", "use_cpu": False}
    values |= write_rows(ACCELERATE_ROWS[2:4], words)
    if layout.precision == TENSORS:
        values["fp8_config.backend"] = "AO"
    values["distributed_type"] = "DEEPSPEED" if layout.zero == 1 else "FSDP" if layout.zero else "MULTI_GPU"
    if layout.zero == 1:
        values |= {"deepspeed_config.zero_stage": 1, "deepspeed_config.gradient_accumulation_steps": layout.microbatches}
        values |= {"deepspeed_config.offload_optimizer_device": "cpu" if layout.offload == "optimizer" else "none"}
    elif layout.zero:
        values |= _fsdp_values(request, "fsdp_config.fsdp_")
        values["fsdp_config.fsdp_version"] = 2
        if layout.tensor > 1 or layout.context > 1 or layout.zero_groups > 1:
            prefix = "parallelism_config.parallelism_config_"
            values |= {f"{prefix}dp_replicate_size": layout.zero_groups, f"{prefix}dp_shard_size": layout.data // layout.zero_groups}
            values[f"{prefix}tp_size"] = layout.tensor
            if layout.attention == "ulysses":
                values |= {f"{prefix}sp_size": layout.context, f"{prefix}sp_backend": "deepspeed"}
            else:
                values[f"{prefix}cp_size"] = layout.context
            if layout.attention == "ring":
                values[f"{prefix}cp_comm_strategy"] = "alltoall"
    return {"accelerate.yaml": write_yaml(values, f"{layout}\naccelerate launch --config_file accelerate.yaml train.py")}


def _fsdp_values(request: ExportRequest, prefix: str) -> dict[str, Any]:
    values: dict[str, Any] = {f"{prefix}reshard_after_forward": request.layout.zero == 3}
    values[f"{prefix}activation_checkpointing"] = request.layout.recompute == "full"
    if request.block and prefix.endswith("fsdp_"):
        values |= {f"{prefix}auto_wrap_policy": "TRANSFORMER_BASED_WRAP", f"{prefix}transformer_layer_cls_to_wrap": request.block}
    elif request.block:
        values[f"{prefix}transformer_layer_cls_to_wrap"] = [request.block]
    return values


def _refuse_shard(layout: Layout) -> str:
    if layout.zero_groups > 1 and (layout.zero == 1 or layout.expert > 1):
        return f"shard={layout.shard} is FSDP's, without experts: use zero=2 or zero=3 and expert=1, or shard=0"
    return ""


def _check_accelerate(request: ExportRequest) -> str:
    layout = request.layout
    if reason := _refuse_shard(layout):
        return reason
    if (layout.tensor > 1 or layout.context > 1) and layout.zero not in (2, 3):
        return f"its sizes of tensor and context go with FSDP 2 only; use zero=2 or zero=3, not zero={layout.zero}"
    if layout.recompute == "full" and layout.zero not in (2, 3):
        return f"its recomputation is FSDP's; use zero=2 or zero=3, not zero={layout.zero}, or call it in the model"
    if layout.offload == "optimizer" and layout.zero != 1:
        return f"offload=optimizer alone is DeepSpeed's; use zero=1, not zero={layout.zero}"
    return ""


def _notes_accelerate(request: ExportRequest) -> list[str]:
    layout, notes = (
        request.layout,
        [f"per device {request.micro_batch} samples: the script's DataLoader has batch_size={request.micro_batch}"],
    )
    if layout.microbatches > 1 and layout.zero != 1:
        notes.append(
            f"microbatches={layout.microbatches} is said in the script: Accelerator(gradient_accumulation_steps={layout.microbatches})"
        )
    if layout.precision == TENSORS:
        notes.append("torchao leaves the first and the last linear layer in 16 bits")
    if layout.zero == 1:
        notes.append("DeepSpeed clips gradients at a norm of 1.0 by default: deepspeed_config.gradient_clipping says another")
    if layout.zero == 2:
        notes.append("without resharding gathered weights are kept until backward: more memory than zero=2")
    return notes


_LOSES = {
    "sequence_parallel": ("off", "its tensor ranks keep whole sequences between layers"),
}
ACCELERATE = Framework(
    name="accelerate", title="Accelerate", file_name="accelerate.yaml", signs=("distributed_type", "compute_environment", "num_processes"),
    rows=ACCELERATE_ROWS,
    says={
        "data": None, "tensor": None, "context": None, "microbatches": None, "shard": None, "zero": (0, 1, 2, 3),
        "precision": (*_PRECISION, TENSORS),
        "recompute": ("none", "full"), "attention": ("gather", "ring", "ulysses"), "compile": ("off", "on"),
        "offload": ("none", "optimizer"),
    },
    loses=_LOSES, read=read_accelerate, write=_write_accelerate, check=_check_accelerate, notes=_notes_accelerate, unpriced=_UNPRICED,
)  # fmt: skip

TRAINER_ROWS = (
    KeyRow("micro_batch", "per_device_train_batch_size", 8, always=True, aliases=("train_micro_batch_size_per_gpu",)),
    KeyRow("microbatches", "gradient_accumulation_steps", 1, always=True),
    KeyRow("tensor", "distributed_config.tp_size", 1, aliases=("tp_size", "tensor_parallel_size")),
    KeyRow("expert", "distributed_config.ep_size", 1, aliases=("ep_size",)),
    KeyRow("context", "cp_size", 1, aliases=("sp_size",)),
    KeyRow("compile", "torch_compile", "off", {"on": True, "off": False}),
    KeyRow("sequence", _SEQUENCE[0], 0, aliases=_SEQUENCE[1:]),
)


def read_trainer(keys: ConfigurationKeys, words: Words) -> None:
    """Read what is no single key."""
    micro = keys.take_number("micro_batch_size") if not keys.has("per_device_train_batch_size") else 0
    words["micro_batch"] = micro or words["micro_batch"]
    words["precision"] = "bfloat16" if keys.take_flag("bf16") else "float16" if keys.take_flag("fp16") else "float32"
    if keys.take_flag("fp8"):  # LLaMA-Factory's
        _read_eight_bit(keys, words, "fp8")
    mode = str(keys.take("cp_mode", default="ulysses"))
    words["attention"] = mode if mode in ("ulysses", "ring") else "gather"
    read_fsdp(keys, words)
    if keys.take_number("fsdp_size", default=1) > 1 and not keys.find("fsdp", "fsdp_config.version"):
        words["zero"] = 3
    names = ("dp_replicate_size mp_replicate_size", "fsdp_size dp_shard_size mp_shard_size dp_size")
    _read_sizes(keys, words, names)
    keys.take("use_cpu", "output_dir", "fsdp_config.transformer_layer_cls_to_wrap")
    words["model"] = words.get("model") or keys.take("model_name_or_path", "model") or ""


def _write_trainer(request: ExportRequest) -> Mapping[str, str]:
    layout, words = request.layout, request.words
    words |= {"sequence": None, "tensor": 1, "expert": 1}
    values: dict[str, Any] = {"output_dir": "out", **write_rows(TRAINER_ROWS, words)}
    if layout.precision in ("bfloat16", "float16"):
        values["bf16" if layout.precision == "bfloat16" else "fp16"] = True
    if layout.zero == 1:
        inner = {key: value for key, value in values_of_layout(request).items() if key.startswith("zero")}
        inner |= {"bf16.enabled": "auto", "fp16.enabled": "auto", "train_micro_batch_size_per_gpu": "auto"}
        inner |= {"gradient_accumulation_steps": "auto", "train_batch_size": "auto"}
        values |= {f"deepspeed.{key}": value for key, value in inner.items()}
    elif layout.zero:
        values |= {"fsdp": "full_shard" if layout.zero == 3 else "shard_grad_op", "fsdp_config.version": 2}
        values |= _fsdp_values(request, "fsdp_config.")
    if layout.recompute == "full" and layout.zero not in (2, 3):
        values["gradient_checkpointing"] = True
    if layout.tensor > 1 or layout.expert > 1 or layout.zero_groups > 1:
        groups = layout.zero_groups if layout.zero else layout.data
        sizes = {"tp_size": layout.tensor, "fsdp_size": layout.data // groups, "dp_replicate_size": groups}
        values |= {f"distributed_config.{key}": size for key, size in sizes.items() if size > 1}
        if layout.tensor > 1:
            values["distributed_config.tp_plan"] = "auto"
        if layout.expert > 1:
            values["distributed_config.ep_size"] = layout.expert
    return {"training_arguments.json": write_json(values)}


def _check_trainer(request: ExportRequest) -> str:
    layout = request.layout
    if reason := _refuse_shard(layout):
        return reason
    if layout.expert > 1 and layout.zero not in (2, 3):
        return f"expert={layout.expert} is a part of its sharded ranks; use zero=2 or zero=3"
    if layout.expert > 1 and layout.expert % layout.tensor:
        return f"expert={layout.expert} is no multiple of tensor={layout.tensor}, as its `ep_size` must be"
    if layout.tensor > 1 and layout.zero == 1:
        return "ZeRO 1 is DeepSpeed's there, which excludes its own tensor sizes; use zero=3 or tensor=1"
    if layout.offload == "optimizer" and layout.zero != 1:
        return f"offload=optimizer alone is DeepSpeed's; use zero=1, not zero={layout.zero}"
    return ""


def _notes_trainer(request: ExportRequest) -> list[str]:
    layout = request.layout
    notes = [f"started on {layout.num_ranks} ranks, for example torchrun --nproc-per-node {min(8, layout.num_ranks)}"]
    if layout.tensor > 1 or layout.expert > 1 or layout.zero_groups > 1:
        notes.append("`distributed_config` is no training argument: hand it to from_pretrained(distributed_config=DistributedConfig(...))")
    return notes


TRANSFORMERS = Framework(
    name="transformers", title="transformers", file_name="training_arguments.json",
    signs=("per_device_train_batch_size", "model_name_or_path", "dist_config.name", "cp_size", "fsdp_config.transformer_layer_cls_to_wrap"),
    rows=TRAINER_ROWS,
    says={
        "data": None, "tensor": None, "expert": None, "microbatches": None, "shard": None, "zero": (0, 1, 2, 3),
        "precision": tuple(_PRECISION),
        "recompute": ("none", "full"), "compile": ("off", "on"), "offload": ("none", "optimizer"),
    },
    loses=_LOSES, read=read_trainer, write=_write_trainer, check=_check_trainer, notes=_notes_trainer, unpriced=_UNPRICED,
    clip_key="max_grad_norm",
)  # fmt: skip

AXOLOTL_ROWS = (
    KeyRow("micro_batch", "micro_batch_size", 1, always=True),
    KeyRow("microbatches", "gradient_accumulation_steps", 1, always=True),
    KeyRow("tensor", "tensor_parallel_size", 1),
    KeyRow("context", "context_parallel_size", 1, aliases=("sequence_parallel_degree",)),
    KeyRow("expert", "expert_parallel_size", 1),
    KeyRow("sequence", "sequence_len", 0),
    KeyRow("compile", "torch_compile", "off", {"on": True, "off": False}),
)


def read_axolotl(keys: ConfigurationKeys, words: Words) -> None:
    """Read what is no single key."""
    keys.take("fsdp_config.transformer_layer_cls_to_wrap", "fsdp_config.auto_wrap_policy")
    read_fsdp(keys, words)
    bf16 = str(keys.take("bf16", "bfloat16", default="auto")).lower()  # its default: where the GPU has it
    fp16 = str(keys.take("fp16", default=False)).lower()
    words["precision"] = "float16" if fp16 == "true" else "float32" if bf16 in ("false", "none") else "bfloat16"
    if keys.take_flag("fp8"):
        _read_eight_bit(keys, words, "fp8")
    words["attention"] = "ring"
    words["_expert_multiplies"] = True
    _read_sizes(keys, words, ("dp_replicate_size", "dp_shard_size"))
    words["model"] = words.get("model") or keys.take("base_model") or ""


def _write_axolotl(request: ExportRequest) -> Mapping[str, str]:
    layout, words = request.layout, request.words
    values: dict[str, Any] = {"base_model": request.model.removeprefix("hf:")} if request.model.startswith("hf:") else {}
    values |= write_rows(AXOLOTL_ROWS, words)
    if layout.zero > 1:
        values |= {
            "dp_shard_size": layout.data // layout.expert // layout.zero_groups,
            "dp_replicate_size": layout.zero_groups,
            "fsdp_version": 2,
        }
        values |= {"fsdp_config.reshard_after_forward": layout.zero == 3, "fsdp_config.offload_params": False}
        values |= {"fsdp_config.auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_config.state_dict_type": "SHARDED_STATE_DICT"}
        if request.block:
            values["fsdp_config.transformer_layer_cls_to_wrap"] = request.block
    elif layout.zero == 1:
        values["deepspeed"] = "deepspeed_configs/zero1.json"
    if layout.recompute == "full":
        values["gradient_checkpointing"] = True
    values["bf16"] = layout.precision in ("bfloat16", TENSORS)
    if layout.precision == TENSORS:
        values["fp8"] = True
    if layout.precision == "float16":
        values["fp16"] = True
    if layout.context > 1:
        values["attn_implementation"] = "flash_attention_2"  # its ring has no other
    if layout.expert > 1:
        values["plugins"] = ["axolotl.integrations.expert_parallel.ExpertParallelPlugin"]
    return {"axolotl.yaml": write_yaml(values, f"{layout}, on {layout.num_ranks} GPUs\nadd datasets, optimizer and output_dir")}


def _check_axolotl(request: ExportRequest) -> str:
    layout = request.layout
    if reason := _refuse_shard(layout):
        return reason
    if layout.context > 1 and request.micro_batch > 1:
        return f"context={layout.context} needs single samples: use microbatches={layout.microbatches * request.micro_batch}"
    if (layout.tensor > 1 or layout.context > 1 or layout.expert > 1) and layout.zero not in (2, 3):
        return f"its sizes of tensor, context and expert go with FSDP 2; use zero=2 or zero=3, not zero={layout.zero}"
    return ""


AXOLOTL = Framework(
    name="axolotl", title="Axolotl", file_name="axolotl.yaml", signs=("base_model", "sequence_len"), rows=AXOLOTL_ROWS,
    says={
        "data": None, "tensor": None, "context": None, "expert": None, "microbatches": None, "shard": None, "zero": (0, 1, 2, 3),
        "precision": (*_PRECISION, TENSORS), "recompute": ("none", "full"), "attention": ("ring",), "compile": ("off", "on"),
    },
    loses=_LOSES, read=read_axolotl, write=_write_axolotl, check=_check_axolotl,
    notes=lambda request: [f"started on {request.layout.num_ranks} GPUs"], unpriced=_UNPRICED, clip_key="max_grad_norm",
)  # fmt: skip
