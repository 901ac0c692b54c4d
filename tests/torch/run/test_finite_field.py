"""Arithmetic of a finite field against Python's whole numbers, and torch's operators on it against closed forms."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from math import gcd, prod

import pytest
import torch

from shardwise.run.prove import order_rules, rules  # noqa: F401 - they register the rules of operators
from shardwise.run.prove.field_tensor import (
    CERTAINTY,
    FieldMode,
    FieldTensor,
    NotProvable,
    degree_of,
    have_equal_numbers,
    lift_constants,
    random_numbers,
)
from shardwise.run.prove.finite_field import (
    LARGEST_WEIGHT,
    ORDERS,
    PRIME_FACTORS,
    G,
    P,
    Q,
    apply_bilinear,
    apply_linear,
    constant_of,
    exponential_of,
    inverse_of,
    logarithm_of,
    multiply_matrices,
    multiply_residues,
    random_function,
)


def random_integers(*shape: int, below: int = P) -> torch.Tensor:
    return torch.randint(1, below, shape, generator=torch.Generator().manual_seed(0))


def test_p_is_a_prime_and_g_generates_its_units() -> None:
    assert pow(G, Q, P) == 1  # with the next line: the units of P have P - 1 elements (Lucas 1876)
    assert all(pow(G, Q // p, P) != 1 for p in PRIME_FACTORS)
    assert all(p % d for p in PRIME_FACTORS for d in range(2, int(p**0.5) + 1))
    rest = Q
    for p in PRIME_FACTORS:
        while rest % p == 0:
            rest //= p
    assert rest == 1
    assert prod(ORDERS) == Q
    assert all(gcd(x, y) == 1 for x, y in combinations(ORDERS, 2))


@pytest.mark.parametrize("modulus", [P, Q, 97])
def test_products_are_those_of_whole_numbers(modulus: int) -> None:
    x, y = random_integers(2000, below=modulus), random_integers(2000, below=modulus).flip(0)
    x[:3], y[:3] = modulus - 1, torch.tensor([0, 1, modulus - 1])
    assert multiply_residues(x, y, modulus).tolist() == [a * b % modulus for a, b in zip(x.tolist(), y.tolist(), strict=True)]


def test_numbers_are_about_equally_likely() -> None:
    assert 1 / P <= LARGEST_WEIGHT < 1.25 / P


def test_inverse_exponential_and_logarithm_are_those_of_whole_numbers() -> None:
    x, e = random_integers(1001), random_integers(50, below=Q)
    x[3] = P - 1
    for part in (x, x[:5], x.view(7, 143)):
        assert inverse_of(part).flatten().tolist() == [pow(n, -1, P) for n in part.flatten().tolist()]
    assert inverse_of(torch.tensor([0] * 200 + [1])).tolist() == [0] * 200 + [1]
    assert exponential_of(e).tolist() == [pow(G, n, P) for n in e.tolist()]
    assert torch.equal(logarithm_of(exponential_of(e)), e)
    assert torch.equal(exponential_of(logarithm_of(x)), x)


def test_products_of_limbs_are_exact() -> None:
    x, y = random_integers(5, 300), random_integers(300, 4)
    product = [[sum(a * b for a, b in zip(row, column, strict=True)) % P for column in y.T.tolist()] for row in x.tolist()]
    assert apply_bilinear(torch.matmul, x, y).tolist() == product
    assert multiply_matrices(x, y).tolist() == product
    assert apply_bilinear(torch.matmul, x, y, num_terms=300).tolist() == product
    largest = torch.full((2, 5000), P - 1), torch.full((5000, 3), P - 1)
    assert multiply_matrices(*largest).tolist() == [[5000] * 3] * 2
    assert multiply_matrices(x.expand(3, 5, 300), y).tolist() == [product] * 3
    assert apply_linear(lambda part: part.sum(-1), x).tolist() == [sum(row) % P for row in x.tolist()]


@pytest.mark.parametrize("number", [Fraction(1, 3), Fraction(-5, 8), Fraction(7)])
def test_small_rationals_are_exact(number: Fraction) -> None:
    assert constant_of(float(number)) == number.numerator * pow(number.denominator, -1, P) % P


@pytest.mark.parametrize("width", [2, 6, 15, 32, 80, 128])
def test_the_scale_of_attention_is_a_root(width: int) -> None:
    assert constant_of(width**-0.5) ** 2 * width % P == 1
    assert constant_of(width**-0.25) != constant_of(width**-0.5)


def test_other_numbers_are_unknowns_of_their_own() -> None:
    assert constant_of(0.1 + 1e-15) != constant_of(0.1)
    assert constant_of(-0.1234567) == P - constant_of(0.1234567)


def test_a_random_function_depends_on_name_and_number() -> None:
    x = torch.arange(1000)
    assert len(set(random_function("f", x).tolist())) == 1000
    assert not (random_function("f", x) == random_function("g", x)).any()
    assert ((random_function("f", x) >= 0) & (random_function("f", x) < P)).all()


def test_rescaled_softmax_is_exact_and_its_weights_sum_to_one() -> None:
    x = random_numbers((3, 8), "x", 0)
    whole = x.softmax(-1)
    assert have_equal_numbers(whole.sum(-1), lift_constants(torch.ones(3)))
    first, second = x[:, :4], x[:, 4:]
    top = torch.maximum(first.amax(-1), second.amax(-1))
    parts = [(part - part.amax(-1, True)).exp() * (part.amax(-1) - top).exp().unsqueeze(-1) for part in (first, second)]
    assert have_equal_numbers(whole, torch.cat(parts, -1) / sum(part.sum(-1) for part in parts).unsqueeze(-1))


def test_autograd_runs_on_it() -> None:
    x, y = random_numbers((3, 4), "x", 0).requires_grad_(), random_numbers((4, 2), "y", 0).requires_grad_()
    (x @ y).pow(2).sum().backward()
    assert x.grad is not None
    assert have_equal_numbers(x.grad, 2.0 * (x @ y).detach() @ y.detach().T)  # type: ignore[arg-type]


def test_a_norm_is_squared_exactly() -> None:
    x = random_numbers((7,), "x", 0)
    assert have_equal_numbers(torch.linalg.vector_norm(x) ** 2, (x * x).sum())  # type: ignore[arg-type]


def test_views_of_a_buffer_write_into_it() -> None:
    with FieldMode():  # type: ignore[no-untyped-call]
        flat = torch.zeros(6, dtype=torch.float64)
        flat[2:4].view(2, 1).copy_(random_numbers((2, 1), "x", 0))
        assert isinstance(flat, FieldTensor)
    assert (flat.a != 0).tolist() == [False, False, True, True, False, False]
    assert degree_of(flat).total == 1


def test_degrees_and_divisors_are_counted() -> None:
    x = random_numbers((3,), "x", 0)
    CERTAINTY.reset()
    cube, quotient = x * x * x, x / (x * x)
    assert [degree_of(value).total for value in (cube, quotient, x.exp(), x + 1.0)] == [3, 2, 1, 1]
    divisors = 3 * 2  # three elements of degree 2
    assert CERTAINTY.wrong_point_probability(degree_of(quotient)) == (2 + divisors + CERTAINTY.num_functions) * LARGEST_WEIGHT
    assert x.tanh() is not None
    assert not CERTAINTY.zero_divisors
    assert (x / (x - x)) is not None
    assert CERTAINTY.zero_divisors == 3


def test_what_has_no_exact_form_is_refused_by_name() -> None:
    with pytest.raises(NotProvable, match="linalg_lu_factor"):
        torch.linalg.lu_factor(random_numbers((4, 4), "x", 0))


@pytest.mark.parametrize("text", ["0.9997", "0.999", "0.99", "0.9", "0.75", "0.1"])
def test_what_is_one_less_a_rational_keeps_its_digits(text: str) -> None:
    """In floats 1 - 0.9997 has lost four digits, and 1 / (1 - 0.999) is not 1000; others nearby are other numbers."""
    rational, p = Fraction(text), float(text)
    for x, exact in ((1 - p, 1 - rational), (1 / (1 - p), 1 / (1 - rational))):
        assert constant_of(x) * exact.denominator % P == exact.numerator % P
        assert constant_of(x * (1 + 1e-13)) != constant_of(x)
