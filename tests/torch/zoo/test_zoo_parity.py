"""Models of the zoo against other people's implementations of the same papers: same weights, same outputs and gradients.

Weights are carried over by name, every one of them; a name that is left over on either side fails.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from shardwise.zoo import bert, gpt, llama, t5, vit

transformers = pytest.importorskip(
    "transformers", minversion="5.0", reason="shardwise[hf] is not installed, or its layers have other names"
)

FLOAT32_INSIDE = 1e-4  # the library computes RMS norms and rotary tables in float32, whatever the model's dtype
Names = list[tuple[str, str]]  # ours (a pattern) -> theirs

GPT2: Names = [
    (r"tokens\.", "transformer.wte."),
    (r"positions\.", "transformer.wpe."),
    (r"layers\.(\d+)\.attention_norm\.", r"transformer.h.\1.ln_1."),
    (r"layers\.(\d+)\.mlp_norm\.", r"transformer.h.\1.ln_2."),
    (r"layers\.(\d+)\.attention\.o\.", r"transformer.h.\1.attn.c_proj."),
    (r"layers\.(\d+)\.mlp\.up\.", r"transformer.h.\1.mlp.c_fc."),
    (r"layers\.(\d+)\.mlp\.down\.", r"transformer.h.\1.mlp.c_proj."),
    (r"norm\.", "transformer.ln_f."),
    (r"head\.", "lm_head."),
]
LLAMA: Names = [
    (r"tokens\.", "model.embed_tokens."),
    (r"layers\.(\d+)\.attention_norm\.", r"model.layers.\1.input_layernorm."),
    (r"layers\.(\d+)\.mlp_norm\.", r"model.layers.\1.post_attention_layernorm."),
    (r"layers\.(\d+)\.attention\.(.)\.", r"model.layers.\1.self_attn.\2_proj."),
    (r"layers\.(\d+)\.mlp\.(\w+)\.", r"model.layers.\1.mlp.\2_proj."),
    (r"norm\.", "model.norm."),
    (r"head\.", "lm_head."),
]
_BERT = r"bert.encoder.layer.\1."
BERT: Names = [
    (r"tokens\.", "bert.embeddings.word_embeddings."),
    (r"positions\.", "bert.embeddings.position_embeddings."),
    (r"sentences\.", "bert.embeddings.token_type_embeddings."),
    (r"layers\.(\d+)\.attention\.q\.", _BERT + "attention.self.query."),
    (r"layers\.(\d+)\.attention\.k\.", _BERT + "attention.self.key."),
    (r"layers\.(\d+)\.attention\.v\.", _BERT + "attention.self.value."),
    (r"layers\.(\d+)\.attention\.o\.", _BERT + "attention.output.dense."),
    (r"layers\.(\d+)\.attention_norm\.", _BERT + "attention.output.LayerNorm."),
    (r"layers\.(\d+)\.mlp\.up\.", _BERT + "intermediate.dense."),
    (r"layers\.(\d+)\.mlp\.down\.", _BERT + "output.dense."),
    (r"layers\.(\d+)\.mlp_norm\.", _BERT + "output.LayerNorm."),
    (r"norm\.", "bert.embeddings.LayerNorm."),
    (r"transform\.", "cls.predictions.transform.dense."),
    (r"transform_norm\.", "cls.predictions.transform.LayerNorm."),
    (r"head\.", "cls.predictions.decoder."),
]
_T5 = r"\1.block.\2.layer."
T5: Names = [
    (r"tokens\.", "shared."),
    (r"head\.", "lm_head."),
    (r"(encoder|decoder)\.bias\.table\.", r"\1.block.0.layer.0.SelfAttention.relative_attention_bias."),
    (r"(encoder|decoder)\.layers\.(\d+)\.attention_norm\.", _T5 + "0.layer_norm."),
    (r"(encoder|decoder)\.layers\.(\d+)\.attention\.", _T5 + "0.SelfAttention."),
    (r"(decoder)\.layers\.(\d+)\.cross_norm\.", _T5 + "1.layer_norm."),
    (r"(decoder)\.layers\.(\d+)\.cross\.", _T5 + "1.EncDecAttention."),
    (r"(encoder)\.layers\.(\d+)\.mlp_norm\.", _T5 + "1.layer_norm."),
    (r"(decoder)\.layers\.(\d+)\.mlp_norm\.", _T5 + "2.layer_norm."),
    (r"(encoder)\.layers\.(\d+)\.mlp\.up\.", _T5 + "1.DenseReluDense.wi."),
    (r"(decoder)\.layers\.(\d+)\.mlp\.up\.", _T5 + "2.DenseReluDense.wi."),
    (r"(encoder)\.layers\.(\d+)\.mlp\.down\.", _T5 + "1.DenseReluDense.wo."),
    (r"(decoder)\.layers\.(\d+)\.mlp\.down\.", _T5 + "2.DenseReluDense.wo."),
    (r"(encoder|decoder)\.norm\.", r"\1.final_layer_norm."),
]
_VIT = r"vit.layers.\1."
VIT: Names = [
    (r"class_token", "vit.embeddings.cls_token"),
    (r"positions", "vit.embeddings.position_embeddings"),
    (r"patches\.", "vit.embeddings.patch_embeddings.projection."),
    (r"layers\.(\d+)\.attention_norm\.", _VIT + "layernorm_before."),
    (r"layers\.(\d+)\.mlp_norm\.", _VIT + "layernorm_after."),
    (r"layers\.(\d+)\.attention\.(.)\.", _VIT + r"attention.\2_proj."),
    (r"layers\.(\d+)\.mlp\.up\.", _VIT + "mlp.fc1."),
    (r"layers\.(\d+)\.mlp\.down\.", _VIT + "mlp.fc2."),
    (r"norm\.", "vit.layernorm."),
    (r"head\.", "classifier."),
]


def theirs(name: str, names: Names) -> str:
    for pattern, replacement in names:
        if re.match(pattern, name):
            return re.sub(f"^{pattern}", replacement, name)
    raise KeyError(name)


def carried(model: nn.Module, other: nn.Module, names: Names, transposed: tuple[str, ...] = ()) -> None:
    """Copy all our weights into the other model."""
    state = other.state_dict(keep_vars=True)
    left = {id(p): name for name, p in other.named_parameters()}
    fused: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            found = re.match(r"layers\.(\d+)\.attention\.([qkv])\.(\w+)", name)
            if found and names is GPT2:  # keeps q, k and v in one, and weights transposed
                fused.setdefault(f"transformer.h.{found[1]}.attn.c_attn.{found[3]}", []).append(weight.t() if weight.dim() == 2 else weight)
                continue
            target = theirs(name, names)
            value = weight.t() if transposed and target.endswith(transposed) else weight
            assert state[target].shape == value.shape, (name, target)
            state[target].copy_(value)
            left.pop(id(state[target]), None)  # tied ones come twice
        for target, parts in fused.items():
            state[target].copy_(torch.cat(parts, dim=-1))
            left.pop(id(state[target]), None)  # tied ones come twice
    assert not left


def randomised(model: nn.Module) -> nn.Module:
    """Norms and biases that differ from 1 and 0, so that a swap shows."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.double().eval()


