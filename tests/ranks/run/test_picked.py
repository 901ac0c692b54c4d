"""Losses over rows that a mask picks, of which ranks have different numbers: equal to plain PyTorch in float64, in one launch of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.errors import ModelError
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run.rank_model.model_source import ModelSource
from shardwise.run.verify.verify import verify_on_rank
from shardwise.world.world import World

WORDS = 16


def batch() -> tuple[Tensor, Tensor]:
    """Words, and those to be told: most of the first half's, few of the second's."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(WORDS, (8, 6), generator=generator)
    asked = torch.rand(8, 6, generator=generator) < torch.tensor([0.8] * 4 + [0.1] * 4)[:, None]
    asked[:, 0] = True
    return ids, torch.where(asked, ids, -100)


def classes(h: Tensor, labels: Tensor, head: nn.Linear) -> Tensor:
    logits, mask = head(h), labels != -100
    with torch.no_grad():
        right = (logits[mask].argmax(-1) == labels[mask]).float().mean()
    return F.cross_entropy(logits[mask], labels[mask], label_smoothing=0.1) * (1 + right)


def before_the_head(h: Tensor, labels: Tensor, head: nn.Linear) -> Tensor:
    picked = F.gelu(F.layer_norm(h[labels != -100], (8,)))
    return F.cross_entropy(head(picked).float(), labels[labels != -100], weight=torch.arange(WORDS) + 1.0, reduction="sum") / 100


def flat(h: Tensor, labels: Tensor, head: nn.Linear) -> Tensor:
    logits, targets = head(h).view(-1, WORDS), labels.view(-1)
    kept = targets.ne(-100).nonzero().squeeze(-1)
    return F.nll_loss(F.log_softmax(logits.index_select(0, kept), -1), targets[kept])


def by_hand(h: Tensor, labels: Tensor, head: nn.Linear) -> Tensor:
    rows = F.log_softmax(head(h)[labels >= 0], dim=-1)
    losses = -rows.gather(1, labels[labels >= 0].unsqueeze(-1)).squeeze(-1)
    return losses.sum() / losses.shape[0]


def selected(h: Tensor, labels: Tensor, head: nn.Linear) -> Tensor:
    losses = F.cross_entropy(head(h).flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    return torch.masked_select(losses, labels != -100).mean() + losses[labels != -100].sum() / (labels != -100).sum()


def errors(h: Tensor, labels: Tensor, head: nn.Linear) -> Tensor:
    mask = labels != -100
    rows, wanted = h[mask], torch.zeros_like(h)[mask]
    mean = rows.mean(0).square().sum() + 0.5 * rows.view(-1, 2, 4)[:, 1].pow(2).sum(-1).clamp(min=0.1).mean()
    return F.mse_loss(rows, wanted + 1) + F.smooth_l1_loss(rows, wanted) + F.binary_cross_entropy_with_logits(rows, wanted) + mean


CAPTURED: dict[str, Callable[[Tensor, Tensor, nn.Linear], Tensor]] = {
    f.__name__: f for f in (classes, before_the_head, flat, by_hand, selected, errors)
}


def logarithm(h: Tensor, labels: Tensor, head: nn.Linear) -> Tensor:
    """Zero where nothing is picked, so that its slope there is none to be counted with 0."""
    return (h.square() * (labels != -100)[..., None])[labels != -100].log().mean()


def infinite(h: Tensor, labels: Tensor, head: nn.Linear) -> Tensor:
    mask = labels != -100
    return head(h)[mask].masked_fill((labels == -100)[mask][:, None], float("-inf")).softmax(-1).max(-1).values.mean()


def written_later(h: Tensor, labels: Tensor, head: nn.Linear) -> Tensor:
    logits = head(h) * 1.0
    rows = logits[labels != -100]
    logits.zero_()
    return rows.square().mean() + logits.mean()


def written(h: Tensor, labels: Tensor, head: nn.Linear) -> Tensor:
    rows = head(h)[labels != -100]
    rows.mul_(3.0)
    return rows.square().mean()


def other_rows(h: Tensor, labels: Tensor, head: nn.Linear) -> Tensor:
    first, last = head(h)[labels != -100], head(h)[labels.flip(0) != -100]
    return (first.mean(0) * last.mean(0)).sum() + (first * last[: len(first)]).mean() * 0.0


def put_back(h: Tensor, labels: Tensor, head: nn.Linear) -> Tensor:
    out = torch.zeros(8, 6, WORDS)
    out[labels != -100] = head(h[labels != -100])
    return out.square().mean()


REFUSED = [logarithm, infinite, written_later, written, other_rows, put_back]


class Telling(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.loss = CAPTURED.get(name) or globals()[name]
        self.emb, self.up, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Linear(8, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.emb(ids)
        found: Tensor = self.loss(h + torch.tanh(self.up(h)), labels, self.head)
        return found


def differing(world: World) -> dict[str, str]:
    """By model and layout, what differs from plain PyTorch."""
    found = {}
    for name in CAPTURED:
        for text in ("data=2", "tensor=2", "data=2 microbatches=2 zero=3") if name in ("classes", "by_hand") else ("data=2",):
            source = ModelSource.from_model(lambda name=name: Telling(name))
            graph = source.capture(batch(), None, 8).graph
            plan = Plan(Layout.parse(f"{text} precision=float64"), name, "1xcpu-2", 8, shards=shards(text))
            assert graph.operators
            result = verify_on_rank(world, plan, lambda name=name: Telling(name), batch(), None)
            if result is not None and not result.ok:
                found[f"{name} {text}"] = str(result)
    return found


def shards(layout: str) -> Any:
    return (("tensor", (("head.weight", 0), ("head.bias", 0), ("emb.weight", 0))),) if "tensor" in layout else ()


def test_losses_over_picked_rows_are_those_of_one_process(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(differing, 2) == [{}, {}]


@pytest.mark.parametrize("loss", REFUSED)
def test_rows_whose_computation_for_all_is_something_else_stay_data_dependent(loss: Callable[..., Tensor]) -> None:
    assert torch.isfinite(Telling(loss.__name__)(*batch()))
    with pytest.raises(ModelError, match="data-dependent"):
        ModelSource.from_model(lambda: Telling(loss.__name__)).capture(batch(), None, 8)
