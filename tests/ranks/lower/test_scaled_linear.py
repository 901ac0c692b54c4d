"""Linear layers of 8 bits: what is rounded, that ranks with pieces of a row round alike, and whole models against the serial run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_narrow_verification import verified

from shardwise.lower import call
from shardwise.lower.kernels import scaled
from shardwise.lower.kernels.scaled import scaled_linear, scaled_product, supports_scaled_product
from shardwise.plan.layout import Layout
from shardwise.world import private
from shardwise.world.world import World


def _rounded(x: torch.Tensor, most: float = 448.0) -> torch.Tensor:
    """Each row in 8 bits and back, by its definition: 3 bits of fraction below the power of two that brings its largest to at most 448, or
    2 bits and 57,344."""
    largest = x.abs().amax(1, keepdim=True).float()
    scale = torch.ones_like(largest)
    while (largest / scale > most).any() or (largest / scale <= most / 2).any():
        scale = torch.where(largest / scale > most, scale * 2, torch.where(largest / scale <= most / 2, scale / 2, scale))
    return (x.float() / scale).to(torch.float8_e4m3fn if most == 448.0 else torch.float8_e5m2).float() * scale


@pytest.mark.parametrize(("m", "n", "k"), [(32, 48, 64), (5, 16, 32), (7, 9, 11), (1, 1, 1)])
def test_a_product_is_that_of_rounded_rows(m: int, n: int, k: int) -> None:
    torch.manual_seed(m)
    a, b = (torch.randn(rows, k).mul(torch.rand(rows, 1) * 1e3).bfloat16() for rows in (m, n))
    want = (_rounded(a).double() @ _rounded(b).double().T).bfloat16()
    assert torch.allclose(scaled_product(a, b, ()).float(), want.float(), rtol=2**-7, atol=float(want.float().abs().max()) * 2**-8)


def test_gradients_are_of_rounded_operands_and_the_weights_of_16_bits() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(8, 32).bfloat16().requires_grad_(), torch.randn(16, 32).requires_grad_()
    grad = torch.randn(8, 16).bfloat16()
    scaled_linear((), (), x, weight).backward(grad)
    want = _rounded(grad, 57344.0) @ _rounded(weight.detach().bfloat16().T.contiguous()).T
    assert torch.allclose(x.grad.float(), want, rtol=2**-6, atol=float(want.abs().max()) * 2**-7)
    assert torch.equal(weight.grad, (grad.T @ x.detach()).float())
    assert float((x.grad.float() - grad.float() @ weight.detach()).abs().max()) > 0.01  # which rounds in earnest


def test_rows_of_zeros_and_sides_that_do_not_fit() -> None:
    assert torch.equal(scaled_product(torch.zeros(3, 16).bfloat16(), torch.ones(4, 16).bfloat16(), ()), torch.zeros(3, 4).bfloat16())
    assert supports_scaled_product((16, 32))
    assert not supports_scaled_product((10, 32))


def _in_pieces(world: World, alone: bool) -> torch.Tensor:
    """The sum over ranks that have pieces of rows, in float64, so that nothing but the operands is rounded."""
    private.scaled_matmul = lambda a, b, of_a, of_b: (a.double() * of_a) @ (b.double() * of_b).T  # type: ignore[assignment]
    torch.manual_seed(0)
    a, b = (torch.randn(rows, 64).mul(torch.logspace(-2, 2, 64)).bfloat16() for rows in (8, 16))
    piece = slice(32 * world.rank, 32 * (world.rank + 1))
    made = scaled.scaled_product(a[:, piece], b[:, piece], () if alone else (world.world_group,))
    world.world_group.all_reduce(made)
    private.scaled_matmul = None  # type: ignore[assignment]
    return made - (_rounded(a).double() @ _rounded(b).double().T)


def test_ranks_with_pieces_of_a_row_round_alike(ranks: Callable[..., list[Any]]) -> None:
    for off in ranks(_in_pieces, 2, False):
        assert float(off.abs().max()) < 1e-9


def test_broken_twin_scales_that_do_not_agree(ranks: Callable[..., list[Any]]) -> None:
    assert float(ranks(_in_pieces, 2, True)[0].abs().max()) > 1e-6


def _doubled(a: torch.Tensor, b: torch.Tensor, over: Any, dtype: torch.dtype = scaled.DTYPE) -> torch.Tensor:
    return scaled_product(a, b, over, dtype) * (2.0 if dtype is scaled.OF_GRADIENTS else 1.0)


def test_a_wrong_gradient_is_noticed_in_the_noise_of_8_bits(subject: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is a tenth too large is no more than noise beside the serial run of 8 bits, and shows where the same layout does not
    round; a product that is off is told from what its operands allow, whatever its layout."""
    layout = Layout.parse("data=2 precision=float8")
    found = subject("gpt-tiny").check(layout, sabotage={"layers.1.mlp.up.weight": 1.1}, steps=1)
    assert not found.ok
    assert "the same layout in float64: gradients of layers.1.mlp.up.weight" in str(found.first_difference)
    monkeypatch.setattr(scaled, "scaled_product", _doubled)
    found = verified("tensor=2 precision=float8-rows", steps=1)
    assert not found.ok
    assert "the gradient of " in str(found.first_difference)
    assert "times what operands of 8 bits allow" in str(found.first_difference)


