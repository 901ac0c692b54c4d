"""Models as users write them who never saw shardwise: losses that hold tensors or their model, masks made on the spot, numbers without a
dtype.

Every factory returns (module, batch) or (module, batch, loss), 8 samples in dimension 0. `shardwise verify
tests/support/user_models.py:NAME`.
"""

from __future__ import annotations

from collections import namedtuple
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

N = 8  # samples
Pair = namedtuple("Pair", "x y")


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _ids(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


class _Scored:
    """A loss that is a method, with tensors in attributes, in a module, in a closure and in defaults."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.scale, self.criterion = model, torch.rand(3), nn.CrossEntropyLoss(weight=torch.rand(3))
        drawn = {"of": [torch.rand(3)]}
        self.more = partial(lambda shift, o, by: ((o - shift) * drawn["of"][0] * by).square().mean(), torch.rand(3), by=torch.rand(()))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        penalty = sum((p.square().sum() for p in self.model.parameters()), torch.zeros(()))
        return self.criterion(output * self.scale, batch.y) + 0.1 * penalty + self.more(output)


def penalised() -> Any:
    model = _Net()
    return model, Pair(_normal(N, 6), _ids(3, N)), _Scored(model).loss


class _Spectral(nn.Module):
    """Weights that are complex numbers in pairs, behind one of odd length; a piece of complex zeros that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.pairs, self.lift = nn.Parameter(_normal(3)), nn.Parameter(_normal(8, 8, 4, 2, seed=1) * 0.1), nn.Conv1d(2, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x)
        f = torch.fft.rfft(h)
        kept = torch.zeros(len(x), 8, 7, dtype=f.dtype)
        kept[:, :, :4] = torch.einsum("bix,iox->box", f[:, :, :4], torch.view_as_complex(self.pairs))
        kept[:, :, 5] = f[:, :, 5] * self.odd[0]
        return F.gelu(torch.fft.irfft(kept, n=12) + h).square().mean() + self.odd.square().sum()


def spectral() -> Any:
    return _Spectral(), (_normal(N, 2, 12),)


class _Numbers(nn.Module):
    """Tables made of numbers without a dtype, quotients of integers, norms over two dimensions, vectors, dots, odd `renorm`s."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.inside(x) * torch.linspace(0.1, 1, 8) + torch.arange(0.0, 8, 1.0) / 7
        h = h + torch.arange(4)[:, None] / 3 @ torch.ones(1, 8) + torch.eye(8).mean() + torch.full((4, 8), 0.3).sqrt()
        h = F.layer_norm(h, (4, 8)) + F.rms_norm(h, h.shape[1:]) + torch.einsum("...i,ij->...j", h, torch.ones(8, 8) / 3)
        h = h + (h @ self.out.weight[0])[..., None] + (self.out.weight[1] @ h.transpose(1, 2))[..., None]
        flat = h.flatten(1)
        flat = flat + torch.renorm(flat, 2, 0, 1.0) + torch.renorm(flat, 1, 1, 0.5) + torch.einsum("bi,bi", flat, flat) * 0.01
        out = self.out(flat.unflatten(1, (4, 8)).mean(1)) / (torch.finfo(h.dtype).eps ** 0.25 + torch.finfo(torch.float32).eps)
        return F.cross_entropy(out, y) + F.binary_cross_entropy_with_logits(out, torch.sigmoid(out.detach()), reduction="sum") / N


def numbers() -> Any:
    return _Numbers(), {"x": _normal(N, 4, 6), "y": _ids(3, N)}


class _Translator(nn.Module):
    """torch's Transformer asked with a mask that is made on the spot, which it looks at; distributions, which look at their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(12, 8), nn.Embedding(12, 8)
        self.body = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.head, self.spread = nn.Linear(8, 12), nn.Linear(8, 8)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = torch.triu(torch.ones(4, 4), 1).bool()
        out = self.body(self.source(source), self.target(target[:, :-1]), tgt_mask=mask, src_key_padding_mask=source == 0)
        q = torch.distributions.Normal(out.mean(1), F.softplus(self.spread(out.mean(1))) + 0.1)
        p = torch.distributions.Normal(torch.zeros(8), torch.ones(8))
        words = torch.distributions.Categorical(logits=self.head(out))
        return torch.distributions.kl_divergence(q, p).sum(1).mean() * 0.1 - words.log_prob(target[:, 1:]).mean()


def translator() -> Any:
    source = _ids(11, N, 5) + 1
    source[2, 3:] = 0
    return _Translator(), (source, _ids(12, N, 5, seed=1))


class _Running(nn.Module):
    """A mean and a count of what was seen, which the same call reads; sparse gradients; cells; a function mapped over weights."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.tensor(1e-4))
        self.table, self.cell, self.gru = nn.Embedding(9, 6, sparse=True), nn.LSTMCell(6, 8), nn.GRUCell(8, 8)
        self.experts, self.head = nn.Parameter(_normal(3, 8, 5, seed=2)), nn.Linear(5, 3)

    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        total = self.count + len(x)
        self.mean += (x.mean(0) - self.mean) * len(x) / total
        self.count = total
        h = torch.zeros(len(x), 8, dtype=x.dtype)
        c = g = h
        for t in range(2):
            h, c = self.cell(x - self.mean + self.table(ids[:, t]), (h, c))
            g = self.gru(h, g)
        mixed = torch.vmap(lambda w: torch.tanh(g @ w))(self.experts)
        return F.cross_entropy(self.head(mixed.mean(0)), y)


def running() -> Any:
    return _Running(), {"x": _normal(N, 6), "ids": _ids(9, N, 2), "y": _ids(3, N)}


class _Fields(nn.Module):
    """Categories in bags, a Transformer that looks at its mask, places that a mask writes, numbers as tensors, a learned variance, features
    that are to vary apart."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(9, 8, mode=mode) for mode in ("sum", "mean", "max"))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.place = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))
        self.mean, self.spread = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, ids: Tensor, weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
        bags = [bag(ids, per_sample_weights=weights) if bag.mode == "sum" else bag(ids) for bag in self.bags]
        rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(8.0), indexing="ij")
        h = torch.stack((*bags, self.place(x).unfold(1, 4, 4).flatten(1)), 1) + torch.sin(rows + columns)
        h[h > 2.0] = 2.0
        h = self.body(h, mask=self.mask).mean(1)
        h = h * torch.tensor([0.1, 0.7]).repeat(4) + torch.distributions.Normal(h, 0.1).log_prob(torch.tensor(0.3)) * 1e-3
        close = F.cosine_similarity(h, h.flip(1)) * torch.tensor(0.1) + F.triplet_margin_loss(self.mean(h), y, self.spread(h))
        apart = (torch.cov(h.t(), correction=0).square().sum() + torch.corrcoef(h.t()[:2]).sum()) * 1e-2
        return F.gaussian_nll_loss(self.mean(h), y, F.softplus(self.spread(h)) + 0.1) + close.mean() + apart


