"""Layers shared by models of the zoo: attention with separate q, k, v, feed-forward layers, rotary positions, initialisation.

Layers map activations to activations of the same shape. There are no key-value caches for generation.

Shape letters: B batch, S sequence (queries), T keys' sequence, D model, H heads, G key-value heads, K size of a head, F feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.errors import ModelError


class Attention(nn.Module):
    """Multi-head attention: BSD (and BTD to attend to, by default the same) -> BSD.

    `q`, `k`, `v` are separate, with the heads outermost in their outputs, so that heads can be sharded. With `kv_heads` < `heads`, groups
    of query heads share keys and values (Ainslie et al. 2023). `rotary` is cos_SK and sin_SK, or B1SK; `bias` is added to the scores
    (HST), or a boolean mask (B1ST).
    """

    def __init__(
        self, hidden: int, heads: int, head_dim: int | None = None, kv_heads: int | None = None, *, bias: bool = True,
        causal: bool = False, scale: float | None = None, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads or heads
        self.head_dim = head_dim or hidden // heads
        self.causal, self.scale, self.dropout = causal, scale, dropout
        self.q = nn.Linear(hidden, heads * self.head_dim, bias=bias)
        self.k = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.v = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.o = nn.Linear(heads * self.head_dim, hidden, bias=bias)

    def forward(
        self, x_BSD: Tensor, memory_BTD: Tensor | None = None, rotary: tuple[Tensor, Tensor] | None = None, bias: Tensor | None = None
    ) -> Tensor:
        memory_BTD = x_BSD if memory_BTD is None else memory_BTD
        q_BHSK = self.q(x_BSD).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
        k_BGTK = self.k(memory_BTD).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        v_BGTK = self.v(memory_BTD).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        if rotary is not None:
            cos_SK, sin_SK = rotary
            q_BHSK, k_BGTK = apply_rotary(q_BHSK, cos_SK, sin_SK), apply_rotary(k_BGTK, cos_SK, sin_SK)
        mixed_BHSK = F.scaled_dot_product_attention(
            q_BHSK, k_BGTK, v_BGTK, attn_mask=bias, dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal and bias is None, scale=self.scale, enable_gqa=self.kv_heads != self.heads,
        )  # fmt: skip
        mixed: Tensor = self.o(mixed_BHSK.transpose(1, 2).flatten(2))
        return mixed


class FeedForward(nn.Module):
    """Two linear layers with a GELU between: ...D -> ...D. `approximate` is "none" or "tanh"."""

    def __init__(self, hidden: int, inner: int, approximate: str = "none") -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x), approximate=self.approximate))
        return y


class GatedFeedForward(nn.Module):
    """SwiGLU (Shazeer 2020) without biases: ...D -> ...D."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class PreNormBlock(nn.Module):
    """Attention and feed-forward layers, each behind a norm and added to the residual stream: BSD -> BSD. `norm` makes a norm."""

    def __init__(self, norm: Callable[[], nn.Module], attention: nn.Module, mlp: nn.Module, dropout: float | None = None) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(), attention
        self.mlp_norm, self.mlp = norm(), mlp
        self.dropout = nn.Identity() if dropout is None else nn.Dropout(dropout)

    def forward(self, x_BSD: Tensor, rotary: tuple[Tensor, Tensor] | None = None, mask: Tensor | None = None) -> Tensor:
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD), rotary=rotary, bias=mask))
        x_BSD = x_BSD + self.dropout(self.mlp(self.mlp_norm(x_BSD)))
        return x_BSD


