"""`Graph`: the model that is trained. Operators in topological order, their tensors, parameters, buffers and inputs.

One graph is the forward pass of one microbatch down to a scalar loss, at *global* shapes. It needs no torch: an operator names its target
("aten.linear.default") and `lower/` looks it up.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from weft.ops import Rule, record_of, rule_of, writes
from weft.ops.operator import DTYPE_BYTES, FUNCTION, NARROW, Arg, Function, Operator, Ref, Slot, Tensor, Word

if TYPE_CHECKING:
    from weft.model.dims.runs import Fused
    from weft.model.sharding.fold import Fold
    from weft.model.stages.branches import Region

__all__ = [
    "DTYPE_BYTES", "FUNCTION", "NARROW", "Arg", "Function", "Graph", "Operator", "Ref", "Slot", "Tensor", "Variable", "Word", "copied_into",
    "statistics", "writes_buffer", "written_buffers",
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
                return replace(a, wide=target == "float64")
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
            elif op.multiple or any(self.tensors[v].dtype.startswith(("float", "complex", "bfloat")) for v in op.inputs):
                operators.append(operator)
            else:
                (value,) = narrow_outputs
                tensors[f"{value}_narrow"] = self.tensors[value]
                operators.append(replace(operator, outputs=(f"{value}_narrow",)))
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
        """Index of the operator that computes each value; variables are not in it."""
        return {value: i for i, op in enumerate(self.operators) for value in op.outputs}

    @cached_property
    def sites(self) -> dict[str, int]:
        """Index of the operator at each site."""
        return {op.site: i for i, op in enumerate(self.operators)}

    @cached_property
    def held(self) -> dict[str, bool]:
        """Flag by variable: true for a parameter or a buffer."""
        return {v.value: i < 2 for i, group in enumerate((self.parameters, self.buffers, self.inputs, self.constants)) for v in group}

    @cached_property
    def last_reader(self) -> dict[str, int]:
        """Index of the last operator that reads each value."""
        return {value: i for i, op in enumerate(self.operators) for value in op.inputs}

    @cached_property
    def fold(self) -> Fold | None:
        """The graph with its repeated layers once; None where too few repeat."""
        from weft.model.sharding.fold import fold  # deferred: a circular import

        return fold(self)

    @cached_property
    def rules(self) -> dict[str, Rule | None]:
        """The factor rule of every operator by its name, None where it has none."""
        return {op.name: rule_of(op, self.tensors) for op in self.operators}

    @cached_property
    def solved_first(self) -> dict[Hashable, Any]:
        """Cache of solutions along axes solved before all others, by query; filled by `weft.model.sharding.propagate`."""
        return {}

    @cached_property
    def granules(self) -> tuple[Mapping[tuple[str, int], int], Mapping[tuple[str, int], int]]:
        """`num_units_by_dim` of `weft.model.dims.labels`, without and with `products`."""
        from weft.model.dims.labels import granules  # deferred: a circular import

        return granules(self, self.rules, products=False), granules(self, self.rules, products=True)

    @cached_property
    def fused(self) -> Fused:
        """Dimensions that consist of several runs, see `weft.model.dims.fused_dims`."""
        from weft.model.dims.runs import fused  # deferred: a circular import

        return fused(self)

    @cached_property
    def free(self) -> frozenset[str]:
        """Names of the operators that depend on the batch and constants only, see `weft.model.stages.stages`."""
        from weft.model.stages.stages import free_operators  # deferred: a circular import

        return frozenset(free_operators(self))

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """Regions of parallel branches, see `weft.model.stages.branches`."""
        from weft.model.stages.branches import regions  # deferred: a circular import

        return regions(self)

    @cached_property
    def ragged(self) -> frozenset[tuple[str, int]]:
        """(value, dimension) that are rows of experts, see `weft.model.dims.expert_rows`."""
        from weft.model.dims.rows import ragged  # deferred: a circular import

        return ragged(self, self.rules)

    @cached_property
    def held_together(self) -> frozenset[int]:
        """Indices of the operators before which no stage can begin, see `weft.model.stages.stages`."""
        from weft.model.stages.stages import held_together

        return frozenset(held_together(self))

    def producer(self) -> dict[str, Operator]:
        """Return the operator that computes each value; variables are not in it."""
        return {value: op for op in self.operators for value in op.outputs}

    def consumers(self) -> dict[str, list[Operator]]:
        """Return the operators that read each value, in order."""
        readers: dict[str, list[Operator]] = {}
        for op in self.operators:
            for value in dict.fromkeys(op.inputs):
                readers.setdefault(value, []).append(op)
        return readers


def takes_statistics(op: Operator) -> bool:
    """Return whether a norm normalizes by statistics of its input, as in training."""
    at = record_of(op).statistics
    return at is not None and len(op.args) > at[-1] and bool(op.args[at[-1]])


def statistics(op: Operator) -> set[str]:
    """Return the running statistics that a norm in training updates in place."""
    at = record_of(op).statistics
    if at is None or not takes_statistics(op):
        return set()
    return {a.value for a in op.args[at[0] : at[1] + 1] if isinstance(a, Ref)}


def writes_buffer(op: Operator, placed: Mapping[str, object]) -> bool:
    """Return whether the operator updates a buffer in place (`num_batches_tracked.add_(1)`); batch norm has its own kernel."""
    return writes(op) and op.inputs[0] in placed


def copied_into(graph: Graph) -> set[str]:
    """Return buffers (and parameters) that an operator updates in place: replicated on every rank, as they are written."""
    state = {v.value: v for v in (*graph.parameters, *graph.buffers)}
    return {op.inputs[0] for op in graph.operators if writes_buffer(op, state)}


def written_buffers(graph: Graph) -> set[str]:
    """Return buffers that are updated while the model runs, including running statistics of norms in training."""
    buffers = {v.value for v in graph.buffers}
    return copied_into(graph) | {value for op in graph.operators for value in statistics(op) if value in buffers}