def fields() -> Any:
    return _Fields(), {"ids": _ids(9, N, 3), "weights": _normal(N, 3), "x": _normal(N, 6), "y": _normal(N, 2, seed=1)}


class _Drawn(nn.Module):
    """Dropout of every kind, blocks that are dropped, noise by every name, a latent that is drawn, a forward that is run again."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.again = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh())
        self.images, self.channels = nn.Conv2d(1, 4, 3, padding=1), nn.Dropout2d(0.3)
        self.latent, self.head = nn.Linear(8, 16), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        n, s, d = x.shape
        h = checkpoint(self.again, self.body(x), use_reentrant=False)
        h = h + self.channels(self.images(h[:, None])).mean(1) * torch.rand(n, 1, 1).add(0.8).floor()
        mean, spread = self.latent(h).chunk(2, -1)
        h = mean + torch.randn_like(mean) * torch.exp(spread / 2) + torch.distributions.Normal(mean, 0.1).rsample()
        h = F.alpha_dropout(h, 0.2, training=True) * torch.empty(d).uniform_(0.9, 1.1) + torch.empty_like(h).normal_(0.0, 0.1)
        kept = torch.bernoulli(torch.full((n, s, 1), 0.7, dtype=h.dtype)) * torch.randint(1, 3, (n, 1, 1))
        choice = F.gumbel_softmax(self.head(h[:, torch.randperm(s)]), tau=0.7)
        return (choice * kept).square().mean() + F.dropout(h, 0.5).square().mean()


def drawn() -> Any:
    return _Drawn(), (_normal(N, 4, 8),)


class _Silent(nn.Module):
    """A block without gradients beside what is drawn in place, a table made of a list and written, and `detach_`; attention that drops
    nothing beside dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.qkv, self.head = nn.Linear(6, 8), nn.Linear(8, 24), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.enter(x)
        with torch.no_grad():
            noise = torch.empty_like(h).exponential_(2.0)
            noise.add_(torch.empty_like(h).normal_(0.0, 0.1)).mul_(torch.zeros_like(h).bernoulli_(0.7))
            noise[:, 1:3].uniform_(-1.0, 1.0)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(h + noise).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        target = self.head(attended).softmax(-1)
        early = target * 2
        target.detach_()
        classes = torch.tensor([0.5, 1.0, 2.0, 0.25], dtype=h.dtype)
        classes[1] = 3.0
        backwards = torch.tensor(list(range(4))[::-1])
        scores = self.head(self.drop(attended) + h)[..., backwards] * classes
        return F.cross_entropy(scores.flatten(0, 1), y.flatten()) + (scores * target).mean() + early.square().mean()


