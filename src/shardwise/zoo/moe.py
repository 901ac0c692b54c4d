"""GShard's mixture of experts (Lepikhin et al. 2020) in a GPT: in every second block, each token goes to the best two experts.

Input: `input_ids` BS. Output: logits BSV and the weighted balance loss. The batch has `labels` BS as well, each the *next* token.
With a `capacity` factor every expert takes at most capacity x S / E tokens of each sample, and tokens over capacity are dropped: shapes do
not depend on data, and the work is that of the published models. With capacity 0 there is no limit: every expert computes every token and
a mask selects, which is E / top times the work.

Shape letters: B batch, S sequence, N = B x S tokens, D model, E experts, C capacity of an expert, F feed-forward, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.errors import ModelError
from shardwise.zoo import shared_layers


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Sizes. `inner` is the feed-forward width, 0 for 8 x hidden; `top` the experts of a token; `balance` weights the balance loss.

    `capacity`: the capacity factor, relative to an even share with one expert a token; 0 for no limit.
    """

    vocabulary: int = 32000
    sequence: int = 1024
    hidden: int = 768
    layers: int = 8
    heads: int = 16
    experts: int = 8
    inner: int = 0
    top: int = 2
    every: int = 2
    balance: float = 0.01
    capacity: float = 0.0

    def __post_init__(self) -> None:
        shared_layers.check_sizes(self, may_be_zero=("inner",))
        shared_layers.check_heads(self.hidden, self.heads)
        if self.top > self.experts:
            raise ModelError(f"top = {self.top} experts of a token, but there are only experts = {self.experts}")
        if not 0 <= self.capacity <= self.experts:
            raise ModelError(f"capacity = {self.capacity} must lie from 0 to experts = {self.experts}, at which no token is left out")

    @property
    def expert_capacity(self) -> int:
        """Maximum number of tokens of a sample that an expert takes; 0 for no limit."""
        return math.ceil(self.capacity * self.sequence / self.experts)


