"""Models with recurrent layers and cells: module, batch and loss of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, LENGTH = 40, 5
Made = tuple[nn.Module, dict[str, Tensor], Any]


def _loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), batch["ids"].flatten()[: output.flatten(0, -2).shape[0]])


class _Text(nn.Module):
    """`ends`: the states at the end are read as well."""

    def __init__(self, layers: nn.Module, width: int, made: int, ends: bool = False, first: bool = True) -> None:
        super().__init__()
        self.tokens, self.layers, self.head = nn.Embedding(VOCABULARY, width), layers, nn.Linear(made, VOCABULARY)
        self.ends, self.first = ends, first

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        out, states = self.layers(x if self.first else x.transpose(0, 1))
        states = states if isinstance(states, tuple) else (states,)
        out = out if self.first else out.transpose(0, 1)
        out = out * (1 + sum(s.square().mean() for s in states)) if self.ends else out
        logits: Tensor = self.head(out)
        return logits


def _batch() -> dict[str, Tensor]:
    return {"ids": torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(3))}


def lstm() -> Made:
    """Two layers, a width that two and three ranks divide unequally or not."""
    return _Text(nn.LSTM(16, 21, 2, batch_first=True), 16, 21), _batch(), _loss


def lstm_both() -> Made:
    """Both directions, steps in front, states at the end read too."""
    return _Text(nn.LSTM(16, 12, 2, bidirectional=True), 16, 24, ends=True, first=False), _batch(), _loss


def gru() -> Made:
    return _Text(nn.GRU(16, 20, 2, batch_first=True, bidirectional=True), 16, 40, ends=True), _batch(), _loss


def rnn() -> Made:
    return _Text(nn.RNN(16, 20, 2, batch_first=True, bias=False), 16, 20), _batch(), _loss


def projected() -> Made:
    """Its hidden states are narrower than its cells: whole on every rank."""
    return _Text(nn.LSTM(16, 20, 1, batch_first=True, proj_size=8), 16, 8), _batch(), _loss


class _Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.first, self.second = nn.Embedding(VOCABULARY, 16), nn.LSTMCell(16, 21), nn.GRUCell(21, 18)
        self.third, self.head = nn.RNNCell(18, 14), nn.Linear(14, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x, out = self.tokens(ids), []
        h, c = (x.new_zeros(len(ids), 21) for _ in range(2))
        g, r = x.new_zeros(len(ids), 18), x.new_zeros(len(ids), 14)
        for t in range(3):
            h, c = self.first(x[:, t], (h, c))
            g = self.second(h, g)
            r = self.third(g, r)
            out.append(self.head(r))
        return torch.stack(out, 1)


def cells() -> Made:
    """One step at a time, by the model's own loop."""
    return _Cells(), _batch(), lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch["ids"][:, :3].flatten())


def dropping() -> Made:
    """Dropout between layers, which one process draws inside of the operator: whole on every rank."""
    return _Text(nn.LSTM(16, 20, 2, batch_first=True, dropout=0.5), 16, 20), _batch(), _loss
