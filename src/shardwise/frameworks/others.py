"""nanotron YAML, AxoNN's `init`, Lightning's CLI YAML, and fms-fsdp's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.frameworks.eight_bit import read_recipe_of_key
from shardwise.frameworks.mapping import ConfigurationKeys, ExportRequest, Framework, KeyRow, Words, shard_within_hosts, write_rows
from shardwise.frameworks.texts import write_yaml
from shardwise.plan.ir.grid import parse_grid

NANOTRON_ROWS = (
    KeyRow("tensor", "parallelism.tp", 1, always=True),
    KeyRow("pipeline", "parallelism.pp", 1, always=True),
    KeyRow("context", "parallelism.context_parallel_size", 1),
    KeyRow("expert", "parallelism.expert_parallel_size", 1, always=True),
    KeyRow("schedule", "parallelism.pp_engine", "gpipe", {"1f1b": "1f1b", "gpipe": "afab"}, always=True),
    KeyRow("sequence_parallel", "parallelism.tp_mode", "off", {"on": "REDUCE_SCATTER", "off": "ALL_REDUCE"}, always=True),
    KeyRow("recompute", "parallelism.recompute_layer", "none", {"full": True, "none": False}, always=True),
    KeyRow("zero", "optimizer.zero_stage", 0, always=True),
    KeyRow("precision", "model.dtype", "float32", {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}, always=True),
    KeyRow("micro_batch", "tokens.micro_batch_size", 1, always=True),
    KeyRow("microbatches", "tokens.batch_accumulation_per_replica", 1, always=True),
    KeyRow("sequence", "tokens.sequence_length", 0, always=True),
)
_NANOTRON_MODEL = (
    ("layers", "num_hidden_layers"), ("hidden", "hidden_size"), ("heads", "num_attention_heads"), ("kv_heads", "num_key_value_heads"),
    ("feed_forward", "intermediate_size"), ("vocabulary", "vocab_size"), ("experts", "moe_config.num_experts"),
)  # fmt: skip


def read_nanotron(keys: ConfigurationKeys, words: Words) -> None:
    """Read what is no single key."""
    words["data"] = keys.take_number("parallelism.dp", default=1) * words["expert"]
    words["attention"] = "ring"
    for word, name in _NANOTRON_MODEL:
        words[word] = keys.take_number(f"model_config.{name}", name) or None
    words["gated"] = bool(keys.find("is_llama_config", "is_qwen2_config"))
    keys.take("is_llama_config", "is_qwen2_config")
    keys.leave("accumulate_grad_in_fp32", "gradients are summed in 32 bits")


def _write_nanotron(request: ExportRequest) -> Mapping[str, str]:
    layout = request.layout
    values = {"parallelism.dp": layout.data // layout.expert, **write_rows(NANOTRON_ROWS, request.words)}
    values |= {
        "parallelism.pp_engine": "afab" if layout.schedule == "gpipe" else "1f1b",
        "parallelism.tp_linear_async_communication": False,
    }
    values["optimizer.accumulate_grad_in_fp32"] = True
    return {"nanotron.yaml": write_yaml(values, f"{layout}\nthese sections into your configuration")}


NANOTRON = Framework(
    name="nanotron", title="nanotron", file_name="nanotron.yaml", signs=("parallelism.dp", "parallelism.tp", "parallelism.pp"),
    rows=NANOTRON_ROWS,
    says={
        "data": None, "tensor": None, "pipeline": None, "context": None, "expert": None, "microbatches": None,
        "schedule": ("1f1b", "gpipe"),
        "zero": (0, 1), "precision": ("float32", "bfloat16", "float16"), "recompute": ("none", "full"), "sequence_parallel": ("off", "on"),
        "attention": ("ring",),
    },
    loses={
        "compile": ("off", "no key"),
    },
    read=read_nanotron, write=_write_nanotron,
    notes=lambda request: ["its expert axis multiplies the ranks: dp is data / expert"] if request.layout.expert > 1 else [],
)  # fmt: skip

AXONN_ROWS = (KeyRow("pipeline", "G_inter", 1, always=True), KeyRow("data", "G_data", 1, always=True))
_GRID_KEYS = ("G_intra_r", "G_intra_c", "G_intra_d")


def read_axonn(keys: ConfigurationKeys, words: Words) -> None:
    """Read the grid of tensor ranks."""
    sizes = [keys.take_number(f"init.{key}", key, default=1) for key in _GRID_KEYS]
    keys.read.update(keys.find(*_GRID_KEYS, "G_inter", "G_data", "init"))
    words["tensor"] = sizes[0] * sizes[1] * sizes[2]
    if sum(size > 1 for size in sizes) > 1 or sizes[0] == 1 < words["tensor"]:
        words["grid"] = "x".join(map(str, sizes))
    kind = str(keys.take("init.mixed_precision", "mixed_precision", "init.precision", default="float32"))
    words["precision"] = "bfloat16" if "bf" in kind else "float16" if "16" in kind else "float32"
    words["microbatches"] = keys.take_number("microbatches", default=1)
    words["micro_batch"] = keys.take_number("micro_batch_size", default=1)


def _write_axonn(request: ExportRequest) -> Mapping[str, str]:
    layout = request.layout
    rows, columns, depth = (*(parse_grid(layout.grid) if layout.grid else (layout.tensor,)), 1, 1)[:3]
    text = (
        f"# {layout}\nfrom axonn import axonn as ax\n\nmicro_batch_size = {request.micro_batch}\nmicrobatches = {layout.microbatches}\n"
        f"ax.init(G_inter={layout.pipeline}, G_data={layout.data}, G_intra_r={rows}, G_intra_c={columns}, G_intra_d={depth})\n"
    )
    return {"axonn_init.py": text}


AXONN = Framework(
    name="axonn", title="AxoNN", file_name="axonn_init.py", signs=("G_inter", "G_intra_r", "init.G_intra_r", "init.G_inter"),
    rows=AXONN_ROWS,
    says={"data": None, "tensor": None, "grid": None, "pipeline": None, "microbatches": None, "schedule": ("1f1b",)},
    loses={
        "precision": ("float32", "autocast is the script's: with torch.autocast(...)"),
        "recompute": ("none", "checkpointing is the script's"),
        "zero": (0, "its replicas hold the whole state"),
        "compile": ("off", "compilation is the script's"),
        "sequence_parallel": ("off", "it shards activations over its grid"),
    },
    read=read_axonn, write=_write_axonn, notes=lambda request: ["layers are replaced in the script: axonn.intra_layer.auto_parallelize()"],
)  # fmt: skip

LIGHTNING_ROWS = (
    KeyRow("tensor", "trainer.strategy.init_args.tensor_parallel_size", 1, aliases=("tensor_parallel_size",)),
    KeyRow("microbatches", "trainer.accumulate_grad_batches", 1, aliases=("accumulate_grad_batches",)),
    KeyRow(
        "precision", "trainer.precision", "float32",
        {"float32": "32-true", "bfloat16": "bf16-mixed", "float16": "16-mixed", "float64": "64-true"}, aliases=("precision",), always=True,
    ),
    KeyRow("micro_batch", "data.init_args.batch_size", 1, aliases=("batch_size", "micro_batch_size")),
)  # fmt: skip
_FSDP, _MODEL_PARALLEL = "lightning.pytorch.strategies.FSDPStrategy", "lightning.pytorch.strategies.ModelParallelStrategy"
_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "_HYBRID_SHARD_ZERO2": 2}


def read_lightning(keys: ConfigurationKeys, words: Words) -> None:
    """Read strategy and sizes."""
    if "transformer-engine" in (precision := str(keys.take("trainer.precision", "precision", default=""))):
        read_recipe_of_key(keys, words, "precision", precision)
        keys.notes.append("transformer-engine keeps no 32-bit copy of the weights there: weights with one are priced")
    strategy = str(keys.take("strategy.class_path", "trainer.strategy", "strategy", "Trainer.strategy", default="ddp"))
    nodes = keys.take_number("num_nodes", default=1)
    devices = keys.take("trainer.devices", "devices", "Trainer.devices")
    size = keys.take("data_parallel_size")
    kind = str(keys.take("sharding_strategy", default="FULL_SHARD")).upper()
    words["zero"] = 0
    if "fsdp" in strategy.lower():
        words["zero"] = _STAGES.get(kind, 3)
    elif "modelparallel" in strategy.lower():
        words["zero"] = 3
    elif "deepspeed" in strategy.lower():
        stage = keys.take("strategy.init_args.stage", "stage", default="".join(c for c in strategy if c.isdigit()) or 2)
        words["zero"] = int(str(stage)[:1])
        words["offload"] = "optimizer" if "offload" in strategy or keys.take_flag("offload_optimizer") else "none"
    if isinstance(size, int) or str(size).isdecimal():
        words["data"] = int(size)
    if isinstance(devices, int) or str(devices).isdecimal():
        words["devices"] = words.get("devices") or int(devices) * nodes
    mesh = keys.take("strategy.init_args.device_mesh", "device_mesh")
    if isinstance(mesh, list) and len(mesh) == 2:
        words["data"], words["shard"] = int(mesh[0]) * int(mesh[1]), int(mesh[1])
    elif "HYBRID" in kind and (words.get("devices") or 0) and nodes > 1:
        shard_within_hosts(words, words["devices"] // nodes)
    words["recompute"] = "full" if keys.has("activation_checkpointing_policy", "activation_checkpointing") else "none"
    keys.take("activation_checkpointing_policy", "activation_checkpointing")


def _write_lightning(request: ExportRequest) -> Mapping[str, str]:
    layout = request.layout
    values: dict[str, Any] = {"trainer.accelerator": "gpu", "trainer.devices": min(8, layout.num_ranks)}
    values["trainer.num_nodes"] = max(1, layout.num_ranks // 8)
    values |= write_rows(LIGHTNING_ROWS[1:], request.words)
    if layout.tensor > 1:
        values |= {"trainer.strategy.class_path": _MODEL_PARALLEL, "trainer.strategy.init_args.data_parallel_size": layout.data}
        values["trainer.strategy.init_args.tensor_parallel_size"] = layout.tensor
    elif layout.zero:
        values |= {"trainer.strategy.class_path": _FSDP}
        kinds = ("FULL_SHARD", "SHARD_GRAD_OP") if layout.zero_groups == 1 else ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
        values["trainer.strategy.init_args.sharding_strategy"] = kinds[layout.zero != 3]
        if layout.zero_groups > 1:
            values["trainer.strategy.init_args.device_mesh"] = [layout.zero_groups, layout.shard]
        if layout.recompute == "full":
            values["trainer.strategy.init_args.activation_checkpointing_policy"] = [request.block or "BLOCK_OF_THE_MODEL"]
    else:
        values["trainer.strategy"] = "ddp"
    return {"lightning.yaml": write_yaml(values, f"{layout}\nLightningCLI configuration")}


def _check_lightning(request: ExportRequest) -> str:
    layout = request.layout
    if layout.num_ranks > 8 and layout.num_ranks % 8:
        return f"{layout.num_ranks} ranks are no whole number of hosts of 8; use a multiple of 8"
    if layout.tensor > 1 and layout.zero_groups > 1:
        return f"shard={layout.shard} is FSDPStrategy's: use tensor=1, or shard=0 with tensor={layout.tensor}"
    if layout.tensor > 1 and layout.zero != 3:
        return f"ModelParallelStrategy is written for weights sharded by FSDP: use zero=3 with tensor={layout.tensor}"
    if layout.recompute == "full" and (not layout.zero or layout.tensor > 1):
        return "its recomputation is FSDPStrategy's: use zero=2 or zero=3 and tensor=1, or call it in the model"
    return ""


LIGHTNING = Framework(
    name="lightning", title="Lightning", file_name="lightning.yaml",
    signs=("trainer.accelerator", "trainer.strategy", "Trainer.strategy", "trainer.strategy.class_path"), rows=LIGHTNING_ROWS,
    says={
        "data": None, "tensor": None, "microbatches": None, "shard": None, "zero": (0, 2, 3),
        "precision": ("float32", "bfloat16", "float16", "float64"),
        "recompute": ("none", "full"),
    },
    loses={
        "zero": (2, "it has no sharded optimizer alone: SHARD_GRAD_OP is next"),
        "compile": ("off", "torch.compile is called in configure_model"),
        "sequence_parallel": ("off", "its plan is code of configure_model"),
    },
    read=read_lightning, write=_write_lightning, check=_check_lightning,
    notes=lambda request: ["tensor ranks follow the plan that the module's configure_model writes"] if request.layout.tensor > 1 else [],
)  # fmt: skip

_FMS_LAYERS = {"7b": 32, "13b": 40, "34b": 48, "70b": 80, "1.4b": 24, "llama3_8b": 32, "llama3_70b": 80}
FMS_ROWS = (
    KeyRow("micro_batch", "batch_size", 2, always=True),
    KeyRow("sequence", "seq_length", 4096),
    KeyRow("compile", "use_torch_compile", "off", {"on": True, "off": False}),
)


def read_fms(keys: ConfigurationKeys, words: Words) -> None:
    """Read fms-fsdp's arguments: FSDP of a llama, with a part of its blocks recomputed."""
    words["tensor"] = 1
    per_host = keys.take_number("nproc_per_node")
    words["devices"] = words.get("devices") or per_host * keys.take_number("nnodes")
    strategy = str(keys.take("sharding_strategy", default="hsdp"))
    words["zero"] = {"fsdp": 3, "hsdp": 3, "ddp": 0}.get(strategy, 3)
    if strategy == "hsdp":
        shard_within_hosts(words, per_host or 8)
        if not per_host:
            keys.notes.append("hosts of 8 are taken, among whose ranks HSDP shards: nproc_per_node is not in the file")
    words["precision"] = "bfloat16" if keys.take_flag("mixed_precision", default=True) else "float32"
    variant = str(keys.take("model_variant", default="7b"))
    words["recompute"] = "none"
    part = str(keys.take("selective_checkpointing", default="1"))
    if keys.take_flag("fsdp_activation_checkpointing"):
        top, _, bottom = part.partition("/")
        share = float(top) / float(bottom or 1)
        layers = _FMS_LAYERS.get(variant, 0)
        words["recompute"] = "full" if share >= 1 or not layers else f"full:{max(1, round(share * layers))}" if share > 0 else "none"
        if share < 1:
            keys.notes.append(f"every block of {part} recomputed, spread evenly: as many at the start are priced")
    words["_variant"] = variant


FMS_FSDP = Framework(
    name="fms-fsdp", title="fms-fsdp", file_name="", signs=("fsdp_activation_checkpointing", "selective_checkpointing", "low_cpu_fsdp"),
    rows=FMS_ROWS, says={}, read=read_fms, compiled_stack="torch-compiled",
)  # fmt: skip
