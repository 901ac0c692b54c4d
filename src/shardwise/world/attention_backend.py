"""Attention on CPUs with the faster matmul library for its block sizes. In: torch's operator and its arguments. Out: its result.

torch multiplies attention's scores block by block. Where float32 matmuls go through oneDNN (`shardwise.world.matmul_backend`) each of them
has some microseconds of overhead: short sequences and narrow heads are up to 13 times as fast with torch's own matmul, and long ones up to
1.9 times as fast with oneDNN's. Forward and backward of one call use the same library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwise.world.matmul_backend import HIGHEST

# Multiplications of one block's matmul from which on oneDNN is faster: between 0.8 and 1.6 million, over sequences of 32 to 1024 and heads
# of 16 to 128.
MIN_BLOCK_MULTIPLICATIONS = 1.2e6
BLOCK_KEYS = 512  # most keys of a block


def suits_onednn(queries: int, keys: int, width: int) -> bool:
    """Return whether oneDNN is faster for attention of so many queries and keys with heads of `width`.

    >>> suits_onednn(1024, 1024, 16), suits_onednn(256, 256, 96), suits_onednn(256, 256, 64), suits_onednn(128, 128, 64)
    (True, True, False, False)
    """
    block = 32 if queries < 192 else 64 if queries < 768 else 256  # torch's blocks of queries
    return min(block, queries) * min(BLOCK_KEYS, keys) * width >= MIN_BLOCK_MULTIPLICATIONS


def _prefers_torch(q: Tensor, k: Tensor) -> bool:
    """Return whether torch's own matmul is faster for attention of these, and is not used anyway."""
    if torch.get_float32_matmul_precision() == HIGHEST or q.dtype is not torch.float32 or q.device.type != "cpu":
        return False
    return not torch.compiler.is_compiling() and not suits_onednn(q.shape[-2], k.shape[-2], q.shape[-1])


@contextmanager
def use_attention_backend(q: Tensor, k: Tensor) -> Iterator[None]:
    """Context in which matmuls use the library that is faster for attention of these queries and keys."""
    precision = torch.get_float32_matmul_precision()
    if not _prefers_torch(q, k):
        yield
        return
    try:
        torch.set_float32_matmul_precision(HIGHEST)
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def scaled_dot_product_attention(target: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *more: Any, **named: Any) -> Tensor:
    """Return `target` (torch's scaled_dot_product_attention) of queries [..., queries, width], keys [..., keys, width] and values."""
    if torch.is_autocast_enabled("cpu") or not _prefers_torch(q, k):
        return target(q, k, v, *more, **named)
    precision = torch.get_float32_matmul_precision()
    with use_attention_backend(q, k):
        out = target(q, k, v, *more, **named)
    if out.grad_fn is not None:
        out.grad_fn.register_prehook(lambda gradients: torch.set_float32_matmul_precision(HIGHEST))
        out.grad_fn.register_hook(lambda _, gradients: torch.set_float32_matmul_precision(precision))
    return out