@pytest.mark.parametrize(
    "layout",
    [
        "data=2 zero=2 microbatches=2 precision=float8-rows", "tensor=2 precision=float8-rows",
        "pipeline=2 microbatches=2 precision=float8-rows", "tensor=2 sequence_parallel=on precision=float8",
        "data=2 zero=3 recompute=cheap precision=float8",
    ],
)  # fmt: skip
def test_a_layout_is_as_near_as_serial_runs_are_to_one_another(layout: str) -> None:
    found = verified(layout)
    assert found.ok, str(found)
    assert (found.dtype, found.in_noise) == (layout.rpartition("=")[2], True)


@pytest.mark.parametrize("precision", ["float8", "float8-rows"])
def test_one_rank_is_the_serial_run_bit_for_bit(precision: str) -> None:
    assert set(verified(f"data=1 precision={precision}").worst.values()) == {0.0}


def _rounded_whole(x: torch.Tensor, most: float = 448.0) -> torch.Tensor:
    """A tensor in 8 bits and back, by one power of two: its rows as one."""
    return _rounded(x.reshape(1, -1), most).view(x.shape)


def test_all_three_products_are_of_rounded_tensors() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, 32).mul(torch.rand(9, 1) * 100).bfloat16().requires_grad_(), torch.randn(16, 32).requires_grad_()
    grad = torch.randn(9, 16).mul(torch.rand(9, 1) * 1e-3).bfloat16()
    out = scaled_linear((), (), x, weight, scales_tensors=True)
    out.backward(grad)
    a, w, g = _rounded_whole(x.detach()), _rounded_whole(weight.detach().bfloat16()), _rounded_whole(grad, 57344.0)
    for found, want in ((out.detach(), a @ w.T), (x.grad, g @ w), (weight.grad, g.T @ a)):
        assert torch.allclose(found.float(), want, rtol=2**-6, atol=float(want.abs().max()) * 2**-7)
    exact = grad.float().T @ x.detach().float()
    assert float((weight.grad - exact).abs().max()) > 0.01 * float(exact.abs().max())  # which rounds in earnest


def _weight_gradient_twice(a: Any, b: Any) -> torch.Tensor:
    return scaled.private.scaled_matmul(scaled._pad_sides(a[0]), scaled._pad_sides(b[0]), a[1] * 2, b[1])[: len(a[0]), : len(b[0])]


def test_a_product_that_is_off_is_told_by_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled, "multiply_narrow", _weight_gradient_twice)
    found = verified("data=1 precision=float8", steps=1)
    assert not found.ok
    assert "times what operands of 8 bits allow" in str(found.first_difference)


def test_broken_twin_layers_that_do_not_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ, though by less than serial runs do from one another: what rounds to 3 bits is that noisy."""
    monkeypatch.setattr(call, "supports_scaled_product", lambda shape: False)
    assert min(verified("data=1 precision=float8-rows").worst.values()) > 0.0