def rotary_tables(sequence: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos_SK and sin_SK of rotary positions (Su et al. 2021, eq. 34), for the half-split layout of K."""
    frequency_K = theta ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    angle_SK = torch.outer(torch.arange(sequence).double(), frequency_K).repeat(1, 2)
    return angle_SK.cos().to(torch.get_default_dtype()), angle_SK.sin().to(torch.get_default_dtype())


def rotary_at_positions(tables: tuple[Tensor, Tensor], sequence: int, positions_BS: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the first `sequence` rows of rotary tables, or the rows at the positions of every sample, B1SK."""
    cos, sin = tables
    return (cos[:sequence], sin[:sequence]) if positions_BS is None else (cos[positions_BS].unsqueeze(1), sin[positions_BS].unsqueeze(1))


def document_mask(positions_BS: Tensor) -> Tensor:
    """Return the causal mask within documents, B1ST: True where token S attends to token T. A document begins where a position is 0."""
    document_BS = (positions_BS == 0).cumsum(1)
    place_S = torch.arange(positions_BS.shape[1], device=positions_BS.device)
    visible_BST = (document_BS.unsqueeze(2) == document_BS.unsqueeze(1)) & (place_S.unsqueeze(1) >= place_S)
    return visible_BST.unsqueeze(1)


def apply_rotary(x_BHSK: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
    """Rotate queries or keys to their positions."""
    first, second = x_BHSK.chunk(2, dim=-1)
    return x_BHSK * cos_SK + torch.cat((-second, first), dim=-1) * sin_SK


def initialise_weights(module: nn.Module, std: float = 0.02) -> None:
    """Draw weights of linear layers and embeddings from N(0, std), biases 0. Norms keep torch's own 1 and 0."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)


def initialise_residual_weights(module: nn.Module, layers: int, std: float = 0.02) -> None:
    """Draw projections into the residual stream from N(0, std / sqrt(2 layers)): its variance does not grow with depth.

    Radford et al. 2019, section 2.3.
    """
    for name, weight in module.named_parameters():
        if name.endswith(("attention.o.weight", "down.weight")):
            nn.init.normal_(weight, std=std / (2 * layers) ** 0.5)


def compute_token_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy over the tokens of the global batch whose label is not -100, in nats."""
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def compute_class_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the classes, in nats."""
    return F.cross_entropy(output, batch["labels"])


def random_tokens(size: tuple[int, int], vocabulary: int, seed: int) -> Tensor:
    """Return token ids, int64, with a skewed distribution (small ids are frequent), so that there is something to learn."""
    uniform = torch.rand(size, generator=torch.Generator().manual_seed(seed))
    return (uniform * uniform * vocabulary).long().clamp_(max=vocabulary - 1)


def check_sizes(config: Any, may_be_zero: tuple[str, ...] = ()) -> None:
    """Refuse counts below 1 (below 0 for fields of `may_be_zero`), and dropout outside of [0, 1). Raises ModelError."""
    for field in fields(config):
        value = getattr(config, field.name)
        minimum = 0 if field.name in may_be_zero else 1
        if isinstance(value, bool | str):
            continue
        if field.name == "dropout":
            if not 0 <= value < 1:
                raise ModelError(f"dropout = {value} must be at least 0 and below 1")
        elif isinstance(value, float):
            if value < 0:
                raise ModelError(f"{field.name} = {value} must not be negative")
        elif any(count < minimum for count in (value if isinstance(value, tuple) else (value,))):
            raise ModelError(f"{field.name} = {value} must be at least {minimum}")


def check_heads(hidden: int, heads: int) -> None:
    """Refuse heads that do not divide the model's width. Raises ModelError."""
    if hidden % heads:
        raise ModelError(f"hidden = {hidden} does not divide by heads = {heads}; each head needs hidden/heads features")


def random_classes(size: int, num_classes: int, seed: int) -> Tensor:
    """Return a random class for every sample, int64 of shape [size]."""
    return torch.randint(num_classes, (size,), generator=torch.Generator().manual_seed(seed))


def masked_token_labels(ids_BS: Tensor, seed: int, share: float = 0.15) -> Tensor:
    """Return the ids at a `share` of random positions (Devlin et al. 2018: 15 %), -100 elsewhere; at least one label a sample."""
    uniform = torch.rand(ids_BS.shape, generator=torch.Generator().manual_seed(seed))
    chosen = uniform <= uniform.kthvalue(max(1, round(share * ids_BS.shape[1])), dim=1, keepdim=True).values
    return ids_BS.masked_fill(~chosen, -100)


def draw_text_batch(config: Any, batch_size: int, seed: int = 0) -> dict[str, Tensor]:
    """Return random tokens and their next tokens: `input_ids` BS and `labels` BS."""
    tokens = random_tokens((batch_size, config.sequence + 1), config.vocabulary, seed)
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def random_images(size: tuple[int, int, int, int], classes: int, seed: int) -> dict[str, Tensor]:
    """Return pixels of mean 0 and variance 1, and a class for every image: `pixels` of shape `size`, `labels` B."""
    pixels = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return {"pixels": pixels, "labels": random_classes(size[0], classes, seed + 1)}


def draw_image_batch(config: Any, batch_size: int, seed: int = 0) -> dict[str, Tensor]:
    """Return random square images and classes: `pixels` BCHW, `labels` B."""
    return random_images((batch_size, config.colours, config.image, config.image), config.classes, seed)
