"""Field arithmetic in C gives the bits that torch's operators give, and leaves to these what it cannot do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from shardwise.run.prove import finite_field as field
from shardwise.run.prove import native_field
from shardwise.run.prove.finite_field import P, Q


@pytest.fixture(autouse=True)
def _has_compiler() -> None:
    if native_field.native_library() is None:
        pytest.skip("no C compiler")


def draw(*shape: int, modulus: int = P) -> Tensor:
    """Return residues, the least and the largest among them."""
    x = torch.randint(0, modulus, shape, generator=torch.Generator().manual_seed(sum(shape)))
    edges = torch.tensor([0, modulus - 1, 1, modulus // 2, modulus // 2 + 1])[: x.numel()]
    x.view(-1)[: len(edges)] = edges
    return x


def compute_both(f: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """Return what C and what torch gives."""
    native = f()
    with monkeypatch.context() as without:
        without.setattr(native_field, "native_library", lambda: None)
        return native, f()


@pytest.mark.parametrize("modulus", [P, Q])
def test_elementwise_operations_and_sums_are_torchs(modulus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [((7, 5), (7, 5)), ((7, 5), ()), ((), (4,)), ((7, 1, 5), (3, 1)), ((0, 4), (0, 4)), ((1,), (4, 1))]
    cases: list[Callable[[], Tensor]] = []
    for first, second in shapes:
        x, y = draw(*first, modulus=modulus), draw(*second, modulus=modulus)
        cases += [lambda x=x, y=y: field.multiply_residues(x, y, modulus)]  # type: ignore[misc]
        cases += [lambda x=x, y=y, s=s: field.add_residues(x, y, modulus, s) for s in (1, -1)]  # type: ignore[misc]
    z = draw(4, 6, 5, modulus=modulus).transpose(0, 2)
    for dims in ([0], [1], [-1], [0, 2], [1, 2], [0, 1, 2]):
        cases += [lambda dims=dims, k=k: field.sum_residues(z, dims, k, modulus) for k in (False, True)]  # type: ignore[misc]
    for case in cases:
        native, expected = compute_both(case, monkeypatch)
        assert native.shape == expected.shape
        assert torch.equal(native, expected)


@pytest.mark.parametrize(
    ("left", "right"), [((3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((2, 3, 4), (4, 5)), ((2, 1, 3, 70), (3, 70, 5)), ((3, 0), (0, 4))]
)
def test_products_of_matrices_are_torchs(left: tuple[int, ...], right: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = draw(*left), draw(*right[:-2], right[-1], right[-2]).transpose(-1, -2)
    native, expected = compute_both(lambda: field.multiply_matrices(x, y), monkeypatch)
    assert torch.equal(native, expected)
    largest = torch.full((2, 300), P - 1)
    assert field.multiply_matrices(largest, largest.t()).tolist() == [[300, 300], [300, 300]]  # (-1)(-1), 300 times


@pytest.mark.parametrize(
    "f",
    [
        field.inverse_of,
        field.exponential_of,
        field.logarithm_of,
        field.exponent_of_number,
        lambda x: field.exponent_of_number(x >> 30),
        lambda x: field.random_function("gelu", x),
        lambda x: field.random_function("gelu", x - 7, Q),
        lambda x: field.combine_limbs([x >> 2, -(x >> 3), x >> 1], 21, P),
    ],
)
def test_functions_are_torchs(f: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    native, expected = compute_both(lambda: f(draw(9, 11)), monkeypatch)
    assert native.shape == expected.shape
    assert torch.equal(native, expected)


def test_small_moduli_and_tensors_without_data_are_left_to_torch(tmp_path: Path) -> None:
    x = draw(3, 4)
    assert native_field.multiply(x % 97, x % 97, 97) is None
    assert native_field.multiply(x.double(), x, P) is None
    assert native_field.native_library(tmp_path, "no-such-compiler") is None
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert native_field.multiply(fake, fake, P) is None
        assert field.multiply_residues(fake, fake).shape == x.shape
