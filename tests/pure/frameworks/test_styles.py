"""Configurations of our own in the shapes in which people write them: what they mean, by their frameworks' rules, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.frameworks import find_framework, read_configuration
from shardwise.plan.layout import Layout

TITAN = """
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "405B"
converters = ["float8"]
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "default"
tensor_parallel_degree = 8
enable_async_tensor_parallel = true
pipeline_parallel_degree = 1
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[float8]
enable_fsdp_float8_all_gather = true
filter_fqns = ["output"]
"""
TITAN_PIPELINE = """#!/usr/bin/bash
NGPU=${NGPU:-"8"}
NNODES=${NNODES:-8}
CONFIG_FILE=${CONFIG_FILE:-"./train.toml"}
overrides=""
if [ $# -ne 0 ]; then
    overrides="$*"
fi
torchrun --nproc_per_node=${NGPU} --nnodes=${NNODES} --rdzv_backend c10d \\
    --local-ranks-filter 0 --role rank --tee 3 \\
    -m torchtitan.train --job.config_file ${CONFIG_FILE} --parallelism.pipeline_parallel_degree 4 \\
    --parallelism.pipeline_parallel_schedule Interleaved1F1B --training.local_batch_size 8 $overrides
"""
MEGATRON = """#!/bin/bash
# 175B on 1,024 GPUs
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8
NODES=${SLURM_JOB_NUM_NODES:=16}
TP=8; PP=8
VPP_LAYERS=3
GLOBAL_BATCH=$((1536 / 2))
if [[ -z "${MBS:-}" ]]; then MBS=2; fi
MODEL_ARGS="
    --num-layers 96
    --hidden-size 12288 --num-attention-heads 96
    --seq-length 2048 --max-position-embeddings 2048
"
PARALLEL_ARGS=(
    --tensor-model-parallel-size ${TP}
    --pipeline-model-parallel-size ${PP}   # stages
    --num-layers-per-virtual-pipeline-stage "$VPP_LAYERS"
    --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce
)
torchrun --nproc_per_node $GPUS --nnodes $NODES --master_addr "$(hostname)" \\
  pretrain_gpt.py \\
    ${MODEL_ARGS} \\
    "${PARALLEL_ARGS[@]}" \\
    --micro-batch-size ${MBS} --global-batch-size ${GLOBAL_BATCH} \\
    --recompute-activations \\
    --transformer-impl transformer_engine --fp8-format e4m3 --fp8-recipe delayed \\
    --bf16 2>&1 | tee log.txt
"""
DEEPSPEED = """{
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": "auto",
  "gradient_clipping": 1.0,
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 3, "overlap_comm": true, "stage3_prefetch_bucket_size": "auto",
    "offload_optimizer": {"device": "cpu", "pin_memory": true}, "offload_param": {"device": "nvme"}, "zero_quantized_weights": true
  }
}
"""
ACCELERATE_OLD = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_sharding_strategy: 4
  fsdp_offload_params: false
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
machine_rank: 0
mixed_precision: bf16
num_machines: 4
num_processes: 32
"""
ACCELERATE_8_BIT = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: fp8
fp8_config: {backend: TE, fp8_format: HYBRID, amax_history_len: 1024}
num_machines: 1
num_processes: 8
"""
NANOTRON = """
general: {project: p, run: r, seed: 42}
model:
  ddp_bucket_cap_mb: 25
  dtype: bfloat16
  model_config: {hidden_size: 4096, intermediate_size: 14336, num_attention_heads: 32, num_hidden_layers: 32, num_key_value_heads: 8,
                 is_llama_config: true, vocab_size: 128256}
optimizer:
  accumulate_grad_in_fp32: true
  zero_stage: 1
parallelism: {dp: 16, pp: 2, tp: 4, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER, tp_linear_async_communication: true, recompute_layer: true,
              expert_parallel_size: 1, context_parallel_size: 1}
tokens: {batch_accumulation_per_replica: 8, micro_batch_size: 2, sequence_length: 4096, train_steps: 1000, limit_val_batches: 0}
"""
AXOLOTL = """
base_model: Qwen/Qwen3-14B
load_in_8bit: false
micro_batch_size: 1
gradient_accumulation_steps: 4
sequence_len: 16384
context_parallel_size: 4
dp_shard_size: 8
sample_packing: true
bf16: auto
fp8: true
torch_compile: true
optimizer: adamw_torch_8bit
gradient_checkpointing: true
deepspeed:
fsdp_version: 2
fsdp_config:
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  reshard_after_forward: true
  offload_params: true
"""
NEMO = """
from nemo.collections import llm
import nemo_run as run

def pretrain_recipe(dir=None, name="default", num_nodes: int = 16, num_gpus_per_node: int = 8):
    recipe = run.Partial(
        llm.pretrain,
        model=run.Config(llm.LlamaModel, config=run.Config(llm.Llama31Config70B)),
        trainer=run.Config(
            nl.Trainer, devices=num_gpus_per_node, num_nodes=num_nodes, accumulate_grad_batches=1,
            plugins=bf16_with_fp8_mixed(),
            strategy=run.Config(
                nl.MegatronStrategy, tensor_model_parallel_size=4, pipeline_model_parallel_size=4,
                virtual_pipeline_model_parallel_size=5, context_parallel_size=2, sequence_parallel=True, pipeline_dtype=torch.bfloat16,
                ddp=run.Config(DistributedDataParallelConfig, use_distributed_optimizer=True, grad_reduce_in_fp32=True),
            ),
        ),
        data=run.Config(llm.MockDataModule, seq_length=8192, global_batch_size=512, micro_batch_size=1),
    )
    recipe.trainer.precision = "bf16-mixed"
    return recipe
