"""Derive how a user function acts on sharded tensors, from the factor rules of its operators (sharding propagation).

The result is a `ShardSemantics`: how full tensors among the arguments are redistributed, and whether each result is a shard, a full tensor
or a partial sum; or why the function is not supported on shards.

The function is run twice, on fake tensors. The run on full tensors records its operators, through whose rules shards are propagated. The
run on shards must execute the same operators with the same numbers: a function that divides by the number of local rows is found so. Not
modelled: unequal shards in a dimension whose length differs from the sharded one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import zip_longest
from typing import Any, Self

import torch
from torch import Tensor

from shardwise.capture.fakes import DispatchMode, FakeMode, fake_mode, silence_fake_tensor_log, written_arguments
from shardwise.capture.fx_reader import spec_of
from shardwise.capture.nesting import map_tensors, tensors_in
from shardwise.errors import format_error
from shardwise.model.graph import Arg, Operator, Ref, Word
from shardwise.model.graph import Tensor as Spec
from shardwise.ops import Labels, Rule, elementwise_rule_of_shapes, rule_of
from shardwise.plan.ir.placement import Shard, shard_of_runs
from shardwise.world.world import Group


@dataclass(frozen=True, slots=True)
class ShardRanks:
    """Ranks that hold the shards along one mesh axis: the `members`; if shards are unequal or strided over several segments
    (`segment_lengths`), also all `lengths` and this rank's `index`."""

    members: tuple[int, ...]
    lengths: tuple[int, ...] = ()
    index: int = 0
    segment_lengths: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def from_placement(cls, placement: Shard, group: Group) -> Self:
        """Return the ranks of `group`, over which a tensor has this placement."""
        lengths = tuple(map(sum, zip(*placement.runs, strict=True))) or placement.lengths
        return cls(group.ranks, lengths, group.index if lengths else 0, placement.runs)

    def placement(self, dim: int) -> Shard:
        """Return the placement of dimension `dim` over these ranks."""
        return shard_of_runs(dim, self.segment_lengths) if self.segment_lengths else Shard(dim, self.lengths)

    @property
    def share(self) -> float:
        """Fraction of the dimension that is stored on this rank."""
        return self.lengths[self.index] / sum(self.lengths) if self.lengths else 1.0 / len(self.members)

    def local_length(self, length: int) -> int | None:
        """Return the local length of a dimension of `length`; None if it cannot be sharded like this."""
        if self.lengths:
            return self.lengths[self.index] if sum(self.lengths) == length else None
        return None if length % len(self.members) else length // len(self.members)


DimShards = tuple[tuple[int, ShardRanks], ...]  # sharded dimensions and their ranks; of a dimension sharded twice, the outer axis first
ShardState = dict[ShardRanks, int | float]  # a sharded dimension (int), or the share (float) by which each rank's partial sum counts


@dataclass(frozen=True, slots=True)
class ArgumentSpec:
    """A tensor argument. `is_sharded`: it is a `ShardedTensor`, not a plain tensor of local shape; `requires_grad`: a full tensor does."""

    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    shards: DimShards
    dtype: torch.dtype
    is_sharded: bool
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class ResultSpec:
    """A tensor result: its global shape, shards, and partial sums still to be reduced, each with the share of this rank."""

    global_shape: tuple[int, ...]
    shards: DimShards
    partial_sums: tuple[tuple[ShardRanks, float], ...]


@dataclass(frozen=True)
class ShardSemantics:
    """Shard semantics of a call: why it is unsupported (if it is), whether it is valid on full tensors and runs operators at all; how each
    full argument is sharded and over which ranks its gradient is reduced; and the spec of each result."""

    unsupported_reason: str = ""
    is_valid_on_full: bool = True
    runs_operators: bool = True
    input_shards: tuple[DimShards, ...] = ()
    input_reductions: tuple[tuple[ShardRanks, ...], ...] = ()
    results: tuple[ResultSpec, ...] = ()

    @cached_property
    def redistributes_inputs(self) -> bool:
        """Return whether any argument is redistributed."""
        return any(self.input_shards) or any(self.input_reductions)


