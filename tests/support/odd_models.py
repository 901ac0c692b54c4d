"""Small models that nobody wrote for shardwise, each with something in it that is hard to split. `shardwise verify
tests/support/odd_models.py:NAME`.

Every factory returns (module, batch, loss) or (module, batch), 16 samples in dimension 0, and draws from its own generator only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

N = 16  # samples


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _ids(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def _class_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output, batch["y"])


def swin() -> Any:
    """Windows rolled, cut and put together again: a Hugging Face Swin, with its own loss."""
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=16, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=6, mlp_ratio=2.0,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, drop_path_rate=0.0,
    )  # fmt: skip
    return SwinForImageClassification(config), {"pixel_values": _normal(N, 3, 16, 16), "labels": _ids(6, N)}


class _ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class _ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, stride=2)
        self.blocks = nn.ModuleList(_ConvNextBlock(8) for _ in range(3))
        self.grouped = nn.Conv2d(8, 12, 3, groups=2)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.grouped(x).mean((-2, -1)))
        return {"logits": logits, "loss": F.cross_entropy(logits, y, label_smoothing=0.1)}


def convnext() -> Any:
    """Depthwise and grouped convolutions, layer scale, label smoothing over 5 classes, a dict with the loss."""
    return _ConvNext(), {"x": _normal(N, 3, 12, 12), "y": _ids(5, N)}


class _Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 16, padding_idx=0)
        self.encoder = nn.GRU(16, 16, num_layers=2, batch_first=True)
        self.decoder = nn.GRU(16, 16, num_layers=2, batch_first=True)
        self.bridge = nn.Bilinear(16, 16, 16)
        self.head = nn.Linear(16, 24)
        self.head.weight = self.embedding.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        seen, state = self.encoder(self.embedding(source))
        out, _ = self.decoder(self.embedding(target), state)
        return self.head(out + self.bridge(out, seen[:, -1:].expand_as(out).contiguous()))


def _seq2seq_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(output[:, :-1].transpose(1, 2), batch[1][:, 1:], ignore_index=0)


def seq2seq() -> Any:
    """Recurrent encoder and decoder, a table that is tied and has a padding row, cross-entropy of (N, C, S), a tuple batch."""
    return _Seq2Seq(), (_ids(24, N, 7), _ids(24, N, 6, seed=1)), _seq2seq_loss


class _TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.left, self.right = nn.Linear(6, 16), nn.Linear(8, 16)
        self.gate = nn.Parameter(torch.zeros(16))
        self.head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 3))

    def forward(self, dense: Tensor, words: dict[str, Tensor], scale: float = 1.0) -> Tensor:
        mask = words["mask"].unsqueeze(-1)
        pooled = (self.table(words["ids"]) * mask).sum(1) / mask.sum(1).clamp(min=1)
        mixed = torch.sigmoid(self.gate) * self.left(dense) + (1 - torch.sigmoid(self.gate)) * self.right(pooled)
        return self.head(mixed * scale)


def _two_loss(output: Tensor, batch: dict[str, Any]) -> Tensor:
    return F.mse_loss(output, batch["dense"][:, :3]) + output.abs().mean() * 0.1


def two_inputs() -> Any:
    """Floating-point inputs (their gradients are compared), a nested dict, a number in the batch, targets taken from an input."""
    words = {"ids": _ids(12, N, 5), "mask": _ids(2, N, 5, seed=2).bool()}
    return _TwoInputs(), {"dense": _normal(N, 6), "words": words, "scale": 0.5}, _two_loss


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.cross = nn.MultiheadAttention(16, 2, dropout=0.0, batch_first=True, kdim=16, vdim=16)
        self.query = nn.Parameter(torch.zeros(1, 1, 16))
        self.head = nn.Linear(16, 7)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        padding = ids == 0
        hidden = self.encoder(self.embedding(ids), src_key_padding_mask=padding)
        pooled, _ = self.cross(self.query.expand(ids.shape[0], -1, -1), hidden, hidden, key_padding_mask=padding)
        return F.cross_entropy(self.head(pooled.squeeze(1)), y)


def encoder() -> Any:
    """torch's own TransformerEncoder and MultiheadAttention with padding masks: fused projections, sequence-first inside."""
    ids = _ids(20, N, 6)
    ids[:, 0] = 1
    return _Encoder(), {"ids": ids, "y": _ids(7, N, seed=3)}


