"""What writes buffers while the model runs: updates in place, and norms that keep running statistics.

A forward that is repeated writes nothing, and what later microbatches would write to one buffer may be kept for after the step: `Draw` says
which. In: a rank's tensors. Out: what the operator makes, or the buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.lower.kernels import statistics
from weft.lower.kernels.randomness import Draw
from weft.lower.kernels.statistics import Parts


def write_buffer(target: Callable[..., Any], draw: Draw, buffer: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The buffer, which `target` updates in place."""
    if draw.recomputing:
        return buffer
    later = draw.later.get(id(buffer))
    if later is not None:
        later.writes.setdefault(draw.microbatch, []).append(lambda: target(buffer, *args, **kwargs))
        return buffer
    with torch.no_grad():
        target(_apart(buffer) if buffer.requires_grad else buffer, *args, **kwargs)
    return buffer


def _apart(parameter: Tensor) -> Tensor:
    """The memory of a parameter as a tensor of its own: parameters lie in one buffer, and autograd takes a write to one as one to all."""
    empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return empty.set_(parameter.untyped_storage(), parameter.storage_offset(), parameter.shape, parameter.stride())


def batch_norm(draw: Draw, parts: Parts, x: Tensor, *as_torch: Any) -> Tensor:
    """As torch's own in training, of statistics over `parts`."""
    weight, bias, mean, var, training, momentum, eps = as_torch[:7]
    if mean is not None and var is not None:
        if draw.recomputing:
            mean, var = mean.clone(), var.clone()  # written the first time; left out, torch would keep other tensors for backward
        elif id(mean) in draw.later:
            running = torch.zeros_like(mean), torch.zeros_like(var)
            for buffer, value in zip((mean, var), running, strict=True):
                draw.later[id(buffer)].statistics.setdefault(draw.microbatch, []).append((momentum, value))
            (mean, var), momentum = running, 1.0  # what this microbatch finds, alone
    if not parts:
        return torch.ops.aten.batch_norm.default(x, weight, bias, mean, var, training, momentum, eps, False)  # type: ignore[no-any-return]
    return statistics.batch_norm(x, weight, bias, mean, var, momentum, eps, parts)


def instance_norm(draw: Draw, x: Tensor, *as_torch: Any) -> Tensor:
    """As torch's own in training, with running statistics."""
    weight, bias, mean, var, training, momentum, eps = as_torch[:7]
    if draw.recomputing:
        mean, var = mean.clone(), var.clone()
    return torch.ops.aten.instance_norm.default(x, weight, bias, mean, var, training, momentum, eps, False)  # type: ignore[no-any-return]