class _UnsupportedOnShards(Exception):
    """The function cannot run on shards, for the reason given."""


class _NeedsSharding(Exception):
    """A full argument is combined with shards and has to be sharded like them."""

    def __init__(self, argument: int, dim: int, ranks: ShardRanks) -> None:
        self.argument, self.shard = argument, (dim, ranks)


@dataclass(frozen=True, slots=True)
class _DispatchedCall:
    """A dispatched operator with its arguments and result."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


class _DispatchRecorder(DispatchMode):  # type: ignore[no-untyped-call]
    """Record the operators that are dispatched in its block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_DispatchedCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = _DispatchedCall(func, args, kwargs, None)
        self.calls.append(call)
        out = func(*args, **kwargs)
        self.calls[-1 if self.calls[-1] is call else self.calls.index(call)] = _DispatchedCall(func, args, kwargs, out)
        return out


def infer_shard_semantics(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Sequence[ArgumentSpec]
) -> ShardSemantics:
    """Infer how a call of `func` acts on shards; `inputs` describes its tensor arguments in order."""
    full = _record_run(func, args, kwargs, [spec.global_shape for spec in inputs], inputs)
    if not full.calls:
        part = _record_run(func, args, kwargs, [spec.local_shape for spec in inputs], inputs)
        if part.calls or (part.error is None) != (full.error is None):
            return ShardSemantics(
                f"the whole cannot be called so: {format_error(full.error or part.error or ValueError('no elements'))}",
                is_valid_on_full=False,
            )
        return ShardSemantics(runs_operators=False)  # it runs no operator
    if full.error is not None:
        return ShardSemantics(
            f"the whole cannot be called so, or not without its values: {format_error(full.error)}", is_valid_on_full=False
        )
    cuts = [list(spec.shards) for spec in inputs]
    while True:
        try:
            propagation = _ShardPropagation(full, inputs, cuts)
            break
        except _NeedsSharding as needed:
            cuts[needed.argument].append(needed.shard)
        except _UnsupportedOnShards as error:
            return ShardSemantics(str(error))
    try:
        parts = [
            local_shape_of(spec.global_shape, tuple(c)) if not spec.shards else spec.local_shape
            for spec, c in zip(inputs, cuts, strict=True)
        ]
        part = _record_run(func, args, kwargs, parts, inputs)
        if part.error is not None:
            raise _UnsupportedOnShards(f"it does not run on parts: {format_error(part.error)}")
        _compare_runs(full, part, propagation)
        return _semantics_of(full, inputs, cuts, propagation)
    except _UnsupportedOnShards as error:
        return ShardSemantics(str(error))


def local_shape_of(shape: Sequence[int], shards: DimShards) -> tuple[int, ...]:
    """Return the shape of a rank's shard."""
    local = list(shape)
    for dim, ranks in shards:
        part = ranks.local_length(local[dim])
        if part is None:
            raise _UnsupportedOnShards(f"dimension {dim} of {list(shape)} does not divide between {len(ranks.members)} ranks")
        local[dim] = part
    return tuple(local)


@dataclass(frozen=True, slots=True)
class _RecordedRun:
    """One run of the function on fake tensors: its inputs, the dispatched calls, and its result or error."""

    inputs: list[Tensor]
    calls: list[_DispatchedCall]
    result: Any = None
    error: Exception | None = None


@cache
def _shared_fake_mode() -> FakeMode:
    return fake_mode()