def silent() -> Any:
    return _Silent(), {"x": _normal(N, 4, 6), "y": _ids(4, N, 4)}


class _Cached(nn.Module):
    """Makes a table and a part without weights in its first call, and keeps them: tables of positions are often made so."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.rates: Tensor
        self.register_buffer("rates", torch.arange(1.0, 9.0) / 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.outer(torch.arange(x.shape[1]), self.rates).cos(), persistent=False)
            self.after = nn.Sequential(nn.ReLU(), nn.Dropout(0.0))
        return F.cross_entropy(self.head(self.after(self.enter(x) * self.table)).flatten(0, 1), y.flatten())


def cached() -> Any:
    return _Cached(), {"x": _normal(N, 4, 6), "y": _ids(4, N, 4)}


class _Speech(nn.Module):
    """Transcripts of unequal length, with lengths as tensors; frames held against others by their cosines."""

    def __init__(self) -> None:
        super().__init__()
        self.frames, self.body, self.head = nn.Conv1d(4, 8, 3, 2, 1), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 6)

    def forward(self, x: Tensor, length: Tensor, words: Tensor, said: Tensor) -> Tensor:
        frames = F.gelu(self.frames(x)).transpose(1, 2)
        heard = self.body(frames)[0]
        there = torch.div(length + 1, 2, rounding_mode="floor")
        classes = self.head(heard).log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(classes, words, there, said, zero_infinity=True)
        odd = words % 2 == 1  # of which a loss is told one after the other, in one row, as the Wav2Vec2 of a library does it
        loss = loss + F.ctc_loss(classes, words[odd].to(torch.int32), there, odd.sum(-1), reduction="sum", zero_infinity=True)
        alike = F.cosine_similarity(heard[:, :, None], torch.stack((frames, frames.roll(1, 1)), 2), -1) / 0.1
        return loss + 0.1 * F.cross_entropy(alike.flatten(0, 1), torch.zeros(len(x) * heard.shape[1], dtype=torch.int64))


def speech() -> Any:
    said = torch.tensor([3, 2, 3, 1, 2, 3, 0, 3])
    return _Speech(), {"x": _normal(N, 4, 14), "length": torch.arange(14, 6, -1), "words": 1 + _ids(5, N, 3), "said": said}


class _Placed(nn.Module):
    """An image turned as a layer says, its patches in the places of a text that a mask names; norms and blocks of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.patches, self.words = nn.Linear(64, 6), nn.Conv2d(1, 8, 4, 4), nn.Embedding(9, 8)
        self.left, self.right, self.head = nn.Parameter(_normal(2, 4, seed=1)), nn.Parameter(_normal(4, 2, seed=2)), nn.Linear(8, 3)

    def forward(self, image: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        theta = 0.1 * self.turn(image.flatten(1)).view(-1, 2, 3) + torch.eye(2, 3)
        image = F.grid_sample(image, F.affine_grid(theta, list(image.shape), align_corners=False), align_corners=False)
        seen = self.patches(image).flatten(2).transpose(1, 2)
        text = self.words(ids)
        text = text.masked_scatter((ids == 0).unsqueeze(-1).expand_as(text), seen)
        text = text @ torch.kron(self.left, self.right) / torch.linalg.norm(text, dim=-1, keepdim=True)
        return F.cross_entropy(self.head(text.mean(1)), y) + 0.1 * torch.linalg.matrix_norm(text).mean()


def placed() -> Any:
    ids = 1 + _ids(8, N, 7)
    for sample, places in enumerate(torch.stack([torch.randperm(7, generator=torch.Generator().manual_seed(i))[:4] for i in range(N)])):
        ids[sample, places] = 0
    return _Placed(), {"image": _normal(N, 1, 8, 8), "ids": ids, "y": _ids(3, N)}


class _Modes(nn.Module):
    """Weights that are complex numbers (Li et al. 2021), one of them read twice; others that are real."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Conv1d(2, 8, 1), nn.Linear(8, 3)
        self.low = nn.Parameter(torch.complex(_normal(8, 8, 4, seed=1), _normal(8, 8, 4, seed=2)) * 0.1)
        self.high = nn.Parameter(torch.complex(_normal(8, 8, 2, seed=3), _normal(8, 8, 2, seed=4)) * 0.1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.lift(x)
        for _ in range(2):
            f = torch.fft.rfft(h)
            kept = torch.zeros(len(x), 8, 7, dtype=f.dtype)
            kept[:, :, :4] = torch.einsum("bix,iox->box", f[:, :, :4], self.low)
            kept[:, :, -2:] = torch.einsum("bix,iox->box", f[:, :, -2:], self.high)
            h = F.gelu(torch.fft.irfft(kept, n=12) + h)
        return F.cross_entropy(self.head(h.mean(-1)), y) + 0.01 * self.low.abs().square().sum()


def modes() -> Any:
    return _Modes(), {"x": _normal(N, 2, 12), "y": _ids(3, N)}


class _Cast(nn.Module):
    """A part that is told its own dtype in every call, as routers of experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.router = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.router = self.router.to(torch.float32)
        return F.cross_entropy(self.router(torch.relu(self.inside(x))).float(), y)


def cast() -> Any:
    return _Cast(), {"x": _normal(N, 6), "y": _ids(3, N)}


class _CastBranch(_Cast):
    """The same where a branch on values keeps it from being captured."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 1e9 else x + 0.5, y)


def cast_branch() -> Any:
    return _CastBranch(), {"x": _normal(N, 6), "y": _ids(3, N)}


class _Causal(nn.Conv2d):
    """Sees what comes before (van den Oord et al. 2016): its weights are masked through `.data` whenever it is called."""

    def __init__(self, before: int, inside: int, outside: int) -> None:
        super().__init__(inside, outside, 3, padding=1)
        self.register_buffer("mask", torch.ones_like(self.weight))
        self.mask[:, :, 1, 1 + before :] = 0
        self.mask[:, :, 2:] = 0

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= self.mask
        return super().forward(x)


class _Pixels(nn.Module):
    """Every pixel by those before it, weighed by how many there are of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(_Causal(0, 1, 8), nn.ReLU(), _Causal(1, 8, 8), nn.ReLU(), nn.Conv2d(8, 4, 1))

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        counts = torch.bincount(kinds, minlength=4) + torch.bincount(kinds, torch.ones(len(kinds)), 4)
        return F.cross_entropy(self.layers(x.float()[:, None] / 3), x, 1 / (1 + counts))


def pixels() -> Any:
    return _Pixels(), {"x": _ids(4, N, 5, 5), "kinds": _ids(4, 30)}


MODELS = {
    make.__name__: make
    for make in (penalised, spectral, numbers, translator, running, fields, drawn, silent, cached, speech, placed, modes, cast, pixels)
}
