"""Constants in proofs: their order, functions of draws, and rows of a user's own function under a context axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise
from shardwise.errors import LayoutError
from shardwise.run.prove import finite_field as field
from shardwise.run.prove import prove as _  # noqa: F401 - registers the rules
from shardwise.run.prove.field_tensor import lift_constants, random_numbers, zeros_of
from shardwise.run.prove.proof import Proof

HIDDEN = 4


def prove_layout(make: Any, layout: str, shape: tuple[int, ...] = (4, HIDDEN)) -> Proof:
    generator = torch.Generator().manual_seed(0)
    batch = (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
    proof = shardwise.prove(make, layout, batch, max_error_probability=0.1)
    assert isinstance(proof, Proof)
    return proof


class _Tripled(torch.autograd.Function):
    """The square of each row's entries, with three times its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 6 * grad * x


class Drawn(nn.Module):
    """A layer whose result is changed as `change` says."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(HIDDEN, HIDDEN), change

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.change(self.layer(x)), y)


class OwnFunction(nn.Module):
    """A user's own function of the rows of all samples' positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = functional.scaled_dot_product_attention(x, x, x)
        return functional.mse_loss(_Tripled.apply(self.layer(x).flatten(0, 1)).view_as(y), y)  # type: ignore[no-untyped-call]


def test_small_constants_are_in_their_own_order() -> None:
    constants = [-1e4, -3, -0.5, -0.02, 0, 1e-5, 0.02, 1 / 7, 1 / 3, 0.5, 0.75, 1, 2, 1e6]
    numbers = torch.tensor([field.constant_of(x) for x in constants])
    assert bool((field.order_of(numbers).diff() > 0).all())
    assert bool((field.order_of(field.negative_number(torch.arange(1000) * 77777)) < 0).all())


def test_a_threshold_hides_what_is_below_the_largest_but_never_that() -> None:
    scores = random_numbers((50, 4), "scores", 0)
    largest = scores.max(-1, keepdim=True)[0]
    hidden = (largest - scores) / scores > 0.02
    assert not bool(hidden.gather(-1, scores.argmax(-1, keepdim=True)).any())
    assert bool(hidden.any())


@pytest.mark.parametrize("layout", ["data=2", "tensor=2"])
def test_functions_of_draws_are_equal_whatever_a_draw_is_written_into(layout: str) -> None:
    def perturb(x: Tensor) -> Tensor:
        noise, beside = torch.empty_like(x).uniform_(), torch.zeros_like(x)
        beside[:, :2].exponential_()
        return functional.gumbel_softmax(x, tau=0.5) + noise.view(-1).sqrt().view_as(x) * torch.stack([noise, beside]).exp().sum(0)

    assert prove_layout(lambda: Drawn(perturb), layout).ok


def test_real_numbers_are_placed_among_others_as_constants() -> None:
    placed = torch.slice_scatter(zeros_of((2, 3)), torch.full((2, 1), 0.5, dtype=torch.float64), 1, 2, 3)
    expected: Any = lift_constants(torch.tensor([[0, 0, 0.5]] * 2, dtype=torch.float64))
    assert torch.equal(placed.a, expected.a)  # type: ignore[attr-defined]


def test_a_user_s_function_runs_on_rows_of_some_positions() -> None:
    assert prove_layout(OwnFunction, "context=2", (4, 6, HIDDEN)).ok
    with pytest.raises(LayoutError, match="unequally"):
        prove_layout(OwnFunction, "context=3", (4, 5, HIDDEN))


def test_freed_memory_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that ZeRO-3 has freed have a shape, from which others are allocated; to read their numbers ended the process."""

    def fail(numbers: Tensor) -> None:
        raise AssertionError(f"{numbers.shape} is read")

    monkeypatch.setattr(field, "reals_of", fail)
    freed = zeros_of((3, 2))
    freed.a.untyped_storage().resize_(0)
    assert freed.new_empty(1).expand(3, 2).shape == (3, 2)
