"""`Graph`: what is trained. Operators in a legal order, the tensors between them, parameters, buffers and inputs.

One graph is the forward pass of one microbatch down to a scalar loss, at its *global* shapes. It needs no torch: an
operator names what it calls ("aten.linear.default") and `lower/` looks it up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.model.fold import Fold
    from weft.model.rules import Rule

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip

NARROW = ("float32", "bfloat16", "float16")  # what float64 takes the place of, to compare exactly


@dataclass(frozen=True, slots=True)
class Tensor:
    """Shape and dtype ("float32") of a tensor that has no data."""

    shape: tuple[int, ...]
    dtype: str

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


@dataclass(frozen=True, slots=True)
class Variable:
    """A value that no operator makes. `value` is its name in the graph, `name` the user's (state-dict name or batch path).

    A tied parameter is one variable; `aliases` are its further names. `trainable` is for parameters, `batched` for inputs
    whose dimension 0 counts samples. `pairs`: complex numbers that lie as pairs of real ones, in a dimension behind their own.
    """

    value: str
    name: str
    tensor: Tensor
    aliases: tuple[str, ...] = ()
    trainable: bool = False
    batched: bool = False
    pairs: bool = False


@dataclass(frozen=True)
class Graph:
    """The forward pass of one microbatch. `loss` names a scalar value; `tensors` has the spec of every value.

    Buffers may be updated in place while it runs (batch-norm statistics); nothing else is.
    """

    parameters: tuple[Variable, ...]
    buffers: tuple[Variable, ...]
    inputs: tuple[Variable, ...]
    constants: tuple[Variable, ...]
    operators: tuple[Operator, ...]
    tensors: dict[str, Tensor]
    loss: str
    batch_size: int  # samples in dimension 0 of the batched inputs
    outputs: tuple[str, ...] = ()  # the model's outputs, where it was captured without a loss

    @property
    def variables(self) -> tuple[Variable, ...]:
        return (*self.parameters, *self.buffers, *self.inputs, *self.constants)

    @cached_property
    def num_parameters(self) -> int:
        return sum(v.tensor.size for v in self.parameters)

    @cached_property
    def num_trainable(self) -> int:
        return sum(v.tensor.size for v in self.parameters if v.trainable)

    def cast(self, target: str) -> Graph:
        """The same graph with dtype `target` in place of float32 and what is narrower, in tensors and in arguments (`x.bfloat16()`).

        So autocast has nothing to do in it. Complex numbers of float32 become those of float64. What is made of numbers alone
        (`torch.linspace(0, 1, 5)`) is told its dtype; what is made of integers (`torch.arange(5) / 4`) is computed as it was, and cast.
        """
        dtypes = dict.fromkeys(NARROW, target) | ({"complex64": "complex128"} if target == "float64" else {})

        def tensor(t: Tensor) -> Tensor:
            return replace(t, dtype=dtypes.get(t.dtype, t.dtype))

        def arg(a: Arg) -> Arg:
            if isinstance(a, tuple):
                return tuple(arg(item) for item in a)
            if isinstance(a, Function):
                return replace(a, wide=target == "float64")
            return Word("dtype", dtypes[a.name]) if isinstance(a, Word) and a.kind == "dtype" and a.name in dtypes else a

        def variables(group: tuple[Variable, ...]) -> tuple[Variable, ...]:
            return tuple(replace(v, tensor=tensor(v.tensor)) for v in group)

        operators: list[Operator] = []
        tensors = {value: tensor(t) for value, t in self.tensors.items()}
        for op in self.operators:
            kwargs = tuple((k, arg(a)) for k, a in op.kwargs)
            autocast = "" if ":" in op.autocast else op.autocast
            made = replace(op, args=arg(op.args), kwargs=kwargs, autocast=autocast)  # type: ignore[arg-type]
            narrow = [v for v in op.outputs if self.tensors[v].dtype in NARROW]
            if not narrow or any(isinstance(a, Word) and a.kind == "dtype" for a in (*op.args, *dict(op.kwargs).values())):
                operators.append(made)
            elif not op.inputs:
                operators.append(replace(made, kwargs=(*((k, a) for k, a in kwargs if k != "dtype"), ("dtype", Word("dtype", target)))))
            elif op.multiple or any(self.tensors[v].dtype.startswith(("float", "complex", "bfloat")) for v in op.inputs):
                operators.append(made)
            else:
                (value,) = narrow
                tensors[f"{value}_narrow"] = self.tensors[value]
                operators.append(replace(made, outputs=(f"{value}_narrow",)))
                cast = (Ref(f"{value}_narrow"), Word("dtype", target))
                operators.append(Operator(f"{op.name}_cast", "aten.to.dtype", cast, (), (value,), f"{op.site}/{target}"))
        return replace(
            self,
            parameters=variables(self.parameters),
            buffers=variables(self.buffers),
            inputs=variables(self.inputs),
            constants=variables(self.constants),
            operators=tuple(operators),
            tensors=tensors,
        )

    @cached_property
    def place(self) -> dict[str, int]:
        """Number of the operator that makes each value; variables are not in it."""
        return {value: i for i, op in enumerate(self.operators) for value in op.outputs}

    @cached_property
    def sites(self) -> dict[str, int]:
        """Number of the operator that stands at each site."""
        return {op.site: i for i, op in enumerate(self.operators)}

    @cached_property
    def held(self) -> dict[str, bool]:
        """Of each variable, whether it is a parameter or a buffer."""
        return {v.value: i < 2 for i, group in enumerate((self.parameters, self.buffers, self.inputs, self.constants)) for v in group}

    @cached_property
    def last_reader(self) -> dict[str, int]:
        """Number of the last operator that reads each value."""
        return {value: i for i, op in enumerate(self.operators) for value in op.inputs}

    @cached_property
    def fold(self) -> Fold | None:
        """The graph with its repeated layers once; None where too few repeat."""
        from weft.model.fold import fold  # here, since folding is written in terms of Graph

        return fold(self)

    @cached_property
    def rules(self) -> dict[str, Rule | None]:
        """The factor rule of every operator by its name, None where it has none."""
        from weft.model.rules import rule_of  # here, since rules are written in terms of Graph

        return {op.name: rule_of(op, self.tensors) for op in self.operators}

    @cached_property
    def free(self) -> frozenset[str]:
        """Names of the operators that follow from the batch and constants alone, see `weft.model.stages`."""
        from weft.model.stages import free_operators  # here, since stages are written in terms of Graph

        return frozenset(free_operators(self))

    @cached_property
    def held_together(self) -> frozenset[int]:
        """Numbers of the operators before which no stage can begin, see `weft.model.stages`."""
        from weft.model.stages import held_together

        return frozenset(held_together(self))

    def producer(self) -> dict[str, Operator]:
        """The operator that makes each value; variables are not in it."""
        return {value: op for op in self.operators for value in op.outputs}

    def consumers(self) -> dict[str, list[Operator]]:
        """The operators that read each value, in order."""
        found: dict[str, list[Operator]] = {}
        for op in self.operators:
            for value in dict.fromkeys(op.inputs):
                found.setdefault(value, []).append(op)
        return found


def statistics(op: Operator) -> set[str]:
    """Values of the running statistics that a norm in training writes where it reads them."""
    training = op.target.split(".")[1] in ("batch_norm", "instance_norm") and len(op.args) > 5 and op.args[5]
    return {a.value for a in op.args[3:5] if isinstance(a, Ref)} if training else set()
