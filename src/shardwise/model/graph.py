"""`Graph`: the model that is trained. Operators in topological order, their tensors, parameters, buffers and inputs.

One graph is the forward pass of one microbatch down to a scalar loss, at *global* shapes. It needs no torch: an operator names its target
("aten.linear.default") and `lower/` looks it up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shardwise.ops import Rule, record_of, rule_of, writes_in_place
from shardwise.ops.operator import DTYPE_BYTES, FUNCTION, NARROW, Arg, Function, Operator, Ref, Slot, Tensor, Word

__all__ = [
    "DTYPE_BYTES", "FUNCTION", "NARROW", "Arg", "Function", "Graph", "Operator", "Ref", "Slot", "Tensor", "Variable", "Word",
    "buffers_written_in_place", "rename_arguments", "rename_inputs", "running_statistics_of", "writes_buffer", "written_buffers",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Variable:
    """A value that no operator computes. `value` is its name in the graph, `name` the user's (state-dict name or batch path).

    A tied parameter is one variable; `aliases` are its other names. `trainable` is for parameters, `batched` for inputs whose dimension 0
    counts samples. `is_complex_pairs`: complex numbers stored as pairs of reals in an extra last dimension.
    """

    value: str
    name: str
    tensor: Tensor
    aliases: tuple[str, ...] = ()
    trainable: bool = False
    batched: bool = False
    is_complex_pairs: bool = False


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

    @property
    def parameter_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(v.tensor.shape for v in self.parameters)

    @cached_property
    def num_parameters(self) -> int:
        return sum(v.tensor.size for v in self.parameters)

    @cached_property
    def num_trainable(self) -> int:
        return sum(v.tensor.size for v in self.parameters if v.trainable)

    def cast(self, target: str) -> Graph:
        """Return the graph with dtype `target` in place of float32 and narrower ones, in tensors and in arguments (`x.bfloat16()`).

        Autocast then has no effect. Complex numbers of float32 become those of float64. Tensors made from numbers (`torch.linspace(0, 1,
        5)`) get the dtype as an argument; those computed from integers (`torch.arange(5) / 4`) are computed as before, and cast.
        """
        dtypes = dict.fromkeys(NARROW, target) | ({"complex64": "complex128"} if target == "float64" else {})

        def tensor(t: Tensor) -> Tensor:
            return replace(t, dtype=dtypes.get(t.dtype, t.dtype))

        def arg(a: Arg) -> Arg:
            if isinstance(a, tuple):
                return tuple(arg(item) for item in a)
            if isinstance(a, Function):
                return replace(a, is_float64=target == "float64")
            return Word("dtype", dtypes[a.name]) if isinstance(a, Word) and a.kind == "dtype" and a.name in dtypes else a

        def variables(group: tuple[Variable, ...]) -> tuple[Variable, ...]:
            return tuple(replace(v, tensor=tensor(v.tensor)) for v in group)

        operators: list[Operator] = []
        tensors = {value: tensor(t) for value, t in self.tensors.items()}
        for op in self.operators:
            kwargs = tuple((k, arg(a)) for k, a in op.kwargs)
            autocast = "" if ":" in op.autocast else op.autocast
            operator = replace(op, args=arg(op.args), kwargs=kwargs, autocast=autocast)  # type: ignore[arg-type]
            narrow_outputs = [v for v in op.outputs if self.tensors[v].dtype in NARROW]
            if not narrow_outputs or any(isinstance(a, Word) and a.kind == "dtype" for a in (*op.args, *dict(op.kwargs).values())):
                operators.append(operator)
            elif not op.inputs:
                operators.append(replace(operator, kwargs=(*((k, a) for k, a in kwargs if k != "dtype"), ("dtype", Word("dtype", target)))))
            elif op.returns_sequence or any(self.tensors[v].dtype.startswith(("float", "complex", "bfloat")) for v in op.inputs):
                operators.append(operator)
            else:
                (value,) = narrow_outputs
                tensors[f"{value}_narrow"] = self.tensors[value]
                operators.append(replace(operator, outputs=(f"{value}_narrow",)))
                cast = (Ref(f"{value}_narrow"), Word("dtype", target))
                operators.append(Operator(f"{op.name}_cast", "aten.to.dtype", cast, (), (value,), f"{op.site}/{target}"))
        return self.replace_variables(variables, operators=tuple(operators), tensors=tensors)

    @cached_property
    def producer_index(self) -> dict[str, int]:
        """Index of the operator that computes each value; variables are not in it."""
        return {value: i for i, op in enumerate(self.operators) for value in op.outputs}

    @cached_property
    def index_of_site(self) -> dict[str, int]:
        """Index of the operator at each site."""
        return {op.site: i for i, op in enumerate(self.operators)}

    @cached_property
    def is_state(self) -> dict[str, bool]:
        """Flag by variable: true for a parameter or a buffer."""
        return {v.value: i < 2 for i, group in enumerate((self.parameters, self.buffers, self.inputs, self.constants)) for v in group}

    @cached_property
    def last_reader_index(self) -> dict[str, int]:
        """Index of the last operator that reads each value."""
        return {value: i for i, op in enumerate(self.operators) for value in op.inputs}

    @cached_property
    def rules(self) -> dict[str, Rule | None]:
        """The factor rule of every operator by its name, None where it has none."""
        return {op.name: rule_of(op, self.tensors) for op in self.operators}

    @cached_property
    def analyses(self) -> dict[Hashable, Any]:
        """Results of analyses of the graph, see `shardwise.model.dataflow.cached_on_graph`."""
        return {}

    @cached_property
    def producers(self) -> dict[str, Operator]:
        """The operator that computes each value; variables are not in it."""
        return {value: op for op in self.operators for value in op.outputs}

    @cached_property
    def state(self) -> dict[str, Variable]:
        """The parameters and buffers by value."""
        return {v.value: v for v in (*self.parameters, *self.buffers)}

    def replace_variables(self, change: Callable[[tuple[Variable, ...]], tuple[Variable, ...]], **fields: Any) -> Graph:
        """Return the graph with each group of variables as `change` returns it, and other `fields`."""
        groups: dict[str, Any] = {key: change(getattr(self, key)) for key in ("parameters", "buffers", "inputs", "constants")}
        return replace(self, **groups, **fields)


def rename_inputs(op: Operator, name_of: Callable[[str], str]) -> Operator:
    """Return an operator that reads `name_of(value)` in place of each value."""
    args = rename_arguments(op.args, name_of)
    return replace(op, args=args, kwargs=tuple((key, rename_arguments(arg, name_of)) for key, arg in op.kwargs))  # type: ignore[arg-type]


def rename_arguments(arg: Arg, name_of: Callable[[str], str]) -> Arg:
    """Return an argument with `name_of(value)` in place of each value."""
    if isinstance(arg, Ref):
        return Ref(name_of(arg.value))
    return tuple(rename_arguments(item, name_of) for item in arg) if isinstance(arg, tuple) else arg


def uses_batch_statistics(op: Operator) -> bool:
    """Return whether a norm normalizes by statistics of its input, as in training."""
    at = record_of(op).statistics.positions
    return at is not None and len(op.args) > at[-1] and bool(op.args[at[-1]])


def running_statistics_of(op: Operator) -> set[str]:
    """Return the running statistics that a norm in training updates in place."""
    at = record_of(op).statistics.positions
    if at is None or not uses_batch_statistics(op):
        return set()
    return {a.value for a in op.args[at[0] : at[1] + 1] if isinstance(a, Ref)}


def writes_buffer(op: Operator, state: Mapping[str, object]) -> bool:
    """Return whether the operator updates a buffer in place (`num_batches_tracked.add_(1)`); batch norm has its own kernel."""
    return writes_in_place(op) and op.inputs[0] in state


def buffers_written_in_place(graph: Graph) -> set[str]:
    """Return buffers (and parameters) that an operator updates in place: replicated on every rank, as they are written."""
    return {op.inputs[0] for op in graph.operators if writes_buffer(op, graph.state)}


def written_buffers(graph: Graph) -> set[str]:
    """Return buffers that are updated while the model runs, including running statistics of norms in training."""
    buffers = {v.value for v in graph.buffers}
    return buffers_written_in_place(graph) | {value for op in graph.operators for value in running_statistics_of(op) if value in buffers}
