"""More models that nobody wrote for shardwise, small and awkward: each holds many ways of computing of one kind.

Every factory returns (module, batch) or (module, batch, loss), 8 samples in dimension 0 (4 where all sizes are alike), and draws from its
own generator only. `shardwise verify tests/support/awkward_models.py:NAME`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

N = 8  # samples


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _ids(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


class _Alike(nn.Module):
    """Samples, positions, heads, width, classes: all 4, so that no size tells what a dimension is."""

    classes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(4, 4), nn.Embedding(4, 4)
        self.by_sample = nn.Parameter(_normal(4, 4, seed=1))
        self.by_place = nn.Parameter(_normal(4, 4, seed=2))
        self.square = nn.Parameter(_normal(4, 4, 4, seed=3))
        self.qkv, self.out, self.head = nn.Linear(4, 12), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("classes", torch.tensor([1.0, 2.0, 0.5, 1.5]))

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(4)) + self.by_place
        x = x + self.by_sample[:, None] + self.by_sample + self.by_sample.t()[:, :, None] * 0.1
        q, k, v = (t.view(4, 4, 4, 1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(4, 4, 4))
        x = x @ self.square + x.transpose(0, 1) @ self.square.transpose(0, 2) * 0.1 + x.permute(2, 1, 0).softmax(1)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), y.flatten(), weight=self.classes)
        return loss + F.cross_entropy(self.head(x[:, 0]), y[:, 1]) + (x.sum((0, 2)) * self.classes).mean()


def alike() -> Any:
    return _Alike(), {"ids": _ids(4, 4, 4), "y": _ids(4, 4, 4, seed=1)}


class _Guests(nn.Module):
    """Inputs that are no samples but as long as there are samples: class weights, a graph, a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, N), nn.Linear(N, N)

    def forward(self, x: Tensor, weights: Tensor, graph: Tensor, places: Tensor, y: Tensor) -> Tensor:
        hidden = self.second(torch.tanh(self.first(x)) * weights + places)
        mixed = graph @ hidden + hidden @ graph
        return F.cross_entropy(mixed, y, weight=weights.abs()) + (mixed * weights[:, None]).sum() * 0.01


def guests() -> Any:
    batch = {"x": _normal(N, 6), "weights": _normal(N, seed=1), "graph": _normal(N, N, seed=2), "places": _normal(N, N, seed=3)}
    return _Guests(), {**batch, "y": _ids(N, N)}


class _Together(nn.Module):
    """Samples shifted, turned round, paired, stacked, sliced, summed up one after the other, picked by index and one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        parts = [h.flip(0), h.roll(3, 0), h[order], h.index_select(0, order), torch.cat((h[4:], h[:4])), h.cumsum(0) * 0.1]
        h = h + torch.stack(parts).mean(0)
        a, b = h.chunk(2)
        pairs = h.view(4, 2, 8)
        h = h + torch.cat((a - b, a * b)) + torch.stack((pairs[:, 1], pairs[:, 0]), 1).reshape(8, 8)
        h = h + F.pad(h[1:] - h[:-1], (0, 0, 0, 1)) + h[::2].repeat_interleave(2, 0) + h.sort(0).values + h.unbind(0)[3]
        h = h + torch.cat([self.cell(h[i : i + 1], h[i - 1 : i] if i else h[:1] * 0) for i in range(8)])
        far = torch.cdist(h, h) + torch.eye(8)
        return (
            self.head(h).square().mean()
            + far.log().mean()
            + self.head(h[torch.arange(8), order][:, None] * h).mean()
            + h.median(0)[0].sum()
        )


def together() -> Any:
    return _Together(), {"x": _normal(N, 6), "order": torch.tensor([3, 1, 0, 2, 7, 5, 6, 4])}


class _Tied(nn.Module):
    """Weights that are used twice, transposed, across stages, not at all, frozen, in two modules, in the loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.encode = nn.Linear(8, 16)
        self.middle = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.middle[2].weight, self.middle[1].bias = self.middle[0].weight, self.middle[0].bias
        self.again = self.middle[1]
        self.never, self.frozen = nn.Linear(3, 3), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8)), nn.Parameter(torch.tensor(0.5))])
        self.only_loss = nn.Parameter(torch.ones(4))
        self.bare = nn.Linear(8, 8)
        self.bare.bias.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = F.linear(F.gelu(self.encode(x)), self.encode.weight.t())
        for layer in self.middle:
            x = x + torch.tanh(layer(x)) * self.scales[0]
        x = self.frozen(x) + self.again(x[:, ::2].repeat_interleave(2, 1)) * self.scales[1] + self.bare(x)
        logits = x @ self.table.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten()) + self.only_loss.square().sum()


