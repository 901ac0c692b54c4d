"""Exported configurations are read by the frameworks' own parsers, where these are installed, and mean the same there."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from shardwise.frameworks import ExportRequest, export_layout, find_framework
from shardwise.plan.layout import Layout


def exported_text(framework: str, layout: str, batch: int = 64) -> str:
    request = ExportRequest(Layout.parse(layout), batch, "llama-8b", 2048, 32, "LlamaDecoderLayer")
    return next(iter(export_layout(find_framework(framework), request).files.values()))


def test_transformers_reads_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    values = json.loads(exported_text("transformers", "data=8 zero=3 microbatches=4 precision=bfloat16 recompute=full"))
    arguments = transformers.TrainingArguments(**values | {"output_dir": str(tmp_path), "use_cpu": True, "report_to": []})
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps, arguments.bf16) == (2, 4, True)
    assert arguments.fsdp_config["reshard_after_forward"] is True
    assert arguments.fsdp_config["activation_checkpointing"] is True


def test_accelerate_reads_its_file(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate.commands.config.config_args import load_config_from_file  # here: an optional dependency

    file = tmp_path / "accelerate.yaml"
    file.write_text(exported_text("accelerate", "data=4 tensor=2 zero=3 precision=bfloat16"))
    config = load_config_from_file(str(file))
    assert (config.num_processes, str(config.distributed_type), config.mixed_precision) == (8, "DistributedType.FSDP", "bf16") or (
        config.num_processes == 8 and "FSDP" in str(config.distributed_type)
    )
    assert config.fsdp_config["fsdp_reshard_after_forward"] is True
    assert config.parallelism_config["parallelism_config_tp_size"] == 2
    assert config.parallelism_config["parallelism_config_dp_shard_size"] == 4


def test_accelerate_builds_its_mesh_sizes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate.parallelism_config import ParallelismConfig  # here: an optional dependency
    from yaml import safe_load

    text = safe_load(exported_text("accelerate", "data=2 tensor=2 context=2 attention=gather zero=3"))
    prefix = "parallelism_config_"
    sizes = {key.removeprefix(prefix): value for key, value in text["parallelism_config"].items()}
    assert ParallelismConfig(**sizes).total_size == 8


def test_lightning_builds_its_trainer() -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    from lightning.fabric.plugins.environments import LightningEnvironment  # here: an optional dependency
    from lightning.pytorch import strategies  # here: an optional dependency
    from yaml import safe_load

    values = safe_load(exported_text("lightning", "data=4 tensor=2 zero=3 microbatches=2 precision=bfloat16"))["trainer"]
    strategy = values.pop("strategy")
    built = getattr(strategies, strategy["class_path"].rpartition(".")[2])(**strategy["init_args"])
    assert (built._data_parallel_size, built._tensor_parallel_size) == (4, 2)
    alone = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(**values | alone, plugins=[LightningEnvironment()])  # no MPI is asked for
    assert trainer.accumulate_grad_batches == 2
    assert str(trainer.precision) == "bf16-mixed"


def test_torch_reads_the_tables_of_actions(tmp_path: Path) -> None:
    from torch.distributed.pipelining.schedules import _Action  # the parser of its schedules' files

    request = ExportRequest(Layout.parse("pipeline=4 microbatches=8 schedule=zb-h1 zero=0"), 8, "llama-8b", 2048, 32)
    files = export_layout(find_framework("torchtitan"), request).files
    for line in files["zb-h1.csv"].splitlines():
        for cell in line.split(","):
            action = _Action.from_str(cell)
            assert (action is None) == (not cell.strip())
            assert action is None or str(action) == cell.strip()


def test_deepspeed_reads_its_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed: DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8")
    from deepspeed.runtime.config import DeepSpeedConfig  # here: an optional dependency

    file = tmp_path / "deepspeed.json"
    file.write_text(exported_text("deepspeed", "data=1 zero=3 microbatches=8 precision=bfloat16", 8))
    config = DeepSpeedConfig(str(file))
    assert (config.gradient_accumulation_steps, int(config.zero_optimization_stage), config.torch_autocast_enabled) == (8, 3, True)


def test_torchtitan_reads_its_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed: pip install torchtitan==0.3.0 (its newest needs a newer torch to train)")
    from torchtitan.config.manager import ConfigManager  # here: an optional dependency

    words = exported_text(
        "torchtitan", "data=2 tensor=4 pipeline=8 microbatches=8 zero=3 sequence_parallel=on precision=bfloat16 recompute=full"
    )
    lines = [line.rstrip("\\ ") for line in words.splitlines() if not line.startswith("#")]
    config = ConfigManager().parse_args(" ".join(lines).split())
    assert config.parallelism.tensor_parallel_degree == 4
    assert config.parallelism.pipeline_parallel_degree == 8


def test_megatron_reads_its_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.training") is None:
        pytest.skip("megatron.training is not installed: megatron-core==0.19.2 has wheels for Python 3.12 and later")
    from megatron.training.arguments import parse_args, validate_args  # here: an optional dependency

    words = exported_text("megatron", "data=2 tensor=4 pipeline=8 microbatches=8 zero=1 precision=bfloat16", 16)
    lines = [line.rstrip("\\ ") for line in words.splitlines() if not line.startswith("#")]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *" ".join(lines).split(), "--mock-data", "--tokenizer-type", "NullTokenizer"])
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "64")
    arguments = validate_args(parse_args())
    assert arguments.data_parallel_size == 2


@pytest.mark.parametrize("name", ["axolotl", "nanotron", "axonn"])
def test_others_are_skipped_where_they_are_not_installed(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: it needs GPU libraries (flash_attn, bitsandbytes or MPI) to be imported")
