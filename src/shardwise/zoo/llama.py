"""Llama 3 (Grattafiori et al. 2024): a decoder with RMS norms, rotary positions, grouped-query attention and SwiGLU.

Input: `input_ids` BS. Output: logits BSV. The batch has `labels` BS as well, each the *next* token (-100: ignored).
Not supported: the longer context of Llama 3.1 (its scaled rotary frequencies).

Shape letters: B batch, S sequence, D model, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from shardwise.errors import ModelError
from shardwise.zoo import shared_layers


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes. `inner` is the feed-forward width, `kv_heads` the heads of keys and values, `theta` the base of the rotary frequencies."""

    vocabulary: int = 128256
    sequence: int = 8192
    hidden: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    inner: int = 14336
    theta: float = 5e5

    def __post_init__(self) -> None:
        shared_layers.check_sizes(self)
        shared_layers.check_heads(self.hidden, self.heads)
        if self.heads % self.kv_heads:
            raise ModelError(f"heads = {self.heads} does not divide by kv_heads = {self.kv_heads}; each of these serves as many heads")


def _build_block(config: LlamaConfig) -> shared_layers.PreNormBlock:
    attention = shared_layers.Attention(config.hidden, config.heads, kv_heads=config.kv_heads, bias=False, causal=True)
    mlp = shared_layers.GatedFeedForward(config.hidden, config.inner)
    return shared_layers.PreNormBlock(lambda: nn.RMSNorm(config.hidden, eps=1e-5), attention, mlp)


class Llama(nn.Module):
    """Map `input_ids` BS to logits BSV; `labels` are read by the loss only. `position_ids` BS, if given, restart at 0 at every document of
    a sample, and attention is masked to the same document."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.hidden)
        cos_SK, sin_SK = shared_layers.rotary_tables(config.sequence, config.hidden // config.heads, config.theta)
        self.register_buffer("cos", cos_SK, persistent=False)
        self.register_buffer("sin", sin_SK, persistent=False)
        self.layers = nn.ModuleList(_build_block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        shared_layers.initialise_weights(self)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        mask = None if position_ids is None else shared_layers.document_mask(position_ids)
        rotary = shared_layers.rotary_at_positions((self.cos, self.sin), input_ids.shape[1], position_ids)
        x_BSD = self.tokens(input_ids)
        for block in self.layers:
            x_BSD = block(x_BSD, rotary, mask)
        logits_BSV: Tensor = self.head(self.norm(x_BSD))
        return logits_BSV


# Grattafiori et al. 2024, table 3; the vocabulary is that of the published weights.
SIZES = {
    "llama-tiny": LlamaConfig(vocabulary=96, sequence=32, hidden=64, layers=4, heads=8, kv_heads=4, inner=128),
    "llama-8b": LlamaConfig(),
    "llama-70b": LlamaConfig(hidden=8192, layers=80, heads=64, inner=28672),
    "llama-405b": LlamaConfig(hidden=16384, layers=126, heads=128, inner=53248),
}

example_batch = shared_layers.draw_text_batch
compute_loss = shared_layers.compute_token_loss
