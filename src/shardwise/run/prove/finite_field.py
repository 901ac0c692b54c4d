"""Arithmetic modulo a prime on int64 tensors: products, quotients, roots, exponentials, logarithms, and random functions of numbers.

The prime P has a smooth P - 1, so that logarithms are cheap (Pohlig and Hellman 1978), and is 1 modulo 8, 3, 5, 7, 11, 13, 17 and 19, so
that small whole numbers have roots. Exponents are numbers modulo Q = P - 1: exp(x) = G**x keeps exp(x + y) = exp(x) exp(y).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor

P = 1862340481
Q = P - 1
_PRIMES = {2: 7, 3: 2, 5: 1, 7: 1, 11: 1, 13: 1, 17: 1, 19: 1}  # the factors of Q, with their powers
G = next(g for g in range(2, 100) if all(pow(g, Q // p, P) != 1 for p in _PRIMES))
_LIMB = 16  # bits; products of limbs, summed over up to 2^21 terms, are exact in float64
_MAX_DENOMINATOR, _MAX_NUMERATOR = 4096, 1 << 17
_WORD = (1 << 64) - 1
_ROUNDING = 2.3e-16  # of one operation, relative


def reduce_mod(x: Tensor, modulus: int) -> Tensor:
    return torch.remainder(x, modulus)


def raise_to_power(base: Tensor, exponent: int) -> Tensor:
    """Return `base ** exponent` for a whole exponent >= 0."""
    out = torch.ones_like(base)
    while exponent:
        if exponent & 1:
            out = out * base % P
        base = base * base % P
        exponent >>= 1
    return out


def inverse_of(x: Tensor) -> Tensor:
    """Return 1 / x; 0 where x is 0."""
    return raise_to_power(x, P - 2)


@cache
def _power_tables() -> tuple[Tensor, Tensor]:
    low = torch.tensor([pow(G, i, P) for i in range(1 << _LIMB)])
    high = torch.tensor([pow(G, i << _LIMB, P) for i in range((Q >> _LIMB) + 1)])
    return low, high


def exponential_of(exponent: Tensor) -> Tensor:
    """Return G ** exponent, for exponents in 0..Q-1."""
    low, high = _power_tables()
    return low[exponent & ((1 << _LIMB) - 1)] * high[exponent >> _LIMB] % P


@cache
def _build_subgroup(p: int) -> tuple[Tensor, Tensor]:
    """Return the elements of order p in order, sorted, and the exponent of each."""
    root = pow(G, Q // p, P)
    values = torch.tensor([pow(root, i, P) for i in range(p)])
    ordered, exponents = values.sort()
    return ordered, exponents


def logarithm_of(x: Tensor) -> Tensor:
    """Return e with G ** e = x, digit by digit in every prime factor of Q; 0 where x is 0."""
    x = torch.where(x == 0, 1, x)
    total = torch.zeros_like(x)
    for p, k in _PRIMES.items():
        size, residue = p**k, torch.zeros_like(x)
        ordered, exponents = _build_subgroup(p)
        base = raise_to_power(x, Q // size)
        unit = pow(G, Q // size, P)
        for digit in range(k):
            rest = base * power_of_constant(pow(unit, -1, P), residue, size) % P
            residue = residue + exponents[torch.searchsorted(ordered, raise_to_power(rest, p ** (k - 1 - digit)))] * p**digit
        other = Q // size
        total = (total + residue * (other * pow(other, -1, size) % Q)) % Q
    return total


def power_of_constant(base: int, exponent: Tensor, bound: int) -> Tensor:
    """Return `base ** exponent` for exponents in 0..bound-1, a small bound."""
    return torch.tensor([pow(base, i, P) for i in range(bound)])[exponent]


@cache
def hash_text(text: str) -> int:
    """Return 60 bits that depend on a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 4


def random_function(name: str, x: Tensor, modulus: int = P) -> Tensor:
    """Return a random function of whole numbers, of that name: equal numbers give equal numbers (SplitMix64's mixing)."""
    z = x + _offset_of(name)
    z = (z ^ (z >> 30 & 0x3FFFFFFFF)) * _as_signed(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> 27 & 0x1FFFFFFFFF)) * _as_signed(0x94D049BB133111EB)
    return (z ^ (z >> 31 & 0x1FFFFFFFF)) % modulus


@cache
def _offset_of(name: str) -> int:
    return _as_signed(hash_text(name) * 0x9E3779B97F4A7C15)


def _as_signed(word: int) -> int:
    return ((word + (1 << 63)) & _WORD) - (1 << 63)


def apply_bilinear(f: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, modulus: int = P) -> Tensor:
    """Return a bilinear function with whole coefficients, by exact float64 products of 16-bit limbs."""
    limbs = [[(v & ((1 << _LIMB) - 1)).double(), (v >> _LIMB).double()] for v in (x, y)]
    total = None
    for i, left in enumerate(limbs[0]):
        for j, right in enumerate(limbs[1]):
            part = f(left, right).to(torch.int64) % modulus * (pow(2, _LIMB * (i + j), modulus)) % modulus
            total = part if total is None else (total + part) % modulus
    assert total is not None
    return total


def apply_linear(f: Callable[[Tensor], Tensor], x: Tensor, modulus: int = P) -> Tensor:
    """Return a linear function with whole coefficients, by limbs."""
    low, high = f((x & ((1 << _LIMB) - 1)).double()), f((x >> _LIMB).double())
    return (low.to(torch.int64) + high.to(torch.int64) % modulus * (1 << _LIMB)) % modulus


def square_root(x: int) -> int | None:
    """Return the even power of G that squares to x; None if there is none."""
    exponent = int(logarithm_of(torch.tensor([x % P])))
    return pow(G, exponent // 2, P) if exponent % 2 == 0 else None


@cache
def constant_of(x: float) -> tuple[int, int]:
    """Return (number, exponent) of a constant: small rationals and their roots exactly, any other float as an unknown of its own."""
    if x < 0:
        a, b = constant_of(-x)
        return -a % P, -b % Q
    if x == int(x) and x < P:
        return int(x), int(x) % Q
    fraction, square = Fraction(x).limit_denominator(_MAX_DENOMINATOR), Fraction(x * x).limit_denominator(_MAX_DENOMINATOR)
    if abs(float(fraction) - x) <= _ROUNDING * x:  # 1 / (1 - p) of dropout is a rational that was rounded twice
        return _residue_of(fraction), hash_text(f"root {fraction}") ** 2 % Q
    if square and abs(float(square) - x * x) <= 4e-16 * x * x and (root := square_root(_residue_of(square))) is not None:
        return root, hash_text(f"root {square}") % Q
    return hash_text(f"number {x!r}") % P, hash_text(f"exponent {x!r}") % Q


@cache
def exponent_of_residue(a: int) -> int:
    """Return the exponent of the constant with residue `a`: of the fraction of small numbers that has it, if there is one."""
    remainders, factors = (P, a), (0, 1)
    while remainders[1] > _MAX_NUMERATOR:  # Euclid's algorithm, stopped halfway
        quotient = remainders[0] // remainders[1]
        remainders, factors = (remainders[1], remainders[0] % remainders[1]), (factors[1], factors[0] - quotient * factors[1])
    if not 0 < abs(factors[1]) <= _MAX_DENOMINATOR:
        return hash_text(f"residue {a}") % Q
    fraction = Fraction(remainders[1], factors[1])
    return constant_of(float(fraction))[1]


def _residue_of(fraction: Fraction) -> int:
    return fraction.numerator * pow(fraction.denominator, -1, P) % P
