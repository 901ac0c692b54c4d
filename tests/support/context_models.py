"""Small models over sequences, for layouts that cut positions: module, batch and loss of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 48
Made = tuple[nn.Module, dict[str, Tensor], Any]


def _ids(batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(7))


def _labels(ids: Tensor, whole: bool = False) -> Tensor:
    """Most labels at the front do not count, so that ranks have unlike numbers of those that do."""
    ignored = torch.rand(ids.shape, generator=torch.Generator().manual_seed(8)) > torch.linspace(0.1, 0.9, ids.shape[1])
    return ids if whole else ids.masked_fill(ignored, -100)


def _padding(ids: Tensor) -> Tensor:
    lengths = torch.arange(ids.shape[0]) % 3 * 2
    return (torch.arange(ids.shape[1]) < (ids.shape[1] - lengths).unsqueeze(-1)).long()


def _loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = output.loss
    return loss


def _language(name: str, length: int = 12, padded: bool = False, eager: bool = False, **more: Any) -> Made:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(name, **{**sizes, "max_position_embeddings": 64, "use_cache": False, **more})
    config._attn_implementation = "eager" if eager else "sdpa"
    ids = _ids(4, length)
    batch = {"input_ids": ids, "labels": _labels(ids)}
    return AutoModelForCausalLM.from_config(config), batch | ({"attention_mask": _padding(ids)} if padded else {}), _loss


def llama() -> Made:
    return _language("llama", num_key_value_heads=2)


def llama_padded() -> Made:
    return _language("llama", 11, padded=True, num_key_value_heads=1)


def llama_eager() -> Made:
    return _language("llama", 13, eager=True, num_key_value_heads=2)


def mistral() -> Made:
    return _language("mistral", 14, num_key_value_heads=2, sliding_window=4)


def gpt2() -> Made:
    return _language("gpt2", 10, n_embd=32, n_head=4, n_layer=2, n_positions=32, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)


def bert() -> Made:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32
    )
    ids = _ids(4, 10)
    return BertForMaskedLM(config), {"input_ids": ids, "attention_mask": _padding(ids), "labels": _labels(ids)}, _loss


def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = T5Config(**sizes, use_cache=False, decoder_start_token_id=0)
    ids, told = _ids(4, 11), _ids(4, 7)
    return T5ForConditionalGeneration(config), {"input_ids": ids, "attention_mask": _padding(ids), "labels": _labels(told)}, _loss


def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4)
    pixels = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    return ViTForImageClassification(config), {"pixel_values": pixels, "labels": torch.arange(4) % 2}, _loss


class Recurrent(nn.Module):
    """Layers over time between what goes by position."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.lstm, self.gru = nn.LSTM(16, 16, batch_first=True), nn.GRU(16, 16, batch_first=True)
        self.between, self.head = nn.Linear(16, 16), nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.between(self.lstm(self.tokens(ids))[0]).relu()
        logits: Tensor = self.head(x + self.gru(x)[0])
        return logits


def _tokens(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


class _OfIds(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        made: Tensor = self.inner(input_ids)
        return made


def recurrent() -> Made:
    ids = _ids(4, 10)
    return _OfIds(Recurrent()), {"input_ids": ids, "labels": _labels(ids)}, _tokens


class Shifted(nn.Module):
    """Causal convolutions and attention; the loss shifts logits against labels, as language models did, of lengths that do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.conv, self.attention = nn.Conv1d(16, 16, 4, padding=3, groups=16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = x + self.conv(x.transpose(1, 2))[..., : ids.shape[1]].transpose(1, 2)
        y = self.norm(x)
        logits: Tensor = self.head(x + self.attention(y, y, y, need_weights=False)[0])
        return logits


def _shifted(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    logits, labels = output[..., :-1, :].contiguous(), batch["labels"][..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def shifted() -> Made:
    ids = _ids(4, 11)
    return _OfIds(Shifted()), {"input_ids": ids, "labels": _labels(ids)}, _shifted


class Placed(nn.Module):
    """Masked positions take what a table has in order, of samples and positions in one dimension; then each points at a position."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.images = nn.Embedding(VOCABULARY, 16), nn.Parameter(torch.randn(64, 16))
        self.qkv, self.points = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids).flatten(0, 1)
        x = x.masked_scatter((ids.flatten() % 3 == 0).unsqueeze(-1).expand_as(x), self.images).view(*ids.shape, 16)
        x = x + F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1), is_causal=True)
        pointed: Tensor = self.points(x) @ x.transpose(1, 2)
        return pointed


def _pointed(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), (batch["labels"] % output.shape[1]).flatten())


def placed() -> Made:
    ids = _ids(4, 8)
    return _OfIds(Placed()), {"input_ids": ids, "labels": _labels(ids, whole=True)}, _pointed


class Running(nn.Module):
    """Sums that run over the positions of a sequence and over samples, between attention to all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.qkv, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 48), nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = x + F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))
        x = x + 0.1 * x.cumsum(1) + 0.1 * torch.tanh(x).cumsum(0)
        logits: Tensor = self.head(x)
        return logits


def _classes(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def running() -> Made:
    ids = _ids(4, 7)
    return _OfIds(Running()), {"input_ids": ids, "labels": _labels(ids, whole=True)}, _classes


class Banded(nn.Module):
    """Grouped queries that see five positions back, by a mask of positions alone."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.qkv, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 32), nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in self.qkv(x).split((16, 8, 8), -1))
        back = torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1])
        x = x + F.scaled_dot_product_attention(q, k, v, (back >= 0) & (back < 5), enable_gqa=True).transpose(1, 2).flatten(2)
        logits: Tensor = self.head(x)
        return logits


def banded() -> Made:
    ids = _ids(4, 11)
    return _OfIds(Banded()), {"input_ids": ids, "labels": _labels(ids, whole=True)}, _classes


class PositionsFirst(nn.Module):
    """Attention that is written out, of positions in front of samples; what it makes is samples in front, in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.qkv, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 48), nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x_SBD = self.tokens(ids.transpose(0, 1))
        q, k, v = self.qkv(x_SBD).chunk(3, -1)
        x_SBD = x_SBD + torch.einsum("bij,jbd->ibd", torch.einsum("ibd,jbd->bij", q, k).softmax(-1), v)
        logits: Tensor = self.head(x_SBD.transpose(0, 1).contiguous())
        return logits


def positions_first() -> Made:
    ids = _ids(4, 12)
    return _OfIds(PositionsFirst()), {"input_ids": ids, "labels": _labels(ids, whole=True)}, _classes
