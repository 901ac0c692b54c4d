"""Arithmetic modulo a prime on int64 tensors: products, quotients, roots, exponentials, logarithms, and random functions of numbers.

A C library computes it (`native_field`); without a compiler torch's operators give the same bits. The prime P is just below 2^62, so that
one random point suffices for most programs and sums of two numbers fit a word. P - 1 is a product of four coprime orders below 2^17, so
that logarithms are four look-ups (Pohlig and Hellman 1978). All primes up to 23 have square and fourth roots. Exponents are numbers modulo
Q = P - 1: exp(x) = G**x keeps exp(x + y) = exp(x) exp(y).
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from math import nan, prod

import torch
from torch import Tensor

from shardwise.run.prove import native_field

ORDERS = (8 * 3 * 5 * 7 * 23, 11 * 13 * 17 * 19, 69221, 72533)  # coprime, of subgroups small enough for a table
PRIME_FACTORS = (2, 3, 5, 7, 11, 13, 17, 19, 23, 69221, 72533)  # of Q
Q = prod(ORDERS)
P = Q + 1  # 4480424788663463641
G = next(g for g in range(2, 100) if all(pow(g, Q // p, P) != 1 for p in PRIME_FACTORS))
LARGEST_WEIGHT = -(-(1 << 64) // P) / (1 << 64)  # the largest probability of a number that `random_function` gives
_HALF = 31  # bits of a factor that goes into a product at once
_LIMB = 21  # bits: products of limbs, summed over up to 2^11 terms, are exact in float64
_SHORT_LIMB = 16  # bits: over up to 2^21 terms
_MAX_SHORT_SUM = 1 << 11
_TABLE = 16  # bits of an exponent that a table of powers covers
_MAX_DENOMINATOR, _MAX_SQUARE = 1 << 22, 4096  # of constants that are rational, or roots: 2 / n of a mean of n elements is one
_ORDER_FACTOR = 2**12 * 3**2 * 5**8 * 7  # numbers of which this is a denominator are in their own order up to 2.2e7
_LAST_BITS = 34  # in which a shift of a number, as that of a mask of ones, is one of its exponent
_FEW = 64  # elements, which Python inverts faster than torch
_WORD = (1 << 64) - 1
_ROUNDING = 2.3e-16  # of one operation, relative
_REALS: dict[int, float] = {0: 0.0}  # the constant that each number was made of
_ROUNDED: set[float] = set()  # constants without exact numbers


def multiply_residues(x: Tensor, y: Tensor, modulus: int = P) -> Tensor:
    """Return products of numbers in 0..modulus-1 modulo a number below 2^62.

    By torch: words wrap around, so x y - q modulus is exact if the quotient q, which float64 estimates, is off by less than two. It is
    where q has fewer than 34 bits: x is multiplied by the upper half of y's bits first.
    """
    if (native := native_field.multiply(x, y, modulus)) is not None:
        return native
    upper, lower, approximate = y >> _HALF, y & ((1 << _HALF) - 1), x.double()
    rest = torch.sub(x * upper, (approximate * upper / modulus).to(torch.int64), alpha=modulus)
    quotient = (torch.add(approximate * lower, rest, alpha=1 << _HALF) / modulus).to(torch.int64)
    return torch.sub(torch.add(x * lower, rest, alpha=1 << _HALF), quotient, alpha=modulus).remainder_(modulus)


def add_residues(x: Tensor, y: Tensor, modulus: int = P, sign: int = 1) -> Tensor:
    """Return sums of numbers in 0..modulus-1, or differences where `sign` is -1."""
    native = native_field.add(x, y, modulus, sign)
    return (x + sign * y) % modulus if native is None else native


def sum_residues(x: Tensor, dims: Sequence[int], keepdim: bool = False, modulus: int = P) -> Tensor:
    """Return sums of numbers in 0..modulus-1 over some dims."""
    native = native_field.add_over(x, dims, keepdim, modulus)
    return apply_linear(lambda part: part.sum(dims, keepdim), x, modulus=modulus) if native is None else native


def combine_limbs(sums: Sequence[Tensor], bits: int, modulus: int) -> Tensor:
    """Return the sum of `sums[i] << (i bits)` modulo a number, for whole numbers below 2^61 of either sign."""
    if (native := native_field.combine(sums, bits, modulus)) is not None:
        return native
    total = sums[-1]
    for part in reversed(sums[:-1]):
        quotient = ((total.double() * float(1 << bits) + part) / modulus).to(torch.int64)
        total = torch.sub(torch.add(part, total, alpha=1 << bits), quotient, alpha=modulus)
    return total.remainder(modulus)


def raise_to_powers(base: Tensor, exponents: Sequence[int]) -> list[Tensor]:
    """Return `base ** exponent` for whole exponents >= 0. One product a bit squares the base and goes on with every power that has it."""
    powers = torch.stack([base, *[torch.ones_like(base) for _ in exponents]])
    for bit in range(max(exponents).bit_length()):
        rows = [0, *[row for row, exponent in enumerate(exponents, 1) if exponent >> bit & 1]]
        powers[rows] = multiply_residues(powers[rows], powers[0])
    return list(powers[1:])


def inverse_of(x: Tensor) -> Tensor:
    """Return 1 / x; 0 where x is 0. Many numbers share one inversion: that of their product (Montgomery 1987)."""
    if (native := native_field.invert(x, P)) is not None:
        return native
    if x.numel() <= _FEW:
        return torch.tensor([pow(v, -1, P) if v else 0 for v in x.flatten().tolist()], dtype=torch.int64).reshape(x.shape)
    flat = x.reshape(-1)
    is_zero = flat == 0
    levels = [torch.where(is_zero, 1, flat)]
    while levels[-1].numel() > _FEW:
        level = levels[-1]
        if level.numel() % 2:
            level = levels[-1] = torch.cat([level, torch.ones_like(level[:1])])
        levels.append(multiply_residues(level[0::2], level[1::2]))
    inverse = inverse_of(levels.pop())
    for level in reversed(levels):
        inverse = multiply_residues(inverse[: level.numel() // 2].unsqueeze(1), level.view(-1, 2).flip(1)).view(-1)
    return torch.where(is_zero, 0, inverse[: flat.numel()]).reshape(x.shape)


@cache
def _powers_of(base: int, count: int) -> Tensor:
    """Return `base ** i` for i in 0..count-1."""
    powers = torch.ones(1, dtype=torch.int64)
    while powers.numel() < count:
        powers = torch.cat([powers, multiply_residues(powers, torch.tensor(pow(base, powers.numel(), P)))])
    return _outside_accounts(powers[:count])


def _outside_accounts(table: Tensor) -> Tensor:
    """Return a table that stays, in memory that no account of tensors counts."""
    return torch.from_numpy(table.numpy().copy())


@cache
def _tables_of_powers() -> tuple[Tensor, ...]:
    """Return, by digit of an exponent, the powers of G to what each value of the digit stands for."""
    return tuple(_powers_of(pow(G, 1 << shift, P), 1 << _TABLE) for shift in range(0, Q.bit_length(), _TABLE))


def exponential_of(exponent: Tensor) -> Tensor:
    """Return G ** exponent, for exponents in 0..Q-1."""
    tables = _tables_of_powers()
    if (native := native_field.raise_base(exponent, tables, P)) is not None:
        return native
    out: Tensor | None = None
    for digit, table in enumerate(tables):
        power = table[exponent >> digit * _TABLE & ((1 << _TABLE) - 1)]
        out = power if out is None else multiply_residues(out, power)
    assert out is not None
    return out


@cache
def _build_subgroup(order: int) -> tuple[Tensor, Tensor]:
    """Return the elements of an order, sorted, and the exponent of each."""
    ordered, exponents = _powers_of(pow(G, Q // order, P), order).sort()
    return _outside_accounts(ordered), _outside_accounts(exponents)


def _weight_of(order: int) -> int:
    """Return what is 1 modulo one of the orders and 0 modulo the others."""
    other = Q // order
    return other * pow(other, -1, order) % Q


@cache
def _build_subgroups() -> ctypes.Array[native_field.Subgroup]:
    """Return the subgroups of all orders, as C reads them."""
    groups = ((*_build_subgroup(order), order) for order in ORDERS)
    rows = [native_field.Subgroup(elements.data_ptr(), exponents.data_ptr(), n, _weight_of(n)) for elements, exponents, n in groups]
    return (native_field.Subgroup * len(rows))(*rows)


def logarithm_of(x: Tensor) -> Tensor:
    """Return e with G ** e = x: its residue modulo each of four orders, in whose subgroup a power of x lies; 0 where x is 0."""
    if (native := native_field.take_logarithm(x, _build_subgroups(), P)) is not None:
        return native
    first, second, third, fourth = ORDERS
    lower, upper = raise_to_powers(torch.where(x == 0, 1, x), [third * fourth, first * second])
    total = torch.zeros_like(x)
    for power, order in zip([*raise_to_powers(lower, [second, first]), *raise_to_powers(upper, [fourth, third])], ORDERS, strict=True):
        ordered, exponents = _build_subgroup(order)
        residue = exponents[torch.searchsorted(ordered, power)]
        total = (total + multiply_residues(torch.tensor(_weight_of(order)), residue, Q)) % Q
    return total


@cache
def hash_text(text: str) -> int:
    """Return 60 bits that depend on a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 4


