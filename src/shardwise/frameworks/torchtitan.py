"""torchtitan 0.3.0: its command line (`--module --config` and overrides), TOML files of before, and Python registries of configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.frameworks.eight_bit import find_recipe, read_recipe_of_key
from shardwise.frameworks.mapping import ConfigurationKeys, ExportRequest, Framework, KeyRow, Words, write_rows
from shardwise.frameworks.stage_tables import NAMED_TABLES, schedule_of_table, write_table

SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "breadth-first": "LoopedBFS", "zb-v": "ZBVZeroBubble"}
ROWS = (
    KeyRow("tensor", "parallelism.tensor_parallel_degree", 1, aliases=("training.tensor_parallel_degree",)),
    KeyRow("context", "parallelism.context_parallel_degree", 1, aliases=("experimental.context_parallel_degree",)),
    KeyRow("pipeline", "parallelism.pipeline_parallel_degree", 1, aliases=("experimental.pipeline_parallel_degree",)),
    KeyRow("expert", "parallelism.expert_parallel_degree", 1),
    KeyRow("sequence", "training.seq_len", 0, aliases=("training.max_context_length",)),
    KeyRow("compile", "compile.enable", "off", {"on": True, "off": False}, aliases=("training.compile",)),
)
_MODELS = {"llama-8b": ("llama3", "llama3_8b"), "llama-70b": ("llama3", "llama3_70b"), "llama-405b": ("llama3", "llama3_405b")}
_ZOO = {config: name for name, (_, config) in _MODELS.items()} | {"8B": "llama-8b", "70B": "llama-70b", "405B": "llama-405b"}
_TITAN_PRECISION = {"bfloat16": "bfloat16", "float32": "float32", "float16": "float16"}
_UNPRICED = {
    "enable_async_tensor_parallel": "overlap is as shardwise runs it",
    "parallelism.pipeline_parallel_first_stage_less_layers": "stages are cut by their prices",
    "parallelism.pipeline_parallel_last_stage_less_layers": "stages are cut by their prices",
    "parallelism.module_fqns_per_model_part": "stages are cut by their prices",
    "activation_checkpoint.selective_ac_option": "which products are saved is not priced",
    "filter_fqns": "all linear layers are priced in 8 bits",
    "enable_fsdp_float8_all_gather": "weights are gathered in 16 bits",
}


def read_torchtitan(keys: ConfigurationKeys, words: Words) -> None:
    """Read what is no single key."""
    replicate = keys.take_number("parallelism.data_parallel_replicate_degree", "training.data_parallel_replicate_degree", default=1)
    shard = keys.take_number("parallelism.data_parallel_shard_degree", "training.data_parallel_shard_degree", default=-1)
    nodes = keys.take_number("nnodes") or 1
    words["devices"] = words.get("devices") or keys.take_number("nproc_per_node", "ngpu") * nodes
    if shard > 0:
        words["data"] = replicate * shard
    is_sharded = shard != 1 or words["context"] > 1
    if replicate > 1 and shard > 1:
        words["shard"] = shard
    elif replicate > 1 and is_sharded and words["devices"]:
        words["shard"] = max(1, words["devices"] // (replicate * words["tensor"] * words["pipeline"] * words["context"]))
    reshard = str(keys.take("parallelism.fsdp_reshard_after_forward", default="default"))
    never = reshard == "never" or (reshard == "default" and words["pipeline"] > 1)
    words["zero"] = 0 if not is_sharded else 2 if never else 3
    is_on = keys.take_flag("parallelism.enable_sequence_parallel", default=True)
    if keys.take_flag("parallelism.no_enable_sequence_parallel"):
        is_on = False
    words["sequence_parallel"] = "on" if is_on and words["tensor"] > 1 else "off"
    words["attention"] = "gather" if words["context"] > 1 else "auto"
    rotate = keys.take("parallelism.context_parallel_rotate_method", "experimental.context_parallel_rotate_method")
    if rotate == "alltoall":
        words["attention"] = "ring"
    kind = str(keys.take("training.mixed_precision_param", default="bfloat16"))
    words["precision"] = _TITAN_PRECISION.get(kind, "bfloat16")
    if not is_sharded and not keys.has("training.mixed_precision_param"):
        words["precision"] = "bfloat16"
    _read_eight_bit(keys, words)
    _read_recompute(keys, words)
    _read_schedule(keys, words)
    _read_batch(keys, words)
    config = str(keys.take("config", "model.flavor", "model_spec.model_registry", "model_registry", default=""))
    keys.take("module", "model.name", "model_spec")
    words["model"] = words.get("model") or _ZOO.get(config, "")


def _read_eight_bit(keys: ConfigurationKeys, words: Words) -> None:
    """Read the converters of linear layers: torchao's recipe is `tensorwise` where a file of before names none, `rowwise` in a registry."""
    name = next((name for name in ("model.converters", "converters", "quantization", "enable_float8_linear") if keys.has(name)), "")
    value = keys.take(name) if name else None
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value or "")
    recipe = keys.take(
        "float8.recipe_name", "Float8LinearConverter.Config.recipe_name", "converters.recipe_name", "quantization.recipe_name"
    )
    is_float8 = "float8" in text.lower() or (name == "enable_float8_linear" and value not in (False, "false"))
    keys.take("precompute_float8_dynamic_scale_for_fsdp", "model_compile_enabled", "force_recompute_fp8_weight_in_bwd")
    if is_float8:
        default = "rowwise" if "Float8LinearConverter" in text else "tensorwise"
        shown = keys.find("float8.recipe_name", "Config.recipe_name", "converters.recipe_name")
        read_recipe_of_key(keys, words, shown[0] if shown else name, str(recipe or default))
    if name and any(word in text.lower() for word in ("mx", "fp4")):
        key = keys.find(name)[0]
        keys.leave(key, f"{find_recipe(text).difference} ({text}) is no recipe of ours: precision={words['precision']} is priced")