class _Frozen(nn.Module):
    order: Tensor
    offsets: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
        self.backbone.requires_grad_(False)
        self.adapter = nn.Linear(16, 4, bias=False)
        self.up = nn.Linear(4, 16, bias=False)
        self.unused = nn.Linear(16, 16)
        self.head = nn.Linear(16, 6)
        self.head.bias.requires_grad_(False)
        self.register_buffer("order", torch.arange(15, -1, -1))
        self.register_buffer("offsets", torch.arange(8).remainder(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        hidden = self.backbone(x + self.offsets)
        with torch.no_grad():
            hidden = hidden / hidden.norm(dim=-1, keepdim=True)
        hidden = hidden + self.up(self.adapter(hidden))
        return self.head(hidden[:, self.order])


def frozen() -> Any:
    """A frozen backbone with an adapter, a module that nobody calls, integer buffers (one counts), a block without gradients."""
    return _Frozen(), {"x": _normal(N, 8)}, lambda output, batch: F.cross_entropy(output, batch["x"][:, :6].argmax(-1))


class _Slices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.mix = nn.Parameter(_normal(4, 6, 6, seed=9) * 0.1)
        self.position = nn.Parameter(torch.zeros(8, 16))
        self.head = nn.Linear(32, 9)

    def forward(self, x: Tensor) -> Tensor:
        n, s, d = x.shape
        x = x + self.position[:s]
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (t.reshape(n, s, 4, d // 4) for t in (q, k, v))
        scores = torch.einsum("nqhd,nkhd->nhqk", q, k) / 2.0 + self.mix
        scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), float("-inf"))
        mixed = torch.einsum("nhqk,nkhd->nqhd", scores.softmax(-1), v).flatten(2)
        y = x + self.out(mixed)
        y = torch.cat((y[:, 1:], y[:, :1] * 0.5), dim=1).roll(1, dims=-1)
        best, where = y.topk(2, dim=1)
        first = y.gather(1, where[:, :1]).squeeze(1)
        summed = y[:, ::2].cumsum(1)[:, -1] + best.mean(1) + y[..., None, :].amax(1).squeeze(1)
        return self.head(torch.stack((first, summed), dim=1).view(n, -1))


class _WithoutLabels(nn.Module):
    """Gives a model that takes only `x` a batch with labels."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.inner(x)


def slices() -> Any:
    """Fused projections cut by chunk, einsum attention, strides, rolls, top-k, gather, cumulative sums; 9 classes."""
    return _WithoutLabels(_Slices()), {"x": _normal(N, 6, 16), "y": _ids(9, N)}, _class_loss


class _Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.down = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.LeakyReLU(0.1, inplace=True))
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.instance = nn.InstanceNorm2d(8, affine=True)
        self.shuffle = nn.Sequential(nn.Conv2d(8, 8, 1), nn.PixelShuffle(2))
        self.norm = nn.BatchNorm1d(32, momentum=0.3)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skip = x
        x = self.down(F.max_pool2d(x, 2) + F.avg_pool2d(skip, 2))
        x = x * torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        x = self.instance(self.up(x)) + F.interpolate(skip[..., ::2, ::2], scale_factor=1.0, mode="nearest")
        x = self.shuffle(x)
        return self.head(self.norm(F.adaptive_avg_pool2d(x, 4).flatten(1)))


def norms() -> Any:
    """Every norm, in-place activations, pooling, transposed convolution, pixel shuffle, squeeze and excitation."""
    return _WithoutLabels(_Norms()), {"x": _normal(N, 3, 8, 8), "y": _ids(4, N)}, _class_loss


class _Instances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, 8), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for i, layer in enumerate(self.layers):
            x = layer(self.norm(x) if i in (0, 2) else x)
        return x.mean(1).square().mean()


def instances() -> Any:
    """One instance norm with running statistics, used twice: the uses belong on one stage."""
    return _Instances(), (_normal(N, 4, 6),)


class _Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.layer = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embedding.weight
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for _ in range(4):
            x = x + self.layer(x)
        loss = F.cross_entropy((self.head(x) * self.temperature).flatten(0, 1), labels.flatten())
        return loss + 1e-2 * sum(p.pow(2).sum() for p in self.parameters())


def shared() -> Any:
    """One layer called four times, a tied table, a scalar parameter, and weights that the loss reads."""
    return _Shared(), {"ids": _ids(30, N, 5), "labels": _ids(30, N, 5, seed=1)}


class _Losses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 12))

    def forward(self, x: Tensor, y: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        out = self.body(x)
        log_p = F.log_softmax(out[:, :5], dim=-1)
        parts = (
            F.nll_loss(log_p, y),
            F.kl_div(log_p, target[:, :5].softmax(-1), reduction="batchmean"),
            F.l1_loss(out, target),
            F.huber_loss(out, target, delta=0.5),
            F.smooth_l1_loss(out, target, reduction="sum") / out.numel(),
            F.binary_cross_entropy_with_logits(out, (target > 0).to(out.dtype)),
            F.mse_loss(out[:, :1], target[:, :1], reduction="none").squeeze(1).mul(weight).sum() / weight.sum(),
            F.cross_entropy(out[:, :5], target[:, :5].softmax(-1)),
            F.cross_entropy(out[:, :5], y, weight=torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0])),
            out.var(dim=0).mean(),
            out.logsumexp(-1).mean(),
        )
        return torch.stack(parts).sum()


def losses() -> Any:
    """Eleven losses at once: means, sums, averages over the batch, weights by sample and by class, soft labels, variance over samples."""
    weight = torch.rand(N, generator=torch.Generator().manual_seed(5)) + 0.1
    return _Losses(), {"x": _normal(N, 6), "y": _ids(5, N), "target": _normal(N, 12, seed=4), "weight": weight}


class _Cells(nn.Module):
    initial: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 16)
        self.register_buffer("initial", torch.full((1, 16), 0.1))
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.initial.expand(x.shape[0], -1)
        cell = torch.zeros_like(hidden)
        out = []
        for t in range(x.shape[1] - 1):
            hidden, cell = self.cell(x[:, t], (hidden, cell))
            out.append(self.head(hidden))
        return F.smooth_l1_loss(torch.stack(out, dim=1), x[:, 1:])


def cells() -> Any:
    """A recurrence written as a Python loop, with a buffer as its initial state."""
    return _Cells(), (_normal(N, 5, 8),)


class _Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(8, 16), nn.Linear(16, 8)
        self.filter = nn.Parameter(_normal(4, 16, seed=3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.fft.rfft(self.inside(x), dim=1, norm="ortho")
        hidden = hidden * torch.complex(self.filter, self.filter.flip(0))
        return self.out(torch.fft.irfft(hidden, n=x.shape[1], dim=1, norm="ortho")).square().mean()


def fourier() -> Any:
    """Complex numbers and Fourier transforms."""
    return _Fourier(), (_normal(N, 6, 8),)


class _Rotary(nn.Module):
    """Rotary positions as complex numbers, from a buffer of them, as the first Llama has it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 16)
        angles = torch.outer(torch.arange(6.0), torch.tensor([1.0]))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.tokens(ids)).unflatten(-1, (3, 4, 2)).unbind(2)
        q, k = (torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2))) * self.turns[None, :, None]).flatten(3) for t in (q, k))
        mixed = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return F.cross_entropy(self.out(mixed.transpose(1, 2).flatten(2)).transpose(1, 2), ids)