class Experts(nn.Module):
    """A gate and E feed-forward layers: BSD -> BSD, and the load imbalance (a scalar, 1 when balanced)."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.top, self.experts, self.capacity = config.top, config.experts, config.expert_capacity
        inner = config.inner or 8 * config.hidden
        self.gate = nn.Linear(config.hidden, config.experts, bias=False)
        self.up = nn.Parameter(torch.empty(config.experts, config.hidden, inner))
        self.down = nn.Parameter(torch.empty(config.experts, inner, config.hidden))
        nn.init.normal_(self.up, std=0.02)
        nn.init.normal_(self.down, std=0.02 / (2 * config.layers) ** 0.5)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        share_BSE = F.softmax(self.gate(x_BSD), dim=-1)
        best_BST, which_BST = share_BSE.topk(self.top, dim=-1)
        weight_BSE = torch.zeros_like(share_BSE).scatter(-1, which_BST, best_BST / best_BST.sum(-1, keepdim=True))

        if self.capacity:
            return self._dispatch_tokens(x_BSD, weight_BSE, which_BST), self._imbalance(share_BSE, which_BST)
        x_ND = x_BSD.flatten(0, 1)
        x_END = x_ND.expand(self.experts, -1, -1)
        y_END = self._feed_forward(x_END)
        weight_EN1 = weight_BSE.flatten(0, 1).t().unsqueeze(-1)
        y_BSD = (y_END * weight_EN1).sum(0).view_as(x_BSD)
        return y_BSD, self._imbalance(share_BSE, which_BST)

    def _feed_forward(self, x_END: Tensor) -> Tensor:
        return torch.bmm(F.gelu(torch.bmm(x_END, self.up)), self.down)

    def _dispatch_tokens(self, x_BSD: Tensor, weight_BSE: Tensor, which_BST: Tensor) -> Tensor:
        """Dispatch tokens to experts, apply these, and combine by gate weight (Lepikhin et al. 2020, algorithm 1, section 3.1).

        First choices are dispatched before second ones, earlier tokens before later; a sample is the group.
        """
        batch, _, hidden = x_BSD.shape
        used_B1E = torch.zeros_like(weight_BSE[:, :1])
        places_C = torch.arange(self.capacity, device=x_BSD.device)
        sent_BSEC = torch.zeros_like(weight_BSE).unsqueeze(-1) * places_C
        for choice in range(self.top):
            chosen_BSE = torch.zeros_like(weight_BSE).scatter(-1, which_BST[..., choice : choice + 1], 1.0)
            place_BSE = torch.cumsum(chosen_BSE, dim=1) - chosen_BSE + used_B1E
            used_B1E = used_B1E + chosen_BSE.sum(1, keepdim=True)
            sent_BSEC = sent_BSEC + chosen_BSE.unsqueeze(-1) * (place_BSE.unsqueeze(-1) == places_C).to(x_BSD.dtype)
        sent_BSX = sent_BSEC.flatten(2)  # X = E x C
        x_BXD = torch.bmm(sent_BSX.transpose(1, 2), x_BSD)
        x_END = x_BXD.view(batch, self.experts, self.capacity, hidden).transpose(0, 1).reshape(self.experts, -1, hidden)
        y_EBCD = self._feed_forward(x_END).view(self.experts, batch, self.capacity, hidden)
        y_BXD = y_EBCD.transpose(0, 1).reshape(batch, -1, hidden)
        return torch.bmm((sent_BSEC * weight_BSE.unsqueeze(-1)).flatten(2), y_BXD)

    def _imbalance(self, share_BSE: Tensor, which_BST: Tensor) -> Tensor:
        """Mean over samples of E x sum over experts of (tokens whose first choice it is, as a share) x (mean of its gate).

        Lepikhin et al. 2020, algorithm 1, with one sample as the group.
        """
        first_BSE = torch.zeros_like(share_BSE).scatter(-1, which_BST[..., :1], 1.0)
        return self.experts * (first_BSE.mean(1) * share_BSE.mean(1)).sum(-1).mean()


class MoEBlock(nn.Module):
    """BSD -> BSD. `mixed` blocks have experts, the others one feed-forward layer of the same width."""

    def __init__(self, config: MoEConfig, mixed: bool) -> None:
        super().__init__()
        self.mixed = mixed
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = shared_layers.Attention(config.hidden, config.heads, causal=True)
        self.mlp_norm = nn.LayerNorm(config.hidden)
        self.mlp = Experts(config) if mixed else shared_layers.FeedForward(config.hidden, config.inner or 8 * config.hidden)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor | None]:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD))
        if not self.mixed:
            return x_BSD + self.mlp(self.mlp_norm(x_BSD)), None
        y_BSD, imbalance = self.mlp(self.mlp_norm(x_BSD))
        return x_BSD + y_BSD, imbalance


class MoEGPT(nn.Module):
    """Map `input_ids` BS to logits BSV and the weighted balance loss (a scalar); `labels` are read by the loss only."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.positions = nn.Embedding(config.sequence, config.hidden)
        self.layers = nn.ModuleList(MoEBlock(config, mixed=i % config.every == config.every - 1) for i in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        shared_layers.initialise_weights(self)
        shared_layers.initialise_residual_weights(self, config.layers)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x_BSD = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        total = x_BSD.new_zeros(())
        for block in self.layers:
            x_BSD, imbalance = block(x_BSD)
            total = total if imbalance is None else total + imbalance
        return self.head(self.norm(x_BSD)), self.config.balance * total


def _alpa_size(hidden: int, layers: int, experts: int) -> MoEConfig:
    """Return a size of the table of GShard MoE models of Zheng et al. 2022 (Alpa), with GShard's capacity for two experts a token."""
    return MoEConfig(hidden=hidden, layers=layers, experts=experts, capacity=2.0)


SIZES = {
    "moe-tiny": MoEConfig(vocabulary=96, sequence=32, hidden=64, layers=4, heads=8, inner=128),
    "gshard-tiny": MoEConfig(vocabulary=96, sequence=32, hidden=64, layers=4, heads=8, inner=128, capacity=2.0),
    "moe-380m": _alpa_size(768, 8, 8),
    "moe-690m": _alpa_size(768, 8, 16),
    "moe-1.3b": _alpa_size(768, 16, 16),
    "moe-2.4b": _alpa_size(1024, 16, 16),
    "moe-10b": _alpa_size(1536, 16, 32),
    "moe-27b": _alpa_size(2048, 16, 48),
    "moe-70b": _alpa_size(2048, 32, 64),
}

example_batch = shared_layers.draw_text_batch


def compute_loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the next token, in nats, and the weighted balance loss."""
    logits_BSV, balance = output
    return shared_layers.compute_token_loss(logits_BSV, batch) + balance
