"""Attention on processors by the library of products that its blocks suit. In: torch's operator and its arguments. Out: its result.

torch multiplies attention's scores block by block. Where float32 products go through oneDNN (`weft.world.matmul_backend`) each of them
takes some microseconds to begin: short sequences and narrow heads are up to 13 times as fast by torch's own products, and long ones up to
1.9 times as fast by oneDNN's. Forward and backward of one call use the same library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from weft.world.matmul_backend import HIGHEST

# Multiplications of one block's product from which on oneDNN is faster: between 0.8 and 1.6 million, over sequences of 32 to 1024 and heads
# of 16 to 128.
LARGE = 1.2e6
KEYS = 512  # of a block, at most


def suits(queries: int, keys: int, width: int) -> bool:
    """Whether oneDNN's products suit attention of so many queries and keys with heads of `width`.

    >>> suits(1024, 1024, 16), suits(256, 256, 96), suits(256, 256, 64), suits(128, 128, 64)
    (True, True, False, False)
    """
    block = 32 if queries < 192 else 64 if queries < 768 else 256  # torch's blocks of queries
    return min(block, queries) * min(KEYS, keys) * width >= LARGE


def _prefers_torch(q: Tensor, k: Tensor) -> bool:
    """Whether torch's own products suit attention of these, and are not what it takes anyway."""
    if torch.get_float32_matmul_precision() == HIGHEST or q.dtype is not torch.float32 or q.device.type != "cpu":
        return False
    return not torch.compiler.is_compiling() and not suits(q.shape[-2], k.shape[-2], q.shape[-1])


@contextmanager
def products(q: Tensor, k: Tensor) -> Iterator[None]:
    """In its block products are those that attention of these queries and keys suits."""
    way = torch.get_float32_matmul_precision()
    if not _prefers_torch(q, k):
        yield
        return
    try:
        torch.set_float32_matmul_precision(HIGHEST)
        yield
    finally:
        torch.set_float32_matmul_precision(way)


def scaled_dot_product_attention(target: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *more: Any, **named: Any) -> Tensor:
    """`target` (torch's scaled_dot_product_attention) of queries [..., queries, width], keys [..., keys, width] and values."""
    if torch.is_autocast_enabled("cpu") or not _prefers_torch(q, k):
        return target(q, k, v, *more, **named)
    way = torch.get_float32_matmul_precision()
    with products(q, k):
        out = target(q, k, v, *more, **named)
    if out.grad_fn is not None:
        out.grad_fn.register_prehook(lambda gradients: torch.set_float32_matmul_precision(HIGHEST))
        out.grad_fn.register_hook(lambda _, gradients: torch.set_float32_matmul_precision(way))
    return out
