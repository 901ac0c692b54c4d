"""`FieldTensor`: a tensor whose elements are numbers of a finite field, which torch's dispatcher and autograd treat like float64.

A number has two components: itself modulo P, and an exponent modulo Q, from which its exponential follows. Programs of sums, products and
quotients that are equal as rational functions give equal numbers in any order of summation; programs that are not differ at a random point
but with probability degree / P (Schwartz 1980, Zippel 1979). A function that is not rational is a random function: equal numbers in, equal
numbers out. Comparisons take an order of the numbers in which small constants have their own (`order_of`). `FieldMode` makes floating-point
buffers that are allocated within it FieldTensors; all other floating-point tensors stay real, and are constants where they meet one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ModelError
from shardwise.run.prove import finite_field as field
from shardwise.run.prove.degrees import CERTAINTY, CONSTANT, LINEAR, Degree
from shardwise.run.prove.finite_field import P
from shardwise.world import private

LEAST = tuple(torch.finfo(dtype).min for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64))  # minus infinity in masks
Rule = Callable[..., Any]
_CPU = torch.device("cpu")
RULES: dict[Any, Rule] = {}  # by operator (without overload): called with (operator, *args, **kwargs)
COMPLEX_RULES: dict[Any, Rule] = {}  # likewise, of operators with a complex argument
FALLBACKS: list[Rule] = []  # called in order for an operator without exact form; NotImplemented: not its kind


class NotProvable(ModelError):
    """An operator, or a use of numbers, that exact arithmetic does not have."""


class ComplexOperand(NotProvable):
    """A complex number among the arguments of a rule of real ones: there is a rule of complex ones, or none."""


class FieldTensor(Tensor):
    """`a`: numbers modulo P. `root_of`: of a square root, its square, so that it can
    be squared exactly. `reciprocal_of`: of 1 / y, y. `degree`: of the polynomial in random numbers, and reciprocals of divisors, that its
    elements are at most; one list for all views of a buffer, None until the operator has returned. `part_degree`: of a part of a buffer,
    and that of the buffer for which it holds.

    `b`: exponents modulo Q, of which exp is the power: a random function of the number, so that equal numbers have equal exponents however
    they were summed. Only logarithms and largest values, and their sums with others, have exponents of their own (`has_own_exponents`):
    there exp(x - y) is exp(x) / exp(y).
    """

    a: Tensor
    root_of: FieldTensor | None
    reciprocal_of: FieldTensor | None
    degree: list[Degree] | None
    part_degree: tuple[Degree, Degree] | None
    own_exponents: list[Tensor | None]  # of all numbers of the memory; one list for all tensors that lie there
    hidden_numbers: list[Tensor | None]  # of all numbers of the memory, whether each is minus infinity; likewise

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor | None = None, hidden: Tensor | None = None, degree: list[Degree] | None = None) -> FieldTensor:
        x: FieldTensor = private.make_wrapper(cls, a.shape, strides=a.stride(), dtype=torch.float64, device=_CPU, requires_grad=False)
        x.a, x.own_exponents, x.hidden_numbers = a, [None], [None]
        x.root_of, x.reciprocal_of, x.degree, x.part_degree = None, None, degree, None
        if b is not None:
            x.allocate_exponents()
            x.b.copy_(b)
        if hidden is not None:
            x.hide(hidden)
        return x

    def __init__(self, a: Tensor, b: Tensor | None = None, hidden: Tensor | None = None, degree: list[Degree] | None = None) -> None:
        super().__init__()

    @property
    def b(self) -> Tensor:
        """Return the exponents."""
        stored = self.own_exponents[0]
        if stored is None:
            return field.exponent_of_number(self.a)
        return stored.as_strided(self.a.shape, self.a.stride(), self.a.storage_offset())

    @property
    def has_own_exponents(self) -> bool:
        return self.own_exponents[0] is not None

    @property
    def hidden(self) -> Tensor | None:
        """Return where the numbers are minus infinity; None: nowhere."""
        stored = self.hidden_numbers[0]
        return None if stored is None else stored.as_strided(self.a.shape, self.a.stride(), self.a.storage_offset())

    def hide(self, hidden: Tensor) -> None:
        """Set where the numbers are minus infinity."""
        stored = self.hidden_numbers[0]
        if stored is None:
            stored = torch.zeros(self.a.untyped_storage().nbytes() // self.a.element_size(), dtype=torch.bool)
            self.hidden_numbers[0] = stored
        index = torch.arange(stored.numel()).as_strided(self.a.shape, self.a.stride(), self.a.storage_offset())
        stored[index] = hidden  # numbers that lie at one place are the same

    @property
    def is_whole(self) -> bool:
        """Return whether it is all numbers of its memory."""
        return self.a.numel() * self.a.element_size() == self.a.untyped_storage().nbytes()

    def allocate_exponents(self) -> None:
        """Give all numbers of the memory exponents of their own, which are those that follow from them."""
        size = self.a.untyped_storage().nbytes() // self.a.element_size()
        self.own_exponents[0] = field.exponent_of_number(self.a.as_strided((size,), (1,), 0))

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
        return FieldTensor(self.a.clone(), self.b if self.has_own_exponents else None, self.hidden, [degree_of(self)])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return call_rule(func, args, kwargs or {})


class ComplexFieldTensor(Tensor):
    """A complex tensor: pairs of real and imaginary parts, a FieldTensor of shape [..., 2], whose memory it shares.

    i is formal: a rule of complex numbers is composed of rules of the real parts, which are rational functions of real parts.
    """

    pair: FieldTensor

    @staticmethod
    def __new__(cls, pair: FieldTensor) -> ComplexFieldTensor:
        strides = tuple(stride // 2 for stride in pair.a.stride()[:-1])
        z: ComplexFieldTensor = private.make_wrapper(
            cls, pair.shape[:-1], strides=strides, dtype=torch.complex128, device=torch.device("cpu"), requires_grad=False
        )
        z.pair = pair
        return z

    def __init__(self, pair: FieldTensor) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ComplexFieldTensor({self.pair!r})"

    def untyped_storage(self) -> Any:
        """Return the storage of the numbers."""
        return self.pair.untyped_storage()

    def data_ptr(self) -> int:
        """Return the address of the numbers."""
        return self.pair.data_ptr()

    def __deepcopy__(self, memo: Any) -> ComplexFieldTensor:
        return ComplexFieldTensor(self.pair.__deepcopy__(memo))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return call_complex_rule(func, args, kwargs or {})


def degree_of(x: object) -> Degree:
    """Return the degree of a tensor's elements."""
    x = x.pair if isinstance(x, ComplexFieldTensor) else x
    if not isinstance(x, FieldTensor) or x.degree is None:
        return CONSTANT
    part = x.part_degree
    return part[0] if part is not None and part[1] is x.degree[0] else x.degree[0]