def tied() -> Any:
    return _Tied(), (_ids(12, N, 4),)


class _Norms(nn.Module):
    """Norms over samples, over several dimensions, with and without weights, over volumes."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.BatchNorm1d(4, momentum=0.3)
        self.bare = nn.BatchNorm1d(6, affine=False, track_running_stats=False)
        self.three, self.instance3 = nn.BatchNorm3d(4), nn.InstanceNorm3d(4, affine=True)
        self.instance1 = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        self.group, self.layer2 = nn.GroupNorm(2, 4), nn.LayerNorm((4, 6))
        self.layer3, self.plain = nn.LayerNorm((4, 2, 3), bias=False), nn.LayerNorm(6, elementwise_affine=False)
        self.rms, self.local = nn.RMSNorm(6), nn.LocalResponseNorm(2)
        self.inside, self.head = nn.Linear(6, 6), nn.Linear(24, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.inside(x)
        x = self.one(x) + self.bare(x.mT.reshape(-1, 6, 4)).mT + self.instance1(x) + self.layer2(x) + self.plain(x) + self.rms(x)
        cube = x.view(-1, 4, 1, 2, 3)
        cube = self.three(cube) + self.instance3(cube) + self.group(cube) + self.layer3(cube.squeeze(2)).unsqueeze(2)
        cube = self.local(cube.squeeze(2)) + F.normalize(cube.squeeze(2), dim=1) + F.normalize(cube.squeeze(2), p=1.0, dim=0)
        return F.cross_entropy(self.head(cube.flatten(1)), y)


def norms() -> Any:
    return _Norms(), {"x": _normal(N, 4, 6), "y": _ids(5, N)}


class _Images(nn.Module):
    """Convolutions of every kind, paddings, folds, shuffles, pools with indices, samplings."""

    def __init__(self) -> None:
        super().__init__()
        self.dilated = nn.Conv2d(4, 8, 3, padding=2, dilation=2, padding_mode="circular")
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=4, padding_mode="reflect")
        self.depth = nn.Conv2d(8, 16, 3, padding="same", groups=8)
        self.up = nn.ConvTranspose2d(16, 4, 3, stride=2, padding=1, output_padding=1)
        self.up_grouped = nn.ConvTranspose2d(4, 4, 2, stride=2, groups=2)
        self.flat, self.volume = nn.Conv1d(4, 6, 5, stride=3), nn.Conv3d(1, 2, (2, 3, 3))
        self.theta, self.head = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.hardswish(self.depth(F.elu(self.grouped(F.pixel_unshuffle(F.relu6(self.dilated(x)), 2).view(-1, 4, 8, 4, 4).mean(1)))))
        x = self.up_grouped(F.leaky_relu(self.up(x)))
        pooled, where = F.max_pool2d(x, 2, return_indices=True)
        x = x + F.max_unpool2d(pooled, where, 2) + F.interpolate(F.avg_pool2d(x, 2), scale_factor=2, mode="bilinear", align_corners=True)
        x = x + F.fold(F.unfold(x, 2, stride=2), (16, 16), 2, stride=2) + F.interpolate(x[..., ::2, ::2], size=(16, 16), mode="bicubic")
        grid = F.affine_grid(self.theta(x.mean((2, 3))).view(-1, 2, 3) * 0.1, [x.shape[0], 4, 8, 8], align_corners=False)
        x = (
            F.grid_sample(x, grid, padding_mode="border", align_corners=False)
            + F.adaptive_max_pool2d(x, 8)
            + F.lp_pool2d(x.abs() + 1, 2, 2)
        )
        x = F.pixel_shuffle(F.pixel_unshuffle(x, 2), 2) + F.channel_shuffle(x, 2) + torch.rot90(x, 1, (2, 3)) * 0.1
        z = self.volume(F.pad(x, (1, 1, 1, 1), mode="replicate").unsqueeze(1)).amax(1).mean((1, 2)) / 10
        line = self.flat(F.pad(x.flatten(2), (2, -3)))
        return F.cross_entropy(self.head(F.glu(line.repeat(1, 2, 1), 1).mean(-1) + z[:, :6]), y)


def images() -> Any:
    return _Images(), {"x": _normal(N, 4, 8, 8), "y": _ids(4, N)}


class _Attentions(nn.Module):
    """Grouped queries, rotary angles as complex numbers, ALiBi, sinks, windows, padding: by einsum, matmul and the fused operator."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 16, padding_idx=0)
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 16, bias=False), nn.Linear(16, 16)
        self.sink = nn.Parameter(torch.zeros(4))
        self.head = nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        n, s = ids.shape
        x = self.words(ids) * 16**0.5
        place = (ids != 0).cumsum(1) - 1
        angles = place[..., None] * torch.pow(100.0, -torch.arange(2) / 2)
        turn = torch.polar(torch.ones_like(angles), angles)[:, :, None]
        q = self.q(x).view(n, s, 4, 4)
        k, v = self.kv(x).view(n, s, 2, 2, 4).unbind(2)
        q, k = (torch.view_as_real(torch.view_as_complex(t.reshape(n, s, -1, 2, 2)) * turn).flatten(3) for t in (q, k))
        far = torch.arange(s)[:, None] - torch.arange(s)
        bias = -(2.0 ** -torch.arange(1, 5))[:, None, None] * far.abs()
        mask = (far >= 0) & (far < 3) & ((ids != 0)[:, None, None] | (far == 0))
        k4, v4 = k.repeat_interleave(2, 2), v[:, :, :, None].expand(-1, -1, -1, 2, -1).reshape(n, s, 4, 4)
        scores = torch.einsum("nqhd,nkhd->nhqk", q, k4) / 2 + bias
        scores = torch.cat((scores.masked_fill(~mask, -torch.inf), self.sink.view(1, 4, 1, 1).expand(n, -1, s, 1)), -1)
        x = x + self.out(torch.einsum("nhqk,nkhd->nqhd", scores.softmax(-1)[..., :-1], v4).reshape(n, s, 16))
        fused = F.scaled_dot_product_attention(q.mT.mT.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, enable_gqa=True)
        x = x + self.out(fused.transpose(1, 2).flatten(2))
        weights = torch.where(mask[:, 0], q[:, :, 0] @ k[:, :, 0].mT, torch.finfo(q.dtype).min).softmax(-1)
        return self.head(x + torch.bmm(weights, x))