def same(ours: Tensor, other: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(ours, other, rtol=tolerance, atol=tolerance)


def test_gpt() -> None:
    config = gpt.SIZES["gpt-tiny"]
    model = randomised(gpt.GPT(config))
    settings = transformers.GPT2Config(vocab_size=96, n_positions=32, n_embd=64, n_layer=4, n_head=8, bos_token_id=0, eos_token_id=0)
    other = transformers.GPT2LMHeadModel(settings).double().eval()
    carried(model, other, GPT2, transposed=("c_proj.weight", "c_fc.weight"))
    batch = gpt.example_batch(config, 2)
    logits = other(batch["input_ids"]).logits
    same(model(**batch), logits)
    gpt.compute_loss(model(**batch), batch).backward()
    gpt.compute_loss(logits, batch).backward()
    same(model.tokens.weight.grad, other.transformer.wte.weight.grad)


def test_llama() -> None:
    config = llama.SIZES["llama-tiny"]
    model = llama.Llama(config).double()
    settings = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=32, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": config.theta},
    )  # fmt: skip
    other = transformers.LlamaForCausalLM(settings).double().eval()
    randomised(model)
    carried(model, other, LLAMA)
    batch = llama.example_batch(config, 2)
    same(model(**batch), other(batch["input_ids"]).logits, FLOAT32_INSIDE)


def test_bert() -> None:
    config = bert.SIZES["bert-tiny"]
    model = randomised(bert.Bert(config))
    settings = transformers.BertConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=4, num_attention_heads=8, intermediate_size=256, max_position_embeddings=32
    )
    other = transformers.BertForMaskedLM(settings).double().eval()
    carried(model, other, BERT)
    batch = bert.example_batch(config, 3)
    answer = other(**batch)
    same(model(**batch), answer.logits)
    same(bert.compute_loss(model(**batch), batch), answer.loss)


def test_t5() -> None:
    """Over 160 tokens, so that distances of all buckets occur."""
    config = t5.T5Config(vocabulary=96, sequence=160, hidden=64, layers=2, heads=8, head_dim=8, inner=128)
    model = randomised(t5.T5(config))
    settings = transformers.T5Config(
        vocab_size=96, d_model=64, d_kv=8, d_ff=128, num_layers=2, num_heads=8, decoder_start_token_id=0, pad_token_id=0
    )
    other = transformers.T5ForConditionalGeneration(settings).double().eval()
    carried(model, other, T5)
    batch = t5.example_batch(config, 2)
    answer = other(input_ids=batch["input_ids"], labels=batch["labels"])
    same(model(**batch), answer.logits, FLOAT32_INSIDE)
    same(t5.compute_loss(model(**batch), batch), answer.loss, FLOAT32_INSIDE)


def test_vit() -> None:
    config = vit.SIZES["vit-tiny"]
    model = randomised(vit.ViT(config))
    settings = transformers.ViTConfig(
        image_size=32, patch_size=8, hidden_size=64, num_hidden_layers=4, num_attention_heads=8, intermediate_size=256, num_labels=16,
        layer_norm_eps=1e-6,
    )  # fmt: skip
    other = transformers.ViTForImageClassification(settings).double().eval()
    carried(model, other, VIT)
    batch = vit.example_batch(config, 3)
    same(model(batch["pixels"].double()), other(pixel_values=batch["pixels"].double()).logits)


def test_a_swapped_weight_shows() -> None:
    """The twin of `test_bert`: one layer's norms exchanged, and the outputs differ."""
    config = bert.SIZES["bert-tiny"]
    model = randomised(bert.Bert(config))
    batch = bert.example_batch(config, 2)
    before = model(**batch)
    block = model.layers[1]
    block.attention_norm, block.mlp_norm = block.mlp_norm, block.attention_norm
    with pytest.raises(AssertionError):
        same(model(**batch), before)
