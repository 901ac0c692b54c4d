"""Attention by the library of products that its blocks suit: the same results, under the way that is meant, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.world.attention_backend import scaled_dot_product_attention
from shardwise.world.matmul_backend import HIGHEST

WAY = "high"  # torch's name of one that is not its own


@pytest.fixture(autouse=True)
def way() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(WAY)
    yield
    torch.set_float32_matmul_precision(before)


class Seen(torch.autograd.Function):
    """Does nothing, and notes the way that is set while backward is at it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[str]) -> Tensor:
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.seen.append(torch.get_float32_matmul_precision())
        return gradient, None


def _heads(length: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, length, 16, generator=generator, dtype=dtype, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize(("length", "within"), [(64, HIGHEST), (1024, WAY)])
def test_short_sequences_are_torchs_own(length: int, within: str) -> None:
    seen: list[str] = []

    def watched(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return F.scaled_dot_product_attention(q, k, v, **named)

    q, k, v = _heads(length)
    before, behind = [], []
    mixed = scaled_dot_product_attention(watched, Seen.apply(q, before), k, v, is_causal=True)  # type: ignore[no-untyped-call]
    out = Seen.apply(mixed, behind)  # type: ignore[no-untyped-call]
    assert seen == [within]
    assert torch.get_float32_matmul_precision() == WAY
    # What runs in backward itself shows in a node that runs between the two hooks.
    node = out.grad_fn.next_functions[0][0]
    inside: list[str] = []
    node.register_prehook(lambda gradients: inside.append(torch.get_float32_matmul_precision()))
    out.square().mean().backward()
    assert (before, behind, inside) == ([WAY], [WAY], [within])
    assert torch.get_float32_matmul_precision() == WAY
    want = _heads(length)
    torch.set_float32_matmul_precision(HIGHEST)
    F.scaled_dot_product_attention(*want, is_causal=True).square().mean().backward()
    for got, x in zip((q, k, v), want, strict=True):
        assert got.grad is not None
        torch.testing.assert_close(got.grad, x.grad, rtol=1e-4, atol=1e-7)


def test_a_call_that_fails_leaves_the_way_as_it_was() -> None:
    def fails(*_: Any, **named: Any) -> Tensor:
        raise RuntimeError("too large")

    with pytest.raises(RuntimeError, match="too large"):
        scaled_dot_product_attention(fails, *_heads(8))
    assert torch.get_float32_matmul_precision() == WAY


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_only_float32_products_have_ways(dtype: torch.dtype) -> None:
    seen: list[str] = []

    def noted(q: Tensor, *_: Tensor) -> Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return q

    scaled_dot_product_attention(noted, *_heads(8, dtype))
    assert seen == [WAY]
