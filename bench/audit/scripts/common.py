"""The model and the samples of the audited scripts."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, SEQ, DIM, HEADS = 64, 16, int(os.environ.get("AUDIT_DIM", "32")), 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, -1, DIM // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(DIM), Attention(), nn.LayerNorm(DIM)
        self.up, self.down, self.drop = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.drop(self.down(F.gelu(self.up(self.ln2(x)))))


class GPT(nn.Module):
    def __init__(self, layers: int = 2, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB, DIM), nn.Parameter(torch.randn(SEQ, DIM) * 0.1)
        self.layers = nn.ModuleDict({str(i): Block(dropout) for i in range(layers)})
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x) + self.pos
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x))


def loss_fn(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100)


def samples(a: argparse.Namespace, n: int = 64, uneven: bool = False) -> tuple[Tensor, Tensor]:
    """Tokens and targets; `uneven`: answers of different lengths."""
    g = torch.Generator().manual_seed(a.seed + 1)
    x = torch.randint(0, VOCAB, (n, SEQ + 1), generator=g)
    y = x[:, 1:].clone()
    if uneven:
        for i, m in enumerate(torch.randint(1, SEQ, (n,), generator=g).tolist()):
            y[i, m:] = -100
    return x[:, :-1].contiguous(), y


def arguments(**more: Any) -> argparse.Namespace:
    p = argparse.ArgumentParser()
    for k, v in {"batch": 8, "steps": 4, "seed": 0, "bug": "", **more}.items():
        p.add_argument(f"--{k}", type=type(v), default=v)
    return p.parse_args()


def world(connect: bool = True) -> tuple[int, int]:
    """(rank, size); a process group under torchrun."""
    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        return 0, 1
    if connect:
        torch.distributed.init_process_group("gloo")
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
