"""Degrees of numbers of a proof, and what they say about the probability that a wrong program passes.

A value is a polynomial in random numbers and reciprocals of divisors. A divisor is a polynomial itself, or a quotient by divisors of a
lower level. In: the degrees of the values that are compared, and every divisor's. Out: a bound for one random point.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from operator import or_

from torch import Tensor

from shardwise.run.prove.finite_field import LARGEST_WEIGHT

# Level (0: a polynomial, 1: with reciprocals of level 0, ...), size of the tensor in bits, number of the division modulo a few.
DivisorClass = tuple[int, int, int]
_Powers = dict[DivisorClass, int]
HIGH_LEVEL = 3  # of a divisor: a model whose degree is too high is proven with random functions for reciprocals of higher ones
_NUM_CLASSES = 16  # of divisions of a level and size: any partition is right, a finer one tells layers apart
_MAX_JOINED = 1 << 17  # elements of a tensor whose parts' degrees are told apart
_LOW = 1 << 8  # a degree below which parts of a buffer have its degree: recurrences over rows have higher ones


def _add_powers(x: _Powers, y: _Powers) -> _Powers:
    return {key: x.get(key, 0) + y.get(key, 0) for key in x | y} if x and y else x or y


def _join_powers(x: _Powers, y: _Powers) -> _Powers:
    return {key: max(x.get(key, 0), y.get(key, 0)) for key in x | y} if x and y and x != y else x or y


@dataclass(frozen=True, slots=True)
class Degree:
    """Upper bounds over the monomials of a value. `total`: of random numbers and reciprocals; `reciprocals`: of divisors, by class;
    `logarithms`: of which a logarithm is added, and which an exponential therefore divides by. `is_joined`: of a
    tensor put together of others, whose elements' own degrees `Certainty` knows."""

    total: int = 0
    reciprocals: _Powers = field(default_factory=dict)
    logarithms: _Powers = field(default_factory=dict)
    is_joined: bool = False

    def __hash__(self) -> int:
        return hash((self.total, len(self.reciprocals), len(self.logarithms)))

    def __add__(self, other: Degree) -> Degree:
        """Return the degree of a product."""
        if not other.total or not self.total:  # a constant scales
            return self if not other.total else other
        return _degree_of_product(self, other)

    def __or__(self, other: Degree) -> Degree:
        """Return the degree of a sum."""
        if self is other or other is CONSTANT or not (other.total or other.is_joined):
            return self
        return _degree_of_sum(self, other)

    def degree_of_exponential(self) -> Degree:
        """Return the degree of the exponential: a random number, over what the logarithms are of."""
        return Degree(1 + sum(self.logarithms.values()), self.logarithms)


@lru_cache(maxsize=1 << 14)  # of many elements, few degrees
def _degree_of_product(x: Degree, y: Degree) -> Degree:
    return Degree(x.total + y.total, _add_powers(x.reciprocals, y.reciprocals))


@lru_cache(maxsize=1 << 14)
def _degree_of_sum(x: Degree, y: Degree) -> Degree:
    joined = Degree(
        max(x.total, y.total),
        _join_powers(x.reciprocals, y.reciprocals),
        _join_powers(x.logarithms, y.logarithms),
        x.is_joined or y.is_joined,
    )
    return x if joined == x else joined


CONSTANT, LINEAR = Degree(), Degree(1)


def _level_of(divisor: Degree) -> int:
    """Return how many divisions lie below one by a number."""
    return 1 + max((key[0] for key in divisor.reciprocals), default=-1)