def attentions() -> Any:
    ids = _ids(16, N, 6)
    return _Attentions(), (ids,), lambda out, batch: F.cross_entropy(out[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten(), ignore_index=0)


class _Indices(nn.Module):
    """Sorting, picking, scattering, buckets, runs and joins, inside of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head, self.table = nn.Linear(6, 12), nn.Linear(12, 4), nn.Parameter(_normal(5, 12, seed=4))

    def forward(self, x: Tensor, pick: Tensor, y: Tensor) -> Tensor:
        h = self.inside(x)
        values, order = h.sort(dim=1, descending=True)
        h = h + values.cumsum(1) * 0.1 + values.cumprod(1) * 0.01 + h.gather(1, order.flip(1)) + torch.take_along_dim(h, order, 1)
        top, at = h.topk(3, dim=1)
        h = (
            h
            + torch.zeros_like(h).scatter(1, at, top)
            + torch.scatter_add(h, 1, order, h)
            + h.index_select(1, torch.tensor([11, *range(11)]))
        )
        rows = torch.arange(x.shape[0])
        h = h.index_put((rows, pick), torch.full((x.shape[0],), 0.5, dtype=h.dtype)) + h[rows, pick][:, None]
        h = h.index_add(1, torch.tensor([0, 3]), h[:, 1:3]) + h.index_fill(1, torch.tensor([2]), 1.0) + h[:, [0, 2, 1, *range(3, 12)]]
        h = h + self.table[torch.bucketize(h.detach()[:, 0], torch.tensor([-1.0, 0.0, 0.5, 1.0]))] + torch.logcumsumexp(h, 1) * 0.1
        h = (
            torch.where(h > 0, h, h * 0.1).clamp(max=2.0)
            + h.masked_fill(h.abs() < 0.1, 0.0)
            + h.kthvalue(3, 1, True)[0]
            + h.diff(dim=1, prepend=h[:, :1])
        )
        parts = [*h.split([5, 4, 3], 1), *h.tensor_split(5, 1), *h.unflatten(1, (3, 4)).unbind(1)]
        h = (
            torch.cat(parts, 1)[:, ::3]
            + torch.hstack(parts[:3]).roll((1, 2), (0, 1))
            + torch.triu(h[:, :, None] * h[:, None]).sum(1) * 0.01
        )
        return F.cross_entropy(self.head(h + h.swapaxes(0, 1).movedim(0, 1) + torch.tile(h[:, :4], (1, 3))), y)


def indices() -> Any:
    return _Indices(), {"x": _normal(N, 6), "pick": _ids(12, N), "y": _ids(4, N)}


class _Quantile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        return F.cross_entropy(self.head(h + h.quantile(0.3, 1, True)), y)


def quantile() -> Any:
    return _Quantile(), {"x": _normal(N, 6), "y": _ids(4, N)}


class _Losses(nn.Module):
    """Losses with every reduction, with weights, ignored rows, soft and smoothed labels, pairs and triplets."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 12))

    def forward(self, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
        out = self.body(x)
        logits, weight, z = out[:, :5], torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0], dtype=out.dtype), out[:, :4].sigmoid()
        some = y.masked_fill(torch.arange(len(y)) > 4, -100)
        sign = (y % 2) * 2 - 1
        parts = (
            F.cross_entropy(logits, y, reduction="sum") / len(y),
            F.cross_entropy(logits, some, weight, ignore_index=-100, label_smoothing=0.2),
            F.cross_entropy(logits, some, reduction="none").sum() / (some >= 0).sum(),
            F.cross_entropy(out.view(-1, 4, 3), y[:, None].expand(-1, 3) % 4, ignore_index=2),
            F.cross_entropy(logits, t[:, :5].softmax(-1), weight, label_smoothing=0.1),
            F.nll_loss(logits.log_softmax(-1), some, weight, reduction="sum"),
            F.binary_cross_entropy(z, t[:, :4].sigmoid(), weight=torch.full_like(z, 0.5)),
            F.binary_cross_entropy_with_logits(logits, t[:, :5].sigmoid(), pos_weight=weight, reduction="sum"),
            F.kl_div(logits.log_softmax(-1), t[:, :5].log_softmax(-1), reduction="batchmean", log_target=True),
            F.kl_div(logits.log_softmax(-1), t[:, :5].softmax(-1), reduction="sum"),
            F.smooth_l1_loss(out, t, beta=0.3), F.huber_loss(out, t, reduction="sum", delta=0.3),
            F.mse_loss(out, t, reduction="none").mean(0).sum(),
            F.cosine_embedding_loss(out, t, sign, margin=0.1), F.margin_ranking_loss(out[:, 0], out[:, 1], sign, margin=0.2),
            F.triplet_margin_loss(out, t, out.roll(1, 0)), F.multi_margin_loss(logits, y), F.hinge_embedding_loss(out[:, 0], sign),
            F.poisson_nll_loss(out, t.abs()), F.soft_margin_loss(out[:, 0], sign),
            F.multilabel_soft_margin_loss(logits, (t[:, :5] > 0).to(out.dtype)),
            1 - (2 * (z * t[:, :4].sigmoid()).sum() + 1) / (z.sum() + t[:, :4].sigmoid().sum() + 1),
        )  # fmt: skip
        return torch.stack(parts).sum()


