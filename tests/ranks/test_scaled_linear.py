"""Linear layers of 8 bits: what is rounded, that ranks with pieces of a row round alike, and whole models against the serial run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_narrow_verification import verified

from weft.lower import call
from weft.lower.kernels import scaled
from weft.lower.kernels.scaled import fits, product, scaled_linear
from weft.world import private
from weft.world.world import World


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """Each row in 8 bits and back, by its definition: 3 bits of fraction below the power of two that brings its largest to at most 448."""
    largest = x.abs().amax(1, keepdim=True).float()
    scale = torch.ones_like(largest)
    while (largest / scale > 448).any() or (largest / scale <= 224).any():
        scale = torch.where(largest / scale > 448, scale * 2, torch.where(largest / scale <= 224, scale / 2, scale))
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize(("m", "n", "k"), [(32, 48, 64), (5, 16, 32), (7, 9, 11), (1, 1, 1)])
def test_a_product_is_that_of_rounded_rows(m: int, n: int, k: int) -> None:
    torch.manual_seed(m)
    a, b = (torch.randn(rows, k).mul(torch.rand(rows, 1) * 1e3).bfloat16() for rows in (m, n))
    want = (_rounded(a).double() @ _rounded(b).double().T).bfloat16()
    assert torch.allclose(product(a, b, ()).float(), want.float(), rtol=2**-7, atol=float(want.float().abs().max()) * 2**-8)


def test_gradients_are_of_rounded_operands_and_the_weights_of_16_bits() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(8, 32).bfloat16().requires_grad_(), torch.randn(16, 32).requires_grad_()
    grad = torch.randn(8, 16).bfloat16()
    scaled_linear((), (), x, weight).backward(grad)
    want = _rounded(grad) @ _rounded(weight.detach().bfloat16().T.contiguous()).T
    assert torch.allclose(x.grad.float(), want, rtol=2**-6, atol=float(want.abs().max()) * 2**-7)
    assert torch.equal(weight.grad, (grad.T @ x.detach()).float())
    assert float((x.grad.float() - grad.float() @ weight.detach()).abs().max()) > 0.01  # which rounds in earnest


def test_rows_of_zeros_and_sides_that_do_not_fit() -> None:
    assert torch.equal(product(torch.zeros(3, 16).bfloat16(), torch.ones(4, 16).bfloat16(), ()), torch.zeros(3, 4).bfloat16())
    assert fits((16, 32))
    assert not fits((10, 32))


def _in_pieces(world: World, alone: bool) -> torch.Tensor:
    """The sum over ranks that have pieces of rows, in float64, so that nothing but the operands is rounded."""
    private.scaled_product = lambda a, b, of_a, of_b: ((a.double() * of_a) @ (b.double() * of_b).T)  # type: ignore[assignment]
    torch.manual_seed(0)
    a, b = (torch.randn(rows, 64).mul(torch.logspace(-2, 2, 64)).bfloat16() for rows in (8, 16))
    piece = slice(32 * world.rank, 32 * (world.rank + 1))
    made = scaled.product(a[:, piece], b[:, piece], () if alone else (world.everyone,))
    world.everyone.all_reduce(made)
    private.scaled_product = None  # type: ignore[assignment]
    return made - (_rounded(a).double() @ _rounded(b).double().T)


def test_ranks_with_pieces_of_a_row_round_alike(ranks: Callable[..., list[Any]]) -> None:
    for off in ranks(_in_pieces, 2, False):
        assert float(off.abs().max()) < 1e-9


def test_broken_twin_scales_that_do_not_agree(ranks: Callable[..., list[Any]]) -> None:
    assert float(ranks(_in_pieces, 2, True)[0].abs().max()) > 1e-6


@pytest.mark.parametrize("layout", ["data=2 zero=2 microbatches=2", "tensor=2", "pipeline=2 microbatches=2"])
def test_a_layout_is_as_near_as_serial_runs_are_to_one_another(layout: str) -> None:
    found = verified(f"{layout} precision=float8")
    assert found.ok, str(found)
    assert (found.dtype, found.in_noise) == ("float8", True)


def test_one_rank_is_the_serial_run_bit_for_bit() -> None:
    assert set(verified("data=1 precision=float8").worst.values()) == {0.0}


def test_broken_twin_layers_that_do_not_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ, though by less than serial runs do from one another: what rounds to 3 bits is that noisy."""
    monkeypatch.setattr(call, "fits", lambda shape: False)
    assert min(verified("data=1 precision=float8").worst.values()) > 0.0
