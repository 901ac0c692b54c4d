"""Public configurations mean known layouts: the facts of thirteen, by hand from their frameworks' own rules, written down in short here.

The texts are ours, with the same keys and values as the public files (repositories, commits and files: docs/frameworks.md) and the shapes
in which people write them: arrays, defaults, conditions, nested sections, commands in strings.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import Infeasible, UsageError
from shardwise.frameworks import read_configuration
from shardwise.frameworks.shell import parse_command_line, read_script

LLAMA_SCRIPT = """
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-"1"}
TP_SIZE=1
MBS=1
DTYPE="fp8"
DISTRIBUTED=( --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES )
TRAIN=(
    --micro-batch-size $MBS   # samples
    --global-batch-size 128
    --bf16
    --grad-reduce-in-bf16
)
FP8=()
if [[ "$DTYPE" == "fp8" ]]; then
    FP8+=( "--fp8-format hybrid" "--fp8-param-gather" )
fi
PARALLEL=( --tensor-model-parallel-size $TP_SIZE --context-parallel-size 1 --sequence-parallel )
DDP=( --use-distributed-optimizer --overlap-grad-reduce )
TRAIN+=("${DDP[@]}")
torchrun ${DISTRIBUTED[@]} pretrain_gpt.py --seq-length 8192 --num-layers 32 ${TRAIN[@]} ${FP8[@]} ${PARALLEL[@]}
"""
FSDP_SCRIPT = """
USE_MEGATRON_FSDP=${USE_MEGATRON_FSDP:-1}
STRATEGY=${STRATEGY:-"optim_grads_params"}
ARGS=( --micro-batch-size 1 --global-batch-size 128 --bf16 --tensor-model-parallel-size 1 --use-distributed-optimizer )
if [ "${USE_MEGATRON_FSDP}" = 1 ]; then
    unset CUDA_DEVICE_MAX_CONNECTIONS
    ARGS=( "${ARGS[@]}" --use-megatron-fsdp --data-parallel-sharding-strategy ${STRATEGY} --use-nccl-ub )
fi
uv run python -m torch.distributed.run --nproc_per_node 8 --nnodes 1 pretrain_gpt.py ${ARGS[@]}
"""
SLURM_SCRIPT = """
EP=${EP:-8}
MBS=${MBS:-4}
ARGS=(
    --expert-model-parallel-size ${EP} --expert-tensor-parallel-size 1 --micro-batch-size ${MBS} --global-batch-size 2048 --bf16
    --recompute-granularity selective --recompute-modules mlp moe mla_up_proj layernorm --sequence-parallel --use-megatron-fsdp
    --data-parallel-sharding-strategy optim_grads_params
)
CMD="cd /x; python pretrain_gpt.py ${ARGS[@]}"
sbatch <<EOF2
#SBATCH --nodes=your_nodes
srun bash -c "${CMD}"
EOF2
"""
MIXTRAL = (
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 --use-distributed-optimizer "
    "--sequence-parallel --micro-batch-size 1 --global-batch-size 256 --bf16 --seq-length 4096"
)
GPT3 = (
    "torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --micro-batch-size 1 --global-batch-size 1536 --fp16 "
    "--step-batch-size-schedule 0:16 12B:1536 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --seq-length 2048"
)
FMS = """
ARGS="--fsdp_activation_checkpointing={ac}
--selective_checkpointing={part} --sharding_strategy=hsdp --low_cpu_fsdp=False --batch_size=2 --model_variant={variant}
--use_torch_compile=True"
torchrun --nnodes=$SLURM_NTASKS --nproc_per_node=8 main_training.py ${{ARGS}}
"""
ACCELERATE = """
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config: {{fsdp_version: 2, fsdp_reshard_after_forward: true, fsdp_activation_checkpointing: {ac}, fsdp_offload_params: false}}
parallelism_config:
  parallelism_config_cp_size: {cp}
  parallelism_config_dp_replicate_size: {replicate}
  parallelism_config_dp_shard_size: {shard}
  parallelism_config_tp_size: {tp}
