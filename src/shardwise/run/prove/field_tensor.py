"""`FieldTensor`: a tensor whose elements are numbers of a finite field, which torch's dispatcher and autograd treat like float64.

A number has two components: itself modulo P, and an exponent modulo Q, from which its exponential follows. Programs of sums, products and
quotients that are equal as rational functions give equal numbers in any order of summation; programs that are not differ at a random point
but with probability degree / P (Schwartz 1980, Zippel 1979). A function that is not rational is a random function: equal numbers in, equal
numbers out. Comparisons take the order of the representatives, -P/2 to P/2. `FieldMode` makes floating-point buffers that are allocated
within it FieldTensors; all other floating-point tensors stay real, and are constants where they meet a FieldTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ModelError
from shardwise.run.prove import finite_field as field
from shardwise.run.prove.finite_field import P, Q
from shardwise.world import private

LOWEST = -1e300  # what a mask has for minus infinity is below
Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}  # by operator (without overload): called with (operator, *args, **kwargs)


class NotProvable(ModelError):
    """An operator, or a use of numbers, that exact arithmetic does not have."""


class FieldTensor(Tensor):
    """`a`: numbers modulo P; `b`: exponents modulo Q; `hidden`: where it is minus infinity, None: nowhere. `root_of`: of a square root, its
    square, so that it can be squared exactly. `degree`: of the polynomial in random numbers, and reciprocals of divisors, that its elements
    are at most (`certainty`); one list for all views of a buffer, None until the operator has returned."""

    a: Tensor
    b: Tensor
    hidden: Tensor | None
    root_of: FieldTensor | None
    degree: list[int] | None

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor | None = None, hidden: Tensor | None = None, degree: list[int] | None = None) -> FieldTensor:
        x: FieldTensor = private.make_wrapper(
            cls, a.shape, strides=a.stride(), dtype=torch.float64, device=torch.device("cpu"), requires_grad=False
        )
        x.a, x.b, x.hidden = a, field.random_function("exponent", a, Q) if b is None else b, hidden
        x.root_of, x.degree = None, degree
        return x

    def __init__(self, a: Tensor, b: Tensor | None = None, hidden: Tensor | None = None, degree: list[int] | None = None) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FieldTensor({self.a.flatten()[:6].tolist()}, {tuple(self.shape)})"

    def untyped_storage(self) -> Any:
        """Return the storage of the numbers, which buckets free and allocate."""
        return self.a.untyped_storage()

    def data_ptr(self) -> int:
        """Return the address of the numbers, which fingerprints read as words."""
        return self.a.data_ptr()

    def item(self) -> Any:
        """Return the number itself, which no Python float is; a bound of the gradient's norm is compared and divided as on tensors."""
        return self.detach()

    def __deepcopy__(self, memo: Any) -> FieldTensor:
        return FieldTensor(self.a.clone(), self.b.clone(), self.hidden, [degree_of(self)])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return call_rule(func, args, kwargs or {})


def degree_of(x: object) -> int:
    """Return the degree of a tensor; 0 for constants."""
    return x.degree[0] if isinstance(x, FieldTensor) and x.degree is not None else 0


