"""GPT (Radford et al. 2019; Brown et al. 2020): a decoder of pre-norm blocks, learned positions, tied embeddings.

Input: `input_ids` BS. Output: logits BSV. The batch has `labels` BS as well, each the *next* token (-100: ignored).

Shape letters: B batch, S sequence, D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.errors import ModelError
from shardwise.zoo import shared_layers


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes. `inner` is the feed-forward width, 0 for 4 x hidden; `positions` is "learned" or "rotary"."""

    vocabulary: int = 51200
    sequence: int = 1024
    hidden: int = 768
    layers: int = 12
    heads: int = 12
    inner: int = 0
    positions: str = "learned"
    tied: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        shared_layers.check_sizes(self, may_be_zero=("inner",))
        shared_layers.check_heads(self.hidden, self.heads)
        if self.positions not in ("learned", "rotary"):
            raise ModelError(f'positions = "{self.positions}" is unknown; use learned or rotary')

    @property
    def num_parameters(self) -> int:
        """Number of parameters: 12 D^2 + 13 D a layer at the usual inner width (Narayanan et al. 2021, eq. 2, and the biases)."""
        hidden, inner = self.hidden, self.inner or 4 * self.hidden
        layer = 4 * hidden * (hidden + 1) + 2 * hidden * inner + inner + hidden + 4 * hidden
        tables = self.vocabulary * (1 if self.tied else 2) + (self.sequence if self.positions == "learned" else 0)
        return self.layers * layer + tables * hidden + 2 * hidden


def _build_block(config: GPTConfig) -> shared_layers.PreNormBlock:
    attention = shared_layers.Attention(config.hidden, config.heads, causal=True, dropout=config.dropout)
    mlp = shared_layers.FeedForward(config.hidden, config.inner or 4 * config.hidden, approximate="tanh")
    return shared_layers.PreNormBlock(lambda: nn.LayerNorm(config.hidden), attention, mlp, config.dropout)


class GPT(nn.Module):
    """Map `input_ids` BS to logits BSV; `labels` are read by the loss only. `position_ids` BS, if given, restart at 0 at every document of
    a sample, and attention is masked to the same document."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.hidden)
        if config.positions == "learned":
            self.positions = nn.Embedding(config.sequence, config.hidden)
        else:
            tables = shared_layers.rotary_tables(config.sequence, config.hidden // config.heads, 1e4)
            for name, table in zip(("cos", "sin"), tables, strict=True):
                self.register_buffer(name, table, persistent=False)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(_build_block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        shared_layers.initialise_weights(self)
        shared_layers.initialise_residual_weights(self, config.layers)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        sequence = input_ids.shape[1]
        x_BSD = self.tokens(input_ids)
        rotary, mask = None, None if position_ids is None else shared_layers.document_mask(position_ids)
        if self.config.positions == "learned":
            x_BSD = x_BSD + self.positions(torch.arange(sequence, device=input_ids.device) if position_ids is None else position_ids)
        else:
            rotary = shared_layers.rotary_at_positions((self.cos, self.sin), sequence, position_ids)
        x_BSD = self.dropout(x_BSD)
        for block in self.layers:
            x_BSD = block(x_BSD, rotary, mask)
        logits_BSV: Tensor = self.head(self.norm(x_BSD))
        return logits_BSV


def _gpt3_size(hidden: int, layers: int, heads: int) -> GPTConfig:
    """Return a size of Brown et al. 2020, table 2.1. Vocabulary 50,257 padded to 51,200, to be sharded (as in Megatron-LM)."""
    return GPTConfig(vocabulary=51200, sequence=2048, hidden=hidden, layers=layers, heads=heads)


def _alpa_size(hidden: int, layers: int, heads: int) -> GPTConfig:
    """Return a size of the table of GPT models of Zheng et al. 2022 (Alpa)."""
    return GPTConfig(vocabulary=51200, sequence=1024, hidden=hidden, layers=layers, heads=heads)


def _megatron_size(hidden: int, layers: int, heads: int) -> GPTConfig:
    """Return a size of Narayanan et al. 2021, table 1; 22B: Korthikanti et al. 2022, table 3."""
    return GPTConfig(vocabulary=51200, sequence=2048, hidden=hidden, layers=layers, heads=heads)


SIZES = {
    "gpt-tiny": GPTConfig(vocabulary=96, sequence=32, hidden=64, layers=4, heads=8),
    "gpt-10m": GPTConfig(vocabulary=256, sequence=256, hidden=384, layers=6, heads=6),
    "gpt-50m": GPTConfig(vocabulary=256, sequence=256, hidden=512, layers=16, heads=8),
    "gpt-125m": _gpt3_size(768, 12, 12),
    "gpt-350m": _gpt3_size(1024, 24, 16),
    "gpt-760m": _gpt3_size(1536, 24, 16),
    "gpt-1.3b": _gpt3_size(2048, 24, 16),  # the table's 24 heads of 128 do not make its 2,048; 16 do
    "gpt-2.6b": _alpa_size(2560, 32, 32),
    "gpt-6.7b": _alpa_size(4096, 32, 32),
    "gpt-15b": _alpa_size(5120, 48, 40),
    "gpt-39b": _alpa_size(8192, 48, 64),
    "gpt-175b": _gpt3_size(12288, 96, 96),
    "megatron-1.7b": _megatron_size(2304, 24, 24),
    "megatron-3.6b": _megatron_size(3072, 30, 32),
    "megatron-7.5b": _megatron_size(4096, 36, 32),
    "megatron-18b": _megatron_size(6144, 40, 48),
    "megatron-22b": _megatron_size(6144, 48, 64),
    "megatron-39b": _megatron_size(8192, 48, 64),
    "megatron-76b": _megatron_size(10240, 60, 80),
    "megatron-145b": _megatron_size(12288, 80, 96),
    "megatron-310b": _megatron_size(16384, 96, 128),
    "megatron-530b": _megatron_size(20480, 105, 128),
    "megatron-1t": _megatron_size(25600, 128, 160),
}

example_batch = shared_layers.draw_text_batch
compute_loss = shared_layers.compute_token_loss


@torch.no_grad()
def generate(
    logits_of: Callable[[Tensor], Tensor], prompt_ids: Tensor, num_tokens: int, *, sequence: int, temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:  # fmt: skip
    """Continue prompts: BS -> B(S+num_tokens). `logits_of` is any function from ids BS to logits BSV that takes up to `sequence` tokens.

    `temperature` 0 takes the likeliest token (greedy); otherwise tokens are sampled, with logits divided by it.

    Raises:
        ModelError: an empty prompt, or a negative temperature.

    >>> generate(lambda ids: torch.nn.functional.one_hot(ids + 1, 9).float(), torch.tensor([[3]]), 3, sequence=4, temperature=0.0)
    tensor([[3, 4, 5, 6]])
    """
    if prompt_ids.dim() != 2 or not prompt_ids.shape[1]:
        raise ModelError(f"prompts must be token numbers of shape [batch, at least 1], got {list(prompt_ids.shape)}")
    if temperature < 0:
        raise ModelError(f"temperature {temperature} is negative; use 0 for the likeliest token, or more")
    ids_BS = prompt_ids
    for _ in range(num_tokens):
        logits_BV = logits_of(ids_BS[:, -sequence:])[:, -1]
        if temperature:
            next_B1 = torch.multinomial(F.softmax(logits_BV.float() / temperature, dim=-1), 1, generator=generator)
        else:
            next_B1 = logits_BV.argmax(-1, keepdim=True)
        ids_BS = torch.cat((ids_BS, next_B1.to(ids_BS.dtype)), dim=1)
    return ids_BS