class Certainty:
    """What bounds the probability that a wrong program passes (Schwartz 1980, Zippel 1979).

    A value of degree g with at most p reciprocals of divisors of degrees d_i in a monomial becomes a polynomial of degree at most
    g + p (sum of d_i) when it is multiplied by the p-th power of each divisor, class by class, those of the highest level first. One that
    is not zero is zero at a random point with at most its degree times the largest probability of a number. `zero_divisors`: at a point
    where a divisor is zero nothing is shown.
    """

    def __init__(self) -> None:
        self.max_level: int | None = None  # of divisors whose reciprocals are exact; None: of all
        self.reset()

    def reset(self, num_steps: int = 1) -> None:
        """Begin another point, of so many training steps."""
        self.num_steps, self.num_functions, self.zero_divisors = num_steps, 0, 0
        self.unknown_operators = set[str]()  # that stand as random functions of their arguments
        self._num_divisions = Counter[int]()  # by thread: so that ranks with equal programs have equal classes
        self._sums: dict[DivisorClass, int] = {}  # of degrees
        self._nested: dict[DivisorClass, dict[DivisorClass, int]] = {}  # sums of powers of divisors within divisors
        self._joined: dict[int, Degree] = {}  # by number, which tells elements apart: it is random

    def is_exact_divisor(self, degree: Degree) -> bool:
        """Return whether the reciprocal of a number of a degree is exact, and not a random function of it."""
        return self.max_level is None or _level_of(degree) <= self.max_level

    @contextmanager
    def count_apart(self) -> Iterator[Certainty]:
        """Count what a block computes in an account of its own, which `add_counted` adds to any point."""
        own, block = self.__dict__, Certainty()
        block.num_steps, block.max_level = self.num_steps, self.max_level
        self.__dict__ = block.__dict__
        try:
            yield block
        finally:
            self.__dict__ = own

    def add_counted(self, counted: Certainty) -> None:
        """Add what a block has counted."""
        self.num_functions += counted.num_functions
        self.zero_divisors += counted.zero_divisors
        self.unknown_operators |= counted.unknown_operators
        for key, total in counted._sums.items():
            self._sums[key] = self._sums.get(key, 0) + total
        for key, powers in counted._nested.items():
            self._nested[key] = _add_powers(self._nested.get(key, {}), powers)
        self._joined.update(counted._joined)

    def add_divisors(self, degree: Degree, count: int, zeros: int = 0) -> Degree:
        """Note a division by `count` elements of a degree, of which some are zero; return the degree of their reciprocal."""
        self.zero_divisors += zeros
        if not degree.total:
            return CONSTANT
        self._num_divisions[threading.get_ident()] += 1
        key = (_level_of(degree), count.bit_length(), self._num_divisions[threading.get_ident()] % _NUM_CLASSES)
        self._sums[key] = self._sums.get(key, 0) + degree.total * count
        for inner, power in degree.reciprocals.items():
            sums = self._nested.setdefault(key, {})
            sums[inner] = sums.get(inner, 0) + power * count
        return Degree(1, {key: 1})

    def join_degrees(self, parts: Sequence[tuple[Degree, Tensor]]) -> Degree:
        """Return the degree of a tensor put together of parts: (degree, numbers). Parts of it have their own degrees again."""
        joined = CONSTANT
        for degree, _ in parts:
            joined = joined | degree
        if all(degree == joined for degree, _ in parts) or sum(numbers.numel() for _, numbers in parts) > _MAX_JOINED:
            return joined
        for degree, numbers in parts:
            elements: list[int] = numbers.flatten().tolist()
            if degree.is_joined:  # elements that were put together have their own already; others were computed of them
                elements = [element for element in elements if element not in self._joined]
            self._joined.update(dict.fromkeys(elements, replace(degree, is_joined=False)))
        self._joined[0] = CONSTANT  # padding, which is computed with as with other rows
        return replace(joined, is_joined=True)

    def note_sums(self, parts: Sequence[tuple[Degree, Tensor]], sums: Tensor) -> None:
        """Note the degree of each sum of elements of tensors of which some were put together: (degree, numbers)."""
        if sums.numel() > _MAX_JOINED:
            return
        terms = [[self._joined.get(element, degree) for element in numbers.flatten().tolist()] for degree, numbers in parts]
        for element, first, *others in zip(sums.flatten().tolist(), *terms, strict=True):
            self._joined[element] = replace(reduce(or_, others, first), is_joined=False)

    def degree_after_write(self, before: Degree, buffer: Tensor, written: Degree, numbers: Tensor) -> Degree:
        """Return the degree of a buffer, a part of which is written: other parts keep their own, where that is worth their numbers."""
        joined = before | written
        return joined if joined.total < _LOW else self.join_degrees([(before, buffer), (written, numbers)])

    def degree_of_part(self, numbers: Tensor, joined: Degree) -> Degree:
        """Return the degree of a part of a tensor that was put together."""
        own_degrees = list({id(own): own for own in map(self._joined.get, numbers.flatten().tolist())}.values())
        degree = own_degrees[0] if own_degrees else CONSTANT
        for own in own_degrees:
            if own is None or degree is None:
                return joined
            if own is not degree:
                degree = replace(degree | own, is_joined=True)
        return degree or joined

    def add_update_divisor(self) -> Degree:
        """Return the degree of the reciprocal in the update of an element, which no other element's update has."""
        key = (0, -1, 0)
        self._sums[key] = 1
        return Degree(1, {key: 1})

    def wrong_point_probability(self, degree: Degree) -> float:
        """Return the bound for values of that degree, on one random point."""
        powers, total = dict(degree.reciprocals), degree.total
        for key in sorted(self._sums, reverse=True):
            power = powers.get(key, 0)
            total += power * self._sums[key]
            for inner, count in self._nested.get(key, {}).items():
                powers[inner] = powers.get(inner, 0) + power * count
        return min(1.0, (total + self.num_functions) * LARGEST_WEIGHT)


CERTAINTY = Certainty()  # of this process: the ranks and the serial run of a proof
