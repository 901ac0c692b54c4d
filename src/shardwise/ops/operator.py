"""One operator call and its arguments: tensor specs without data, references to values, constants by name.

Frozen data from a graph reader; needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

from shardwise.ops.rule import Rule

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip

NARROW = ("float32", "bfloat16", "float16")  # dtypes that float64 replaces in exact comparisons


@dataclass(frozen=True, slots=True)
class Tensor:
    """Shape, dtype ("float32") and torch strides of a tensor without data; strides () if it is contiguous."""

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
    def is_differentiable(self) -> bool:
        """Return whether autograd has gradients of such a tensor: floating point, real or complex."""
        return self.is_float or self.dtype.startswith("complex")

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is a value of the graph: a parameter, a buffer, an input, a constant or an operator's output."""

    value: str

    def __str__(self) -> str:
        return f"%{self.value}"


FUNCTION = "shardwise.function.default"  # target of the operators that call a `Function`
Arg = object  # Ref, a Python constant, Word, Function, or a tuple of Args


@dataclass(frozen=True, slots=True)
class Word:
    """A torch constant by name, as an argument: dtype "float32", device "cpu", layout "strided", memory format."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Slot:
    """Placeholder for tensor number `number` among the arguments of a function call."""

    number: int


@dataclass(frozen=True, slots=True)
class Function:
    """A user's `torch.autograd.Function` and its call: the first argument of `shardwise.function.default`, before the tensors.

    `cls` is the class, `arguments` and `keywords` are those of its `apply`, with a `Slot` for each tensor; `key` is the same in comparable
    form. `rule` is derived from its forward and backward (`shardwise.capture.autograd_functions`); `requires_grad`: by tensor, whether it
    gets a gradient. FLOPs are of matrix products, bytes are read and written; `saved`: numbers of the tensors (outputs after inputs) saved
    for backward, `extra_bytes` what it saves besides, `working_bytes` temporaries of backward besides gradients. `has_linear_backward`:
    backward maps partial sums of a gradient to partial sums. `is_float64`: float32 constants become float64.
    """

    name: str
    cls: Any = field(repr=False)
    arguments: tuple[object, ...] = field(repr=False, compare=False)
    keywords: tuple[tuple[str, object], ...] = field(repr=False, compare=False)
    key: tuple[object, ...]
    requires_grad: tuple[bool, ...]
    rule: Rule | None = field(default=None, hash=False)
    kind: str = "elementwise"
    flops: float = 0.0
    backward_flops: float = 0.0
    bytes: float = 0.0
    backward_bytes: float = 0.0
    saved: tuple[int, ...] = ()
    extra_bytes: float = 0.0
    working_bytes: float = 0.0
    is_random: bool = False
    has_linear_backward: bool = False
    is_float64: bool = False


@dataclass(frozen=True, slots=True)
class Operator:
    """One call. `site` is its place in the user's model, stable across runs: `h.0.mlp.up/linear`."""

    name: str
    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outputs: tuple[str, ...]  # names of the values it computes
    site: str
    returns_sequence: bool = False  # the call returns a tuple or list, even of one element
    autocast: str = ""  # called in a block that switches autocast "off", or on ("cpu:bfloat16": device and dtype)
    # Names of the values it reads, in order, repeated as they are used; cached since planning reads them a million times.
    inputs: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(_iter_refs((self.args, tuple(v for _, v in self.kwargs)))))

    @property
    def function(self) -> Function | None:
        """The user's autograd function that it calls, if any."""
        return self.args[0] if self.target == FUNCTION and isinstance(self.args[0], Function) else None

    @property
    def layer(self) -> str:
        """Path of its module; empty for the outermost."""
        return self.site.rpartition("/")[0]


def _iter_refs(arg: Arg) -> Iterator[str]:
    if isinstance(arg, Ref):
        yield arg.value
    elif isinstance(arg, tuple | list):
        for item in arg:
            yield from _iter_refs(item)