def call_rule(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator, and give its results the largest degree of its arguments where its rule gives none."""
    result = _run_rule(func, args, kwargs)
    results = result if isinstance(result, list | tuple) else (result,)
    unknown = [x for x in results if isinstance(x, FieldTensor) and x.degree is None]
    if unknown:
        degree = _largest_degree((*args, *kwargs.values()))
        for x in unknown:
            x.degree = [degree]
    return result


def _largest_degree(args: Sequence[Any]) -> int:
    return max((_largest_degree(x) if isinstance(x, list | tuple) else degree_of(x) for x in args), default=0)


def _run_rule(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator with a FieldTensor among its arguments: by its rule, or composed of others. Raises NotProvable if it has neither."""
    rule = RULES.get(func) or RULES.get(func.overloadpacket)
    if rule is not None:
        return rule(func, *args, **kwargs)
    name = func.overloadpacket.__name__
    if name.endswith("_") and (plain := getattr(torch.ops.aten, name[:-1], None)) is not None and plain in RULES:
        return write(args[0], plain(*args, **kwargs))
    if (out := kwargs.get("out")) is not None and func.overloadpacket in RULES:
        return write(out, func.overloadpacket(*args, **{k: v for k, v in kwargs.items() if k != "out"}))
    if (composed := private.DECOMPOSITIONS.get(func)) is not None:
        return composed(*args, **kwargs)
    result = func.decompose(*args, **kwargs)
    if result is NotImplemented:
        raise NotProvable(f"{func} has no exact form in a finite field")
    return result


class FieldMode(private.DispatchMode):  # type: ignore[no-untyped-call]
    """Makes float64 buffers (torch.zeros, torch.empty) FieldTensors, and real tensors that meet one in an operator constants."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, FieldTensor) for kind in types):
            return call_rule(func, args, kwargs)
        result = func(*args, **kwargs)
        if getattr(func, "overloadpacket", None) in _BUFFERS and result.dtype is torch.float64:
            return zeros_of(result.shape)
        return result


aten = torch.ops.aten
_BUFFERS = {aten.zeros, aten.empty, aten.empty_strided}


def register_for(*operators: Any) -> Callable[[Rule], Rule]:
    """Register the rule of some operators."""

    def register_rule(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(operators, function))
        return function

    return register_rule


class Certainty:
    """What bounds the probability that a wrong program passes: a value of degree g in n random numbers and the reciprocals of divisors of
    degrees d_i is a quotient of polynomials of degree at most g (1 + sum of d_i), and one that is not zero is zero at a random point with
    at most that over P (Schwartz 1980, Zippel 1979). `zero_divisors`: at a point where a divisor is zero nothing is shown.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin another point."""
        self.divisor_degree = self.num_functions = self.zero_divisors = 0

    def add_divisor(self, y: FieldTensor) -> None:
        """Note a division by the elements of `y`."""
        self.divisor_degree += degree_of(y) * y.numel()
        self.zero_divisors += int((y.a == 0).sum())

    def wrong_point_probability(self, degree: int) -> float:
        """Return the bound for values of that degree, on one random point."""
        return min(1.0, (degree * (1 + self.divisor_degree) + self.num_functions) / P)


CERTAINTY = Certainty()  # of this process: the ranks and the serial run of a proof


def zeros_of(shape: Sequence[int]) -> FieldTensor:
    return FieldTensor(torch.zeros(tuple(shape), dtype=torch.int64), torch.zeros(tuple(shape), dtype=torch.int64), degree=[0])


def lift_constants(x: Any) -> FieldTensor:
    """Return a real tensor or number as constants."""
    if isinstance(x, FieldTensor):
        return x
    if isinstance(x, Tensor):
        if x.is_complex():
            raise NotProvable("complex numbers have no exact form in a finite field yet")
        if not x.is_floating_point():
            whole = x.detach().to(torch.int64)
            return FieldTensor(whole % P, whole % Q, degree=[0])
        if not x.dim():
            return FieldTensor(*_number_of(float(x)), [0])
        values, where = torch.unique(x.detach().double(), return_inverse=True)
    else:
        return FieldTensor(*_number_of(float(x)), [0])
    numbers = values.tolist()
    if any(v != v or v == float("inf") for v in numbers):
        raise NotProvable("a constant of the model is not a number, or infinite")
    table = torch.tensor([(0, 0) if v < LOWEST else field.constant_of(v) for v in numbers], dtype=torch.int64).reshape(-1, 2)
    hidden = values < LOWEST
    return FieldTensor(table[:, 0][where], table[:, 1][where], hidden[where] if bool(hidden.any()) else None, [0])


@lru_cache(maxsize=4096)
def _number_of(x: float) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return number, exponent and hidden of a constant."""
    if x != x or x == float("inf"):
        raise NotProvable("a constant of the model is not a number, or infinite")
    number, exponent = (0, 0) if x < LOWEST else field.constant_of(x)
    return torch.tensor(number), torch.tensor(exponent), torch.tensor(True) if x < LOWEST else None


def exponents_of_constants(numbers: Tensor) -> Tensor:
    """Return the exponents that constants of these residues have, however they were computed."""
    values, where = torch.unique(numbers, return_inverse=True)
    return torch.tensor([field.exponent_of_residue(v) for v in values.tolist()], dtype=torch.int64)[where]


def signed_order(x: FieldTensor) -> Tensor:
    """Return the representatives from -P/2 to P/2, in whose order numbers are compared; minus infinity is below all."""
    numbers = torch.where(x.a > P // 2, x.a - P, x.a)
    return numbers if x.hidden is None else torch.where(x.hidden, -P, numbers)


def hidden_or_none(x: FieldTensor) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.bool) if x.hidden is None else x.hidden


def write(target: Tensor, source: Any) -> Tensor:
    """Write numbers into a tensor in place."""
    if not isinstance(target, FieldTensor):
        raise NotProvable("the model writes computed numbers into a tensor of constants")
    value = lift_constants(source)
    target.a.copy_(value.a.expand(target.shape))
    target.b.copy_(value.b.expand(target.shape))
    if target.hidden is not None:
        target.hidden.copy_(hidden_or_none(value).expand(target.shape))
    elif value.hidden is not None and bool(value.hidden.any()):
        target.hidden = value.hidden.expand(target.shape).clone()
    target.root_of = None
    if target.degree is not None:
        target.degree[0] = max(target.degree[0], degree_of(value))
    return target


def random_numbers(shape: Sequence[int], name: str, seed: int) -> FieldTensor:
    """Return random numbers that depend on a name, a seed and the index of the element."""
    index = torch.arange(torch.Size(shape).numel())
    return FieldTensor(field.random_function(f"{name}/{seed}", index).reshape(tuple(shape)), degree=[1])


def have_equal_numbers(x: FieldTensor, y: FieldTensor) -> bool:
    """Return whether two tensors have the same numbers."""
    return x.shape == y.shape and bool((x.a == y.a).all()) and bool((hidden_or_none(x) == hidden_or_none(y)).all())