def random_function(name: str, x: Tensor, modulus: int = P) -> Tensor:
    """Return a random function of whole numbers, of that name: equal numbers give equal numbers (SplitMix64's mixing)."""
    if (native := native_field.draw(x, _offset_of(name) & _WORD, modulus)) is not None:
        return native
    z = x + _offset_of(name)
    z = (z ^ (z >> 30 & 0x3FFFFFFFF)) * _as_signed(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> 27 & 0x1FFFFFFFFF)) * _as_signed(0x94D049BB133111EB)
    return (z ^ (z >> 31 & 0x1FFFFFFFF)) % modulus


def exponent_of_number(a: Tensor) -> Tensor:
    """Return the exponents of numbers: a random odd function of all but a number's last bits, plus these, so that exp(-x) exp(x) = 1,
    exp(2) = exp(1) exp(1), and exp(x + 1) = exp(x) exp(1) but where the last bits overflow (2 ** -34 a number)."""
    if (native := native_field.draw_exponents(a, _offset_of("exponent") & _WORD, _LAST_BITS, P)) is not None:
        return native
    sign = torch.where(a > P // 2, -1, 1)
    size = torch.where(sign < 0, P - a, a)
    first = size >> _LAST_BITS
    exponent = torch.where(first == 0, 0, random_function("exponent", first, Q)) + (size & (1 << _LAST_BITS) - 1)
    return sign * exponent % Q


@cache
def order_of(a: Tensor) -> Tensor:
    """Return whole numbers in whose order numbers are compared: the representatives from -P/2 to P/2 of their multiples by a number that
    makes small decimals whole, so that 0 < 0.02 < 1/3."""
    multiple = multiply_residues(a, torch.tensor(_ORDER_FACTOR))
    return torch.where(multiple > P // 2, multiple - P, multiple)


def negative_number(a: Tensor) -> Tensor:
    """Return numbers below zero in that order, one for each number from 0 to P - 1, or two."""
    return multiply_residues(P - 1 - a % (P // 2), torch.tensor(pow(_ORDER_FACTOR, -1, P)))


def _offset_of(name: str) -> int:
    return _as_signed(hash_text(name) * 0x9E3779B97F4A7C15)


def _as_signed(word: int) -> int:
    return ((word + (1 << 63)) & _WORD) - (1 << 63)


def apply_bilinear(
    f: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, modulus: int = P, num_terms: int = 1 << 21, by_sample: bool = False
) -> Tensor:
    """Return a bilinear function with coefficients 0 and 1, which sums up to `num_terms` products, by exact float64 products of limbs.

    `by_sample`: it acts on each sample of `x` by itself, so that limbs of `x` may be samples too.
    """
    bits = _LIMB if num_terms <= _MAX_SHORT_SUM else _SHORT_LIMB
    left, right = _split_limbs(x, bits), _split_limbs(y, bits)
    samples = torch.cat(left) if by_sample else None
    sums: list[Tensor | None] = [None] * (len(left) + len(right) - 1)
    for j, high in enumerate(right):
        products = [f(low, high) for low in left] if samples is None else f(samples, high).chunk(len(left))
        for i, product in enumerate(products):
            part, total = product.to(torch.int64), sums[i + j]
            sums[i + j] = part if total is None else total + part
    return combine_limbs([total for total in sums if total is not None], bits, modulus)


def multiply_matrices(x: Tensor, y: Tensor, modulus: int = P) -> Tensor:
    """Return a matrix product: one of the rows' limbs below one another and the columns' limbs beside one another."""
    if (native := native_field.multiply_matrices(x, y, modulus)) is not None:
        return native
    if x.dim() < 2 or y.dim() < 2 or x.shape[-1] > _MAX_SHORT_SUM:
        return apply_bilinear(torch.matmul, x, y, modulus, x.shape[-1])
    left, right = _split_limbs(x, _LIMB), _split_limbs(y, _LIMB)
    products = torch.matmul(torch.cat(left, -2), torch.cat(right, -1)).to(torch.int64)
    rows, n = torch.split(products, x.shape[-2], -2), len(right)
    parts = [torch.split(row, y.shape[-1], -1) for row in rows]
    sums = [sum(parts[i][k - i] for i in range(len(left)) if 0 <= k - i < n) for k in range(len(left) + n - 1)]
    return combine_limbs(sums, _LIMB, modulus)  # type: ignore[arg-type]


def _split_limbs(x: Tensor, bits: int) -> list[Tensor]:
    return [(x >> shift & ((1 << bits) - 1)).double() for shift in range(0, P.bit_length(), bits)]


def apply_linear(f: Callable[..., Tensor], *tensors: Tensor, modulus: int = P) -> Tensor:
    """Return a linear function of tensors with coefficients 0 and 1 (sums, scatters) of up to 2^22 terms, by halves of their bits."""
    lower = f(*((x & ((1 << _HALF) - 1)).double() for x in tensors))
    upper = f(*((x >> _HALF).double() for x in tensors))
    return combine_limbs([lower.to(torch.int64), upper.to(torch.int64)], _HALF, modulus)


def square_root(x: int) -> int | None:
    """Return the even power of G that squares to x; None if there is none."""
    exponent = int(logarithm_of(torch.tensor([x % P])))
    return pow(G, exponent // 2, P) if exponent % 2 == 0 else None


@cache
def constant_of(x: float) -> int:
    """Return the number of a constant: rationals and roots of small ones exactly, any other float as an unknown of its own."""
    number = -constant_of(-x) % P if x < 0 else _number_of(x)
    _REALS.setdefault(number, x)
    return number


def reals_of(a: Tensor) -> tuple[Tensor, bool]:
    """Return the constants that numbers are, NaN for a number of none, and whether any of them has no exact number."""
    numbers, where = torch.unique(a, return_inverse=True)
    reals = [_REALS.get(number, nan) for number in numbers.tolist()]
    return torch.tensor(reals, dtype=torch.float64)[where], not _ROUNDED.isdisjoint(map(abs, reals))


def _number_of(x: float) -> int:
    if x == int(x) and x < P:
        return int(x)
    fraction = Fraction(x).limit_denominator(_MAX_DENOMINATOR)
    if abs(float(fraction) - x) <= _ROUNDING * x:  # 1 / (1 - p) of dropout is a rational that was rounded twice
        return _residue_of(fraction)
    # One less a rational p, as 1 - momentum of batch norm, and the scale 1 / (1 - p) of dropout, have lost digits that p has.
    part = 1 - x if x < 1 else 1 - 1 / x
    lost = Fraction(part).limit_denominator(_MAX_DENOMINATOR)
    if x < 1 and 1 - float(lost) == x:
        return _residue_of(1 - lost)
    if x > 1 and lost < 1 and 1 / (1 - float(lost)) == x:
        return _residue_of(1 / (1 - lost))
    for degree in (2, 4):  # attention with dropout scales queries and keys by a fourth root each
        power = Fraction(x**degree).limit_denominator(_MAX_SQUARE)
        if power and abs(float(power) - x**degree) <= degree * _ROUNDING * x**degree:
            root = square_root(_residue_of(power))
            root = square_root(root) if degree == 4 and root is not None else root
            if root is not None:
                return root
    _ROUNDED.add(x)
    return hash_text(f"number {x!r}") % P


def _residue_of(fraction: Fraction) -> int:
    return fraction.numerator * pow(fraction.denominator, -1, P) % P
