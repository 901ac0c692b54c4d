"""Batch norms whose running statistics are plain averages over all batches since their reset (`momentum=None`), as `update_bn` makes them.

Such a layer weighs a batch by the value of its counter, which a graph does not hold. It is traced with a momentum of 1, so that a call
leaves the statistics of its batch in the buffers; these are then averaged with what the buffers were, by the counter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.world import private


def cumulative_norms(batch_norms: Iterable[tuple[str, nn.Module]]) -> tuple[str, ...]:
    """Return the names of batch norms in training mode whose statistics are averages over all batches."""
    return tuple(name for name, norm in batch_norms if _is_cumulative(norm))


def _is_cumulative(norm: Any) -> bool:
    return norm.momentum is None and norm.training and norm.running_mean is not None


@contextmanager
def trace_without_counters(model: nn.Module) -> Iterator[None]:
    """Let such batch norms have a momentum of 1 within a block that traces the model."""
    with _momentum_of_one([m for m in model.modules() if isinstance(m, private.BatchNorm) and m.momentum is None]):
        yield


@contextmanager
def average_cumulatively(model: nn.Module, traced: nn.Module, names: tuple[str, ...]) -> Iterator[None]:
    """Average the statistics of the batch norms `names` over batches within a block that calls the model, a copy of the one that is
    `traced` or itself."""
    norms: list[Any] = [model.get_submodule(name) for name in names]
    before = [[x.detach().clone() for x in (norm.running_mean, norm.running_var)] for norm in norms]
    with _momentum_of_one([*norms, *(traced.get_submodule(name) for name in names if traced is not model)]):
        yield
    with torch.no_grad(), private.as_base_tensor():
        for norm, earlier in zip(norms, before, strict=True):
            factor = 1.0 / norm.num_batches_tracked.to(torch.float64)
            for buffer, old in zip((norm.running_mean, norm.running_var), earlier, strict=True):
                # Not counted as a write: batch norm saves its buffers for backward, which in training does not read them.
                buffer.data.copy_(old.lerp(buffer, factor.to(buffer.dtype)))


@contextmanager
def _momentum_of_one(norms: Iterable[Any]) -> Iterator[None]:
    before = [(norm, norm.momentum) for norm in norms]
    for norm, _ in before:
        norm.momentum = 1.0
    try:
        yield
    finally:
        for norm, momentum in before:
            norm.momentum = momentum