def _record_run(func: Any, args: Any, kwargs: Any, shapes: Sequence[Sequence[int]], inputs: Sequence[ArgumentSpec]) -> _RecordedRun:
    recorder = _DispatchRecorder()
    with torch.no_grad(), _shared_fake_mode(), silence_fake_tensor_log():
        fake_inputs = [torch.empty(tuple(shape), dtype=spec.dtype) for shape, spec in zip(shapes, inputs, strict=True)]
        fake_iterator = iter(fake_inputs)
        args, kwargs = map_tensors((args, kwargs), lambda _: next(fake_iterator))
        try:
            with recorder:
                result = func(*args, **kwargs)
        except Exception as error:  # torch raises errors of many types for invalid calls
            return _RecordedRun(fake_inputs, recorder.calls, None, error)
    return _RecordedRun(fake_inputs, recorder.calls, result)


def _memory_key(x: Tensor) -> tuple[Any, ...]:
    """Return a key of the tensor's memory: autograd and views make several objects of one tensor."""
    return (id(x.untyped_storage()), x.storage_offset(), tuple(x.shape), x.stride(), x.dtype)


@dataclass(frozen=True, slots=True)
class _RecordedOperator:
    """An operator on tensors, as factor rules describe it; a foreach operator on lists is several of these."""

    op: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

    @property
    def inputs(self) -> list[Tensor]:
        return list(tensors_in((self.args, list(self.kwargs.values()))))

    @property
    def outputs(self) -> list[Tensor]:
        return list(tensors_in(self.out))

    def written_tensors(self) -> list[Tensor]:
        named = {a.name: v for a, v in zip(self.op._schema.arguments, self.args, strict=False)} | self.kwargs
        return [x for _, name in written_arguments(self.op) for x in tensors_in(named.get(name))]


