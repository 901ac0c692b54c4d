"""Rules of matrices and of lookups in a finite field: against torch's own gradients, and identities that hold exactly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from shardwise.run.prove import prove as _  # noqa: F401 - registers the rules
from shardwise.run.prove.field_tensor import FieldMode, FieldTensor, have_equal_numbers, lift_constants, random_numbers, zeros_of
from tests.support.whole_numbers import check_on_whole_numbers

INDICES, OFFSETS = torch.tensor([1, 2, 0, 3, 3, 1]), torch.tensor([0, 2, 2, 5])
INDEX = torch.tensor([[0, 1, 1, 0], [2, 1, 0, 0], [0, 1, 2, 2]])


def look_up(mode: str, x: Any, **settings: Any) -> Any:
    return functional.embedding_bag(INDICES, x, OFFSETS, mode=mode, **settings)


CALLS: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "sums of rows": ((4, 3), partial(look_up, "sum")),
    "sums of weighted rows": ((4, 6), lambda x: look_up("sum", x, per_sample_weights=x[0])),
    "largest of rows": ((4, 3), partial(look_up, "max")),
    "rows without padding": ((4, 3), partial(look_up, "sum", padding_idx=1)),
    "bilinear": ((3, 3, 3), lambda x: functional.bilinear(x[0], x[1], x, x[2, 0])),
    "sum by index": ((3, 4), lambda x: x.scatter_reduce(0, INDEX, x * 2, "sum", include_self=False)),
    "product by index": ((3, 4), lambda x: x.scatter_reduce(0, INDEX, x, "prod")),
    "largest by index": ((3, 4), lambda x: x.scatter_reduce(0, INDEX, x * 3, "amax", include_self=False)),
    "smallest by index": ((3, 4), lambda x: x.scatter_reduce(1, INDEX, x * 3, "amin")),
    "rounded": ((3, 4), lambda x: x.floor() + x.ceil() + x.trunc() + x.round() + x.remainder(1.0) + x.long()),
    "powers in place": ((3, 4), lambda x: (x * 1).pow_(3)),
    "transposed in place": ((3, 4), lambda x: (x * 1).transpose_(0, 1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_operators_are_torch_s_on_whole_numbers(name: str) -> None:
    shape, call = CALLS[name]
    check_on_whole_numbers(shape, call)


def draw_matrices(num: int, size: int) -> Any:
    return random_numbers((num, size, size), "matrices", 0)


def test_systems_and_inverses_are_exact() -> None:
    a, b = draw_matrices(3, 4), random_numbers((3, 4, 2), "columns", 0)
    with FieldMode():
        solved, inverse = torch.linalg.solve(a, b), torch.linalg.inv(a)
        assert have_equal_numbers(a @ solved, b)
        assert have_equal_numbers(inverse @ b, solved)
        permutation: Any = lift_constants(torch.eye(4).roll(1, 0))
        assert have_equal_numbers(torch.linalg.inv(permutation), permutation.mT)
        assert have_equal_numbers(torch.linalg.det(a @ a), torch.linalg.det(a) * torch.linalg.det(a))


def test_a_triangular_factor_has_the_products_of_the_matrix() -> None:
    """A square root is a random function, so that only products with a column, divided by its root, are those of the matrix."""
    a = draw_matrices(2, 3)
    with FieldMode():
        factor, alone = torch.linalg.cholesky(a), torch.linalg.cholesky(a[1])
        assert have_equal_numbers(factor[1], alone)
        assert have_equal_numbers(factor[:, 1:, 0] * factor[:, :1, 0], a[:, 1:, 0])
        assert have_equal_numbers(torch.linalg.cholesky(a.mT, upper=True), factor.mT)


def test_gradients_of_matrices_follow_from_inverses() -> None:
    """d det(A) = det(A) A^-T, d log |det A| = A^-T, and of A^-1 b along each entry."""
    a = draw_matrices(2, 3)
    with FieldMode():
        inverse = torch.linalg.inv(a).mT
        for call, expected in (
            (torch.linalg.det, lambda x: torch.linalg.det(x)[:, None, None] * inverse),
            (lambda x: torch.linalg.slogdet(x)[1], lambda x: inverse),
            (lambda x: torch.linalg.solve(x, torch.ones(2, 3, 1, dtype=torch.float64)), lambda x: None),
        ):
            leaf = a.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(call(leaf).sum(), leaf)
            wanted = expected(a)
            if wanted is None:
                ones: Any = lift_constants(torch.ones(2, 3, 1, dtype=torch.float64))
                wanted = -(inverse @ ones) @ (torch.linalg.inv(a) @ ones).mT
            assert have_equal_numbers(gradient, wanted)


def test_a_function_of_a_matrix_has_a_linear_derivative() -> None:
    a, along = draw_matrices(1, 3)[0], random_numbers((2, 3, 3), "directions", 0)
    with FieldMode():
        leaf = a.detach().requires_grad_()
        result = torch.linalg.matrix_exp(leaf)
        first, second, both = (torch.autograd.grad(result, leaf, x, retain_graph=True)[0] for x in (along[0], along[1], along.sum(0)))
        assert have_equal_numbers(first + second, both)
        assert have_equal_numbers(torch.linalg.matrix_exp(a * 0), lift_constants(torch.eye(3)))


def test_equal_numbers_are_rounded_to_equal_small_ones() -> None:
    x = random_numbers((4000,), "rounded", 0)
    whole = x.floor().long()
    assert isinstance(whole, Tensor)
    assert not isinstance(whole, FieldTensor)
    assert torch.equal(whole, (x + 0.0).floor().long())
    assert int(whole.min()) == -1
    assert {0, 1, 2, 40} <= set(whole.tolist())
    assert int(whole.max()) < 64
    assert have_equal_numbers(lift_constants(torch.tensor([0.5, -1.25])).floor(), lift_constants(torch.tensor([0.0, -2.0])))


def test_steps_of_quantised_numbers_are_equal() -> None:
    x: Any = lift_constants(torch.tensor([1.0, -3.0, 100.0], dtype=torch.float64))
    with FieldMode():
        assert have_equal_numbers(torch.fake_quantize_per_tensor_affine(x, 0.5, 0, -4, 7), lift_constants(torch.tensor([1.0, -2.0, 3.5])))


def test_results_are_written_where_out_says() -> None:
    """As a parametrisation of weights writes its vectors (`spectral_norm`)."""
    x, out = random_numbers((3,), "x", 0), zeros_of((3,))
    with FieldMode():
        assert torch.div(x, 2, out=out) is out
        assert have_equal_numbers(out + out, x)
