"""T5 1.0 (Raffel et al. 2019): an encoder and a decoder, RMS norms, relative position biases, embeddings shared by all three.

Input: `input_ids` BS and `decoder_input_ids` BT. Output: logits BTV. The batch has `labels` BT as well (-100: ignored).
Not supported: padding. As published, attention scores are not scaled, and no linear layer has a bias.

Shape letters: B batch, S input sequence, T output sequence, D model, H heads, K size of a head, F feed-forward, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.zoo import shared_layers

BUCKETS, FARTHEST = 32, 128  # relative positions share a bias by bucket; those at FARTHEST or beyond share the last


@dataclass(frozen=True, slots=True)
class T5Config:
    """Sizes. `layers` of the encoder, and as many of the decoder; both sequences have `sequence` tokens."""

    vocabulary: int = 32128
    sequence: int = 512
    hidden: int = 768
    layers: int = 12
    heads: int = 12
    head_dim: int = 64
    inner: int = 3072
    dropout: float = 0.0

    def __post_init__(self) -> None:
        shared_layers.check_sizes(self)


def relative_position_bucket(offset: int, both_ways: bool) -> int:
    """Return the bucket of a key `offset` tokens after its query: exact for small distances, then logarithmic (the paper's code).

    With `both_ways` (bidirectional attention) half the buckets are for keys after the query; otherwise these all share bucket 0.
    """
    count, first = (BUCKETS // 2, BUCKETS // 2 if offset > 0 else 0) if both_ways else (BUCKETS, 0)
    distance = abs(offset) if both_ways else max(-offset, 0)
    exact = count // 2
    if distance < exact:
        return first + distance
    far = exact + int(math.log(distance / exact) / math.log(FARTHEST / exact) * (count - exact))
    return first + min(far, count - 1)


class RelativeBias(nn.Module):
    """Biases of a stack's attention scores, HST, shared by all its layers; a decoder's are causally masked."""

    buckets: Tensor
    later: Tensor

    def __init__(self, config: T5Config, decoder: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self.table = nn.Embedding(BUCKETS, config.heads)
        size = config.sequence
        by_offset = torch.tensor([relative_position_bucket(offset, both_ways=not decoder) for offset in range(1 - size, size)])
        offsets_ST = torch.arange(size) - torch.arange(size)[:, None]
        self.register_buffer("buckets", by_offset[offsets_ST + size - 1], persistent=False)
        self.register_buffer("later", offsets_ST > 0, persistent=False)

    def forward(self, sequence: int) -> Tensor:
        bias_HST: Tensor = self.table(self.buckets[:sequence, :sequence]).permute(2, 0, 1)
        if self.decoder:
            bias_HST = bias_HST.masked_fill(self.later[:sequence, :sequence], -math.inf)
        return bias_HST


class T5FeedForward(nn.Module):
    """Two linear layers with a ReLU between: ...D -> ...D."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner, bias=False), nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.relu(self.up(x)))
        return y


class T5Block(nn.Module):
    """BSD -> BSD in the encoder; in the decoder it attends to the encoder's output (memory) as well."""

    def __init__(self, config: T5Config, decoder: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self.attention_norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.attention = _make_attention(config)
        if decoder:
            self.cross_norm = nn.RMSNorm(config.hidden, eps=1e-6)
            self.cross = _make_attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.mlp = T5FeedForward(config.hidden, config.inner)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BSD: Tensor, bias_HST: Tensor, memory_BSD: Tensor | None = None) -> Tensor:
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD), bias=bias_HST))
        if self.decoder:
            x_BSD = x_BSD + self.dropout(self.cross(self.cross_norm(x_BSD), memory_BSD))
        x_BSD = x_BSD + self.dropout(self.mlp(self.mlp_norm(x_BSD)))
        return x_BSD


def _make_attention(config: T5Config) -> shared_layers.Attention:
    return shared_layers.Attention(config.hidden, config.heads, config.head_dim, bias=False, scale=1.0, dropout=config.dropout)


class T5Stack(nn.Module):
    """The encoder or the decoder without its embedding: BSD -> BSD."""

    def __init__(self, config: T5Config, decoder: bool) -> None:
        super().__init__()
        self.bias = RelativeBias(config, decoder)
        self.layers = nn.ModuleList(T5Block(config, decoder) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-6)

    def forward(self, x_BSD: Tensor, memory_BSD: Tensor | None = None) -> Tensor:
        bias_HST = self.bias(x_BSD.shape[1])
        for block in self.layers:
            x_BSD = block(x_BSD, bias_HST, memory_BSD)
        out_BSD: Tensor = self.norm(x_BSD)
        return out_BSD


class T5(nn.Module):
    """Map `input_ids` BS and `decoder_input_ids` BT to logits BTV; `labels` are read by the loss only."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.encoder = T5Stack(config, decoder=False)
        self.decoder = T5Stack(config, decoder=True)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        self._initialise()
        self.head.weight = self.tokens.weight

    def _initialise(self) -> None:
        """Initialise with standard deviations that make up for the missing scale of the attention scores (as in the published code)."""
        hidden, inner = self.config.hidden, self.config.inner
        attention = self.config.heads * self.config.head_dim
        std_of = {
            "q.weight": (hidden * self.config.head_dim) ** -0.5,
            "k.weight": hidden**-0.5,
            "v.weight": hidden**-0.5,
            "o.weight": attention**-0.5,
            "up.weight": hidden**-0.5,
            "down.weight": inner**-0.5,
            "table.weight": hidden**-0.5,
            "tokens.weight": 1.0,
        }
        for name, weight in self.named_parameters():
            std = std_of.get(".".join(name.split(".")[-2:]))
            if std is not None:
                nn.init.normal_(weight, std=std)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        memory_BSD = self.dropout(self.encoder(self.dropout(self.tokens(input_ids))))
        x_BTD = self.dropout(self.decoder(self.dropout(self.tokens(decoder_input_ids)), memory_BSD))
        logits_BTV: Tensor = self.head(x_BTD * self.config.hidden**-0.5)
        return logits_BTV


# Raffel et al. 2019, section 3.7 (model sizes).
SIZES = {
    "t5-tiny": T5Config(vocabulary=96, sequence=32, hidden=64, layers=2, heads=8, head_dim=8, inner=128),
    "t5-small": T5Config(hidden=512, layers=6, heads=8, inner=2048),
    "t5-base": T5Config(),
    "t5-large": T5Config(hidden=1024, layers=24, heads=16, inner=4096),
    "t5-3b": T5Config(hidden=1024, layers=24, heads=32, head_dim=128, inner=16384),
    "t5-11b": T5Config(hidden=1024, layers=24, heads=128, head_dim=128, inner=65536),
}


def example_batch(config: T5Config, batch_size: int, seed: int = 0) -> dict[str, Tensor]:
    """Return random tokens: `input_ids` BS, `labels` BT, and `decoder_input_ids` BT (the labels shifted right, after token 0)."""
    labels_BT = shared_layers.random_tokens((batch_size, config.sequence), config.vocabulary, seed + 1)
    return {
        "input_ids": shared_layers.random_tokens((batch_size, config.sequence), config.vocabulary, seed),
        "decoder_input_ids": F.pad(labels_BT[:, :-1], (1, 0)),
        "labels": labels_BT,
    }


compute_loss = shared_layers.compute_token_loss
