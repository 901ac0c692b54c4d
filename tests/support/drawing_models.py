"""Models that draw random numbers, in every way that follows the samples of a batch. Loss is a mean over samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

N, S, D = 12, 4, 8  # samples, positions, features


class _Block(nn.Module):
    """Attention with dropout, dropout where samples are not outermost, rows of (sample, position), stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.mlp = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        q, k, v = (t.unflatten(-1, (2, D // 2)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True).transpose(1, 2).flatten(2)
        kept = torch.rand(n, 1, 1, dtype=x.dtype).add(0.8).floor() / 0.8  # torchvision's blocks
        x = x + kept * F.dropout(self.out(h).transpose(0, 1), 0.3).transpose(0, 1)
        rows = F.dropout(self.mlp(x).reshape(n * S, D).tanh(), 0.1).reshape(n, S, D)
        return x + rows * x.new_empty(n, 1, 1).bernoulli_(0.7)  # timm's


class _Everything(nn.Module):
    """Blocks, one of them run again in backward; a latent that is drawn; timesteps and noise of a diffusion; one noise for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.latent, self.steps, self.head = nn.Linear(D, 2 * D), nn.Embedding(10, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.blocks[0], x, use_reentrant=False)
        h = self.blocks[1](h)
        mean, spread = self.latent(h).chunk(2, -1)
        h = mean + torch.randn_like(mean) * torch.exp(spread / 2)
        at = torch.randint(0, 10, (x.shape[0],))
        noise = torch.randn(x.shape, dtype=x.dtype)
        level = torch.linspace(0.1, 0.9, 10, dtype=x.dtype)[at].view(-1, 1, 1)
        noisy = level * h + (1 - level) * noise + 0.1 * torch.randn(S, D, dtype=x.dtype)
        chosen = torch.multinomial(self.head(noisy).softmax(-1).mean(1), 1)[:, :, None]
        noisy = noisy + 0.1 * chosen * F.alpha_dropout(noisy, 0.2, training=True)
        return (self.head(noisy + self.steps(at)[:, None]) - noise).square().mean()


def everything() -> Any:
    torch.manual_seed(0)
    return _Everything(), (torch.randn(N, S, D, generator=torch.Generator().manual_seed(1)),)
