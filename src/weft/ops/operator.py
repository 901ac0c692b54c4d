"""One call of an operator, and what it is called with: tensors without data, references to values, constants by name.

In: what a graph's reader saw. Out: frozen data, which needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

from weft.ops.rule import Rule

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip

NARROW = ("float32", "bfloat16", "float16")  # what float64 takes the place of, to compare exactly


@dataclass(frozen=True, slots=True)
class Tensor:
    """Shape and dtype ("float32") of a tensor that has no data, and its strides as torch has them; () where it lies in the order of its
    dimensions."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] = field(default=(), repr=False, compare=False)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def is_float(self) -> bool:
        return "float" in self.dtype

    @property
    def can_learn(self) -> bool:
        """Whether autograd has gradients of such a tensor: floating point, real or complex."""
        return self.is_float or self.dtype.startswith("complex")

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is a value of the graph: a parameter, a buffer, an input, a constant or an operator's output."""

    value: str

    def __str__(self) -> str:
        return f"%{self.value}"


FUNCTION = "weft.function.default"  # target of the operators that call a `Function`
Arg = object  # Ref, a Python constant, Word, Function, or a tuple of Args


@dataclass(frozen=True, slots=True)
class Word:
    """A torch constant by name, as an argument: dtype "float32", device "cpu", layout "strided", memory format."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for tensor number `number` among the arguments of a function's call."""

    number: int


@dataclass(frozen=True, slots=True)
class Function:
    """A `torch.autograd.Function` of the user's own and how it is called: the first argument of `weft.function.default`, before tensors.

    `cls` is the class, `arguments` and `keywords` are what its `apply` is called with, a `Slot` for each tensor; `key` says the same in
    a form that can be compared. `rule` is followed from what its forward and backward do (`weft.capture.functions`); `learns`: of
    each tensor, whether it is given a gradient. FLOPs are of matrix products, bytes are read and written; `keeps` are numbers of tensors,
    the outputs' behind the inputs', that backward keeps, `extra_bytes` what it keeps besides, `working_bytes`
    what is there while backward runs beside gradients. `linear`: of summands of a gradient backward
    makes summands. `wide`: numbers of float32 are float64's.
    """

    name: str
    cls: Any = field(repr=False)
    arguments: tuple[object, ...] = field(repr=False, compare=False)
    keywords: tuple[tuple[str, object], ...] = field(repr=False, compare=False)
    key: tuple[object, ...]
    learns: tuple[bool, ...]
    rule: Rule | None = field(default=None, hash=False)
    kind: str = "elementwise"
    flops: float = 0.0
    backward_flops: float = 0.0
    bytes: float = 0.0
    backward_bytes: float = 0.0
    keeps: tuple[int, ...] = ()
    extra_bytes: float = 0.0
    working_bytes: float = 0.0
    draws: bool = False
    linear: bool = False
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Operator:
    """One call. `site` names where in the user's model it stands, stable across runs: `h.0.mlp.up/linear`."""

    name: str
    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outputs: tuple[str, ...]  # names of the values it makes
    site: str
    multiple: bool = False  # the call returns a tuple or list, even where that has one element
    autocast: str = ""  # stands in a block that switches autocast "off", or on ("cpu:bfloat16": device and dtype)
    # Names of the values it reads, in order, each as often as it is used; planning asks for them a million times.
    inputs: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(_refs((self.args, tuple(v for _, v in self.kwargs)))))

    @property
    def function(self) -> Function | None:
        """The user's own function that it calls, if it does."""
        return self.args[0] if self.target == FUNCTION and isinstance(self.args[0], Function) else None

    @property
    def layer(self) -> str:
        """Path of the module that it stands in; empty for the outermost."""
        return self.site.rpartition("/")[0]


def _refs(arg: Arg) -> Iterator[str]:
    if isinstance(arg, Ref):
        yield arg.value
    elif isinstance(arg, tuple | list):
        for item in arg:
            yield from _refs(item)
