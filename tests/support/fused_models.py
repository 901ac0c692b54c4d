"""Models whose weights make several things at once: queries, keys and values, a gate beside what it gates.

Each factory returns (module, batch, loss); the batch is made from a seed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, VOCABULARY, SEQUENCE = 48, 6, 40, 6
Made = tuple[nn.Module, dict[str, Tensor], Any]


def _loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["ids"].flatten())


def _made(layer: Any, layers: int = 2, batch: int = 4) -> Made:
    ids = torch.randint(VOCABULARY, (batch, SEQUENCE), generator=torch.Generator().manual_seed(0))
    return _Text([layer() for _ in range(layers)]), {"ids": ids}, _loss


class _Text(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = x + layer(x)
        logits: Tensor = self.head(x)
        return logits


class _Attention(nn.Module):
    """`how` the product is taken apart; `keys`: heads of keys and values."""

    def __init__(self, how: str, keys: int = HEADS, gated: bool = True) -> None:
        super().__init__()
        self.how, self.keys, self.gated, self.size = how, keys, gated, WIDTH // HEADS
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * keys) * self.size)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * 64, bias=False)
        self.down = nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shape, made = x.shape[:2], self.qkv(self.norm(x))
        if self.how == "viewed":
            q, k, v = made.view(*shape, 3, HEADS, self.size).permute(2, 0, 3, 1, 4)
        elif self.how == "unflattened":
            made = made.unflatten(-1, (3, HEADS, self.size))
            q, k, v = (made[:, :, i].transpose(1, 2) for i in range(3))
        elif self.how == "by heads":
            q, k, v = made.view(*shape, HEADS, 3, self.size).permute(3, 0, 2, 1, 4).unbind(0)
        else:
            sizes = [n * self.size for n in (HEADS, self.keys, self.keys)]
            if self.how == "chunked":
                parts: Any = made.chunk(3, dim=-1)
            elif self.how == "split":
                parts = made.split(sizes, dim=2)
            elif self.how == "in two":
                first, second = made.split([sizes[0], 2 * sizes[1]], dim=-1)
                parts = (first, *second.chunk(2, dim=-1))
            else:
                parts = (made[..., : sizes[0]], made[..., sizes[0] : -sizes[1]], made[..., -sizes[1] :])
            q, k, v = (part.view(*shape, -1, self.size).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.keys < HEADS)
        x = self.out(y.transpose(1, 2).reshape(*shape, WIDTH))
        if not self.gated:
            return x
        gate, up = self.up(x).chunk(2, dim=-1)
        made = self.down(F.silu(gate) * up)
        return made


def chunked() -> Made:
    """GPT-2: queries, keys and values behind one another; a gate and what it gates in one product."""
    return _made(lambda: _Attention("chunked"))


def split() -> Made:
    """Phi-3: fewer heads of keys and values than of queries."""
    return _made(lambda: _Attention("split", 2))


def in_two() -> Made:
    """Parts of parts."""
    return _made(lambda: _Attention("in two", 3))


def sliced() -> Made:
    """Parts by where they begin and end; one head of keys and values for all queries, as Falcon has it."""
    return _made(lambda: _Attention("sliced", 1))


def viewed() -> Made:
    """nanoGPT and vision transformers: seen as three of so many heads, and turned round."""
    return _made(lambda: _Attention("viewed"))


def unflattened() -> Made:
    """The same, each picked by its number."""
    return _made(lambda: _Attention("unflattened"))


def by_heads() -> Made:
    """BLOOM and GPT-NeoX: three of each head, which are no runs."""
    return _made(lambda: _Attention("by heads"))


class _Apart(_Attention):
    """The same with a weight for each."""

    def __init__(self) -> None:
        super().__init__("split")
        del self.qkv, self.up
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gate, self.up = (nn.Linear(WIDTH, 64, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape[:2], self.norm(x)
        q, k, v = (made(x).view(*shape, HEADS, self.size).transpose(1, 2) for made in (self.q, self.k, self.v))
        x = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(*shape, WIDTH))
        made: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return made


def apart() -> Made:
    """What `chunked` computes, with weights that each make one thing."""
    return _made(_Apart)


class _ByInputs(nn.Module):
    """A weight whose rows are its inputs, as GPT-2 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 2 * 60) * 0.2)
        self.bias = nn.Parameter(torch.zeros(2 * 60))
        self.down = nn.Linear(60, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.addmm(self.bias, x.view(-1, WIDTH), self.weight).view(*x.shape[:2], -1).split(60, dim=2)
        made: Tensor = self.down(F.gelu(gate) * up)
        return made


def by_inputs() -> Made:
    """Pieces of columns, which do not lie together."""
    return _made(_ByInputs)
