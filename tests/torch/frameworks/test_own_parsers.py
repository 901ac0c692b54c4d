"""Exported configurations are read by the frameworks' own parsers, where these are installed, and mean the same there."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.frameworks import ExportRequest, export_layout, find_framework
from shardwise.plan.layout import Layout

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "tests" / "support" / "framework_parsers.py"
HOW = "scripts/test --frameworks installs it, pinned in requirements-frameworks.txt"
MUST_NOT = ("refused", "unknown")  # words of an answer that are never right
# What a framework's parser needs, with the files that are given to it: a layout, its batch, and what is not said in our words.
LLAMA = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "feed_forward": 14336, "vocabulary": 128256, "gated": True}
PLANS: dict[str, tuple[str, tuple[tuple[str, int, dict[str, Any]], ...]]] = {
    "megatron": ("megatron.training", (
        ("data=2 tensor=4 pipeline=8 microbatches=8 zero=1 precision=bfloat16 sequence_parallel=on recompute=full:2", 16, {"layers": 32}),
        ("data=2 pipeline=4 microbatches=8 chunks=2 schedule=interleaved precision=bfloat16 recompute=selective", 16, {}),
        ("data=8 zero=3 microbatches=2 precision=bfloat16 recompute=full", 16, {}),
        ("data=4 context=2 attention=ulysses zero=1 precision=float16", 8, {}),
    )),
    "bridge": ("megatron.training", (("data=8 tensor=2 zero=3 precision=bfloat16 recompute=full", 16, {"unknown": []}),
        ("data=2 pipeline=4 microbatches=8 chunks=2 schedule=interleaved zero=1 offload=optimizer", 16, {"unknown": []}))),
    "torchtitan": ("torchtitan", (
        ("data=2 tensor=4 pipeline=8 microbatches=8 zero=3 sequence_parallel=on precision=bfloat16 recompute=full", 64,
         {"tensor_ranks": [0, 1, 2, 3], "schedule": "1F1B"}),
        ("data=2 pipeline=4 microbatches=8 schedule=zb-h1 zero=2 precision=bfloat16", 32, {"schedule": "PipelineScheduleMulti"}),
        ("data=8 context=2 attention=gather zero=3 microbatches=2 shard=4 precision=bfloat16", 32, {"schedule": "1F1B"}),
        ("data=16 expert=8 zero=2 precision=bfloat16", 32, {"schedule": "1F1B"}),
        ("data=4 tensor=2 precision=bfloat16", 32, {"schedule": "1F1B"}),
    )),
    "deepspeed": ("deepspeed", (
        ("data=8 zero=3 microbatches=8 precision=bfloat16", 64, {"clipping": 0}),
        ("data=4 tensor=2 zero=1 precision=float16", 16, {}),
        ("data=8 expert=4 zero=2 microbatches=2", 16, {}),
        ("data=8 zero=2 offload=optimizer", 16, {}),
    )),
    "axolotl": ("axolotl", (
        ("data=4 tensor=2 zero=3 microbatches=4 precision=bfloat16 recompute=full", 64, {}),
        ("data=4 context=2 attention=ring zero=2 microbatches=4 precision=bfloat16", 16, {}),
        ("data=8 microbatches=2", 16, {}),
        ("data=8 zero=1 precision=float16", 16, {}),
    )),
    "nanotron": ("nanotron", (
        ("data=2 tensor=4 pipeline=8 microbatches=8 zero=1 precision=bfloat16 sequence_parallel=on recompute=full", 16, {}),
        ("data=8 expert=4 context=2 attention=ring", 16, {}),
        ("data=2 pipeline=2 microbatches=4 schedule=gpipe", 16, {}),
    )),
    "axonn": ("axonn", (("data=2 tensor=2x2x1 pipeline=2 microbatches=2", 8, {"grid": "2x2x1"}),
                        ("data=4 tensor=2", 8, {"grid": "2x1x1"}))),
}  # fmt: skip


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


def is_installed(module: str) -> bool:
    """Whether a framework is here itself; `tests/support/stand_ins` has files of two of these names."""
    try:
        found = importlib.util.find_spec(module)
    except ImportError:
        return False
    return found is not None and "stand_ins" not in str(found.origin)


@pytest.mark.parametrize("name", PLANS)
def test_a_framework_reads_what_is_exported(name: str, tmp_path: Path) -> None:
    module, plans = PLANS[name]
    if not is_installed(module):
        pytest.skip(f"{module} is not installed: {HOW}")
    words, layouts = [], []
    for number, (text, batch, _) in enumerate(plans):
        layout = Layout.parse(text)
        request = ExportRequest(layout, batch, "llama-8b", 2048, 32, "LlamaDecoderLayer", sizes=LLAMA)
        exported = export_layout(find_framework(name), request)
        assert not exported.lost
        (folder := tmp_path / str(number)).mkdir()
        for file, written in exported.files.items():
            (folder / file).write_text(written)
        words.append(f"{folder / next(iter(exported.files))}:{layout.num_ranks}")
        layouts.append(layout)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, str(PROGRAM), name, *words], cwd=tmp_path, env=environment, capture_output=True, text=True,
                          timeout=200, check=False)  # fmt: skip
    read = [json.loads(line.removeprefix("read ")) for line in done.stdout.splitlines() if line.startswith("read ")]
    assert len(read) == len(plans), done.stdout[-2000:] + done.stderr[-4000:]
    for layout, answer, (text, _, more) in zip(layouts, read, plans, strict=True):
        expected = {key: getattr(layout, key, answer[key] if key not in MUST_NOT else None) for key in answer} | more
        assert answer == expected, text


def test_the_page_has_the_pinned_versions() -> None:
    pins = dict(line.split("==") for line in (ROOT / "requirements-frameworks.txt").read_text().splitlines() if "==" in line)
    page = (ROOT / "docs" / "frameworks.md").read_text()
    names = {"torchtitan": "torchtitan", "megatron-core": "megatron", "deepspeed": "deepspeed", "axolotl": "axolotl", "axonn": "axonn"}
    shown = {pin: re.search(rf"^\| `{name}` \| ([\d.]+) ", page, re.M) for pin, name in names.items()}
    assert {pin: found and pins[pin].startswith(found[1]) for pin, found in shown.items()} == dict.fromkeys(names, True)