def rotary() -> Any:
    """Complex numbers that are cut by samples and heads, a complex buffer, and cross-entropy over [batch, class, position]."""
    return _Rotary(), {"ids": _ids(16, N, 6)}


class _Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        hidden = (hidden - hidden.mean(0)) / (hidden.std(0) + 1e-3)
        rank = hidden.argsort(dim=0).to(hidden.dtype) / len(hidden)
        spread = hidden.amax(0) - hidden.amin(0)
        return self.head(hidden * 0.9 + 0.1 * rank).softmax(0).square().sum() + spread.mean() + hidden.norm() * 0.01


def statistics() -> Any:
    """Everything that couples the samples of a batch: batch norm, mean, deviation, order, softmax over samples, a norm of all."""
    return _Statistics(), (_normal(N, 6),)


class _Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(20, 8), nn.Embedding(32, 8)
        self.bag = nn.EmbeddingBag(16, 8, mode="mean")
        self.bias = nn.Parameter(torch.zeros(32))
        self.deep = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, user: Tensor, item: Tensor, history: Tensor) -> Tensor:
        u, i, h = self.users(user), self.items(item), self.bag(history)
        wide = (u * i).sum(-1) + self.bias[item]
        return wide + self.deep(torch.cat((u, i, h), dim=-1)).squeeze(-1)