def losses() -> Any:
    return _Losses(), {"x": _normal(N, 6), "y": _ids(5, N), "t": _normal(N, 12, seed=4)}


class _Coupled(nn.Module):
    """Losses over pairs of samples: contrast of two views, the hardest negative, covariance, centres, capacity, no diagonal."""

    centres: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
        self.gate, self.experts = nn.Linear(8, 4), nn.Parameter(_normal(4, 8, 8, seed=5) * 0.3)
        self.register_buffer("centres", _normal(4, 8, seed=6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        n = len(x)
        both = self.body(torch.cat((x, x + 0.1 * x.flip(1))))
        z = F.normalize(both, dim=1)
        near = (z @ z.t() / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
        contrast = F.cross_entropy(near, torch.arange(2 * n).roll(n))
        a, b = both[:n], both[n:]
        far = (a[:, None] - a[None]).square().sum(-1) + 1e-6
        same = y[:, None] == y
        hardest = (far.masked_fill(~same, 0.0).amax(1) - far.masked_fill(same, 1e9).amin(1) + 0.3).relu().mean()
        centred = a - a.mean(0)
        covariance = centred.t() @ centred / (n - 1)
        spread = (1 - (a.var(0) + 1e-4).sqrt()).relu().mean() + covariance.fill_diagonal_(0).square().sum() / 8
        choice = self.gate(a).softmax(-1)
        best = choice.argmax(-1)
        place = (F.one_hot(best, 4).cumsum(0) * F.one_hot(best, 4)).sum(-1)
        kept = (place <= 2).to(a.dtype) * choice.amax(-1)
        mixed = torch.einsum("nd,nde->ne", a * kept[:, None], self.experts[best])
        balance = (F.one_hot(best, 4).to(a.dtype).mean(0) * choice.mean(0)).sum() * 4
        pull = (b - self.centres[y]).square().sum(1).mean()
        return contrast + hardest + spread + mixed.square().mean() + balance + pull + a.logsumexp(0).mean() + (a.T @ b).trace() / n


def coupled() -> Any:
    return _Coupled(), {"x": _normal(N, 6), "y": _ids(4, N)}


class _Tables(nn.Module):
    """Embeddings: padding, bags by offset and weight, gradients by frequency, tables read by other tables."""

    def __init__(self) -> None:
        super().__init__()
        self.padded, self.often = nn.Embedding(8, 8, padding_idx=3), nn.Embedding(8, 8, scale_grad_by_freq=True)
        self.summed, self.most = nn.EmbeddingBag(8, 8, mode="sum"), nn.EmbeddingBag(8, 8, mode="max", padding_idx=0)
        self.bilinear, self.bias = nn.Bilinear(8, 8, 4), nn.Parameter(torch.zeros(8, 1))

    def forward(self, ids: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        bags = self.summed(ids.flatten(), torch.arange(0, ids.numel(), 4), per_sample_weights=weight.flatten()) + self.most(ids)
        words = self.padded(ids) + self.often(ids) + self.bias[ids] + F.embedding(ids, self.padded.weight.roll(1, 0))
        onehot = F.one_hot(ids, 8).to(weight.dtype) @ self.often.weight
        return F.cross_entropy(self.bilinear(bags, (words + onehot).mean(1)) + words[:, 0, :4], y)


def tables() -> Any:
    return _Tables(), {"ids": _ids(8, N, 4), "weight": _normal(N, 4, seed=1), "y": _ids(4, N)}


class _Recurrent(nn.Module):
    """Both directions, projections, batch second, cells, a plain recurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 8, bidirectional=True, batch_first=True)
        self.lstm = nn.LSTM(16, 8, 2, proj_size=4)
        self.plain, self.cell = nn.RNN(4, 6, nonlinearity="relu", bias=False), nn.LSTMCell(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out, last = self.gru(x)
        out, (h, c) = self.lstm(out.transpose(0, 1))
        out, _ = self.plain(out)
        state = (out[0], out[1])
        for step in out:
            state = self.cell(step, state)
        return state[0].square().mean() + last.mean() + (h.mean() * c.sum()) + out.transpose(0, 1)[:, -1].sum() * 0.1


def recurrent() -> Any:
    return _Recurrent(), (_normal(N, 4, 6),)


class _Torch(nn.Module):
    """torch's own Transformer, with masks, sequence first, and attention with extra keys and averaged weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.both = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0)
        self.extra = nn.MultiheadAttention(8, 2, dropout=0.0, add_bias_kv=True, add_zero_attn=True, batch_first=True)
        self.head = nn.Linear(8, 12)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        a, b = self.words(source).transpose(0, 1), self.words(target).transpose(0, 1)
        out = self.both(
            a, b, tgt_mask=nn.Transformer.generate_square_subsequent_mask(b.shape[0]), src_key_padding_mask=source == 0, tgt_is_causal=True
        )
        out, weights = self.extra(out.transpose(0, 1), a.transpose(0, 1), a.transpose(0, 1), average_attn_weights=True)
        return F.cross_entropy(self.head(out).mT, target.roll(-1, 1), ignore_index=0) + (weights * weights.clamp_min(1e-6).log()).mean()


def transformer() -> Any:
    source = _ids(12, N, 5)
    source[:, 0] = 1
    return _Torch(), {"source": source, "target": _ids(12, N, 4, seed=1)}


class _Parametrised(nn.Module):
    """Weights that are made of others (weight norm, a mask, an orthogonal matrix), layers that run again in backward."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.normed = parametrizations.weight_norm(nn.Linear(6, 8))
        self.conv = parametrizations.weight_norm(nn.Conv1d(2, 4, 3, padding=1), dim=1)
        self.low = nn.ParameterDict({"a": nn.Parameter(_normal(8, 2, seed=8)), "b": nn.Parameter(_normal(2, 8, seed=9))})
        self.turn = parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="cayley")
        self.register_buffer("mask", torch.ones(8, 8).tril(), persistent=False)
        self.again = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.normed(x)
        h = h + F.linear(h, (self.low["a"] @ self.low["b"]) * self.mask)
        h = h + checkpoint(self.again, h, use_reentrant=False)
        h = self.conv(h.view(-1, 2, 4)) + self.turn(h.view(-1, 2, 4)).repeat(1, 2, 1)
        return F.cross_entropy(self.head(torch.cat((h, h.square()), 1).flatten(1)), y)


def parametrised() -> Any:
    return _Parametrised(), {"x": _normal(N, 6), "y": _ids(3, N)}


class _Writes(nn.Module):
    """Writes behind the gradient's back, averages and queues kept in buffers in every way, power iterations."""

    average: Tensor
    assigned: Tensor
    copied: Tensor
    queue: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), parametrizations.spectral_norm(nn.Linear(8, 8))
        self.again, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)
        for name in ("average", "assigned", "copied"):
            self.register_buffer(name, torch.zeros(8))
        self.register_buffer("queue", F.normalize(_normal(16, 8, seed=7), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        with torch.no_grad():
            h[:, 0] = 0.0
            h[h > 1] = 0.5
            h.mul_(1.5)
        h.data.clamp_(-2, 2)
        h.detach()[:, 1:3] += 0.25
        h = torch.tanh(h) + checkpoint(self.again, self.second(h * 2), use_reentrant=True)
        z = F.normalize(h, dim=1)
        near = z @ self.queue.clone().detach().t()
        with torch.no_grad():
            self.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
            self.queue[4:12] = self.queue[:8].clone()
            self.queue[: len(z)] = z
            self.place += len(z)
        self.assigned = self.assigned * 0.9 + 0.1 * h.detach().amax(0)
        self.copied.data.copy_(self.copied * 0.5 + h.detach()[0])
        kept = (h - self.average + self.assigned * self.copied).masked_fill(h.detach() > 1.5, 0.0)
        return F.cross_entropy(self.head(kept), y) + near.logsumexp(1).mean() + self.place * 1e-3


def writes() -> Any:
    return _Writes(), {"x": _normal(N, 6), "y": _ids(3, N)}


class _Overwritten(nn.Module):
    """A table that is read in pieces where its readers are cut, written whole, and read again."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 32).view(4, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            before = torch.mm(self.table, self.inside.weight).sum(0)
            self.table.copy_(self.table * 0.5 + 1.0)
            after = torch.mm(self.table, self.inside.weight).sum(0)
        return F.cross_entropy(self.head(torch.tanh(self.inside(x) + torch.mv(x, before + after).unsqueeze(1))), y)


def overwritten() -> Any:
    return _Overwritten(), {"x": _normal(N, 6), "y": _ids(3, N)}


class _Quiet(nn.Module):
    """Dropouts that drop nothing, stops of gradients, straight-through estimators, masked means, sizes used as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.target = nn.Linear(6, 8), nn.Linear(6, 8)
        self.codes = nn.Parameter(_normal(5, 8, seed=3))
        self.dropped = nn.Sequential(nn.Dropout(0.0), nn.Dropout1d(0.0), nn.AlphaDropout(0.0), nn.FeatureAlphaDropout(0.0))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = F.dropout(self.dropped(self.inside(x)), 0.5, training=False)
        with torch.no_grad():
            want = F.normalize(self.target(x), dim=-1)
            same = h.to(h.dtype)  # the tensor itself, with its gradient
        nearest = self.codes[torch.cdist(h.detach(), self.codes).argmin(-1)]
        quantised = h + (nearest - h).detach()
        rounded = h + (h.round() - h).detach()
        commitment = (h - nearest.detach()).square().sum() / h.numel() + (nearest - h.detach()).square().mean()
        per_token = self.head(quantised + rounded).square().sum(-1)
        masked = (per_token * mask).sum() / mask.sum().clamp(min=1)
        by_sample = ((per_token * mask).sum(1) / mask.sum(1).clamp(min=1)).sum() / x.size(0)
        agree = -(F.normalize(same, dim=-1) * want).sum(-1).mean()
        return masked + by_sample + commitment + agree + h.norm(dim=0).max() + h.amax() + h.std() + h.abs().max(1).values.sum() / len(x)


def quiet() -> Any:
    return _Quiet(), {"x": _normal(N, 3, 6), "mask": _ids(2, N, 3, seed=2)}


MODELS: dict[str, Callable[[], Any]] = {
    f.__name__: f
    for f in (
        alike,
        guests,
        together,
        tied,
        norms,
        images,
        attentions,
        indices,
        losses,
        coupled,
        tables,
        recurrent,
        transformer,
        parametrised,
        writes,
        overwritten,
        quiet,
    )
}
