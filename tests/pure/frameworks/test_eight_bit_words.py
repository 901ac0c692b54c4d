"""Words of 8-bit recipes, by the rules of the libraries that they name: what is ours, what is told, and what goes out."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import ShardwiseError
from shardwise.frameworks import EXPORTED, ExportRequest, export_layout, find_framework, read_configuration
from shardwise.plan.layout import Layout

MEGATRON = "pretrain_gpt.py --tensor-model-parallel-size 1 --num-layers 4 --micro-batch-size 1 --global-batch-size 8 --bf16"
BRIDGE = "model: {{tensor_model_parallel_size: 1}}\ntrain: {{micro_batch_size: 1, global_batch_size: 8}}\nmixed_precision: {}\n"
TITAN = (
    '[model]\nconverters = ["{}"]\n[{}]\nrecipe_name = "{}"\n[training]\nlocal_batch_size = 1\n[parallelism]\ntensor_parallel_degree = 1\n'
)
TITAN_REGISTRY = """
def debug():
    return Trainer.Config(training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=8192, max_context_length=8192),
        model_spec=model_registry("8B", quantization=[Float8LinearConverter.Config({})]))
"""
ACCELERATE = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: fp8\nnum_processes: 8\nfp8_config: {{{}}}\n"
FACTORY = "model_name_or_path: m\nper_device_train_batch_size: 1\nfp8: true\nfp8_backend: {}\nbf16: true\n"
# name of the file, its text, the precision, words of what is told ("" for nothing)
WORDS = [
    ("a.args", f"{MEGATRON} --fp8-format hybrid --fp8-recipe tensorwise", "float8", ""),
    ("b.args", f"{MEGATRON} --fp8-format hybrid", "float8", "steps before"),
    ("c.args", f"{MEGATRON} --fp8-format e4m3 --fp8-recipe tensorwise", "float8", "E5M2"),
    ("d.args", f"{MEGATRON} --fp8-format e4m3 --fp8-recipe mxfp8", "bfloat16", "block of 32"),
    ("e.args", f"{MEGATRON} --fp8-format e4m3 --fp8-recipe blockwise", "bfloat16", "block of 128"),
    ("f.yaml", BRIDGE.format("bf16_with_fp8_current_scaling_mixed"), "float8", ""),
    ("g.yaml", BRIDGE.format("bf16_with_nvfp4_mixed"), "bfloat16", "4 bits"),
    ("h.yaml", BRIDGE.format("bf16_with_fp8_subchannel_scaling_mixed"), "bfloat16", "block of 128"),
    ("i.toml", TITAN.format("float8", "float8", "rowwise_with_gw_hp"), "float8-rows", ""),
    ("j.toml", TITAN.format("quantize.linear.float8", "quantize.linear.float8", "tensorwise"), "float8", ""),
    ("k.toml", TITAN.format("float8", "float8", "rowwise"), "float8-rows", "gradients of weights"),
    ("l.py", TITAN_REGISTRY.format('recipe_name="tensorwise"'), "float8", ""),
    ("m.py", TITAN_REGISTRY.format('filter_fqns=["output"]'), "float8-rows", "gradients of weights"),
    ("n.yaml", ACCELERATE.format("backend: AO"), "float8", ""),
    ("o.yaml", ACCELERATE.format("backend: TE, fp8_format: E4M3"), "float8", "steps before"),
    ("p.yaml", ACCELERATE.format("backend: TE, use_mxfp8_block_scaling: true"), "bfloat16", "block of 32"),
    ("q.yaml", ACCELERATE.format("backend: MSAMP, opt_level: O2"), "bfloat16", "optimizer states"),
    ("r.yaml", FACTORY.format("torchao"), "float8", ""),
    ("s.yaml", FACTORY.format("te"), "float8", "steps before"),
]


@pytest.mark.parametrize(("name", "text", "precision", "told"), WORDS, ids=[row[0] for row in WORDS])
def test_a_recipe_means_a_precision_or_is_told(name: str, text: str, precision: str, told: str, tmp_path: Path) -> None:
    """No recipe without a word of ours is silent."""
    (tmp_path / name).write_text(text)
    read = read_configuration(tmp_path / name, devices=8)
    assert read.layout.precision == precision
    reasons = " ".join(why for _, _, why in read.unpriced)
    assert told in reasons
    assert bool(told) == ("priced for" in reasons or "E5M2" in reasons or "no recipe of ours" in reasons), reasons


@pytest.mark.parametrize("precision", ["float8", "float8-rows"])
@pytest.mark.parametrize("name", EXPORTED)
def test_products_in_8_bits_go_out_or_are_told_as_lost(name: str, precision: str, tmp_path: Path) -> None:
    """What goes out comes in again; what is lost runs with weights of 16 bits, as the recipe holds them."""
    layout = Layout.parse(f"data=8 zero={1 if name in ('megatron', 'bridge', 'nanotron', 'deepspeed') else 3} precision={precision}")
    framework = find_framework(name)
    try:
        exported = export_layout(framework, ExportRequest(layout, 8, "llama-8b", 2048, 32, "LlamaDecoderLayer"))
    except ShardwiseError:
        assert name == "axonn"  # no ZeRO, no precision
        return
    lost = [one for one in exported.lost if one.key == "precision"]
    if name == "axonn":
        return
    if precision in (framework.says["precision"] or ()):
        assert not lost
        for file, text in exported.files.items():
            (tmp_path / file).write_text(text)
        assert str(read_configuration(tmp_path / next(iter(exported.files)), devices=8, words={"layers": 32}).layout) == str(layout)
    else:
        assert [one.instead for one in lost] == ["bfloat16-mixed"]
        assert exported.layout.precision == "bfloat16-mixed"
