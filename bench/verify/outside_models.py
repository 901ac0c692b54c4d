"""Small models of many kinds that are none of the zoo's nor of the tests': what `scripts/verify_all --outside --random N` runs.

In: a name of `MODELS`. Out: (module, batch): the module returns its loss, batches have 16 samples in dimension 0 where there are samples.
No model draws random numbers. A model is made of named layers and a function of them and the batch, so that sixty fit on a few pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

N = 16  # samples
L = nn.Linear
MODELS: dict[str, Callable[[], Any]] = {}


class Made(nn.Module):
    """Named layers, and a function of them and of the batch that returns the loss."""

    def __init__(self, function: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, **batch: Tensor) -> Tensor:
        return self.function(self, **batch)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ids(high: int, *shape: int, seed: int = 0) -> Tensor:
    """Return integers below `high`."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def model(
    batch: Callable[[], dict[str, Tensor]], **layers: Callable[[], nn.Module]
) -> Callable[[Callable[..., Tensor]], Callable[[], Any]]:
    """Register a model under the name of its function."""

    def register(function: Callable[..., Tensor]) -> Callable[[], Any]:
        def build() -> Any:
            torch.manual_seed(0)
            return Made(function, **{name: make() for name, make in layers.items()}), batch()

        build.__name__ = build.__qualname__ = function.__name__
        MODELS[function.__name__] = build
        return build

    return register


def rows(width: int = 6, classes: int = 5) -> Callable[[], dict[str, Tensor]]:
    """Return a maker of batches of rows with classes."""
    return lambda: {"x": normal(N, width), "y": ids(classes, N)}


def images(size: int = 8, classes: int = 5, channels: int = 3) -> Callable[[], dict[str, Tensor]]:
    """Return a maker of batches of images with classes."""
    return lambda: {"x": normal(N, channels, size, size), "y": ids(classes, N)}


def tokens(length: int = 8, vocabulary: int = 20) -> Callable[[], dict[str, Tensor]]:
    """Return a maker of batches of token rows."""
    return lambda: {"t": ids(vocabulary, N, length), "y": ids(5, N)}


def sequences(length: int = 12, width: int = 4) -> Callable[[], dict[str, Tensor]]:
    """Return a maker of batches of signals [sample, channel, time]."""
    return lambda: {"x": normal(N, width, length), "y": ids(5, N)}


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return [sample, head, position, feature]."""
    return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return attention written out, heads merged."""
    weights = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if mask is not None:
        weights = weights.masked_fill(mask, float("-inf"))
    return (weights.softmax(-1) @ v).transpose(1, 2).flatten(2)


# Rows


@model(rows(), a=lambda: L(6, 16), b=lambda: L(16, 5))
def plain_mlp(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.b(torch.tanh(m.a(x))), y)


