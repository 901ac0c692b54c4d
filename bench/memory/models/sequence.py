"""Models of sequences, graphs, tables and films. Each factory returns (module, batch); the module's output is its loss."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES = 8
VOCABULARY = 256

Made = tuple[nn.Module, dict[str, Tensor]]


def normal(*shape: int) -> Tensor:
    """Normal numbers, the same at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def integers(below: int, *shape: int, seed: int = 0) -> Tensor:
    """Integers from 0, the same at every call."""
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def texts(length: int) -> dict[str, Tensor]:
    """Tokens and what should follow them."""
    return {"tokens": integers(VOCABULARY, SAMPLES, length), "labels": integers(VOCABULARY, SAMPLES, length, seed=1)}


class LanguageModel(nn.Module):
    """An embedding, blocks, a norm, a head."""

    def __init__(self, blocks: Iterable[nn.Module], hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class RecurrentTranslator(nn.Module):
    """A recurrent encoder both ways, a recurrent decoder, additive attention between them (Bahdanau et al. 2015)."""

    def __init__(self, cell: type[nn.GRU] | type[nn.LSTM], hidden: int = 192) -> None:
        super().__init__()
        self.source_embedding = nn.Embedding(VOCABULARY, hidden)
        self.target_embedding = nn.Embedding(VOCABULARY, hidden)
        self.encoder = cell(hidden, hidden, 1, batch_first=True, bidirectional=True)
        self.reduction = nn.Linear(2 * hidden, hidden)
        self.decoder = cell(hidden, hidden, 2, batch_first=True)
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.score = nn.Linear(hidden, 1)
        self.output = nn.Linear(2 * hidden, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        memory = self.reduction(self.encoder(self.source_embedding(source))[0])
        h = self.decoder(self.target_embedding(target))[0]
        scores = self.score(torch.tanh(self.query(h)[:, :, None] + self.key(memory)[:, None]))[..., 0]
        context = scores.softmax(-1) @ memory
        return F.cross_entropy(self.output(torch.cat([h, context], -1)).flatten(0, 1), labels.flatten())


def translations() -> dict[str, Tensor]:
    """Sources of 48 tokens, targets of 40."""
    return {
        "source": integers(VOCABULARY, SAMPLES, 48),
        "target": integers(VOCABULARY, SAMPLES, 40),
        "labels": integers(VOCABULARY, SAMPLES, 40),
    }


def gru_attention() -> Made:
    """Translator of GRUs."""
    return RecurrentTranslator(nn.GRU), translations()


def lstm_attention() -> Made:
    """Translator of LSTMs."""
    return RecurrentTranslator(nn.LSTM), translations()


class RelativeAttentionBlock(nn.Module):
    """Causal attention by content and by distance, written out, and an MLP with dropout (Dai et al. 2019)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(hidden, 3 * hidden, bias=False)
        self.distances = nn.Linear(hidden, hidden, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(heads, hidden // heads))
        self.distance_bias = nn.Parameter(torch.zeros(heads, hidden // heads))
        self.attention_norm = nn.LayerNorm(hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        samples, length, hidden = x.shape
        width = hidden // self.heads
        query, key, value = (part.view(samples, length, self.heads, width) for part in self.query_key_value(x).chunk(3, -1))
        positions = torch.arange(length - 1, -1, -1.0)
        frequencies = 1 / (10000 ** (torch.arange(0, hidden, 2.0) / hidden))
        angles = torch.outer(positions, frequencies)
        distances = self.distances(torch.cat([angles.sin(), angles.cos()], -1)).view(length, self.heads, width)
        by_content = torch.einsum("bihd,bjhd->bhij", query + self.content_bias, key)
        by_distance = torch.einsum("bihd,jhd->bhij", query + self.distance_bias, distances)
        by_distance = F.pad(by_distance, (1, 0)).view(samples, self.heads, length + 1, length)[:, :, 1:]
        by_distance = by_distance.reshape(samples, self.heads, length, length)
        scores = (by_content + by_distance) * width**-0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        context = torch.einsum("bhij,bjhd->bihd", weights, value).reshape(samples, length, hidden)
        x = self.attention_norm(x + self.output(context))
        return self.mlp_norm(x + self.mlp(x))


def transformer_xl() -> Made:
    """Transformer-XL, without the memory of earlier segments."""
    return LanguageModel([RelativeAttentionBlock(128, 4) for _ in range(4)], 128), texts(128)


class LinearAttentionBlock(nn.Module):
    """Attention by positive random features, and an MLP (Choromanski et al. 2021)."""

    def __init__(self, hidden: int, heads: int, features: int = 64) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)
        self.attention_norm = nn.LayerNorm(hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        self.register_buffer("projection", torch.randn(hidden // heads, features))

    def features(self, x: Tensor) -> Tensor:
        """Random features of queries or keys."""
        projected = x @ self.projection
        norm = x.pow(2).sum(-1, keepdim=True) / 2
        return torch.exp(projected - norm - projected.amax(-1, keepdim=True).detach()) / 8 + 1e-4

    def forward(self, x: Tensor) -> Tensor:
        samples, length, hidden = x.shape
        parts = self.query_key_value(self.attention_norm(x)).chunk(3, -1)
        query, key, value = (part.view(samples, length, self.heads, -1).transpose(1, 2) for part in parts)
        query = self.features(query * 0.3)
        key = self.features(key * 0.3)
        sums = torch.einsum("bhsf,bhsd->bhfd", key, value)
        scale = 1 / torch.einsum("bhsf,bhf->bhs", query, key.sum(2))
        context = torch.einsum("bhsf,bhfd,bhs->bhsd", query, sums, scale)
        x = x + self.output(context.transpose(1, 2).reshape(samples, length, hidden))
        return x + self.mlp(self.mlp_norm(x))


def performer() -> Made:
    """Performer, both ways."""
    return LanguageModel([LinearAttentionBlock(128, 4) for _ in range(4)], 128), texts(256)


class SelectiveStateSpace(nn.Module):
    """A state space whose steps depend on the input, position by position (Gu and Dao 2023)."""

    def __init__(self, hidden: int, states: int = 8, rank: int = 8) -> None:
        super().__init__()
        inner = 2 * hidden
        self.states = states
        self.rank = rank
        self.norm = nn.LayerNorm(hidden)
        self.input = nn.Linear(hidden, 2 * inner, bias=False)
        self.convolution = nn.Conv1d(inner, inner, 4, padding=3, groups=inner)
        self.selection = nn.Linear(inner, 2 * states + rank, bias=False)
        self.step = nn.Linear(rank, inner)
        self.output = nn.Linear(inner, hidden, bias=False)
        self.log_decay = nn.Parameter(torch.log(torch.arange(1.0, states + 1).repeat(inner, 1)))
        self.skip = nn.Parameter(torch.ones(inner))

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = self.input(self.norm(x)).chunk(2, -1)
        length = inner.shape[1]
        inner = F.silu(self.convolution(inner.transpose(1, 2))[..., :length].transpose(1, 2))
        step, entering, leaving = self.selection(inner).split([self.rank, self.states, self.states], -1)
        step = F.softplus(self.step(step))
        decay = torch.exp(step[..., None] * -torch.exp(self.log_decay))
        added = step[..., None] * entering[:, :, None] * inner[..., None]
        state = torch.zeros_like(added[:, 0])
        outputs = []
        for position in range(length):
            state = decay[:, position] * state + added[:, position]
            outputs.append((state * leaving[:, position, None]).sum(-1))
        return x + self.output((torch.stack(outputs, 1) + inner * self.skip) * F.silu(gate))


def mamba() -> Made:
    """Mamba, its scan written as a loop."""
    return LanguageModel([SelectiveStateSpace(128) for _ in range(2)], 128), texts(24)


class DiagonalStateSpace(nn.Module):
    """A diagonal state space as a long convolution by Fourier transforms (Gu et al. 2022)."""

    def __init__(self, hidden: int, states: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.log_step = nn.Parameter(torch.rand(hidden) - 4)
        self.leaving = nn.Parameter(torch.randn(hidden, states, 2) * 0.3)
        self.log_decay = nn.Parameter(torch.zeros(hidden, states))
        self.frequency = nn.Parameter(torch.arange(states) * math.pi * torch.ones(hidden, 1))
        self.skip = nn.Parameter(torch.randn(hidden))
        self.output = nn.Sequential(nn.Conv1d(hidden, 2 * hidden, 1), nn.GLU(dim=1))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(x).transpose(1, 2)
        length = inner.shape[-1]
        step = self.log_step.exp()
        poles = -self.log_decay.exp() + 1j * self.frequency
        steps = poles * step[:, None]
        exponents = steps[..., None] * torch.arange(length)
        leaving = torch.view_as_complex(self.leaving) * (torch.exp(steps) - 1) / poles
        kernel = 2 * torch.einsum("hn,hnl->hl", leaving, torch.exp(exponents)).real
        product = torch.fft.rfft(inner, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
        y = torch.fft.irfft(product, n=2 * length)[..., :length] + inner * self.skip[:, None]
        return x + self.output(F.gelu(y)).transpose(1, 2)


def s4d() -> Made:
    """S4D."""
    return LanguageModel([DiagonalStateSpace(128) for _ in range(3)], 128), texts(256)


class FourierBlock(nn.Module):
    """A Fourier transform over tokens and channels, and an MLP (Lee-Thorp et al. 2022)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.fourier_norm = nn.LayerNorm(hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        x = self.fourier_norm(x + torch.fft.fft2(x, dim=(-2, -1)).real)
        return self.mlp_norm(x + self.mlp(x))


def fnet() -> Made:
    """FNet."""
    return LanguageModel([FourierBlock(128) for _ in range(3)], 128), texts(256)


class WaveNet(nn.Module):
    """Gated causal convolutions of growing dilation, whose skips are added up (van den Oord et al. 2016)."""

    def __init__(self, channels: int = 48, depth: int = 8) -> None:
        super().__init__()
        self.input = nn.Embedding(VOCABULARY, channels)
        self.dilated = nn.ModuleList(nn.Conv1d(channels, 2 * channels, 2, dilation=2 ** (i % 4)) for i in range(depth))
        self.residual = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in range(depth))
        self.skips = nn.ModuleList(nn.Conv1d(channels, 2 * channels, 1) for _ in range(depth))
        self.inner = nn.Conv1d(2 * channels, 2 * channels, 1)
        self.output = nn.Conv1d(2 * channels, VOCABULARY, 1)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = self.input(tokens).transpose(1, 2)
        total: Tensor | int = 0
        for i, (dilated, residual, skip) in enumerate(zip(self.dilated, self.residual, self.skips, strict=True)):
            value, gate = dilated(F.pad(h, (2 ** (i % 4), 0))).chunk(2, 1)
            gated = torch.tanh(value) * torch.sigmoid(gate)
            total = total + skip(gated)
            h = h + residual(gated)
        return F.cross_entropy(self.output(F.relu(self.inner(F.relu(total)))), labels)


def wavenet() -> Made:
    """WaveNet."""
    return WaveNet(), texts(512)


class Perceiver(nn.Module):
    """Learned latents that read a long input twice, with layers of their own between (Jaegle et al. 2021)."""

    def __init__(self, hidden: int = 128, latents: int = 64, inputs: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(latents, hidden) * 0.02)
        self.input = nn.Linear(inputs, hidden)
        self.reading = nn.ModuleList(nn.MultiheadAttention(hidden, 4, batch_first=True) for _ in range(2))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, 4, 4 * hidden, 0.1, "gelu", batch_first=True, norm_first=True) for _ in range(4)
        )
        self.key_norm = nn.LayerNorm(hidden)
        self.query_norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, places: Tensor, labels: Tensor) -> Tensor:
        x = self.key_norm(self.input(places))
        h = self.latents.expand(x.shape[0], -1, -1)
        for i, layer in enumerate(self.layers):
            if i % 2 == 0:
                h = h + self.reading[i // 2](self.query_norm(h), x, x, need_weights=False)[0]
            h = layer(h)
        return F.cross_entropy(self.head(h.mean(1)), labels)


def perceiver() -> Made:
    """Perceiver."""
    return Perceiver(), {"places": normal(SAMPLES, 1024, 16), "labels": integers(10, SAMPLES)}


class GraphAttention(nn.Module):
    """Attention over a node's neighbours, by sums over edges (Veličković et al. 2018)."""

    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.outputs = outputs
        self.linear = nn.Linear(inputs, heads * outputs, bias=False)
        self.source_weights = nn.Parameter(torch.randn(heads, outputs) * 0.1)
        self.target_weights = nn.Parameter(torch.randn(heads, outputs) * 0.1)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        h = self.linear(x).view(-1, self.heads, self.outputs)
        scores = (h * self.source_weights).sum(-1)[source] + (h * self.target_weights).sum(-1)[target]
        scores = F.leaky_relu(scores, 0.2).exp()
        total = torch.zeros(h.shape[0], self.heads).index_add(0, target, scores)
        weights = scores / (total[target] + 1e-9)
        return torch.zeros_like(h).index_add(0, target, h[source] * weights[..., None]).flatten(1)


class GraphNetwork(nn.Module):
    """Two layers of graph attention, one of sums, a mean over nodes, a head. The edges of all samples are those of one graph."""

    def __init__(self, hidden: int = 64, inputs: int = 32, classes: int = 8) -> None:
        super().__init__()
        self.first = GraphAttention(inputs, hidden // 4, 4)
        self.second = GraphAttention(hidden, hidden // 4, 4)
        self.third = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, nodes: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        samples, count, _ = nodes.shape
        offsets = (torch.arange(samples) * count)[:, None]
        source = (edges[:, 0] + offsets).flatten()
        target = (edges[:, 1] + offsets).flatten()
        h = F.elu(self.first(nodes.flatten(0, 1), source, target))
        h = F.elu(self.second(h, source, target))
        h = F.relu(torch.zeros_like(h).index_add(0, target, self.third(h)[source]))
        return F.cross_entropy(self.head(h.view(samples, count, -1).mean(1)), labels)


def gat() -> Made:
    """Graph attention network."""
    return GraphNetwork(), {"nodes": normal(SAMPLES, 256, 32), "edges": integers(256, SAMPLES, 2, 2048), "labels": integers(8, SAMPLES)}


class Recommender(nn.Module):
    """Bags of embeddings and dense features, multiplied with one another (Naumov et al. 2019)."""

    def __init__(self, hidden: int = 32, rows: int = 8000, tables: int = 6) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, hidden, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, hidden), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(hidden + pairs, 256), nn.ReLU(), nn.Linear(256, 1))
        first, second = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("first", first)
        self.register_buffer("second", second)

    def forward(self, features: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.bottom(features)
        vectors = torch.stack([h, *(bag(ids[:, k]) for k, bag in enumerate(self.bags))], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.first, self.second]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([h, products], 1))[:, 0], labels)


