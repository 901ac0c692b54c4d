"""Tiny models of Hugging Face's classes, made from a configuration class alone: every size shrunk by what its name says.

In: a model type. Out: `ResolvedModel`, two layers or one of each kind of layer, a head that learns where there is one. Nothing is
    downloaded.
Not modelled: images, sound and video beside text; models that need one of these say so.

Ratios are kept where a way of cutting depends on them: of key heads to heads, of inner features to features.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ModelError, format_error
from shardwise.zoo.resolved import ResolvedModel
from shardwise.zoo.shared_layers import random_tokens

VOCABULARY, WIDTH, HEADS, HEAD, SEQUENCE, BATCH = 1024, 64, 4, 16, 16, 4
MOST_LAYERS = 4
# What is set to a number whatever it was; 0 and None stay.
SCALED = {
    "hidden_size": WIDTH, "d_model": WIDTH, "moe_hidden_size": WIDTH, "head_dim": HEAD, "swa_head_dim": HEAD, "qk_nope_head_dim": HEAD,
    "qk_rope_head_dim": 8, "qk_head_dim": HEAD + 8, "v_head_dim": HEAD, "index_head_dim": HEAD, "linear_key_head_dim": HEAD,
    "linear_value_head_dim": HEAD, "linear_head_dim": HEAD, "mamba_d_head": HEAD, "mamba_head_dim": HEAD, "q_lora_rank": 32,
    "kv_lora_rank": 32, "o_lora_rank": 32, "hidden_size_per_layer_input": 16, "ple_embed_dim": 32, "embedding_dim": 32, "rotary_dim": 8,
    "dim_model_base": 32,
}  # fmt: skip
COUNTS = {
    "num_attention_heads": HEADS, "num_heads": HEADS, "vocab_size": VOCABULARY, "o_groups": 2, "index_n_heads": 2, "index_topk": 8,
    "index_block_size": 4, "index_topk_blocks": 2, "index_kpool": 4, "sliding_window": 8, "sliding_window_size": 8,
    "attention_chunk_size": 8, "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "n_group": 2, "num_expert_group": 2, "topk_group": 1,
    "zero_expert_num": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_num_heads": HEADS, "mamba_d_state": 8,
    "mamba_n_heads": 8, "mamba_dt_rank": 8, "mamba_chunk_size": 8, "ssm_state_size": 8, "mamba_num_heads": 8, "n_groups": 2,
    "chunk_size": 8, "max_position_embeddings": 64, "model_max_length": 64, "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 8,
    "vision_vocab_size": VOCABULARY, "unpadded_vocab_size": VOCABULARY, "swa_num_attention_heads": HEADS, "d_rel": 8, "rel_extent": 16,
    "gated_norm_rank": 8, "embedding_rank": 16, "ngram_vocab_size_base": 64, "split_ngram_parts": 2,
    "make_ngram_vocab_size_divisible_by": 2, "heads_per_ngram": 2, "hc_lowrank": 16, "codebook_size": 32, "num_codebooks": 2,
    "num_code_groups": 4, "keep_window_size": 16, "block_size": 8, "layer_group_size": 2, "global_attn_every_n_layers": 2,
    "sliding_window_pattern": 2, "_sliding_window_pattern": 2, "no_rope_layer_interval": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
    "num_sliding_attention_heads": HEADS, "first_k_dense_replace": 1, "num_dense_layers": 1, "image_size": 16, "patch_size": 4,
    "num_kv_shared_layers": 0, "num_nextn_predict_layers": 0, "num_layers_per_stack": 2, "n_layers_per_attn_res_block": 1,
    "pos_emb_height": 8, "pos_emb_width": 8, "position_embedding_size": 64, "original_max_position_embeddings": 64, "max_window_layers": 1,
}  # fmt: skip
# What classes leave open that cannot stay so.
OPEN = {
    "head_dim": HEAD, "num_experts_per_tok": 2, "moe_topk": 2, "num_key_value_heads": 2, "moe_intermediate_size": 32, "num_experts": 4,
    "top_k_experts": 2, "n_routed_experts": 4, "n_shared_experts": 1, "sliding_window": 8,
}  # fmt: skip
# What a model needs besides: a number for what its own class leaves open, so that it can be made of its sizes alone.
ODD: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "qwen4_exp_text": {"layer_types": ["linear_attention", "full_attention"]},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_text": {"dropout_rate": 0.0},
}
# What forward is given beside or in place of tokens: states as wide as the model's; by model type, where it asks for them itself.
STATES = ("inputs_embeds", "noise_embeds", "context_hidden_states", "encoder_hidden_states")
ASKED = {
    "t5gemma2_decoder": ("input_ids", "encoder_hidden_states"), "qwen3_omni_moe_talker_code_predictor": ("inputs_embeds",),
}  # fmt: skip
LAYERS = ("num_hidden_layers", "num_layers", "depth", "n_layers")
# What goes with the width as it did, in steps of 16.
INNER = ("intermediate_size", "ffn_hidden_size", "expert_dim", "mlp_hidden", "intermediate_size_mlp")


def planned(*words: str) -> dict[str, Any]:
    """The configuration classes that ship a tensor plan, by model type; those of `words` alone, if there are any."""
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    classes = {name: auto.CONFIG_MAPPING[name] for name in words or auto.CONFIG_MAPPING_NAMES}
    return {name: cls for name, cls in classes.items() if getattr(cls, "base_model_tp_plan", None)}


def shrunk(cls: Any, scale: int = 1) -> Any:
    """A configuration of the class with small sizes; widths are `scale` times the smallest, counts stay."""
    usual = cls()
    values = {k: v for k, v in vars(usual).items() if not k.startswith("_")}
    changes = dict(_changes(values, scale))
    layers = next((k for k in LAYERS if isinstance(values.get(k), int)), None)
    if layers:
        kinds = _kinds(values, values[layers])
        changes |= {layers: len(kinds)} | {k: [v[i] for i in kinds] for k, v in _by_layer(values, values[layers])}
    changes |= {key: shrunk(sub, scale) for key, sub in getattr(cls, "sub_configs", {}).items() if values.get(key) and _is_own(sub)}
    takes = set(inspect.signature(cls.__init__).parameters)
    changes = {k: v for k, v in changes.items() if k in takes or k in LAYERS or k in values} | ODD.get(cls.model_type, {})
    if "mrope_section" in inspect.getsource(_modeling(cls)):  # thirds of what is rotated: of time, height and width
        rotary = changes.get("rope_parameters") or values.get("rope_parameters") or {"rope_type": "default", "rope_theta": 1e4}
        head = changes.get("head_dim") or values.get("head_dim") or scale * WIDTH // HEADS
        half = int(head * rotary.get("partial_rotary_factor", 1.0)) // 2
        thirds = {"mrope_section": [half - 2 * (half // 4), half // 4, half // 4]}
        nested = all(isinstance(part, dict) for part in rotary.values())  # by kind of layer
        changes["rope_parameters"] = {k: part | thirds for k, part in rotary.items()} if nested else rotary | thirds
    made = cls(**changes)
    if overrides := made.to_dict().get("per_layer_config"):  # layers whose sizes are not those of the others
        by_layer = {int(layer): sizes | dict(_changes(sizes, scale)) | _head_of(sizes, scale) for layer, sizes in overrides.items()}
        made = cls(**changes, per_layer_config=by_layer)
    made._experts_implementation = "eager"  # which every dtype has; what runs in its place says `shardwise.capture.experts`
    made.use_cache = False
    return made


def _is_own(cls: Any) -> bool:
    """Whether a class of configurations says by itself which sizes there are."""
    return cls.__name__ != "AutoConfig"


def _changes(values: dict[str, Any], scale: int) -> Iterator[tuple[str, Any]]:
    heads = values.get("num_attention_heads") or 1
    width = values.get("hidden_size") or WIDTH
    for key, value in values.items():
        if isinstance(value, bool):
            continue
        if key == "head_dim" and value and value == values.get("qk_rope_head_dim"):
            yield key, SCALED["qk_rope_head_dim"] * scale
        elif isinstance(value, int) and value and key in SCALED:
            yield key, SCALED[key] * scale
        elif isinstance(value, int) and value and key in COUNTS:
            yield key, COUNTS[key]
        elif value is None and key in OPEN:
            yield key, OPEN[key] * (scale if key in SCALED or key in INNER else 1)
        elif key in ("num_key_value_heads", "swa_num_key_value_heads") and isinstance(value, int):
            yield key, HEADS if value == heads else 1 if value == 1 else 2
        elif isinstance(value, int) and value and any(word in key for word in INNER):
            yield key, max(16, round(value * WIDTH / width / 16) * 16) * scale
        elif isinstance(value, int) and key.endswith(("token_id", "token_index")):
            yield key, value % VOCABULARY
        elif key == "rope_parameters" and isinstance(value, dict):
            yield key, _rotary(value)


def _head_of(sizes: dict[str, Any], scale: int) -> dict[str, Any]:
    """The width of a head of a layer that is the sum of what is rotated and what is not."""
    parts = ("qk_nope_head_dim", "qk_rope_head_dim")
    is_sum = all(key in sizes for key in ("head_dim", *parts)) and sizes["head_dim"] == sum(sizes[key] for key in parts)
    return {"head_dim": sum(SCALED[key] for key in parts) * scale} if is_sum else {}


def _rotary(value: dict[str, Any]) -> dict[str, Any]:
    found = {k: _rotary(v) if isinstance(v, dict) else v for k, v in value.items()}
    if "mrope_section" in found:
        found["mrope_section"] = [2, 3, 3]
    if found.get("original_max_position_embeddings"):
        found["original_max_position_embeddings"] = 64
    return found


def _by_layer(values: dict[str, Any], count: int) -> list[tuple[str, list[Any]]]:
    return [(k, v) for k, v in values.items() if isinstance(v, list) and len(v) == count > 1]


def _kinds(values: dict[str, Any], count: int) -> list[int]:
    """Layers that stand for all: the first of each kind, two at least."""
    seen: dict[str, int] = {}
    rows = [v for k, v in _by_layer(values, count) if k.endswith(("types", "type"))]
    for i in range(count):
        seen.setdefault(repr([row[i] for row in rows]), i)
    found = list(seen.values())[:MOST_LAYERS]
    return sorted(found if len(found) > 1 else [0, min(1, count - 1)])


def _modeling(cls: Any) -> Any:
    try:
        return importlib.import_module(cls.__module__.replace("configuration_", "modeling_"))
    except ImportError as error:
        raise ModelError(f"{cls.__name__} has no code of a model beside it ({error})") from error


def model_of(cls: Any) -> tuple[Any, str]:
    """(the class with a causal or masked head, else the bare model; what it learns) of a configuration class."""
    module = _modeling(cls)
    found = [c for c in vars(module).values() if inspect.isclass(c) and _of(c, cls)]
    for ending, learns in (("ForCausalLM", "next"), ("ForMaskedLM", "masked"), ("Model", "bare"), ("", "bare")):
        mine = [c for c in found if c.__name__.endswith(ending) and "PreTrained" not in c.__name__]
        if mine:
            kind = min(mine, key=lambda c: len(c.__name__))
            return kind, "next" if "labels" in inspect.signature(kind.forward).parameters else learns
    raise ModelError(f"no class of {module.__name__} has the configuration {cls.__name__}")


def _of(found: Any, cls: Any) -> bool:
    transformers = importlib.import_module("transformers")
    return issubclass(found, transformers.PreTrainedModel) and getattr(found, "config_class", None) is cls


def resolved(name: str, cls: Any, scale: int = 1, sequence: int = SEQUENCE) -> ResolvedModel:
    """The tiny model of a configuration class."""
    kind, learns = model_of(cls)
    config = shrunk(cls, scale)

    def make() -> nn.Module:
        try:
            module: nn.Module = kind(copy.deepcopy(config)).train()
        except Exception as error:
            raise ModelError(f"{kind.__name__} cannot be made so small: {format_error(error)}") from error
        return module

    given = inspect.signature(kind.forward).parameters.items()
    asked = ASKED.get(name) or tuple(k for k, p in given if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and k != "self")

    def batch(size: int) -> dict[str, Tensor]:
        ids = random_tokens((size, sequence), VOCABULARY, seed=0)
        made = {key: _of_input(kind, config, key, ids) for key in asked or ("input_ids",)}
        return made if learns == "bare" else made | {"labels": ids.clone()}

    return ResolvedModel(name, make, batch, bare_loss if learns == "bare" else None, BATCH)


def _of_input(kind: Any, config: Any, key: str, ids: Tensor) -> Tensor:
    """What forward is given by that name: tokens, states, or square images."""
    draw = torch.Generator().manual_seed(len(key))
    if key == "input_ids":
        return ids
    if key in STATES:
        return torch.randn(*ids.shape, config.hidden_size, generator=draw)
    if key == "pixel_values" and isinstance(size := getattr(config, "image_size", None), int):
        return torch.randn(len(ids), config.num_channels, size, size, generator=draw)
    raise ModelError(f"{kind.__name__} takes {key}")


def bare_loss(output: Any, batch: Any) -> Tensor:
    """Of a model without a head: how far its last states are from others."""
    return far(output.last_hidden_state)


def far(states: Tensor) -> Tensor:
    """How far states are from such as no model begins with."""
    return (states - torch.linspace(-1, 1, states.shape[-1], dtype=states.dtype)).square().mean()