def _expand_foreach(call: _DispatchedCall) -> Iterator[_RecordedOperator]:
    name = call.op.__name__.partition(".")[0]
    base_name = name.removesuffix("_") if not name.endswith("__") else name
    if not base_name.startswith(("_foreach_", "_fused_")):  # foreach operators act on tensors of equal index in their lists
        yield _RecordedOperator(call.op, base_name, call.args, call.kwargs, call.out)
        return
    lists = [a for a in (*call.args, *call.kwargs.values()) if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
    count = len(lists[0]) if lists else 0

    def at(value: Any, i: int) -> Any:
        return value if not isinstance(value, list | tuple) else value[i] if len(value) == count else None

    for i in range(count):
        out = at(call.out, i) if call.out is not None else None
        yield _RecordedOperator(
            call.op,
            base_name.removeprefix("_foreach_"),
            tuple(at(a, i) for a in call.args),
            {k: at(a, i) for k, a in call.kwargs.items()},
            out,
        )


class _ShardPropagation:
    """The shard state of every tensor of a run, propagated from the shards of its arguments."""

    def __init__(self, run: _RecordedRun, inputs: Sequence[ArgumentSpec], shards: Sequence[Sequence[tuple[int, ShardRanks]]]) -> None:
        self._inputs = inputs
        self._states: dict[tuple[Any, ...], ShardState] = {}
        self._argument_numbers: dict[tuple[Any, ...], int] = {}
        self._storages = [x.untyped_storage() for x in tensors_in([(c.args, c.kwargs, c.out) for c in run.calls])]
        for number, (twin, cuts_of) in enumerate(zip(run.inputs, shards, strict=True)):
            self._states[_memory_key(twin)] = {ranks: dim for dim, ranks in cuts_of}
            self._argument_numbers[_memory_key(twin)] = number
        for call in run.calls:
            for row in _expand_foreach(call):
                if row.outputs or row.written_tensors():  # other operators return metadata only
                    self._propagate(row)

    def state_of(self, x: Tensor) -> ShardState:
        return self._states.get(_memory_key(x), {})

    def _propagate(self, row: _RecordedOperator) -> None:
        inputs, written = row.inputs, row.written_tensors()
        states = [self.state_of(x) for x in inputs]
        outs = row.outputs or written
        outputs: list[ShardState] = [{} for _ in outs]
        axes = list(dict.fromkeys(ranks for state in states for ranks in state))
        if axes:
            rule = _factor_rule(row, inputs, outs)
            for ranks in axes:
                self._propagate_axis(row, rule, ranks, inputs, states, outputs)
        by_place = {_memory_key(o): state for o, state in zip(outs, outputs, strict=True)}
        for x in written:
            self._check_in_place(row, x, by_place.get(_memory_key(x), outputs[0] if outputs else {}))
        for x, state in zip(outs, outputs, strict=True):
            self._states[_memory_key(x)] = state

    def _propagate_axis(
        self,
        row: _RecordedOperator,
        rule: Rule,
        ranks: ShardRanks,
        inputs: list[Tensor],
        states: list[ShardState],
        outputs: list[ShardState],
    ) -> None:
        """Propagate the sharding over one axis through an operator."""
        labels = set()
        for state, operand_labels in zip(states, rule.inputs, strict=True):
            dim = state.get(ranks)
            if isinstance(dim, float):
                raise _UnsupportedOnShards(f"{row.name} would compute with a summand")
            if dim is not None and operand_labels is not None:
                if not operand_labels[dim]:
                    raise _UnsupportedOnShards(f"{row.name} needs dimension {dim} whole")
                labels.add(operand_labels[dim])
        if not labels:
            return  # it reads no sharded value
        if len(labels) > 1:
            raise _UnsupportedOnShards(f"{row.name} would combine parts of different dimensions")
        (label,) = labels
        for x, state, operand_labels in zip(inputs, states, rule.inputs, strict=True):
            if ranks not in state and operand_labels is not None and label in operand_labels:
                number = self._argument_numbers.get(_memory_key(x))
                if number is None or self._inputs[number].shards:
                    raise _UnsupportedOnShards(f"{row.name} would combine it with a tensor that is sharded differently")
                raise _NeedsSharding(number, operand_labels.index(label), ranks)
        for state, output_state in zip(outputs, self._output_states(row, rule, label, ranks), strict=True):
            state[ranks] = output_state

    def _output_states(self, row: _RecordedOperator, rule: Rule, label: str, ranks: ShardRanks) -> list[int | float]:
        kernel = rule.kernels.get(label)
        present = [label in labels for labels in rule.outputs]
        if all(present) and kernel is None:
            return [labels.index(label) for labels in rule.outputs]
        contracted = not any(present) and all(labels is not None and label in labels for labels in rule.inputs)
        if not contracted or kernel not in (None, "average"):
            raise _UnsupportedOnShards(f"{row.name} of parts is more than parts or summands of the whole")
        return [ranks.share if kernel else 1.0 for _ in rule.outputs]

    def _check_in_place(self, row: _RecordedOperator, x: Tensor, state: ShardState) -> None:
        number = self._argument_numbers.get(_memory_key(x))
        if self.state_of(x) != state or (state and number is not None and not self._inputs[number].is_sharded):
            raise _UnsupportedOnShards(
                f"{row.name} would write a part into a tensor that does not know that it is one: make it with torch.zeros_like(parameter)"
            )


def _factor_rule(row: _RecordedOperator, inputs: list[Tensor], outs: list[Tensor]) -> Rule:
    """Return the operator's factor rule at these shapes."""
    op = row.op
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise _UnsupportedOnShards(f"{row.name} draws random numbers, which no rank has of the whole")
    tensors: dict[str, Spec] = {}

    def arg(value: Any) -> Arg:
        if isinstance(value, Tensor):
            name = f"v{len(tensors)}"
            tensors[name] = spec_of(value)
            return Ref(name)
        if isinstance(value, list | tuple):
            return tuple(arg(item) for item in value)
        if isinstance(value, torch.dtype):
            return Word("dtype", str(value).removeprefix("torch."))
        return value if value is None or isinstance(value, bool | int | float | complex | str) else Word("device", "run")

    args = tuple(arg(a) for a in row.args)
    kwargs = tuple((k, arg(a)) for k, a in row.kwargs.items())
    read = dict(tensors)
    outputs = tuple(arg(o).value for o in outs)  # type: ignore[attr-defined]
    overload = op.__name__.partition(".")[2]
    operator = Operator(row.name, f"{op.namespace}.{row.name}.{overload or 'default'}", args, kwargs, outputs, row.name)
    try:
        rule = rule_of(operator, tensors)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # a form of call that model graphs do not have
        rule = None
    if rule is None and torch.Tag.pointwise in op.tags and outs:
        rule = elementwise_rule_of_shapes([spec.shape for spec in read.values()], [tensors[o].shape for o in outputs])
    if rule is None or not _matches_ranks(rule.inputs, inputs) or not _matches_ranks(rule.outputs, outs):
        raise _UnsupportedOnShards(f"{row.name} has no rule that says what it gives of parts")
    return rule


def _matches_ranks(rows: Sequence[Labels | None], tensors: Sequence[Tensor]) -> bool:
    return len(rows) == len(tensors) and all(labels is None or len(labels) == x.dim() for labels, x in zip(rows, tensors, strict=True))


def _compare_runs(full: _RecordedRun, part: _RecordedRun, propagation: _ShardPropagation) -> None:
    """Raise if the run on shards differs from the full run in its operators, numbers or local shapes."""
    for call, local_call in zip_longest(full.calls, part.calls):
        if call is None or local_call is None or call.op is not local_call.op:
            raise _UnsupportedOnShards("it runs other operators on parts")
        if _scalar_arguments(call) != _scalar_arguments(local_call):
            raise _UnsupportedOnShards(f"{call.op.__name__.partition('.')[0]} computes with the size of what is cut")
        for x, local in zip_longest(tensors_in(call.out), tensors_in(local_call.out)):
            if x is None or local is None:
                raise _UnsupportedOnShards("it runs other operators on parts")
            cuts = tuple((int(dim), ranks) for ranks, dim in propagation.state_of(x).items() if not isinstance(dim, float))
            if local_shape_of(x.shape, cuts) != tuple(local.shape):
                raise _UnsupportedOnShards(f"of the whole it is {list(x.shape)}, of which a part is not {list(local.shape)}")


def _scalar_arguments(call: _DispatchedCall) -> list[str]:
    """Return the arguments that are neither tensors nor lists (lists are sizes, which the results' shapes show)."""
    return [repr(a) for a in (*call.args, *call.kwargs.values()) if not isinstance(a, Tensor | list | tuple)]


def _semantics_of(
    run: _RecordedRun, inputs: Sequence[ArgumentSpec], shards: Sequence[Sequence[tuple[int, ShardRanks]]], propagation: _ShardPropagation
) -> ShardSemantics:
    axes = list(dict.fromkeys(ranks for spec in inputs for _, ranks in spec.shards))
    results: list[ResultSpec] = []
    for x in tensors_in(run.result):
        state = propagation.state_of(x)
        if not state and any(spec.requires_grad for spec in inputs):
            raise _UnsupportedOnShards(
                "one result depends on full tensors only, others on parts, and their gradients would be reduced differently"
            )
        cuts_of = tuple((int(dim), ranks) for ranks, dim in state.items() if not isinstance(dim, float))
        sums = tuple((ranks, share) for ranks, share in state.items() if isinstance(share, float))
        results.append(ResultSpec(tuple(x.shape), cuts_of, sums))
    input_shards = tuple(() if spec.shards else tuple(cuts_of) for spec, cuts_of in zip(inputs, shards, strict=True))
    reductions = tuple(
        tuple(ranks for ranks in axes if spec.requires_grad and ranks not in {r for _, r in cuts_of})
        for spec, cuts_of in zip(inputs, input_shards, strict=True)
    )
    return ShardSemantics(input_shards=input_shards, input_reductions=reductions, results=tuple(results))


__all__ = [
    "ArgumentSpec",
    "DimShards",
    "ResultSpec",
    "ShardRanks",
    "ShardSemantics",
    "infer_shard_semantics",
    "local_shape_of",
]
