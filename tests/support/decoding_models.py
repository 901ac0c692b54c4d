"""Small decoders: Hugging Face's GPT-2, Llama (two queries share a head of keys) and Mixtral, shardwise's own, and what is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.zoo import gpt

LAYERS, HEADS, KEYS, WIDTH, VOCABULARY = 2, 4, 2, 8, 96
TOKENS = {"bos_token_id": 0, "eos_token_id": 1}


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=LAYERS, n_head=HEADS, **TOKENS))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_sizes(), **TOKENS))


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"experts_implementation": "eager", "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**_sizes(), **experts, sliding_window=None, **TOKENS))


def windowed() -> Any:
    """Attention sees the last eight tokens alone."""
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**_sizes(), sliding_window=8, **TOKENS))


def _sizes() -> dict[str, int]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KEYS, "max_position_embeddings": 64,
    }  # fmt: skip


def own() -> nn.Module:
    return gpt.GPT(gpt.GPTConfig(vocabulary=VOCABULARY, sequence=64, hidden=32, layers=LAYERS, heads=HEADS))


class Averaging(nn.Module):
    """A decoder each of whose tokens also has the mean of all before it, which no attention tells."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = own()

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.inside(input_ids)
        return logits.cumsum(1) / torch.arange(1, input_ids.shape[1] + 1).unsqueeze(-1)


def loss(output: Any, batch: Any) -> Tensor:
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2, "llama": llama, "mixtral": mixtral, "windowed": windowed, "own": own, "averaging": Averaging,
}  # fmt: skip
