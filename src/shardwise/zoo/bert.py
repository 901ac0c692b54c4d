"""BERT (Devlin et al. 2018) with its masked language model: an encoder of post-norm blocks, decoder tied to the embeddings.

Input: `input_ids` and `token_type_ids` (which of two sentences) BS. Output: logits BSV. The batch has `labels` BS as well: the original
token where one is masked, -100 elsewhere. Not supported: next-sentence prediction, padding.

Shape letters: B batch, S sequence, D model, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.zoo import shared_layers

EPS = 1e-12


@dataclass(frozen=True, slots=True)
class BertConfig:
    """Sizes. The feed-forward width is 4 x hidden; `mask_id` is the mask token."""

    vocabulary: int = 30522
    sequence: int = 512
    hidden: int = 768
    layers: int = 12
    heads: int = 12
    mask_id: int = 103
    dropout: float = 0.0

    def __post_init__(self) -> None:
        shared_layers.check_sizes(self)
        shared_layers.check_heads(self.hidden, self.heads)


class BertBlock(nn.Module):
    """BSD -> BSD."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = shared_layers.Attention(config.hidden, config.heads, dropout=config.dropout)
        self.attention_norm = nn.LayerNorm(config.hidden, eps=EPS)
        self.mlp = shared_layers.FeedForward(config.hidden, 4 * config.hidden)
        self.mlp_norm = nn.LayerNorm(config.hidden, eps=EPS)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = self.attention_norm(x_BSD + self.dropout(self.attention(x_BSD)))
        x_BSD = self.mlp_norm(x_BSD + self.dropout(self.mlp(x_BSD)))
        return x_BSD


class Bert(nn.Module):
    """Map `input_ids` and `token_type_ids` BS to logits BSV; `labels` are read by the loss only."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.positions = nn.Embedding(config.sequence, config.hidden)
        self.sentences = nn.Embedding(2, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=EPS)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(BertBlock(config) for _ in range(config.layers))
        self.transform = nn.Linear(config.hidden, config.hidden)
        self.transform_norm = nn.LayerNorm(config.hidden, eps=EPS)
        self.head = nn.Linear(config.hidden, config.vocabulary)
        shared_layers.initialise_weights(self)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        positions_SD = self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        x_BSD = self.dropout(self.norm(self.tokens(input_ids) + self.sentences(token_type_ids) + positions_SD))
        for block in self.layers:
            x_BSD = block(x_BSD)
        logits_BSV: Tensor = self.head(self.transform_norm(F.gelu(self.transform(x_BSD))))
        return logits_BSV


# Devlin et al. 2018, section 3; the vocabulary is that of the published uncased weights.
SIZES = {
    "bert-tiny": BertConfig(vocabulary=96, sequence=32, hidden=64, layers=4, heads=8, mask_id=4),
    "bert-base": BertConfig(),
    "bert-large": BertConfig(hidden=1024, layers=24, heads=16),
}


def example_batch(config: BertConfig, batch_size: int, seed: int = 0) -> dict[str, Tensor]:
    """Return random tokens, 15 % of them masked: `input_ids`, `token_type_ids`, `labels`, BS. The second sentence starts at random."""
    ids_BS = shared_layers.random_tokens((batch_size, config.sequence), config.vocabulary, seed)
    labels_BS = shared_layers.masked_token_labels(ids_BS, seed + 1)
    start_B = torch.randint(1, config.sequence + 1, (batch_size, 1), generator=torch.Generator().manual_seed(seed + 2))
    return {
        "input_ids": ids_BS.masked_fill(labels_BS != -100, config.mask_id),
        "token_type_ids": (torch.arange(config.sequence) >= start_B).long(),
        "labels": labels_BS,
    }


compute_loss = shared_layers.compute_token_loss