def _click_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, (batch["item"] % 2).to(output.dtype))


def recommender() -> Any:
    """Tables, a bag of embeddings, a bias looked up by index, labels of shape (N)."""
    return _Recommender(), {"user": _ids(20, N), "item": _ids(32, N, seed=1), "history": _ids(16, N, 4, seed=2)}, _click_loss


class _Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.GELU(), nn.Linear(16, 16))
        self.text = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        a = F.normalize(self.image(image), dim=-1)
        b = F.normalize(self.text(text).mean(1), dim=-1)
        logits = a @ b.t() * self.scale.exp()
        same = torch.arange(len(logits))
        return (F.cross_entropy(logits, same) + F.cross_entropy(logits.t(), same)) / 2


def contrastive() -> Any:
    """Every sample against every other (Radford et al. 2021): the batch is on both sides of a product."""
    return _Contrastive(), {"image": _normal(N, 3, 4, 4), "text": _ids(20, N, 5)}


class _Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 5)
        self.register_buffer("average", torch.zeros(16))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden[:, 0] = 0.0
        hidden[:, 1:3] *= 2.0
        hidden.add_(1.0).clamp_(min=-1.0)
        view = hidden[:, 4:8]
        view += hidden[:, 8:12]
        hidden = F.relu_(self.second(hidden)).clone()
        hidden[hidden > 1.0] = 1.0
        with torch.no_grad():
            self.average.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        return F.cross_entropy(self.head(hidden - self.average), y)


def writes() -> Any:
    """In-place writes into slices, views of slices and masks, and a moving average kept in a buffer."""
    return _Writes(), {"x": _normal(N, 8), "y": _ids(5, N)}


class _GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(8, 8), nn.Linear(16, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for _ in range(2):
            sent = torch.relu(self.message(nodes))
            picked = sent.gather(1, edges[..., 0:1].expand(-1, -1, 8))
            got = torch.zeros_like(nodes).scatter_add(1, edges[..., 1:2].expand(-1, -1, 8), picked)
            nodes = nodes + self.update(torch.cat((nodes, got), dim=-1))
        return self.head(nodes.amax(1)).square().mean()


def graph_net() -> Any:
    """Messages gathered and scattered along edges that the batch brings."""
    return _GraphNet(), {"nodes": _normal(N, 5, 8), "edges": _ids(5, N, 12, 2)}


class _StateSpace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 32)
        self.conv = nn.Conv1d(16, 16, 3, padding=2, groups=16)
        self.decay = nn.Parameter(_normal(16, 4, seed=7) * 0.1)
        self.select = nn.Linear(16, 8)
        self.norm = nn.RMSNorm(16)
        self.out = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        hidden, gate = self.inside(x).split(16, dim=-1)
        hidden = F.silu(self.conv(hidden.mT)[..., :length].mT)
        b, c = self.select(hidden).tensor_split(2, dim=-1)
        state = torch.zeros(x.shape[0], 16, 4, dtype=x.dtype)
        out = []
        for t in range(length):
            state = state * torch.exp(-F.softplus(self.decay)) + hidden[:, t, :, None] * b[:, t, None, :]
            out.append((state * c[:, t, None, :]).sum(-1))
        return F.mse_loss(self.out(self.norm(torch.stack(out, 1)) * F.silu(gate)), x)


