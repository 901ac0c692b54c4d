"""Buffer writes while the model runs: updates in place, and norms with running statistics.

A recomputed forward writes nothing, and writes of later microbatches to one buffer may be deferred until after the step, as `DrawState`
says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.lower.kernels import statistics
from shardwise.lower.kernels.randomness import DrawState
from shardwise.lower.kernels.statistics import StatisticsGroups


def write_buffer(target: Callable[..., Any], draw: DrawState, buffer: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Update the buffer in place by `target`, and return it."""
    if draw.is_recomputing:
        return buffer
    later = draw.deferred_writes.get(id(buffer))
    if later is not None:
        later.writes.setdefault(draw.microbatch, []).append(lambda: target(buffer, *args, **kwargs))
        return buffer
    with torch.no_grad():
        target(_detached_alias(buffer) if buffer.requires_grad else buffer, *args, **kwargs)
    return buffer


def _detached_alias(parameter: Tensor) -> Tensor:
    """Return a parameter's memory as a separate tensor: parameters share a buffer, and autograd takes a write to one as one to all."""
    empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return empty.set_(parameter.untyped_storage(), parameter.storage_offset(), parameter.shape, parameter.stride())


def batch_norm(draw: DrawState, parts: StatisticsGroups, x: Tensor, *as_torch: Any) -> Tensor:
    """Return torch's batch norm in training, with statistics over `parts`."""
    weight, bias, mean, var, training, momentum, eps = as_torch[:7]
    if mean is not None and var is not None:
        if draw.is_recomputing:
            mean, var = mean.clone(), var.clone()  # updated in the first forward; without them, torch would save other tensors
        elif id(mean) in draw.deferred_writes:
            running = torch.zeros_like(mean), torch.zeros_like(var)
            for buffer, value in zip((mean, var), running, strict=True):
                draw.deferred_writes[id(buffer)].statistics.setdefault(draw.microbatch, []).append((momentum, value))
            (mean, var), momentum = running, 1.0  # the statistics of this microbatch alone
    if not parts:
        return torch.ops.aten.batch_norm.default(x, weight, bias, mean, var, training, momentum, eps, False)  # type: ignore[no-any-return]
    return statistics.batch_norm(x, weight, bias, mean, var, momentum, eps, parts)


def instance_norm(draw: DrawState, x: Tensor, *as_torch: Any) -> Tensor:
    """Return torch's instance norm in training, with running statistics."""
    weight, bias, mean, var, training, momentum, eps = as_torch[:7]
    if draw.is_recomputing:
        mean, var = mean.clone(), var.clone()
    return torch.ops.aten.instance_norm.default(x, weight, bias, mean, var, training, momentum, eps, False)  # type: ignore[no-any-return]
