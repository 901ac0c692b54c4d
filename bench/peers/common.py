"""What every peer shares: the model, its loss, the optimizer, rows of the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bench.common.case import Case
from shardwise.zoo import gpt
from shardwise.zoo.resolve import resolve

Step = Callable[[Tensor], "Tensor | float | None"]


def model_of(case: Case) -> gpt.GPT:
    """The whole model with the case's initial values, the same on every rank."""
    torch.manual_seed(case.seed)
    model = resolve(case.model).make()
    assert isinstance(model, gpt.GPT)  # cases name models of this family
    return model


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The next token's cross-entropy; `tokens` are inputs and, one further, labels."""
    return gpt.compute_loss(model(tokens[:, :-1]), {"labels": tokens[:, 1:]})


def adamw(parameters: Iterable[Any], case: Case) -> torch.optim.Optimizer:
    """PyTorch's AdamW, fused. It does not take distributed and plain tensors in one group, so each kind has its own."""
    kinds: dict[type, list[Any]] = {}
    for parameter in parameters:
        kinds.setdefault(type(parameter.data), []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in kinds.values()], lr=case.lr, fused=True)


def autocast_if(on: bool) -> contextlib.AbstractContextManager[Any]:
    """bfloat16 autocast, or nothing."""
    return torch.autocast("cpu", dtype=torch.bfloat16) if on else contextlib.nullcontext()


def my_rows(tokens: Tensor, rank: int, num_ranks: int) -> Tensor:
    """This rank's rows of the whole batch."""
    each = tokens.shape[0] // num_ranks
    return tokens[rank * each : (rank + 1) * each]
