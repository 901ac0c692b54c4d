"""Other frameworks' own parsers, each in a process of its own: `python framework_parsers.py NAME FILE:WORLD ...` prints what they read.

A line of JSON a file, with our words for the framework's values after parsing. Nothing here reads a configuration itself. Parsers that
ask for GPUs get the answer of an H100; torch's fake process group answers for the other ranks.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.machinery
import json
import os
import runpy
import shlex
import sys
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

Words = dict[str, Any]


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports of GPU libraries that a parser does not use give empty modules."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in self.names else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return mock.MagicMock(__spec__=spec, __path__=[], __version__="2.7.0")

    def exec_module(self, module: Any) -> None:
        pass


def start_fake_group(world: int) -> None:
    """Start a process group of any size in this process alone."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # here: for tests of torch's own kind only

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)


def split_arguments(text: str) -> list[str]:
    return shlex.split(text.replace("\\\n", " "), comments=True)


def parse_megatron(file: Path, world: int) -> Words:
    """Run parse_args, validate_args and core_transformer_config_from_args."""
    if not hasattr(typing, "override"):
        import typing_extensions

        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    device = types.SimpleNamespace(major=9, minor=0, name="H100", total_memory=80 << 30, multi_processor_count=132)
    with mock.patch.multiple(torch.cuda, get_device_capability=lambda *_: (9, 0), get_device_properties=lambda *_: device):
        words = split_arguments(file.read_text())
        os.environ.update(WORLD_SIZE=str(world), RANK="0", LOCAL_RANK="0", CUDA_DEVICE_MAX_CONNECTIONS="1")
        if "--use-megatron-fsdp" in words:
            del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
        sys.argv = ["pretrain_gpt.py", *words, "--mock-data", "--tokenizer-type", "NullTokenizer"]
        from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args

        arguments = validate_args(parse_args())
        config = core_transformer_config_from_args(arguments)
    strategy = ("no_shard", "optim", "optim_grads", "optim_grads_params").index(arguments.data_parallel_sharding_strategy)
    chunks = arguments.virtual_pipeline_model_parallel_size or 1
    layers = "full" if config.recompute_method == "uniform" else f"full:{config.recompute_num_layers}"
    return {
        "data": arguments.data_parallel_size,
        "tensor": arguments.tensor_model_parallel_size,
        "pipeline": arguments.pipeline_model_parallel_size,
        "context": arguments.context_parallel_size,
        "expert": arguments.expert_model_parallel_size,
        "chunks": chunks,
        "zero": strategy if arguments.use_megatron_fsdp else int(arguments.use_distributed_optimizer),
        "microbatches": arguments.global_batch_size // arguments.micro_batch_size // arguments.data_parallel_size,
        "sequence_parallel": "on" if config.sequence_parallel else "off",
        "recompute": layers if config.recompute_granularity == "full" else config.recompute_granularity or "none",
        "precision": str(config.params_dtype).removeprefix("torch."),
        "layers": config.num_layers,
    }


