"""Models that torch.export cannot follow, as people write them, and what of them cannot be divided; of `test_undivided`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

BATCH, STEPS = 8, 3


class Experts(nn.Module):
    """A loop over the experts that get tokens; the last may get none on a rank. Frozen, unused and tied weights are there too."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 8)
        self.gate = nn.Linear(8, 2, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(3))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.never = nn.Linear(4, 4)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.emb.weight

    def logits(self, ids: Tensor) -> Tensor:
        h = self.frozen(self.emb(ids))
        flat = h.reshape(-1, 8)
        weight, chosen = self.gate(flat).softmax(-1).max(-1)
        chosen = torch.where((ids.reshape(-1) < 2), 2, chosen)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero(as_tuple=True)[0]
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, None])
        logits: Tensor = self.head(h + out.reshape(h.shape))
        return logits

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits(ids)


class Scored(Experts):
    """Returns its loss, a mean over samples, in a dict with other things."""

    def forward(self, ids: Tensor, y: Tensor) -> dict[str, Any]:  # type: ignore[override]
        logits = self.logits(ids)
        return {"scores": {"logits": logits}, "words": "none", "nothing": None, "loss": F.cross_entropy(logits.flatten(0, 1), y.flatten())}


class Reentrant(Experts):
    """Its head runs twice in reentrant checkpoints, whose backward is a backward of its own."""

    def forward(self, ids: Tensor) -> Tensor:
        h = self.logits(ids)
        run: Any = checkpoint(lambda x: self.head(x[..., :8]) + h.detach().sum() * 0, h, use_reentrant=True)
        again: Tensor = checkpoint(lambda x: self.head(x[..., 8:]), h + run, use_reentrant=True)
        return h + again


def tokens() -> list[tuple[Tensor, Tensor]]:
    """Batches of which the first half alone has tokens of the last expert."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for _ in range(STEPS):
        x, y = (torch.randint(16, (BATCH, 6), generator=generator) for _ in range(2))
        x[BATCH // 2 :] = x[BATCH // 2 :].clamp(min=2)
        x[0, 0] = 0
        made.append((x, y))
    return made


class Branching(nn.Module):
    """A layer, and a branch on its values that keeps it from being captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def more(self, x: Tensor, h: Tensor) -> Any:
        return h

    def forward(self, x: Tensor) -> Any:
        h = self.layer(x)
        return self.more(x, h) if x.sum() > -1e9 else 2 * h


class Normed(Branching):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def more(self, x: Tensor, h: Tensor) -> Tensor:
        normed: Tensor = self.norm(h)
        return normed


class Remembering(Branching):
    """Centres by what it saw in the call before, which it keeps in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def more(self, x: Tensor, h: Tensor) -> Tensor:
        self.seen.append(float(x.mean()))
        return h - self.seen[-2] if len(self.seen) > 1 else h


class Logging(Branching):
    """Keeps what it saw, and does nothing with it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def more(self, x: Tensor, h: Tensor) -> Tensor:
        self.seen.append(float(x.mean()))
        return h


class Contrasting(Branching):
    def more(self, x: Tensor, h: Tensor) -> Tensor:
        return h @ h.T


class Summed(Branching):
    def more(self, x: Tensor, h: Tensor) -> Tensor:
        return h.square().sum()


class Selecting(Branching):
    """Rows of a number of their own."""

    def more(self, x: Tensor, h: Tensor) -> Tensor:
        return h[x[:, 0] > 0]


class Clipping(Branching):
    """Cuts off gradients in backward."""

    def more(self, x: Tensor, h: Tensor) -> Tensor:
        h.register_hook(lambda grad: grad.clamp(-0.01, 0.01))  # type: ignore[no-untyped-call]
        return h * 2


class Noisy(Branching):
    def more(self, x: Tensor, h: Tensor) -> Tensor:
        return F.dropout(h, 0.5, self.training)


class Sometimes(Branching):
    """Uses a layer for some samples only, and then to no effect: its gradient is zero, and not none."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(4, 4)

    def more(self, x: Tensor, h: Tensor) -> Tensor:
        return h + 0.0 * self.extra(x) if (x > 50.0).any() else h


STRANGER = nn.Parameter(torch.ones(4))


class Borrowing(Branching):
    """Reads a parameter that is none of its own."""

    def more(self, x: Tensor, h: Tensor) -> Tensor:
        return h * STRANGER.to(h.dtype)