def dlrm() -> Made:
    """Deep learning recommendation model."""
    return Recommender(), {"features": normal(2048, 13), "ids": integers(8000, 2048, 6, 10), "labels": torch.rand(2048)}


class ConvolutionalLSTM(nn.Module):
    """Tells each picture of a film by those before it (Shi et al. 2015)."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.channels = channels
        self.gates = nn.Conv2d(3 + channels, 4 * channels, 3, padding=1)
        self.output = nn.Conv2d(channels, 3, 1)

    def forward(self, films: Tensor) -> Tensor:
        samples, length, _, height, width = films.shape
        hidden = cell = torch.zeros(samples, self.channels, height, width)
        told = []
        for time in range(length - 1):
            enter, forget, leave, new = self.gates(torch.cat([films[:, time], hidden], 1)).chunk(4, 1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            hidden = leave.sigmoid() * cell.tanh()
            told.append(self.output(hidden))
        return F.mse_loss(torch.stack(told, 1), films[:, 1:])


def convlstm() -> Made:
    """Convolutional LSTM."""
    return ConvolutionalLSTM(), {"films": normal(SAMPLES, 6, 3, 32, 32)}


class SoftExperts(nn.Module):
    """Every expert computes every token; the two best by the gate are added up."""

    def __init__(self, hidden: int, experts: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.gate = nn.Linear(hidden, experts)
        self.up = nn.Parameter(torch.randn(experts, hidden, 4 * hidden) * 0.05)
        self.down = nn.Parameter(torch.randn(experts, 4 * hidden, hidden) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        gates = self.gate(h).softmax(-1)
        best, which = gates.topk(2, -1)
        weights = torch.zeros_like(gates).scatter(-1, which, best)
        inner = F.gelu(torch.einsum("bsd,edf->bsef", h, self.up))
        y = torch.einsum("bsef,efd->bsed", inner, self.down)
        return x + (y * weights[..., None]).sum(2)


def soft_moe() -> Made:
    """Soft mixture of experts."""
    return LanguageModel([SoftExperts(96) for _ in range(3)], 96), texts(128)


FACTORIES = (
    gru_attention, lstm_attention, transformer_xl, performer, mamba, s4d, fnet, wavenet, perceiver, gat, dlrm, convlstm, soft_moe,
)  # fmt: skip