def parse_bridge(file: Path, world: int) -> Words:
    """Look the overrides up in Megatron-Core's dataclasses, of which Bridge's are made."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig
    from yaml import safe_load

    values = safe_load(file.read_text())
    kinds = {"model": TransformerConfig, "ddp": DistributedDataParallelConfig, "optimizer": OptimizerConfig}
    known = {name: {one.name for one in dataclasses.fields(kind)} for name, kind in kinds.items()}
    known["model"] |= {"seq_length", "use_tp_pp_dp_mapping"}  # of its own GPTModelProvider
    unknown = [f"{name}.{key}" for name, names in known.items() for key in values.get(name, {}) if key not in names]
    model = values["model"]
    return {"unknown": unknown, "tensor": model["tensor_model_parallel_size"], "pipeline": model["pipeline_model_parallel_size"]}


def parse_torchtitan(file: Path, world: int) -> Words:
    """Run ConfigManager and build the meshes of ParallelDims."""
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined]
    torch._utils._get_device_module = lambda kind=None: torch.cpu  # type: ignore[attr-defined]
    from torchtitan.config.manager import ConfigManager
    from torchtitan.distributed.parallel_dims import ParallelDims

    config = ConfigManager().parse_args(split_arguments(file.read_text()))
    start_fake_group(world)
    dims = ParallelDims.from_config(config.parallelism, world)
    dims.build_mesh()
    training, parallelism = config.training, config.parallelism
    replicas = dims.dp_replicate * dims.dp_shard
    if dims.pp > 1:
        count = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    else:
        count = training.global_batch_size // (training.local_batch_size * replicas)
    tensor = dims.get_optional_mesh("tp")
    kind = type(config.activation_checkpoint)
    return {
        "data": replicas,
        "shard": dims.dp_shard if dims.dp_replicate > 1 and dims.dp_shard > 1 else 0,
        "tensor": dims.tp,
        "pipeline": dims.pp,
        "context": dims.cp,
        "expert": dims.ep,
        "microbatches": count,
        "zero": {"always": 3, "never": 2}[parallelism.fsdp_reshard_after_forward] if dims.dp_shard * dims.cp > 1 else 0,
        "sequence_parallel": "on" if parallelism.enable_sequence_parallel and dims.tp > 1 else "off",
        "recompute": "full" if kind.__qualname__.startswith("Full") else "none",
        "schedule": parallelism.pipeline_parallel_schedule,
        "tensor_ranks": dist.get_process_group_ranks(tensor.get_group()) if tensor is not None else [0],
    }


def parse_deepspeed(file: Path, world: int) -> Words:
    """Run DeepSpeedConfig for a world of any size."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.runtime import config as runtime_config

    runtime_config.dist = mock.MagicMock(get_world_size=lambda *_: world, get_rank=lambda *_: 0)
    values = json.loads(file.read_text())
    replica = values.get("tensor_parallel", {}).get("autotp_size", 1) * values.get("sequence_parallel_size", 1)
    mpu = mock.MagicMock(get_data_parallel_world_size=lambda: world // replica)
    config = runtime_config.DeepSpeedConfig(str(file), mpu=mpu)
    return {
        "data": config.train_batch_size // config.train_micro_batch_size_per_gpu // config.gradient_accumulation_steps,
        "tensor": config.tensor_parallel_config.autotp_size or 1,
        "expert": config.expert_parallel_config.autoep_size if config.expert_parallel_config else 1,
        "microbatches": config.gradient_accumulation_steps,
        "zero": int(config.zero_optimization_stage),
        "precision": "bfloat16" if config.torch_autocast_enabled else "float16" if config.float16_config.enabled else "float32",
        "offload": "optimizer" if config.zero_config.offload_optimizer else "none",
        "clipping": config.gradient_clipping,
    }


def parse_axolotl(file: Path, world: int) -> Words:
    """Run AxolotlInputConfig on the file with a data set, which a layout does not have."""
    sys.meta_path.insert(0, StubFinder("flash_attn", "ring_flash_attn"))
    from axolotl.utils.schemas.config import AxolotlInputConfig
    from yaml import safe_load

    rest = {"base_model": "meta-llama/Llama-3.1-8B", "datasets": [{"path": "p", "type": "alpaca"}], "learning_rate": 1e-3}
    values = safe_load(file.read_text())
    config = AxolotlInputConfig(**rest | values)
    sharded = (config.dp_shard_size or 1) * (config.dp_replicate_size or 1)
    zero = (3 if config.fsdp_config.reshard_after_forward else 2) if config.fsdp_config else 1 if config.deepspeed else 0
    return {
        "data": sharded if zero > 1 else world,
        "shard": config.dp_shard_size if (config.dp_replicate_size or 1) > 1 < config.dp_shard_size else 0,
        "tensor": config.tensor_parallel_size or 1,
        "context": config.context_parallel_size or 1,
        "microbatches": config.gradient_accumulation_steps,
        "zero": zero,
        "recompute": "full" if config.gradient_checkpointing else "none",
        "precision": "bfloat16" if config.bf16 else "float16" if config.fp16 else "float32",
    }


def parse_nanotron(file: Path, world: int) -> Words:
    """Read the sections into its dataclasses by dacite, strictly, with its own casts."""
    sys.meta_path.insert(0, StubFinder("flash_attn", "grouped_gemm"))
    import nanotron.logging  # noqa: F401  (before its config, which imports it in a circle)
    from dacite import Config, from_dict
    from nanotron.config import ParallelismArgs
    from yaml import safe_load

    values = safe_load(file.read_text())
    read = from_dict(ParallelismArgs, values["parallelism"], config=Config(strict=True, check_types=False))
    return {
        "data": read.dp * read.expert_parallel_size,
        "tensor": read.tp,
        "pipeline": read.pp,
        "context": read.context_parallel_size,
        "expert": read.expert_parallel_size,
        "sequence_parallel": "on" if read.tp_mode.name == "REDUCE_SCATTER" else "off",
        "recompute": "full" if read.recompute_layer else "none",
        "schedule": "gpipe" if type(read.pp_engine).__name__.startswith("AllForwardAllBackward") else "1f1b",
    }


def parse_axonn(file: Path, world: int) -> Words:
    """Run the script's axonn.init on the fake process group."""
    sys.modules["mpi4py"] = None  # type: ignore[assignment]  # without an MPI library its import fails otherwise than axonn expects
    os.environ.update(RANK="0", WORLD_SIZE=str(world), LOCAL_RANK="0")
    start_fake_group(world)
    new_group = dist.new_group
    replaced = {"new_group": lambda *a, **k: new_group(a[0] if a else k.get("ranks"))}
    with mock.patch.multiple(torch.cuda, set_device=lambda _: None, device_count=lambda: 8), mock.patch.multiple(dist, **replaced):
        names = runpy.run_path(str(file))
        config = names["ax"].config
    return {
        "data": config.G_data,
        "pipeline": config.G_inter,
        "tensor": config.G_intra,
        "grid": f"{config.G_intra_r}x{config.G_intra_c}x{config.G_intra_d}",
    }


PARSERS: dict[str, Callable[[Path, int], Words]] = {
    name.removeprefix("parse_"): value for name, value in list(globals().items()) if name.startswith("parse_")
}


def main(words: Sequence[str]) -> None:
    """Print a line for each file: what its framework read, or why it refused."""
    for word in words[1:]:
        file, _, world = word.rpartition(":")
        try:
            answer = PARSERS[words[0]](Path(file), int(world))
        except (Exception, SystemExit) as error:  # a parser that refuses exits, or raises what it likes
            answer = {"refused": f"{type(error).__name__}: {error}"}
        print(f"read {json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