@model(rows(), a=lambda: L(6, 16), n=lambda: nn.LayerNorm(16), c=lambda: L(16, 16), b=lambda: L(16, 5))
def residual_mlp(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m.a(x)
    for _ in range(2):
        h = h + F.gelu(m.c(m.n(h)))
    return F.cross_entropy(m.b(h), y)


@model(rows(), a=lambda: L(6, 24), b=lambda: L(12, 5))
def gated_rows(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.b(F.glu(m.a(x))), y, label_smoothing=0.1)


@model(rows(), a=lambda: L(6, 24), b=lambda: L(8, 5))
def maxout(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.b(m.a(x).view(-1, 8, 3).amax(-1)), y)


@model(rows(), a=lambda: L(6, 35))
def mixture_density(m: Any, x: Tensor, y: Tensor) -> Tensor:
    pi, mu, scale = m.a(x).split([5, 15, 15], -1)
    d = (x[:, None, :3] - mu.view(-1, 5, 3)) / F.softplus(scale.view(-1, 5, 3)).add(0.1)
    return -(pi.log_softmax(-1) - d.square().sum(-1)).logsumexp(-1).mean()


@model(rows(), a=lambda: L(6, 12), s=lambda: L(3, 5))
def product_of_thirds(m: Any, x: Tensor, y: Tensor) -> Tensor:
    a, b, c, d = m.a(x).chunk(4, -1)
    return F.cross_entropy(m.s(a * b + c.sigmoid() * d), y)


@model(rows(), a=lambda: L(6, 16), n=lambda: nn.BatchNorm1d(16), b=lambda: L(16, 5))
def normed_rows(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.b(F.relu(m.n(m.a(x)))), y)


@model(rows(), a=lambda: L(6, 16), b=lambda: L(16, 5), g=lambda: L(6, 3), e=lambda: nn.ModuleList(L(16, 16) for _ in range(3)))
def soft_experts(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h, gate = torch.tanh(m.a(x)), m.g(x).softmax(-1)
    return F.cross_entropy(m.b(sum(gate[:, i : i + 1] * e(h) for i, e in enumerate(m.e))), y)


@model(rows(), a=lambda: nn.Bilinear(6, 6, 8), b=lambda: L(8, 5))
def bilinear_rows(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.b(m.a(x, x.flip(-1)).tanh()), y)


@model(rows(), a=lambda: L(6, 8), b=lambda: L(8, 6))
def auto_encoder(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(m.b(m.a(x).relu()), x) + 0.01 * m.a.weight.abs().sum()


@model(lambda: {"x": normal(N, 6)}, a=lambda: L(6, 8), b=lambda: L(4, 6))
def variational(m: Any, x: Tensor) -> Tensor:
    mu, log_var = m.a(x).chunk(2, -1)
    return F.mse_loss(m.b(mu), x) - 0.05 * (1 + log_var - mu.square() - log_var.exp()).sum(-1).mean()


@model(rows(), a=lambda: L(6, 16), b=lambda: L(16, 16), h=lambda: nn.ModuleList(L(16, 5) for _ in range(3)))
def early_exits(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h, total = m.a(x).tanh(), x.new_zeros(())
    for head in m.h:
        total = total + F.cross_entropy(head(h), y)
        h = h + m.b(h).tanh()
    return total


@model(lambda: {"x": normal(N, 6), "z": normal(N, 4, seed=1), "y": ids(5, N)}, a=lambda: L(6, 8), c=lambda: L(4, 8), b=lambda: L(16, 5))
def two_inputs(m: Any, x: Tensor, z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.b(torch.cat([m.a(x).relu(), m.c(z).tanh()], -1)), y)


@model(lambda: {"x": normal(N, 6), "w": normal(N, seed=2).abs()}, a=lambda: L(6, 16), b=lambda: L(16, 1))
def weighted_regression(m: Any, x: Tensor, w: Tensor) -> Tensor:
    return (w * (m.b(m.a(x).tanh()).squeeze(-1) - x.sum(-1)).square()).sum() / w.sum()


@model(lambda: {"x": normal(N, 8), "k": ids(9, N, 3), "y": ids(2, N)}, e=lambda: nn.Embedding(9, 8), a=lambda: L(8, 8), b=lambda: L(14, 1))
def factor_interactions(m: Any, x: Tensor, k: Tensor, y: Tensor) -> Tensor:
    v = torch.cat([m.a(x)[:, None], m.e(k)], 1)
    pairs = (v @ v.transpose(1, 2))[:, *torch.triu_indices(4, 4, 1).tolist()]
    return F.binary_cross_entropy_with_logits(m.b(torch.cat([x, pairs], -1)).squeeze(-1), y.to(x.dtype))


# Contrastive


@model(lambda: {"a": normal(N, 8), "b": normal(N, 8, seed=1)}, f=lambda: nn.Sequential(L(8, 16), nn.ReLU(), L(16, 8)))
def siamese(m: Any, a: Tensor, b: Tensor) -> Tensor:
    za, zb = F.normalize(m.f(a), dim=-1), F.normalize(m.f(b), dim=-1)
    return F.cross_entropy(za @ zb.t() / 0.2, torch.arange(a.shape[0]))


@model(lambda: {"a": normal(N, 8), "b": normal(N, 8, seed=1)}, f=lambda: nn.Sequential(L(8, 16), nn.BatchNorm1d(16), nn.ReLU(), L(16, 8)))
def siamese_with_statistics(m: Any, a: Tensor, b: Tensor) -> Tensor:
    return 2 - 2 * (F.normalize(m.f(a), dim=-1) * F.normalize(m.f(b), dim=-1)).sum(-1).mean()


@model(lambda: {"a": normal(N, 8), "b": normal(N, 8, seed=1)}, f=lambda: L(8, 6))
def decorrelation(m: Any, a: Tensor, b: Tensor) -> Tensor:
    za, zb = (z - z.mean(0) for z in (m.f(a), m.f(b)))
    c = za.t() @ zb / a.shape[0]
    return (c.diagonal() - 1).square().sum() + 0.01 * (c.square().sum() - c.diagonal().square().sum())


@model(
    lambda: {"a": normal(N, 8), "p": normal(N, 8, seed=1), "n": normal(N, 8, seed=2)},
    f=lambda: nn.Sequential(L(8, 16), nn.Tanh(), L(16, 4)),
)  # fmt: skip
def triplets(m: Any, a: Tensor, p: Tensor, n: Tensor) -> Tensor:
    return F.triplet_margin_loss(m.f(a), m.f(p), m.f(n))


@model(
    lambda: {"i": normal(N, 3, 8, 8), "t": ids(20, N, 6)}, c=lambda: nn.Conv2d(3, 8, 3, 2), e=lambda: nn.Embedding(20, 8),
    s=lambda: L(8, 8),
)  # fmt: skip
def image_and_text(m: Any, i: Tensor, t: Tensor) -> Tensor:
    a, b = F.normalize(m.c(i).mean((2, 3)), dim=-1), F.normalize(m.s(m.e(t).mean(1)), dim=-1)
    z = 5 * a @ b.t()
    y = torch.arange(i.shape[0])
    return F.cross_entropy(z, y) + F.cross_entropy(z.t(), y)


# Images


@model(images(), a=lambda: nn.Conv2d(3, 8, 3, padding=1), b=lambda: nn.Conv2d(8, 8, 3, 2, 1), h=lambda: L(8, 5))
def plain_convolutions(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.h(m.b(m.a(x).relu()).relu().mean((2, 3))), y)


@model(images(), a=lambda: nn.Conv2d(3, 8, 3, padding="same"), b=lambda: nn.Conv2d(8, 8, 2, padding="valid"), h=lambda: L(8, 5))
def padding_in_words(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.h(m.b(m.a(x).relu()).relu().mean((2, 3))), y)


@model(images(), a=lambda: nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"), h=lambda: L(8, 5))
def circular_convolution(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.h(m.a(x).relu().amax((2, 3))), y)


@model(images(), a=lambda: nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), h=lambda: L(8 * 64, 5))
def reflected_convolution(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.h(m.a(x).relu().flatten(1)), y)


@model(
    images(), a=lambda: nn.Conv2d(3, 8, 3, padding=1), n=lambda: nn.BatchNorm2d(8), b=lambda: nn.Conv2d(8, 8, 3, padding=1),
    h=lambda: L(8, 5),
)  # fmt: skip
def residual_convolutions(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m.n(m.a(x)).relu()
    return F.cross_entropy(m.h(F.adaptive_avg_pool2d((h + m.b(h)).relu(), 1).flatten(1)), y)


@model(
    images(), d=lambda: nn.Conv2d(3, 6, 3, padding=1, groups=3), p=lambda: nn.Conv2d(6, 8, 1), n=lambda: nn.GroupNorm(2, 8),
    h=lambda: L(8, 5),
)  # fmt: skip
def separable_convolutions(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.h(F.silu(m.n(m.p(m.d(x)))).mean((2, 3))), y)


@model(
    images(), a=lambda: nn.Conv2d(3, 8, 3, padding=1), s=lambda: L(8, 4), e=lambda: L(4, 8), h=lambda: L(8, 5),
)  # fmt: skip
def squeeze_and_excite(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m.a(x).relu()
    return F.cross_entropy(m.h((h * m.e(m.s(h.mean((2, 3))).relu()).sigmoid()[:, :, None, None]).amax((2, 3))), y)


@model(
    images(), a=lambda: nn.Conv2d(3, 8, 3, padding=1), b=lambda: nn.Conv2d(3, 8, 1), c=lambda: nn.Conv2d(3, 8, 5, padding=2),
    h=lambda: L(24, 5),
)  # fmt: skip
def inception(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.h(torch.cat([m.a(x), m.b(x), m.c(x)], 1).relu().mean((2, 3))), y)


@model(
    images(), a=lambda: nn.Conv2d(3, 4, 3, padding=1), b=lambda: nn.Conv2d(7, 4, 3, padding=1), c=lambda: nn.Conv2d(11, 8, 3, 2),
    h=lambda: L(8, 5),
)  # fmt: skip
def dense_connections(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = torch.cat([x, m.a(x).relu()], 1)
    h = torch.cat([h, m.b(h).relu()], 1)
    return F.cross_entropy(m.h(m.c(h).mean((2, 3))), y)


@model(
    lambda: {"x": normal(N, 2, 8, 8), "y": ids(3, N, 8, 8)}, d=lambda: nn.Conv2d(2, 8, 3, padding=1), w=lambda: nn.Conv2d(8, 8, 3, 2, 1),
    u=lambda: nn.ConvTranspose2d(8, 8, 2, 2), o=lambda: nn.Conv2d(16, 3, 1),
)  # fmt: skip
def u_net(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m.d(x).relu()
    return F.cross_entropy(m.o(torch.cat([h, m.u(m.w(h).relu())], 1)), y)


@model(
    lambda: {"x": normal(N, 2, 8, 8), "y": normal(N, 1, 16, 16)}, a=lambda: nn.Conv2d(2, 8, 3, padding=1),
    b=lambda: nn.Conv2d(8, 4, 3, padding=1),
)  # fmt: skip
def pixel_shuffle(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.l1_loss(F.pixel_shuffle(m.b(m.a(x).relu()), 2), y)


@model(
    lambda: {"x": normal(N, 2, 8, 8), "y": normal(N, 1, 16, 16)}, a=lambda: nn.Conv2d(2, 8, 3, padding=1),
    b=lambda: nn.Conv2d(8, 1, 3, padding=1),
)  # fmt: skip
def upsampling(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(m.b(F.interpolate(m.a(x).relu(), scale_factor=2, mode="bilinear")), y)


@model(images(), a=lambda: nn.Conv2d(3, 8, 3, padding=1), h=lambda: L(8, 5))
def pyramid_pooling(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m.a(x).relu()
    h = h + F.interpolate(F.avg_pool2d(h, 2), scale_factor=2) + F.interpolate(F.max_pool2d(h, 4), scale_factor=4)
    return F.cross_entropy(m.h(h.mean((2, 3))), y)


@model(images(), p=lambda: nn.Conv2d(3, 16, 4, 4), n=lambda: nn.LayerNorm(16), t=lambda: L(4, 4), c=lambda: L(16, 16), h=lambda: L(16, 5))
def mixer(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m.p(x).flatten(2).transpose(1, 2)
    h = h + m.t(m.n(h).transpose(1, 2)).transpose(1, 2)
    return F.cross_entropy(m.h((h + m.c(m.n(h)).relu()).mean(1)), y)


@model(images(), p=lambda: nn.Conv2d(3, 16, 4, 4), c=lambda: nn.Embedding(1, 16), q=lambda: L(16, 48), h=lambda: L(16, 5))
def patches_with_class_token(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = torch.cat([m.c.weight.expand(x.shape[0], 1, 16), m.p(x).flatten(2).transpose(1, 2)], 1)
    q, k, v = (split_heads(z, 4) for z in m.q(h).chunk(3, -1))
    return F.cross_entropy(m.h((h + attend(q, k, v))[:, 0]), y)


@model(images(), a=lambda: nn.Conv2d(3, 8, 3, padding=1), q=lambda: nn.Conv2d(8, 24, 1), h=lambda: L(8, 5))
def attention_over_pixels(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m.a(x)
    q, k, v = (z.flatten(2).transpose(1, 2)[:, None] for z in m.q(h).chunk(3, 1))
    return F.cross_entropy(m.h((h.flatten(2).transpose(1, 2) + attend(q, k, v)).mean(1)), y)


@model(
    lambda: {"x": normal(N, 2, 4, 6, 6), "y": ids(5, N)}, a=lambda: nn.Conv3d(2, 6, 3, padding=1), b=lambda: nn.Conv3d(6, 6, 2, 2),
    h=lambda: L(6, 5),
)  # fmt: skip
def volumes(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.h(m.b(m.a(x).relu()).mean((2, 3, 4))), y)


@model(
    lambda: {"x": normal(N, 1, 8, 8), "s": normal(N, seed=3).sigmoid()}, t=lambda: L(1, 8), a=lambda: nn.Conv2d(1, 8, 3, padding=1),
    b=lambda: nn.Conv2d(8, 1, 3, padding=1),
)  # fmt: skip
def denoiser(m: Any, x: Tensor, s: Tensor) -> Tensor:
    noise = x.flip(-1)
    noisy = x * s.view(-1, 1, 1, 1) + noise * (1 - s).view(-1, 1, 1, 1)
    return F.mse_loss(m.b(F.silu(m.a(noisy) + m.t(s[:, None])[:, :, None, None])), noise)


@model(lambda: {"x": normal(N, 3, 8, 8), "s": normal(N, 3, 8, 8, seed=1)}, c=lambda: nn.Conv2d(3, 4, 3, padding=1))
def style_loss(m: Any, x: Tensor, s: Tensor) -> Tensor:
    def gram(z: Tensor) -> Tensor:
        f = m.c(z).flatten(2)
        return f @ f.transpose(1, 2) / f.shape[-1]

    return F.mse_loss(gram(x), gram(s))


# Signals


@model(sequences(), a=lambda: nn.Conv1d(4, 8, 3, padding=1), h=lambda: L(8, 5))
def short_convolution(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.h(m.a(x).relu().mean(-1)), y)


@model(
    sequences(), a=lambda: nn.Conv1d(4, 8, 3, padding=2, dilation=2), b=lambda: nn.Conv1d(8, 8, 3, padding=4, dilation=4),
    h=lambda: L(8, 5),
)  # fmt: skip
def dilated_convolutions(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.h(m.b(m.a(x).relu()).amax(-1)), y)


@model(sequences(5), a=lambda: nn.Conv1d(4, 8, 3), b=lambda: nn.Conv1d(8, 8, 3), h=lambda: L(8, 5))
def convolutions_to_one_place(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.h(m.b(m.a(x).relu()).squeeze(-1)), y)


@model(sequences(), a=lambda: nn.Conv1d(4, 8, 3), h=lambda: L(8, 5))
def causal_padding(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.h(torch.tanh(m.a(F.pad(x, (2, 0))))[..., -1]), y)


@model(sequences(), a=lambda: nn.Conv1d(4, 16, 3, padding=1), b=lambda: nn.Conv1d(8, 4, 1), h=lambda: L(4, 5))
def gated_signals(m: Any, x: Tensor, y: Tensor) -> Tensor:
    a, b = m.a(x).chunk(2, 1)
    return F.cross_entropy(m.h((x + m.b(a.tanh() * b.sigmoid())).mean(-1)), y)


@model(sequences(), a=lambda: L(4, 8), b=lambda: L(8, 5))
def recurrence_by_hand(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], 8)
    for t in range(4):
        h = torch.tanh(m.a(x[..., t]) + h)
    return F.cross_entropy(m.b(h), y)


@model(sequences(), a=lambda: L(7, 8), b=lambda: L(8, 5))
def spectrum(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.b(m.a(torch.fft.rfft(x).abs()).relu().mean(1)), y)


@model(sequences(), a=lambda: L(4, 8), d=lambda: L(4, 8), b=lambda: L(8, 5))
def linear_scan(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z = x.transpose(1, 2)
    decay = m.d(z).sigmoid().log().cumsum(1)
    return F.cross_entropy(m.b(((m.a(z) * (-decay).exp()).cumsum(1) * decay.exp())[:, -1]), y)


# Tokens


@model(tokens(), e=lambda: nn.Embedding(20, 8), h=lambda: L(8, 5))
def bag_of_words(m: Any, t: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.h(m.e(t).mean(1)), y)


@model(tokens(), e=lambda: nn.Embedding(20, 16), q=lambda: L(16, 48), o=lambda: L(16, 16))
def causal_with_tied_head(m: Any, t: Tensor, y: Tensor) -> Tensor:
    h = m.e(t)
    q, k, v = (split_heads(z, 4) for z in m.q(h).chunk(3, -1))
    mask = torch.ones(t.shape[1], t.shape[1], dtype=torch.bool).triu(1)
    h = h + m.o(attend(q, k, v, mask))
    return F.cross_entropy((h @ m.e.weight.t())[:, :-1].flatten(0, 1), t[:, 1:].flatten())


@model(tokens(), e=lambda: nn.Embedding(20, 12), q=lambda: L(12, 12), k=lambda: L(12, 4), v=lambda: L(12, 4), h=lambda: L(12, 5))
def multi_query(m: Any, t: Tensor, y: Tensor) -> Tensor:
    x = m.e(t)
    return F.cross_entropy(m.h((x + attend(split_heads(m.q(x), 3), m.k(x)[:, None], m.v(x)[:, None])).mean(1)), y)


@model(tokens(), e=lambda: nn.Embedding(20, 16), q=lambda: L(16, 48), b=lambda: nn.Embedding(15, 4), h=lambda: L(16, 5))
def relative_positions(m: Any, t: Tensor, y: Tensor) -> Tensor:
    x = m.e(t)
    q, k, v = (split_heads(z, 4) for z in m.q(x).chunk(3, -1))
    at = torch.arange(t.shape[1])
    bias = m.b(at[:, None] - at + 7).permute(2, 0, 1)
    return F.cross_entropy(m.h(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2).mean(1)), y)


@model(tokens(), e=lambda: nn.Embedding(20, 16), q=lambda: L(16, 48), h=lambda: L(16, 5))
def rotary_positions(m: Any, t: Tensor, y: Tensor) -> Tensor:
    x = m.e(t)
    q, k, v = (split_heads(z, 4) for z in m.q(x).chunk(3, -1))
    angle = torch.arange(t.shape[1])[:, None] * torch.tensor([1.0, 0.1])

    def turn(z: Tensor) -> Tensor:
        a, b = z.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    out = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
    return F.cross_entropy(m.h(out.transpose(1, 2).flatten(2)[:, -1]), y)


@model(
    tokens(), e=lambda: nn.Embedding(20, 16), k=lambda: L(16, 16), v=lambda: L(16, 16), q=lambda: nn.Embedding(3, 16),
    h=lambda: L(48, 5),
)  # fmt: skip
def latent_queries(m: Any, t: Tensor, y: Tensor) -> Tensor:
    x = m.e(t)
    q = m.q.weight.expand(t.shape[0], 3, 16)
    return F.cross_entropy(m.h(attend(split_heads(q, 2), split_heads(m.k(x), 2), split_heads(m.v(x), 2)).flatten(1)), y)


@model(tokens(), e=lambda: nn.Embedding(20, 16), f=lambda: L(16, 16), h=lambda: L(16, 5))
def linear_attention(m: Any, t: Tensor, y: Tensor) -> Tensor:
    x = m.e(t)
    q, k = F.elu(m.f(x)) + 1, F.elu(x) + 1
    out = torch.einsum("nld,nde->nle", q, torch.einsum("nld,nle->nde", k, x)) / (q @ k.sum(1)[:, :, None])
    return F.cross_entropy(m.h(out.mean(1)), y)


@model(tokens(), e=lambda: nn.Embedding(20, 16), f=lambda: L(16, 16), h=lambda: L(16, 5))
def fourier_mixing(m: Any, t: Tensor, y: Tensor) -> Tensor:
    x = m.e(t)
    return F.cross_entropy(m.h((x + m.f(torch.fft.fft2(x).real)).mean(1)), y)


@model(tokens(), e=lambda: nn.Embedding(20, 8), w=lambda: L(24, 16), h=lambda: L(16, 20))
def n_gram(m: Any, t: Tensor, y: Tensor) -> Tensor:
    windows = m.e(t).unfold(1, 3, 1).flatten(2)
    return F.cross_entropy(m.h(m.w(windows).tanh())[:, :-1].flatten(0, 1), t[:, 3:].flatten())


@model(
    lambda: {"s": ids(20, N, 6), "t": ids(20, N, 5, seed=1)}, e=lambda: nn.Embedding(20, 16), k=lambda: L(16, 32), q=lambda: L(16, 16),
    h=lambda: L(16, 20),
)  # fmt: skip
def cross_attention(m: Any, s: Tensor, t: Tensor) -> Tensor:
    k, v = (split_heads(z, 2) for z in m.k(m.e(s)).chunk(2, -1))
    x = m.e(t[:, :-1])
    return F.cross_entropy(m.h(x + attend(split_heads(m.q(x), 2), k, v)).flatten(0, 1), t[:, 1:].flatten())


@model(tokens(), e=lambda: nn.Embedding(20, 8, padding_idx=0), a=lambda: L(8, 1), h=lambda: L(8, 5))
def attentive_pooling(m: Any, t: Tensor, y: Tensor) -> Tensor:
    x = m.e(t)
    weights = m.a(x).squeeze(-1).masked_fill(t == 0, -1e4).softmax(-1)
    return F.cross_entropy(m.h((weights[:, None] @ x).squeeze(1)), y)


# Graphs, sets


@model(lambda: {"x": normal(24, 6), "e": ids(24, 2, 90), "y": ids(4, 24)}, a=lambda: L(6, 8), b=lambda: L(8, 4))
def graph_convolution(m: Any, x: Tensor, e: Tensor, y: Tensor) -> Tensor:
    h = m.a(x).relu()
    degree = torch.ones_like(h[:, 0]).index_add(0, e[1], torch.ones_like(e[1], dtype=h.dtype))
    return F.cross_entropy(m.b(torch.zeros_like(h).index_add(0, e[1], h[e[0]]) / degree[:, None] + h), y)


@model(lambda: {"x": normal(24, 6), "e": ids(24, 2, 90), "y": ids(4, 24)}, a=lambda: L(6, 8), s=lambda: L(16, 1), b=lambda: L(8, 4))
def graph_attention(m: Any, x: Tensor, e: Tensor, y: Tensor) -> Tensor:
    h = m.a(x)
    score = F.leaky_relu(m.s(torch.cat([h[e[0]], h[e[1]]], -1)), 0.2).exp()
    total = torch.zeros_like(h[:, :1]).index_add(0, e[1], score) + 1e-6
    return F.cross_entropy(m.b(torch.zeros_like(h).index_add(0, e[1], score * h[e[0]]) / total), y)


@model(lambda: {"x": normal(24, 6), "a": (normal(24, 24, seed=5) > 1).float(), "y": ids(4, 24)}, f=lambda: L(6, 8), b=lambda: L(8, 4))
def dense_graph(m: Any, x: Tensor, a: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.b((a @ m.f(x)).relu()), y)


@model(lambda: {"x": normal(N, 7, 4), "y": ids(5, N)}, p=lambda: L(4, 16), r=lambda: L(16, 5))
def deep_sets(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.r(m.p(x).relu().sum(1)), y)


@model(lambda: {"x": normal(N, 7, 3), "y": ids(5, N)}, a=lambda: L(3, 16), b=lambda: L(19, 16), r=lambda: L(16, 5))
def point_cloud(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m.a(x - x.mean(1, keepdim=True)).relu()
    h = m.b(torch.cat([x, h.amax(1, keepdim=True).expand_as(h)], -1)).relu()
    return F.cross_entropy(m.r(h.amax(1)), y)


@model(lambda: {"x": normal(N, 7, 3), "y": ids(5, N)}, a=lambda: L(6, 16), r=lambda: L(16, 5))
def message_passing_on_all_pairs(m: Any, x: Tensor, y: Tensor) -> Tensor:
    pairs = torch.cat([x[:, :, None].expand(-1, -1, 7, -1), x[:, None].expand(-1, 7, -1, -1)], -1)
    return F.cross_entropy(m.r(m.a(pairs).relu().sum((1, 2))), y)


# Reinforcement, physics


@model(lambda: {"s": normal(N, 6), "a": ids(4, N), "r": normal(N, seed=4)}, f=lambda: L(6, 16), p=lambda: L(16, 4), v=lambda: L(16, 1))
def actor_critic(m: Any, s: Tensor, a: Tensor, r: Tensor) -> Tensor:
    h = m.f(s).tanh()
    value, log_p = m.v(h).squeeze(-1), m.p(h).log_softmax(-1)
    gain = (r - value).detach()
    return -(gain * log_p.gather(1, a[:, None]).squeeze(1)).mean() + F.mse_loss(value, r) + 0.01 * (log_p.exp() * log_p).sum(-1).mean()


@model(lambda: {"s": normal(N, 6), "a": ids(4, N), "r": normal(N, seed=4)}, v=lambda: L(6, 1), g=lambda: L(6, 4))
def dueling_values(m: Any, s: Tensor, a: Tensor, r: Tensor) -> Tensor:
    gain = m.g(s)
    return F.smooth_l1_loss((m.v(s) + gain - gain.mean(-1, keepdim=True)).gather(1, a[:, None]).squeeze(1), r)


@model(lambda: {"x": normal(N, 2), "y": normal(N, seed=1)}, f=lambda: L(2, 12), a=lambda: L(24, 1))
def fourier_features(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z = m.f(x)
    return F.mse_loss(m.a(torch.cat([z.sin(), z.cos()], -1)).squeeze(-1), y)


@model(lambda: {"x": normal(N, 4)}, s=lambda: L(2, 8), t=lambda: L(8, 4))
def coupling_flow(m: Any, x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    scale, shift = m.t(m.s(a).tanh()).chunk(2, -1)
    z = torch.cat([a, b * scale.exp() + shift], -1)
    return (0.5 * z.square().sum(-1) - scale.sum(-1)).mean()


@model(lambda: {"u": normal(N, 1, 16)}, k=lambda: nn.Conv1d(1, 8, 1), w=lambda: L(8, 8), o=lambda: nn.Conv1d(8, 1, 1))
def spectral_operator(m: Any, u: Tensor) -> Tensor:
    h = m.k(u)
    low = torch.fft.rfft(h)[..., :4]
    mixed = torch.complex(m.w(low.real.transpose(1, 2)), m.w(low.imag.transpose(1, 2))).transpose(1, 2)
    return F.mse_loss(m.o(torch.fft.irfft(F.pad(mixed, (0, 5)), n=16) + h), u.roll(1, -1))