"""
AXOLOTL_TENSOR = """
base_model: meta-llama/Llama-3.1-8B
dp_shard_size: 4
dp_replicate_size: 2
tensor_parallel_size: 2
fsdp_version: 2
fsdp_config: {offload_params: false, reshard_after_forward: true}
sequence_len: 2048
sample_packing: true
micro_batch_size: 1
gradient_accumulation_steps: 1
bf16: true
"""
AXOLOTL_EXPERT = """
base_model: Qwen/Qwen3-30B-A3B
expert_parallel_size: 2
dp_shard_size: 2
sequence_len: 2048
micro_batch_size: 1
gradient_accumulation_steps: 1
optimizer: adamw_torch_8bit
bf16: true
gradient_checkpointing: true
fsdp_config: {fsdp_version: 2, sharding_strategy: FULL_SHARD, reshard_after_forward: true}
"""
NEOX = """
{
  "pipe_parallel_size": 4, "model_parallel_size": 2, "seq_length": 2048,
  "num_layers": 44, "hidden_size": 6144, "num_attention_heads": 64,
  "zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 1260000000,},
  "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 32,
  "checkpoint_activations": true, "checkpoint_num_layers": 1, "fp16": {"fp16": true, "enabled": true},
}
"""
LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen3-30B-A3B-Instruct-2507
cutoff_len: 4096
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
tensor_model_parallel_size: 1
sequence_parallel: false
pipeline_model_parallel_size: 4
use_distributed_optimizer: true
expert_model_parallel_size: 2
recompute_granularity: full
"""
PERFORMANCE_RECIPE = """
from base import pretrain_common
def llama3_70b_pretrain_64gpu_config():
    cfg = pretrain_common()
    cfg.mixed_precision = _perf_precision("bf16")
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.pipeline_model_parallel_size = 4
    cfg.model.context_parallel_size = 2
    cfg.model.virtual_pipeline_model_parallel_size = 5
    cfg.model.sequence_parallel = True
    cfg.train.global_batch_size = 256
    cfg.train.micro_batch_size = 1
    return cfg
"""
REGISTRY = """
def llama3_8b():
    return Trainer.Config(training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=1 * 8192, max_context_length=8192),
        model_spec=model_registry("8B"), activation_checkpoint=SelectiveAC.Config())
def llama3_70b():
    config = llama3_8b()
    config.model_spec = model_registry("70B")
    config.parallelism = ParallelismConfig(tensor_parallel_degree=8)
    config.activation_checkpoint = FullAC.Config()
    config.override.converters = [MXFP8Converter.Config(fqns=["attention"]), Other.Config()]
    return config
"""
NANOTRON = """
parallelism: {dp: 4, tp: 2, pp: 1, expert_parallel_size: 1, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER}
optimizer: {zero_stage: 0}
model: {dtype: bfloat16, model_config: {is_llama_config: true, num_hidden_layers: 28, hidden_size: 2048, num_attention_heads: 16}}
tokens: {micro_batch_size: 3, batch_accumulation_per_replica: 2, sequence_length: 4096}
"""
TITAN_TOML = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 4
pipeline_parallel_degree = 1
[activation_checkpoint]
mode = "full"
[compile]
enable = false
"""
# file, its text, devices (0: in the file), layout, samples a step
CASES = [
    ("h01.sh", LLAMA_SCRIPT, 0, "data=8 zero=1 microbatches=16 precision=float8", 128),
    ("h02.args", MIXTRAL, 32, "data=8 expert=8 pipeline=4 microbatches=32 zero=1 precision=bfloat16", 256),
    ("h03.args", GPT3, 128, "data=1 tensor=8 pipeline=16 microbatches=1536 precision=float16", 1536),
    ("h04.sh", FSDP_SCRIPT, 0, "data=8 zero=3 microbatches=16 precision=bfloat16", 128),
    ("h05.sh", SLURM_SCRIPT, 256, "data=256 expert=8 zero=3 microbatches=2 precision=bfloat16", 2048),
    ("h06.sh", FMS.format(ac=False, part=1, variant="7b"), 96, "data=96 zero=3 shard=8 precision=bfloat16 compile=on", 192),
    ("h07.sh", FMS.format(ac=True, part="1/4", variant="13b"), 96, "data=96 zero=3 shard=8 precision=bfloat16 recompute=full:10", 192),
    (
        "h08.yaml", ACCELERATE.format(cp=1, replicate=2, shard=2, tp=2, ac="false"), 0,
        "data=4 tensor=2 zero=3 shard=2 precision=bfloat16", 4,
    ),
    (
        "h09.yaml", ACCELERATE.format(cp=8, replicate=1, shard=1, tp=1, ac="true"), 0,
        "context=8 attention=gather zero=3 recompute=full precision=bfloat16", 1,
    ),
    ("h10.yaml", AXOLOTL_TENSOR, 0, "data=8 tensor=2 zero=3 shard=4 precision=bfloat16", 8),
    ("h11.yaml", AXOLOTL_EXPERT, 0, "data=4 expert=2 zero=3 recompute=full precision=bfloat16", 4),
    ("h12.yml", NEOX, 96, "data=12 tensor=2 pipeline=4 microbatches=32 zero=1 recompute=full precision=float16", 1536),
    ("h13.yaml", LLAMA_FACTORY, 8, "data=2 expert=2 pipeline=4 microbatches=8 zero=1 recompute=full precision=bfloat16", 16),
    (
        "recipe.py", PERFORMANCE_RECIPE, 0,
        "data=2 tensor=4 pipeline=4 context=2 attention=ring microbatches=128 schedule=interleaved chunks=5 sequence_parallel=on "
        "precision=bfloat16", 256,
    ),
    ("nanotron.yaml", NANOTRON, 0, "data=4 tensor=2 microbatches=2 sequence_parallel=on precision=bfloat16", 24),
    ("titan.toml", TITAN_TOML, 16, "data=4 tensor=4 zero=3 sequence_parallel=on recompute=full precision=bfloat16", 4),
]  # fmt: skip


@pytest.mark.parametrize(("file", "text", "devices", "layout", "batch"), CASES, ids=[case[0] for case in CASES])
def test_a_public_configuration_means_its_layout(file: str, text: str, devices: int, layout: str, batch: int, tmp_path: Path) -> None:
    from shardwise.plan.layout import Layout  # here: beside what it is compared with

    path = tmp_path / file
    path.write_text(text)
    read = read_configuration(path, devices=devices)
    assert str(read.layout) == str(Layout.parse(layout))
    assert read.batch_size == batch


def test_a_registry_has_several_recipes_and_follows_their_calls(tmp_path: Path) -> None:
    path = tmp_path / "config_registry.py"
    path.write_text(REGISTRY)
    with pytest.raises(UsageError, match="2 recipes: name one with --recipe NAME: llama3_8b, llama3_70b"):
        read_configuration(path, devices=8)
    read = read_configuration(path, recipe="llama3_70b", devices=64)
    assert str(read.layout) == "data=8 tensor=8 pipeline=1 zero=3 recompute=full precision=bfloat16 sequence_parallel=on"
    assert (read.model, read.sequence, read.micro_batch) == ("llama-70b", 8192, 1)
    assert "block of 32" in next(why for key, _, why in read.unpriced if key == "override.converters")


def test_what_is_not_priced_is_listed_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "h01.sh"
    path.write_text(LLAMA_SCRIPT)
    read = read_configuration(path)
    reasons = {key: why for key, _, why in read.unpriced}
    assert "32 bits" in reasons["grad_reduce_in_bf16"]
    assert "scales are of steps before" in reasons["fp8_format"]  # `delayed`, its default
    assert "16 bits" in reasons["fp8_param_gather"]
    assert reasons["overlap_grad_reduce"] == ""
    assert "tensor_model_parallel_size" not in reasons


def test_the_world_is_asked_for_where_it_is_not_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "h13.yaml"
    path.write_text(LLAMA_FACTORY)
    with pytest.raises(UsageError, match="--devices N or --cluster"):
        read_configuration(path)


def test_a_world_that_cannot_hold_the_sizes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "h03.args"
    path.write_text(GPT3)
    with pytest.raises(Infeasible, match="tensor=8 x pipeline=16 are 128 ranks, which do not divide 8 devices"):
        read_configuration(path)


def test_a_command_line_is_read_as_its_script() -> None:
    words = "torchrun --nproc-per-node=8 pretrain_gpt.py --tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 8 --bf16"
    assert str(read_configuration(words.split()).layout) == "data=4 tensor=2 pipeline=1 microbatches=2 precision=bfloat16"


def test_nothing_of_a_script_runs(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    read_script(f"touch {marker}\nX=$(touch {marker})\nY=`touch {marker}`\nZ=$((9**9**9**9))\ntorchrun t.py --bf16 --a $X\n")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        ("p --a 1 --b --c=x d.e=3", {"a": "1", "b": True, "c": "x", "d.e": "3"}),
        ("p --a -1 --b 2 3 --no-c", {"a": "-1", "b": ["2", "3"], "no_c": True}),
        ("p --a.b 1 activation-checkpoint:full", {"a.b": "1", "activation_checkpoint": "full"}),
    ],
)
def test_options_of_a_command_line(line: str, keys: dict[str, object]) -> None:
    assert parse_command_line(line.split()) == keys | {".program": "p"}
