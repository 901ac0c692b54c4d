"""What of a model can be put together from parts of its batch, and where samples are coupled: held against running the parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model.batch.additive import analyze_additivity, describe_couplings, describe_microbatch_couplings
from shardwise.model.batch.summable_loss import SHARE, normalize_loss, with_counted_means
from shardwise.model.graph import Operator, Ref, Word
from shardwise.run.rank_model.model_source import ModelSource

WIDTH, SAMPLES = 6, 8


class Model(nn.Module):
    def __init__(self, loss: Callable[[Model, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.loss, self.layer, self.head = loss, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.first, self.row = nn.BatchNorm1d(WIDTH), nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(8, 1))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self, torch.tanh(self.layer(x)), y)


def root(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(h, h.roll(1, -1) * 0.5).sqrt()


def contrastive(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(h @ m.head(h).T, torch.arange(len(h)))


def normed(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.norm(h), y)


def product(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return h.mean() * h.square().mean()


def balanced(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return (h.softmax(-1).mean(0) * (h > 0).to(h.dtype).mean(0)).sum()


def dice(m: Model, h: Tensor, y: Tensor) -> Tensor:
    wanted = F.one_hot(y, WIDTH).to(h.dtype)
    return 1 - 2 * (h.sigmoid() * wanted).sum() / (h.sigmoid().sum() + wanted.sum())


def by_number(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return (h.sum(-1, keepdim=True) * m.row[: len(h)]).mean()


def whole_deviation(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return h.std()


def counts_calls(m: Model, h: Tensor, y: Tensor) -> Tensor:
    m.calls.add_(1)
    return h.square().mean()


COUPLED = [root, contrastive, normed, product, balanced, dice, by_number, whole_deviation, counts_calls]


def with_a_first_token(m: Model, h: Tensor, y: Tensor) -> Tensor:
    tokens = torch.cat((m.first.expand(len(h), -1, -1), h[:, None]), 1) + torch.arange(2.0)[None, :, None].repeat(len(h), 1, 1)
    return F.cross_entropy(m.head(tokens[:, 0] * tokens[:, 1]), y)


def divided_by_length(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(h, y, reduction="sum") / len(h) + h.square().sum() / h.numel()


def of_the_norm_of_each(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return (1 - F.cosine_similarity(h, m.head(h))).mean() - 0.5 * torch.logsumexp(h, -1).mean()


def centred_targets(m: Model, h: Tensor, y: Tensor) -> Tensor:
    wanted = y.to(h.dtype)
    return F.mse_loss(h[:, 0], wanted - wanted.mean())


def balanced_by_counts(m: Model, h: Tensor, y: Tensor) -> Tensor:
    counts = F.one_hot(y, WIDTH).sum(0)
    return F.cross_entropy(h, y, weight=1 / (counts.to(h.dtype) + 1), ignore_index=2)


def probabilities(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(h), F.one_hot(y, WIDTH).to(h.dtype) * 0.9 + 0.1 / WIDTH)


def penalty(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return 0.1 * m.head.weight.norm() + torch.where(y[:, None] > 2, h, -h).mean() + 3


def counted_otherwise(m: Model, h: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(h, y, reduction="none", ignore_index=1)
    return each.sum() / torch.count_nonzero(y != 1) + each.nansum() / max(len(y), 1)


def rows_of_ones(m: Model, h: Tensor, y: Tensor) -> Tensor:
    weights = torch.ones_like(y).to(h.dtype)
    return (weights * h.square().sum(-1)).sum() / weights.sum() + (h * torch.full((len(h), WIDTH), 0.5)).sum() / torch.ones(len(h)).sum()


def one_target_for_all(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(h), torch.zeros(len(h), dtype=torch.int64)) + m.first.expand(len(h), -1, -1).square().sum() / len(h)


def the_logit_of_each(m: Model, h: Tensor, y: Tensor) -> Tensor:
    own, of_two = h[torch.arange(len(h)), y - 1], h.view(len(h), 2, 3)[torch.arange(len(h)), y % 2, (y + 1) % 3]
    table = h.view(len(h), 3, 2)[torch.arange(len(h))[:, None], torch.arange(2)]
    return own.sum() / (y > 1).sum() + of_two.mean() + table.square().mean()


ADDITIVE = [
    with_a_first_token, divided_by_length, of_the_norm_of_each, centred_targets, balanced_by_counts, probabilities, penalty,
    counted_otherwise, rows_of_ones, one_target_for_all, the_logit_of_each,
]  # fmt: skip


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(SAMPLES, WIDTH, generator=generator), torch.randint(0, 4, (SAMPLES,), generator=generator)


@pytest.mark.parametrize("loss", COUPLED)
def test_what_couples_samples_is_named(loss: Callable[..., Tensor]) -> None:
    graph = ModelSource.from_model(lambda: Model(loss)).capture(data(), None, SAMPLES).graph
    coupled = analyze_additivity(with_counted_means(graph)).coupled
    assert coupled
    assert "microbatches change what is trained" in describe_microbatch_couplings(coupled)
    assert coupled[0].site in describe_couplings(coupled)


@pytest.mark.parametrize("loss", ADDITIVE)
@pytest.mark.parametrize("size", [1, 2])
def test_parts_add_up_to_the_whole(loss: Callable[..., Tensor], size: int) -> None:
    """The graph of a part, run by torch with totals that this test adds up, gives losses whose sum is plain PyTorch's."""
    source = ModelSource.from_model(lambda: Model(loss))
    captured = source.capture(data(), None, size)
    whole, part = (
        with_counted_means(source.capture(data(), None, SAMPLES).graph.cast("float64")),
        with_counted_means(captured.graph.cast("float64")),
    )
    known = analyze_additivity(whole, part)
    assert not known.coupled
    made = normalize_loss(part, whole, known)
    torch.manual_seed(0)
    model = Model(loss).double()
    x, y = data()
    held: dict[str, Tensor] = {SHARE: torch.tensor(size / SAMPLES, dtype=torch.float64)}
    held |= {v: t.double() if t.is_floating_point() else t for v, t in captured.constants.items()}
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    held |= {v.value: named[v.name].detach() for v in (*made.graph.parameters, *made.graph.buffers)}
    paths = [v.value for v in made.graph.inputs]
    parts = [dict(zip(paths, (x[i : i + size].double(), y[i : i + size]), strict=True)) for i in range(0, SAMPLES, size)]
    for total in made.totals:
        counts = [run(made.total_operators((total,)), held | one)[total.value] for one in parts]
        held[total.variable] = torch.stack(counts).sum(0)
    losses = [run(made.graph.operators, held | one)[made.graph.loss].item() for one in parts]
    assert sum(losses) == pytest.approx(model(x.double(), y).item(), rel=1e-12)


def run(operators: Sequence[Operator], held: dict[str, Tensor]) -> dict[str, Tensor]:
    """What these operators make, called one by one."""

    def arg(a: Any) -> Any:
        if isinstance(a, Ref):
            return held[a.value]
        if isinstance(a, Word):
            return torch.device("cpu") if a.kind == "device" else getattr(torch, a.name)
        return [arg(x) for x in a] if isinstance(a, tuple) else a

    for op in operators:
        _, name, overload = op.target.split(".")
        made = getattr(getattr(torch.ops.aten, name), overload)(*map(arg, op.args), **{k: arg(a) for k, a in op.kwargs})
        held.update(zip(op.outputs, made if op.returns_sequence else (made,), strict=True))
    return held
