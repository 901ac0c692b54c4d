"""Megatron-LM command lines, Megatron Bridge and NeMo recipes, and LLaMA-Factory's Megatron YAML: one set of keys, the words of their
`TransformerConfig` and training arguments. Versions read and written: megatron-core 0.19.2, megatron-bridge 0.6.2."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from shardwise.frameworks.eight_bit import TENSORS, read_format, read_recipe_of_key
from shardwise.frameworks.mapping import ConfigurationKeys, ExportRequest, Framework, KeyRow, Words, write_rows
from shardwise.frameworks.texts import write_yaml
from shardwise.plan.residency import strip_layers

SIZES = (
    KeyRow("tensor", "tensor_model_parallel_size", 1, aliases=("model_parallel_size",)),
    KeyRow("pipeline", "pipeline_model_parallel_size", 1, aliases=("pipe_parallel_size",)),
    KeyRow("context", "context_parallel_size", 1),
    KeyRow("expert", "expert_model_parallel_size", 1),
    KeyRow("sequence_parallel", "sequence_parallel", "off", {"on": True, "off": False}),
    KeyRow("neighbours", "use_tp_pp_dp_mapping", "branch", {"pipeline": True, "branch": False}),
    KeyRow("offload", "optimizer_cpu_offload", "none", {"optimizer": True, "none": False}),
    KeyRow("attention", "cp_comm_type", "ring", {"ring": "p2p", "gather": "all_gather", "ulysses": "a2a"}),
    KeyRow("micro_batch", "micro_batch_size", 0, aliases=("per_device_train_batch_size",), always=True),
    KeyRow("global_batch", "global_batch_size", 0, always=True),
    KeyRow("sequence", "seq_length", 0, aliases=("cutoff_len",), always=True),
)
MODEL = (
    KeyRow("layers", "num_layers", 0),
    KeyRow("hidden", "hidden_size", 0),
    KeyRow("feed_forward", "ffn_hidden_size", 0),
    KeyRow("heads", "num_attention_heads", 0),
    KeyRow("kv_heads", "num_query_groups", 0),
    KeyRow("vocabulary", "vocab_size", 0, aliases=("padded_vocab_size",)),
    KeyRow("experts", "num_experts", 0, aliases=("num_moe_experts",)),
    KeyRow("top", "moe_router_topk", 0),
    KeyRow("gated", "swiglu", False, {True: True, False: False}),
)
ROWS = (*SIZES, *MODEL)
_UNPRICED = {
    "first_last_layers_bf16": "all layers' products are in 8 bits",
    "fp8_param_gather": "weights are gathered in 16 bits",
    "grad_reduce_in_bf16": "gradients are reduced in 32 bits",
    "grad_reduce_in_fp32": "gradients are reduced in 32 bits",
    "expert_tensor_parallel_size": "experts are cut by tensor",
    "use_nccl_ub": "registered buffers are not priced",
    "fsdp_double_buffer": "double buffers are not priced",
    "outer_dp_sharding_strategy": "sharding is over all replicas, not inside groups of them",
    "rampup_batch_size": "the full batch is priced",
    "step_batch_size_schedule": "the full batch is priced",
    "recompute_modules": "recomputation of single modules is not priced",
    "mtp_num_layers": "layers for several next tokens are not priced",
    "pipeline_model_parallel_layout": "stages are cut by their prices",
    "decoder_first_pipeline_num_layers": "stages are cut by their prices",
    "decoder_last_pipeline_num_layers": "stages are cut by their prices",
    "tp_comm_overlap": "overlap is as shardwise runs it",
    "overlap_moe_expert_parallel_comm": "overlap is as shardwise runs it",
    "cuda_graph_impl": "graphs are not priced",
    "enable_cuda_graph": "graphs are not priced",
    "fine_grained_activation_offloading": "offload of single modules is not priced",
    "cpu_offloading_num_layers": "see offload=activations:N",
    "multi_latent_attention": "give the model itself with --model",
}


def read_megatron(keys: ConfigurationKeys, words: Words) -> None:
    """Read what is no single key."""
    words["zero"] = _read_zero(keys)
    words["precision"] = _read_precision(keys)
    _read_eight_bit(keys, words)
    _read_recompute(keys, words)
    keys.take("disable_bias_linear", "untie_embeddings_and_output_weights", "group_query_attention")
    _read_chunks(keys, words)
    expert_tensor = keys.take_number("expert_tensor_parallel_size", default=words["tensor"])
    if expert_tensor != words["tensor"] and words["expert"] > 1:
        keys.leave("expert_tensor_parallel_size", f"experts are cut over tensor={words['tensor']} as well")
    words["microbatches"] = keys.take_number("gradient_accumulation_steps") if not words["global_batch"] else 0
    sizes = keys.take_number("nproc_per_node", "num_gpus_per_node", "gpus_per_node", "num_devices_per_node", "ntasks_per_node", "devices")
    nodes = keys.take_number("nnodes", "num_nodes", "num_machines") or 1
    if not words.get("devices") and sizes:
        words["devices"] = sizes * nodes
    instances = keys.take_number("num_distributed_optimizer_instances", default=1)
    if instances > 1 and words.get("devices"):
        words["shard"] = words["devices"] // (words["tensor"] * words["pipeline"] * words["context"] * instances)
    words["model"] = words.get("model") or keys.take("model_name_or_path", "model.from_hf_pretrained", "from_hf_pretrained") or ""


def _read_zero(keys: ConfigurationKeys) -> int:
    is_sharded = keys.take_flag("use_megatron_fsdp", "use_custom_fsdp")
    strategy = keys.take("data_parallel_sharding_strategy", default="no_shard" if not is_sharded else "optim_grads_params")
    optimizer = keys.take_flag("use_distributed_optimizer")
    if keys.take_flag("use_torch_fsdp2"):
        return 3
    if is_sharded:
        return {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}.get(str(strategy), 3)
    return 1 if optimizer else 0


def _read_precision(keys: ConfigurationKeys) -> str:
    recipe = str(keys.take("mixed_precision._perf_precision", "mixed_precision", "precision", default=""))
    kind = str(keys.take("params_dtype", "dtype", default=""))
    is_bf16 = keys.take_flag("bf16", "bf16.enabled") or "bf16" in recipe or "bfloat16" in kind or "fp8" in recipe or "nvfp4" in recipe
    is_fp16 = keys.take_flag("fp16", "fp16.enabled") or "fp16" in recipe or "float16" in kind.replace("bfloat16", "")
    return "bfloat16" if is_bf16 else "float16" if is_fp16 else "float32"


def _read_eight_bit(keys: ConfigurationKeys, words: Words) -> None:
    """Read a recipe of 8-bit products: by its arguments, whose recipe is `delayed` by default, or by the name of a mixed precision."""
    for name in ("mixed_precision._perf_precision", "mixed_precision", "plugins", "precision"):
        text = str(keys.values[keys.find(name)[0]]) if keys.find(name) else ""
        if any(word in text.lower() for word in ("fp8", "mx", "fp4")):
            keys.take(name)
            read_recipe_of_key(keys, words, name, text)
            return
    form = str(keys.take("fp8_format", "fp8", default=""))
    recipe = str(keys.take("fp8_recipe", default="delayed"))
    keys.take("fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_margin", "fp8_interval", "transformer_impl")
    if form and form.lower() not in ("false", "none"):
        name = "fp8_recipe" if keys.has("fp8_recipe") else "fp8_format" if keys.has("fp8_format") else "fp8"
        if read_recipe_of_key(keys, words, name, recipe) and name != "fp8_format":
            read_format(keys, "fp8_format" if keys.has("fp8_format") else "fp8", form)


def _read_recompute(keys: ConfigurationKeys, words: Words) -> None:
    granularity = str(keys.take("recompute_granularity", default="none"))
    method = str(keys.take("recompute_method", "activations_checkpoint_method", "checkpoint_activations", default=""))
    layers = keys.take_number("recompute_num_layers", "activations_checkpoint_num_layers", "checkpoint_num_layers", default=1)
    if keys.take_flag("recompute_activations"):
        granularity = "selective"
    if method and granularity == "none":
        granularity = "full" if method.lower() not in ("false", "no") else "none"
    modules = keys.take("recompute_modules", default=[])
    names = modules if isinstance(modules, list) else str(modules).split()
    if granularity == "selective" and names and "core_attn" not in names:
        keys.leave("recompute_modules", f"recomputation of {', '.join(map(str, names))} alone is not priced: nothing is recomputed")
        granularity = "none"
    elif granularity == "selective" and len(names) > 1:
        keys.leave("recompute_modules", "only attention from its scores is recomputed (recompute=selective)")
    words["recompute"] = granularity
    if granularity == "full" and method == "block":
        words["recompute"] = f"full:{layers}" if layers else "none"
    elif granularity == "full" and layers > 1:
        words["segment"] = layers


def _read_chunks(keys: ConfigurationKeys, words: Words) -> None:
    chunks = keys.take_number("num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size", default=1)
    by_layers = keys.take_number("num_layers_per_virtual_pipeline_stage")
    if by_layers and words.get("layers"):
        chunks = max(1, int(words["layers"]) // (words["pipeline"] * by_layers))
    elif by_layers:
        keys.leave("num_layers_per_virtual_pipeline_stage", "the number of layers is not in the file, so stages are one a rank")
    words["schedule"] = "interleaved" if chunks > 1 else "1f1b"
    words["chunks"] = chunks
    if chunks > 1 and str(words["recompute"]).startswith("full:"):
        words["recompute"] = f"full:{words['recompute'][5:]}"


def values_of_request(request: ExportRequest) -> dict[str, Any]:
    """Return the arguments of a layout, by their names with underscores; flags are True."""
    layout, words = request.layout, request.words
    if layout.context == 1:
        words["attention"] = "ring"
    values = write_rows(ROWS, words)
    values["tensor_model_parallel_size"], values["pipeline_model_parallel_size"] = layout.tensor, layout.pipeline
    if layout.zero == 1:
        values["use_distributed_optimizer"] = True
        if layout.zero_groups > 1:
            values["num_distributed_optimizer_instances"] = layout.zero_groups
    elif layout.zero:
        strategy = {2: "optim_grads", 3: "optim_grads_params"}[layout.zero]
        values |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy, "use_distributed_optimizer": True}
    if layout.precision in ("bfloat16", "float16"):
        values["bf16" if layout.precision == "bfloat16" else "fp16"] = True
    if layout.precision == TENSORS:
        values |= {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
    if layout.chunks > 1:
        values["num_virtual_stages_per_pipeline_rank"] = layout.chunks
    kind, count = strip_layers("recompute", layout.recompute), layout.recompute.partition(":")[2]
    if kind == "selective":
        values["recompute_granularity"] = "selective"
    elif kind == "full":
        method = {"recompute_method": "block", "recompute_num_layers": int(count)} if count else {}
        values |= {"recompute_granularity": "full", **(method or {"recompute_method": "uniform", "recompute_num_layers": layout.segment})}
    return values


def _check_megatron(request: ExportRequest) -> str:
    layout = request.layout
    if layout.zero > 1 and (layout.pipeline > 1 or layout.chunks > 1):
        return f"FSDP (zero={layout.zero}) with pipeline={layout.pipeline} is not what it supports; use zero=1 or pipeline=1"
    if layout.zero > 1 and layout.zero_groups > 1:
        return f"shard={layout.shard} of FSDP (zero={layout.zero}) is not written; use zero=1 or shard=0"
    if layout.recompute.partition(":")[2] and layout.segment > 1:
        return f"recompute={layout.recompute} with segment={layout.segment}: block recomputation has single layers; use segment=1"
    if layout.sequence_parallel == "on" and layout.tensor == 1:
        return "sequence_parallel=on needs tensor=2 or more; leave it out"
    if layout.expert > 1 and layout.data % layout.expert:
        return f"expert={layout.expert} does not divide data={layout.data}"
    if layout.pipeline > 1 and request.layers and request.layers % (layout.pipeline * layout.chunks) and layout.chunks > 1:
        return f"{request.layers} layers on pipeline={layout.pipeline} chunks={layout.chunks} do not divide; use chunks=1"
    if request.sequence and layout.context > 1 and request.sequence % (2 * layout.context):
        return f"a sequence of {request.sequence} does not divide by 2 x context={layout.context}"
    return ""


def _stage_layout(request: ExportRequest) -> str:
    """Return the text of uneven stages, `Et*9|t*10|t*11L`; empty where they are even or unknown."""
    counts = request.stage_layers
    if len(counts) < 2 or len(set(counts)) == 1 or request.layout.chunks > 1:
        return ""
    parts = [f"t*{count}" for count in counts]
    parts[0], parts[-1] = f"E{parts[0]}", f"{parts[-1]}L"
    return "|".join(parts)


def _notes_megatron(request: ExportRequest) -> list[str]:
    layout, notes = request.layout, []
    if not request.sizes:
        notes.append("the model's own arguments (--num-layers and others) are not in it: add those of your model")
    notes.append("set here: gradients are reduced in 32 bits, its default; --overlap-grad-reduce hides them, off by default")
    if layout.precision == TENSORS:
        notes.append("its output layer stays in 16 bits, and TransformerEngine's layers are used (--transformer-impl, its default)")
    if layout.expert > 1 and layout.tensor > 1:
        notes.append("experts are cut by tensor as well: expert-tensor-parallel-size is tensor-model-parallel-size by default")
    if layout.zero > 1:
        notes.append("run it without CUDA_DEVICE_MAX_CONNECTIONS=1")
    elif layout.tensor > 1 or layout.context > 1:
        notes.append("run it with CUDA_DEVICE_MAX_CONNECTIONS=1 on GPUs before Blackwell")
    return notes


def _arguments_of_request(request: ExportRequest) -> dict[str, Any]:
    values, layout = values_of_request(request), request.layout
    if layout.zero > 1:
        values |= {"ckpt_format": "fsdp_dtensor", "no_gradient_accumulation_fusion": True}
    if layout.data > 1:
        values["overlap_grad_reduce"] = True
        if layout.zero:
            values["overlap_param_gather"] = True
    if stages := _stage_layout(request):
        values["pipeline_model_parallel_layout"] = stages
    if request.sizes.get("gated"):
        values |= {"normalization": "RMSNorm", "position_embedding_type": "rope", "disable_bias_linear": True}
        values |= {"untie_embeddings_and_output_weights": True, "no_rope_fusion": True}
    if request.sizes.get("kv_heads"):
        values["group_query_attention"] = True
    if request.sequence:
        values["max_position_embeddings"] = request.sequence
    return values


def _write_command(request: ExportRequest) -> Mapping[str, str]:
    words = []
    for key, value in _arguments_of_request(request).items():
        option = f"--{key.replace('_', '-')}"
        if value is not False:
            words.append(option if value is True else f"{option} {shlex.quote(str(value))}")
    ranks = request.layout.num_ranks
    head = f"# {request.layout}\n# torchrun --nproc-per-node 8 --nnodes {max(1, ranks // 8)} pretrain_gpt.py with these arguments\n"
    head = head.replace("--nproc-per-node 8", f"--nproc-per-node {min(8, ranks)}")
    return {"megatron.args": head + " \\\n".join(words) + "\n"}


_SECTIONS = {"micro_batch_size": "train", "global_batch_size": "train", "bf16": "model", "fp16": "model"}
_DDP = (
    "use_distributed_optimizer",
    "use_megatron_fsdp",
    "data_parallel_sharding_strategy",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "num_distributed_optimizer_instances",
)
_BRIDGE_NAMES = {
    "fp8_format": "fp8",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "num_experts": "num_moe_experts",
}
_NOT_BRIDGE = (  # a recipe has its model already
    "no_gradient_accumulation_fusion", "ckpt_format", "no_rope_fusion", "swiglu", "group_query_attention", "disable_bias_linear",
    "normalization", "position_embedding_type", "max_position_embeddings", "untie_embeddings_and_output_weights", "vocab_size",
)  # fmt: skip


def _write_recipe(request: ExportRequest) -> Mapping[str, str]:
    values = {}
    for key, value in _arguments_of_request(request).items():
        name = _BRIDGE_NAMES.get(key, key)
        if key in _NOT_BRIDGE or any(row.key == key for row in MODEL):
            continue
        section = "ddp" if key in _DDP else "optimizer" if key == "optimizer_cpu_offload" else _SECTIONS.get(key, "model")
        values["dist.use_tp_pp_dp_mapping" if key == "use_tp_pp_dp_mapping" else f"{section}.{name}"] = value
    return {
        "bridge.yaml": write_yaml(values, f"{request.layout}\noverrides of a Megatron Bridge recipe, on {request.layout.num_ranks} GPUs")
    }


_SAYS: dict[str, tuple[Any, ...] | None] = {
    "data": None, "tensor": None, "pipeline": None, "microbatches": None, "context": None, "expert": None, "chunks": None, "segment": None,
    "shard": None,
    "schedule": ("1f1b", "interleaved"), "zero": (0, 1, 2, 3), "precision": ("float32", "bfloat16", "float16", TENSORS),
    "recompute": ("none", "selective", "full", "full:N"), "sequence_parallel": ("off", "on"), "offload": ("none", "optimizer"),
    "attention": ("ring", "gather", "ulysses"), "neighbours": ("branch", "pipeline"),
}  # fmt: skip
_LOSES = {"compile": ("off", "it has CUDA graphs instead of a compiler")}
_SIGNS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "use_megatron_fsdp", "num_layers")
_STACKS = {"H": "h100-megatron-core", "A": "a100-megatron", "G": "h100-megatron-core", "B": "h100-megatron-core"}

MEGATRON = Framework(
    name="megatron", title="Megatron-LM", file_name="megatron.args", signs=_SIGNS, rows=ROWS, says=_SAYS, loses=_LOSES, read=read_megatron,
    write=_write_command, check=_check_megatron, notes=_notes_megatron, unpriced=_UNPRICED, stacks=_STACKS, clip_key="--clip-grad",
)  # fmt: skip
BRIDGE = Framework(
    name="bridge", title="Megatron Bridge", file_name="bridge.yaml", signs=("train.micro_batch_size", "trainer.strategy"), rows=ROWS,
    says=_SAYS, loses=_LOSES, read=read_megatron, write=_write_recipe, check=_check_megatron, notes=_notes_megatron, unpriced=_UNPRICED,
    stacks=_STACKS, clip_key="optimizer.clip_grad",
)  # fmt: skip