def _read_recompute(keys: ConfigurationKeys, words: Words) -> None:
    mode = str(
        keys.take("activation_checkpoint.mode", "activation_checkpoint", "training.activation_checkpoint.mode", default="none")
    ).lower()
    option = str(keys.take("activation_checkpoint.selective_ac_option", default=""))
    words["recompute"] = "full" if mode.startswith("full") else "none"
    if mode.startswith("selective"):
        keys.leave("activation_checkpoint", "selective recomputation by operators has no word of ours: nothing is recomputed")
        keys.leave("activation_checkpoint.mode", "selective recomputation by operators has no word of ours: nothing is recomputed")
        if option.isdecimal():
            keys.leave("activation_checkpoint.selective_ac_option", f"one of {option} layers recomputed: recompute=full:N is nearest")


def _read_schedule(keys: ConfigurationKeys, words: Words) -> None:
    name = str(keys.take("parallelism.pipeline_parallel_schedule", "experimental.pipeline_parallel_schedule", default="1F1B"))
    table = keys.take("parallelism.pipeline_parallel_schedule_csv")
    layers = keys.take_number("parallelism.pipeline_parallel_layers_per_stage")
    if words["pipeline"] == 1:
        return
    back = {theirs.lower(): ours for ours, theirs in SCHEDULES.items()}
    if table and keys.files.get(str(table)):
        words["_table"] = keys.files[str(table)]
    elif name.lower() not in back:
        keys.leave("parallelism.pipeline_parallel_schedule", f"{name} has no word of ours: 1f1b is priced")
    words["schedule"] = back.get(name.lower(), "1f1b")
    if words["schedule"] in ("interleaved", "breadth-first"):
        count = words.get("layers") or 0
        words["chunks"] = max(1, -(-count // (words["pipeline"] * layers))) if count and layers else 2
        if layers and not count:
            keys.leave("parallelism.pipeline_parallel_layers_per_stage", "give the model: two stages a rank are priced")
    if words["schedule"] == "zb-v":
        words["chunks"] = 2


def _read_batch(keys: ConfigurationKeys, words: Words) -> None:
    local = keys.take_number("training.local_batch_size", "training.batch_size", default=0)
    tokens = keys.take_number("training.num_tokens_per_microbatch_per_dp_rank")
    if tokens and words["sequence"]:
        local = max(1, tokens // int(words["sequence"]))
    total = keys.take_number("training.global_batch_size", default=-1)
    micro = keys.take_number("parallelism.pipeline_parallel_microbatch_size", "experimental.pipeline_parallel_microbatch_size", default=1)
    local = local or 8
    if words["pipeline"] > 1:
        words["micro_batch"], words["microbatches"] = micro, max(1, local // micro)
    else:
        words["micro_batch"] = local
        words["global_batch"] = max(0, total)
    if words.get("_table"):
        found = schedule_of_table(words["_table"], words["pipeline"], words["microbatches"])
        words["schedule"], words["chunks"] = found or ("1f1b", 1)
        if not found:
            keys.leave("parallelism.pipeline_parallel_schedule_csv", "the table is no named schedule: 1f1b is priced")


def _values_of_request(request: ExportRequest) -> dict[str, Any]:
    layout, words = request.layout, request.words
    values = write_rows(ROWS, words)
    sharded = layout.zero > 0
    values["parallelism.data_parallel_replicate_degree"] = layout.zero_groups if sharded else layout.data
    values["parallelism.data_parallel_shard_degree"] = layout.data // layout.zero_groups if sharded else 1
    if sharded:
        values["parallelism.fsdp_reshard_after_forward"] = "always" if layout.zero == 3 else "never"
    if layout.tensor > 1:
        values["parallelism.enable_sequence_parallel"] = layout.sequence_parallel == "on"
    if layout.precision != "bfloat16":
        values["training.mixed_precision_param"] = layout.precision
    per_rank = request.micro_batch
    values["training.local_batch_size"] = per_rank * layout.microbatches if layout.pipeline > 1 else per_rank
    values["training.global_batch_size"] = request.batch_size
    if layout.pipeline > 1:
        values["parallelism.pipeline_parallel_microbatch_size"] = per_rank
        if layout.schedule in SCHEDULES:
            values["parallelism.pipeline_parallel_schedule"] = SCHEDULES[layout.schedule]
        else:
            values["parallelism.pipeline_parallel_schedule"] = "PipelineScheduleMulti"
            values["parallelism.pipeline_parallel_schedule_csv"] = f"{layout.schedule}.csv"
        values["parallelism.pipeline_parallel_first_stage_less_layers"] = 0
        values["parallelism.pipeline_parallel_last_stage_less_layers"] = 0
        if request.layers:
            values["parallelism.pipeline_parallel_layers_per_stage"] = -(-request.layers // (layout.pipeline * layout.chunks))
    if layout.pipeline > 1 or layout.expert > 1:
        values["training.disable_cuda_graphs"] = True
    return values


def _write(request: ExportRequest) -> Mapping[str, str]:
    layout = request.layout
    module, config = _MODELS.get(request.model.partition(":")[0], ("", ""))
    words = [f"--module {module} --config {config}"] if module else []
    for key, value in _values_of_request(request).items():
        section, _, name = key.partition(".")
        if isinstance(value, bool):
            words.append(f"--{section}.{name if value else f'no_{name}'}")
        else:
            words.append(f"--{key} {value}")
    words.append("activation_checkpoint:full" if layout.recompute == "full" else "activation_checkpoint:none")
    files = {"torchtitan.args": f"# {layout}\n" + " \\\n".join(words) + "\n"}
    if layout.pipeline > 1 and layout.schedule not in SCHEDULES:
        files[f"{layout.schedule}.csv"] = write_table(layout)
    return files


def _check(request: ExportRequest) -> str:
    layout = request.layout
    if layout.pipeline > 1 and layout.chunks > 2 and not request.layers:
        return f"chunks={layout.chunks} needs the number of layers, which is unknown here; use chunks=2"
    parts = layout.pipeline * layout.chunks
    if layout.pipeline > 1 and layout.chunks > 1 and request.layers and request.layers % parts:
        return f"{request.layers} layers do not divide by pipeline={layout.pipeline} x chunks={layout.chunks}"
    if layout.context > 1 and request.sequence and request.sequence % (2 * layout.context):
        return f"a sequence of {request.sequence} does not divide by 2 x context={layout.context}"
    if layout.zero and layout.data == 1 and layout.context == 1:
        return f"zero={layout.zero} on data=1 shards nothing there; use zero=0"
    if layout.context > 1 and not layout.zero:
        return f"context={layout.context} is sharded by its FSDP; use zero=2 or zero=3"
    if layout.expert > 1 and not layout.zero:
        return f"expert={layout.expert} is a part of its sharded ranks; use zero=2 or zero=3"
    return ""


def _notes_of_request(request: ExportRequest) -> list[str]:
    layout, notes = request.layout, []
    if not _MODELS.get(request.model.partition(":")[0]):
        notes.append(f"add --module and --config of your model: torchtitan's registry has no {request.model or 'name for it'}")
    if layout.tensor > 1:
        notes.append("sequence parallelism is on by default there, and set here as the layout has it")
    if layout.pipeline > 1:
        notes.append("end stages are a layer shorter and weights stay gathered by default there: both are set; cuda graphs are off")
    if layout.zero == 2:
        notes.append("`never` keeps gathered weights from forward until backward: more memory than zero=2")
    if layout.pipeline == 1 and layout.microbatches > 1:
        notes.append("its trainer reduces gradients in every accumulated microbatch, not once a step")
    return notes


TORCHTITAN = Framework(
    name="torchtitan", title="torchtitan", file_name="torchtitan.args",
    signs=("parallelism.tensor_parallel_degree", "parallelism.data_parallel_shard_degree", "training.local_batch_size", "module",
           "training.num_tokens_per_microbatch_per_dp_rank", "parallelism", "training.data_parallel_degree"),
    rows=ROWS,
    says={
        "data": None, "tensor": None, "pipeline": None, "microbatches": None, "context": None, "expert": None, "chunks": None,
        "shard": None, "schedule": (*SCHEDULES, *NAMED_TABLES), "zero": (0, 2, 3),
        "precision": ("bfloat16", "float32"), "recompute": ("none", "full"),
        "sequence_parallel": ("off", "on"), "attention": ("gather",), "compile": ("off", "on"),
    },
    loses={
        "zero": (2, "it has no sharded optimizer alone: weights are sharded and kept gathered until backward (`never`)"),
        "recompute": ("full", "it recomputes whole blocks or saves by operators"),
        "offload": ("none", "its offload moves weights and gradients too"),
    },
    read=read_torchtitan, write=_write, check=_check, notes=_notes_of_request, unpriced=_UNPRICED, stacks={},
    clip_key="--training.max_norm",
)  # fmt: skip
