"""A GPT of 10 M parameters as a user would write it, and one batch of text made of numbers. For `scripts/bench start`."""

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, HIDDEN, LAYERS, HEADS, SEQUENCE, SAMPLES = 256, 384, 6, 6, 128, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        heads = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.first(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch() -> tuple[Tensor, Tensor]:
    """(inputs, targets) of SAMPLES samples, the same everywhere."""
    numbers = torch.randint(0, VOCABULARY, (SAMPLES, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    return numbers[:, :-1], numbers[:, 1:]