"""
LIGHTNING = """
trainer:
  accelerator: gpu
  devices: 8
  num_nodes: 2
  precision: transformer-engine
  accumulate_grad_batches: 4
  gradient_clip_val: 1.0
  strategy:
    class_path: lightning.pytorch.strategies.FSDPStrategy
    init_args:
      sharding_strategy: HYBRID_SHARD
      activation_checkpointing_policy: [torch.nn.TransformerEncoderLayer]
      cpu_offload: false
data: {class_path: my.Data, init_args: {batch_size: 4}}
"""
TRAINER = """#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
srun accelerate launch --config_file zero.yaml train.py \\
    --model_name_or_path meta-llama/Meta-Llama-3-8B --per_device_train_batch_size 2 --gradient_accumulation_steps 16 \\
    --bf16 True --gradient_checkpointing --max_length 4096 --optim adamw_bnb_8bit
"""
# name of the file, its text, devices (0: in the file), layout, samples a step, keys that are told as not priced
STYLES = [
    ("llama3_405b.toml", TITAN, 512, "data=64 tensor=8 zero=3 shard=32 precision=float8 sequence_parallel=on", 128,
     ("activation_checkpoint.mode", "float8.enable_fsdp_float8_all_gather", "float8.filter_fqns",
      "parallelism.enable_async_tensor_parallel")),
    ("run_train.sh", TITAN_PIPELINE, 0,
     "data=2 tensor=8 pipeline=4 microbatches=8 schedule=interleaved chunks=2 precision=float8 sequence_parallel=on", 16,
     ()),
    ("pretrain.sh", MEGATRON, 0,
     "data=2 tensor=8 pipeline=8 zero=1 microbatches=192 schedule=interleaved chunks=4 sequence_parallel=on recompute=selective "
     "precision=float8", 768, ("fp8_format", "fp8_recipe")),
    ("ds_config.json", DEEPSPEED, 16, "data=16 zero=3 precision=bfloat16 offload=optimizer", 64,
     ("train_batch_size", "gradient_accumulation_steps", "zero_optimization.offload_param.device",
      "zero_optimization.zero_quantized_weights")),
    ("fsdp1.yaml", ACCELERATE_OLD, 0, "data=32 zero=3 shard=8 precision=bfloat16", 32, ()),
    ("fp8.yaml", ACCELERATE_8_BIT, 0, "data=8 precision=float8", 8, ("fp8_config.backend",)),
    ("nanotron.yaml", NANOTRON, 0,
     "data=16 tensor=4 pipeline=2 zero=1 microbatches=8 recompute=full precision=bfloat16 sequence_parallel=on", 256, ()),
    ("axolotl.yml", AXOLOTL, 0, "data=8 context=4 attention=ring zero=3 microbatches=4 recompute=full precision=float8", 32,
     ("optimizer", "fsdp_config.offload_params")),
    ("recipe.py", NEMO, 0,
     "data=4 tensor=4 pipeline=4 context=2 attention=ring zero=1 microbatches=128 schedule=interleaved chunks=5 sequence_parallel=on "
     "precision=float8", 512, ("plugins",)),
    ("fit.yaml", LIGHTNING, 0, "data=16 zero=3 shard=8 microbatches=4 recompute=full precision=float8", 256, ("trainer.precision",)),
    ("job.sh", TRAINER, 0, "data=32 zero=2 microbatches=16 recompute=full precision=bfloat16", 1024, ("optim",)),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("styles")
    for name, text, *_ in STYLES:
        (made / name).write_text(text)
    (made / "train.toml").write_text(TITAN)
    (made / "zero.yaml").write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: z2.json}\nnum_processes: 32\n")
    (made / "z2.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "train_batch_size": "auto"}')
    return made


@pytest.mark.parametrize(("name", "text", "devices", "layout", "batch", "told"), STYLES, ids=[style[0] for style in STYLES])
def test_a_style_means_its_layout(name: str, text: str, devices: int, layout: str, batch: int, told: tuple[str, ...], folder: Path) -> None:
    read = read_configuration(folder / name, devices=devices)
    assert str(read.layout) == str(Layout.parse(layout))
    assert read.batch_size == batch
    reasons = [key for key, _, why in read.unpriced if why]
    assert {key for key in told if not any(one == key or one.endswith(f".{key}") for one in reasons)} == set()


FMS = ["--model_variant=7b", "--sharding_strategy=hsdp", "--nproc_per_node=8", "--nnodes=2", "--use_torch_compile=True"]
UNSHARDED = "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 4\n"


def test_their_bfloat16_is_priced_as_they_run_it(tmp_path: Path) -> None:
    """FSDP holds weights in 16 bits and updates 32-bit ones; DistributedDataParallel under Accelerate runs autocast."""
    sharded = read_configuration(FMS, "fms-fsdp", "", 16)
    file = tmp_path / "accelerate.yaml"
    file.write_text(UNSHARDED)
    unsharded = read_configuration(file, "", "", 0)
    assert sharded.layout.precision == unsharded.layout.precision == "bfloat16"
    assert (sharded.run_layout.precision, unsharded.run_layout.precision) == ("bfloat16-mixed", "bfloat16")
    fms, titan = find_framework("fms-fsdp"), find_framework("torchtitan")
    assert [each.stack_of("H100", sharded.layout) for each in (fms, titan)] == ["torch-compiled", ""]
    assert fms.stack_of("H100", replace(sharded.layout, compile="off")) == ""
    assert find_framework("megatron").stack_of("H100", sharded.layout) == "h100-megatron-core"