def mamba() -> Any:
    """A selective state space as a loop, a causal depthwise convolution, a gate."""
    return _StateSpace(), (_normal(N, 5, 8),)


class _Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.recurrent = nn.GRU(16, 16, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) + 0.1 * torch.randn(x.shape[0], x.shape[1], 16)
        for layer in self.layers:
            kept = torch.rand(x.shape[0], 1, 1).add(0.7).floor()  # drops whole samples
            hidden = hidden + kept * F.alpha_dropout(layer(hidden + torch.randn_like(hidden)), 0.2, training=True)
        hidden = F.dropout1d(self.recurrent(hidden)[0], 0.4)
        return self.head(hidden * torch.bernoulli(torch.full_like(hidden, 0.5))).square().mean()


def noisy() -> Any:
    """Every way to draw numbers; a serial run draws others, so only ranks and recomputation can be held against each other."""
    return _Noisy(), (_normal(N, 3, 6),)


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.faint = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.norm(self.before(x)) + 1e-15 * self.faint(x)
        return F.cross_entropy(self.head(torch.tanh(hidden)), y)


def small() -> Any:
    """Two kinds of tiny gradients: real ones of 1e-15 (`faint`), and those that are zero but for rounding (`before.bias`)."""
    return _Small(), {"x": _normal(N, 6), "y": _ids(3, N)}


class _Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        if hidden.sum() > 1e6:
            hidden = hidden * 0.5
        # A softmax in float32 whatever the rest is in, as language models have it.
        return self.second(hidden * torch.softmax(hidden, -1, dtype=torch.float32).to(hidden.dtype))


def branch() -> Any:
    """A branch on the data, which cannot be captured: it trains by data parallelism."""
    return _Branch(), (_normal(N, 6),), lambda output, batch: F.mse_loss(output, batch[0])


class _BranchNoise(_Branch):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.empty_like(x).uniform_(0.99, 1.01))


def branch_noise() -> Any:
    """The same with jitter, as routers of experts have it."""
    return _BranchNoise(), (_normal(N, 6),), lambda output, batch: F.mse_loss(output, batch[0])


class _BranchNorm(_Branch):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def branch_norm() -> Any:
    """The same with batch norm, which must not be divided."""
    return _BranchNorm(), (_normal(N, 6),), lambda output, batch: F.mse_loss(output, batch[0])


@torch.library.custom_op("shardwise_odd_models::halved", mutates_args=())
def _halved(x: Tensor) -> Tensor:
    if x.dtype is not torch.float32:
        raise RuntimeError(f"expected Float32, got {'Double' if x.dtype is torch.float64 else x.dtype}")
    return x * 0.5


_halved.register_fake(torch.empty_like)
_halved.register_autograd(lambda ctx, grad: grad * 0.5)


class _Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return _halved(self.layer(x)).square().mean()


def single() -> Any:
    """An operator of somebody's own, with its own backward, that has no float64."""
    return _Single(), (_normal(N, 6),)


class _AlexNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Sequential(
            nn.Dropout(), nn.Linear(512, 1024), nn.ReLU(), nn.Dropout(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 6)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


def alexnet() -> Any:
    """Images much larger than the convolutions' weights, and fully connected weights much larger than what these read."""
    return _AlexNet(), {"x": _normal(N, 3, 32, 32), "y": _ids(6, N)}, _class_loss