def add_divisor(y: FieldTensor) -> Degree:
    """Note a division by the elements of `y`; return the degree of their reciprocals."""
    return CERTAINTY.add_divisors(degree_of(y), y.numel(), int((y.a == 0).sum()))


def call_rule(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator, and give its results the largest degree of its arguments where its rule gives none."""
    if (reals := _real_arguments(func, args)) is not None:
        return lift_results(func(*reals, **kwargs))
    try:
        result = _run_rule(RULES, func, args, kwargs)
    except ComplexOperand:
        return call_complex_rule(func, args, kwargs)
    if type(result) is FieldTensor and result.degree is not None:
        return result
    results = result if isinstance(result, list | tuple) else (result,)
    unknown = [x for x in results if isinstance(x, FieldTensor) and x.degree is None]
    if unknown:
        degree = largest_degree((*args, *kwargs.values()))
        for x in unknown:
            x.degree = [degree]
    return result


def lift_results(result: Any) -> Any:
    """Return an operator's results, those of real numbers as constants."""
    if isinstance(result, list | tuple):
        return type(result)(map(lift_results, result))
    return lift_constants(result) if isinstance(result, Tensor) and result.is_floating_point() else result


def _real_arguments(func: Any, args: Sequence[Any]) -> list[Any] | None:
    """Return arguments of an operator with real numbers in place of constants of the field, so that a function of a draw is that of real
    numbers, whatever the draw was written into; None where arguments are no constants, or exact ones, or the operator writes."""
    tensors = [x for arg in args for x in (arg if isinstance(arg, list | tuple) else (arg,)) if type(x) is FieldTensor]
    if any(degree_of(x).total for x in tensors) or any(argument.alias_info is not None for argument in func._schema.arguments):
        return None
    if any(not x.a.untyped_storage().nbytes() for x in tensors):  # a bucket's, which is freed
        return None
    reals = [field.reals_of(x.a) for x in tensors]
    if not any(has_rounded for _, has_rounded in reals) or any(x.hidden is not None for x in tensors):
        return None
    if any(bool(real.isnan().any()) for real, _ in reals):
        return None
    found = iter([real for real, _ in reals])
    return [
        [next(found) if type(x) is FieldTensor else x for x in arg] if isinstance(arg, list | tuple)
        else next(found) if type(arg) is FieldTensor else arg
        for arg in args
    ]  # fmt: skip


def largest_degree(args: Sequence[Any]) -> Degree:
    """Return the degree of a sum of all tensors among arguments."""
    degree = CONSTANT
    for x in args:
        degree = degree | (largest_degree(x) if isinstance(x, list | tuple) else degree_of(x))
    return degree


def call_complex_rule(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator with a complex tensor or number among its arguments. Raises NotProvable if it has no rule."""
    return _run_rule(COMPLEX_RULES, func, args, kwargs)


def _run_rule(rules: Mapping[Any, Rule], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator by its rule, composed of others, or by a fallback. Raises NotProvable if it has none of them."""
    try:
        return _run_exactly(rules, func, args, kwargs)
    except ComplexOperand:
        raise
    except NotProvable:
        for fallback in FALLBACKS:
            with suppress(NotProvable):
                if (result := fallback(func, *args, **kwargs)) is not NotImplemented:
                    return result
        raise


def _run_exactly(rules: Mapping[Any, Rule], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    rule = rules.get(func) or rules.get(func.overloadpacket)
    out = kwargs.get("out")
    if out is not None and rule is not None:
        return write(out, func.overloadpacket(*args, **{k: v for k, v in kwargs.items() if k != "out"}))
    if rule is not None:
        return rule(func, *args, **kwargs)
    name = func.overloadpacket.__name__
    if name.endswith("_") and (plain := getattr(torch.ops.aten, name[:-1], None)) is not None:
        overload = _OTHER_OVERLOADS.get(func, func.name().partition(".")[2] or "default")
        value = getattr(plain, overload, plain)(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags and value.data_ptr() == args[0].data_ptr() and value.numel() == args[0].numel():
            private.change_view(func, *args)
            return _take_view(args[0], value)
        if value.shape != args[0].shape:
            raise NotProvable(f"{func} changes a tensor's shape in place")
        return write(args[0], value)
    if (composed := private.DECOMPOSITIONS.get(func)) is not None and (result := composed(*args, **kwargs)) is not NotImplemented:
        return result
    result = func.decompose(*args, **kwargs)
    if result is NotImplemented:
        raise NotProvable(f"{func} has no exact form in a finite field")
    return result


def _take_view(x: Any, view: Any) -> Any:
    """Make a tensor a view of its numbers, in place."""
    if isinstance(x, ComplexFieldTensor):
        _take_view(x.pair, view.pair)
    else:
        x.a, x.root_of, x.reciprocal_of = view.a, view.root_of, view.reciprocal_of
    return x


class FieldMode(private.UncompiledDispatchMode):  # type: ignore[no-untyped-call]
    """Makes float64 buffers (torch.zeros, torch.empty) FieldTensors, and real tensors that meet one in an operator constants."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if ComplexFieldTensor in types:
            return call_complex_rule(func, args, kwargs)
        if FieldTensor in types:
            return call_rule(func, args, kwargs)
        result = func(*args, **kwargs)
        is_real = type(result) is Tensor and not result.is_meta  # a capture and a trial of operators allocate meta and fake tensors
        if is_real and getattr(func, "overloadpacket", None) in _BUFFERS:
            if result.dtype is torch.float64:
                return zeros_of(result.shape)
            if result.dtype is torch.complex128:
                return ComplexFieldTensor(zeros_of((*result.shape, 2)))
        return result


aten = torch.ops.aten
_OTHER_OVERLOADS = {aten.pow_.Scalar: "Tensor_Scalar", aten.pow_.Tensor: "Tensor_Tensor"}  # of the operator that is not in place
_BUFFERS = {aten.zeros, aten.empty, aten.empty_strided}


def register_for(*operators: Any, rules: dict[Any, Rule] = RULES) -> Callable[[Rule], Rule]:
    """Register the rule of some operators."""

    def register_rule(function: Rule) -> Rule:
        rules.update(dict.fromkeys(operators, function))
        return function

    return register_rule


def register_fallback(function: Rule) -> Rule:
    """Register a fallback, after those that there are."""
    FALLBACKS.append(function)
    return function


def keep_exponents(x: FieldTensor) -> FieldTensor:
    """Return a tensor from which others are subtracted, or that is subtracted, under an exponential: exp(x - y) is exp(x) / exp(y)."""
    return FieldTensor(x.a.clone(), x.b, x.hidden, x.degree)


def have_own_exponents(*parts: FieldTensor) -> bool:
    """Return whether one of the parts has exponents of its own, from which those of a sum of them follow."""
    return any(x.has_own_exponents for x in parts)


def zeros_of(shape: Sequence[int]) -> FieldTensor:
    return FieldTensor(torch.zeros(tuple(shape), dtype=torch.int64), degree=[CONSTANT])


def lift_constants(x: Any) -> FieldTensor:
    """Return a real tensor or number as constants."""
    if isinstance(x, FieldTensor):
        return x
    if isinstance(x, complex) or (isinstance(x, Tensor) and x.is_complex()):
        raise ComplexOperand("an operator of complex numbers has no exact form in a finite field")
    if isinstance(x, Tensor):
        if not x.is_floating_point():
            return FieldTensor(x.detach().to(torch.int64) % P, degree=[CONSTANT])
        if not x.dim():
            return _constant_of(float(x))
        values, where = torch.unique(x.detach().double(), return_inverse=True)
    else:
        return _constant_of(float(x))
    numbers = values.tolist()
    if any(v != v or v == float("inf") for v in numbers):
        raise NotProvable("a constant of the model is not a number, or infinite")
    hides = [_is_hidden(v) for v in numbers]
    table = torch.tensor([0 if hidden else field.constant_of(v) for v, hidden in zip(numbers, hides, strict=True)], dtype=torch.int64)
    return FieldTensor(table[where], hidden=torch.tensor(hides)[where] if any(hides) else None, degree=[CONSTANT])


def _constant_of(x: float) -> FieldTensor:
    """Return a constant. What is cached are whole numbers: a tensor may be made while a capture runs, which makes it a fake one."""
    if x != x or x == float("inf"):
        raise NotProvable("a constant of the model is not a number, or infinite")
    if _is_hidden(x):
        return FieldTensor(torch.tensor(0), hidden=torch.tensor(True), degree=[CONSTANT])
    return FieldTensor(torch.tensor(field.constant_of(x)), degree=[CONSTANT])


def _is_hidden(x: float) -> bool:
    """Return whether a mask with this constant hides: a capture has the least number of one type, the serial model that of another."""
    return x in LEAST or x == -math.inf


def lift_complex(x: Any) -> ComplexFieldTensor:
    """Return a tensor or number as complex numbers."""
    if isinstance(x, ComplexFieldTensor):
        return x
    if isinstance(x, complex):
        x = torch.tensor(x, dtype=torch.complex128)
    if isinstance(x, Tensor) and x.is_complex():
        return ComplexFieldTensor(lift_constants(torch.view_as_real(x.detach().resolve_conj())))
    real: Any = lift_constants(x)
    return ComplexFieldTensor(torch.stack([real, torch.zeros_like(real)], -1))  # type: ignore[arg-type]


def lift_pairs(x: Tensor) -> FieldTensor:
    """Return a tensor as numbers of the field, complex numbers as pairs."""
    return lift_complex(x).pair if x.is_complex() else lift_constants(x)


def signed_order(x: FieldTensor) -> Tensor:
    """Return whole numbers in whose order numbers are compared; minus infinity is below all."""
    numbers = field.order_of(x.a)
    return numbers if x.hidden is None else torch.where(x.hidden, -P, numbers)


def hidden_or_none(x: FieldTensor) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.bool) if x.hidden is None else x.hidden


def write(target: Tensor, source: Any) -> Tensor:
    """Write numbers into a tensor in place."""
    if isinstance(target, ComplexFieldTensor):
        write(target.pair, lift_complex(source).pair)
        return target
    if not isinstance(target, FieldTensor):
        raise NotProvable("the model writes computed numbers into a tensor of constants")
    value = lift_constants(source)
    if value.has_own_exponents and not target.has_own_exponents:
        target.allocate_exponents()
    elif target.has_own_exponents and target.is_whole and not value.has_own_exponents:
        target.own_exponents[0] = None
    if target.degree is not None:
        target.degree[0] = degree_of(value) if target.is_whole else _degree_after_write(target, target.degree[0], value)
    target.a.copy_(value.a.expand(target.shape))
    if target.has_own_exponents:
        target.b.copy_(value.b.expand(target.shape))
    if target.hidden is not None or (value.hidden is not None and bool(value.hidden.any())):
        target.hide(hidden_or_none(value).expand(target.shape))
    target.root_of = target.reciprocal_of = None
    return target


def _degree_after_write(target: FieldTensor, before: Degree, value: FieldTensor) -> Degree:
    """Return the degree of a buffer, a part of which is written. Other parts keep their own."""
    buffer = target.a.as_strided((target.a.untyped_storage().nbytes() // target.a.element_size(),), (1,), 0)
    return CERTAINTY.degree_after_write(before, buffer, degree_of(value), value.a)


def random_like(x: Tensor, name: str, seed: int) -> Tensor:
    """Return random numbers in the shape of a tensor, complex ones for complex ones."""
    shape = (*x.shape, 2) if x.is_complex() else x.shape
    numbers = random_numbers(shape, name, seed)
    return ComplexFieldTensor(numbers) if x.is_complex() else numbers


def random_numbers(shape: Sequence[int], name: str, seed: int) -> FieldTensor:
    """Return random numbers that depend on a name, a seed and the index of the element."""
    index = torch.arange(torch.Size(shape).numel())
    return FieldTensor(field.random_function(f"{name}/{seed}", index).reshape(tuple(shape)), degree=[LINEAR])


def have_equal_values(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors are equal, of which any may be of the field or complex."""
    if any(isinstance(value, FieldTensor | ComplexFieldTensor) for value in (x, y)):
        return x.is_complex() == y.is_complex() and have_equal_numbers(lift_pairs(x), lift_pairs(y))
    return torch.equal(x, y)


def have_equal_numbers(x: FieldTensor, y: FieldTensor) -> bool:
    """Return whether two tensors have the same numbers."""
    if not torch.equal(x.a, y.a):
        return False
    return (x.hidden is None and y.hidden is None) or torch.equal(hidden_or_none(x), hidden_or_none(y))
