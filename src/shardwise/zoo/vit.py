"""ViT (Dosovitskiy et al. 2020): patches of an image as tokens, an encoder of pre-norm blocks, a head on the class token.

Input: `pixels` BCHW. Output: logits BV. The batch has `labels` B as well.

Shape letters: B batch, C colours, H and W image, P patches and one class token, D model, V classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.errors import ModelError
from shardwise.zoo import shared_layers


@dataclass(frozen=True, slots=True)
class ViTConfig:
    """Sizes. `image` and `patch` are sides in pixels; the feed-forward width is 4 x hidden."""

    image: int = 224
    patch: int = 16
    colours: int = 3
    classes: int = 1000
    hidden: int = 768
    layers: int = 12
    heads: int = 12
    dropout: float = 0.0

    def __post_init__(self) -> None:
        shared_layers.check_sizes(self)
        shared_layers.check_heads(self.hidden, self.heads)
        if self.image % self.patch:
            raise ModelError(f"image = {self.image} does not divide by patch = {self.patch}; patches must cover it")


def _build_block(config: ViTConfig) -> shared_layers.PreNormBlock:
    attention = shared_layers.Attention(config.hidden, config.heads, dropout=config.dropout)
    mlp = shared_layers.FeedForward(config.hidden, 4 * config.hidden)
    return shared_layers.PreNormBlock(lambda: nn.LayerNorm(config.hidden, eps=1e-6), attention, mlp, config.dropout)


class ViT(nn.Module):
    """Map `pixels` BCHW to logits BV; `labels` are read by the loss only."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.patches = nn.Conv2d(config.colours, config.hidden, config.patch, stride=config.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.hidden))
        self.positions = nn.Parameter(torch.empty(1, (config.image // config.patch) ** 2 + 1, config.hidden))
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(_build_block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, eps=1e-6)
        self.head = nn.Linear(config.hidden, config.classes)
        shared_layers.initialise_weights(self)
        nn.init.normal_(self.patches.weight, std=(config.colours * config.patch**2) ** -0.5)
        nn.init.zeros_(self.patches.bias)  # type: ignore[arg-type]
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        x_BPD = self.patches(pixels).flatten(2).transpose(1, 2)
        x_BPD = torch.cat((self.class_token.expand(x_BPD.shape[0], -1, -1), x_BPD), dim=1)
        x_BPD = self.dropout(x_BPD + self.positions)
        for block in self.layers:
            x_BPD = block(x_BPD)
        logits_BV: Tensor = self.head(self.norm(x_BPD)[:, 0])
        return logits_BV


# Dosovitskiy et al. 2020, table 1.
SIZES = {
    "vit-tiny": ViTConfig(image=32, patch=8, classes=16, hidden=64, layers=4, heads=8),
    "vit-b": ViTConfig(),
    "vit-l": ViTConfig(hidden=1024, layers=24, heads=16),
    "vit-h": ViTConfig(patch=14, hidden=1280, layers=32, heads=16),
}

example_batch = shared_layers.draw_image_batch
compute_loss = shared_layers.compute_class_loss
