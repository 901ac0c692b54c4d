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

from weft.capture.fakes import DispatchMode, FakeMode, fake_mode, unlogged
from weft.capture.fx_reader import spec_of
from weft.errors import said
from weft.model.graph import Arg, Operator, Ref, Word
from weft.model.graph import Tensor as Spec
from weft.ops import Labels, Rule, of_elements, rule_of
from weft.plan.placement import Shard, in_runs
from weft.world.world import Group


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks that hold the shards along one mesh axis: the `members`; if shards are unequal or strided over several segments
    (`segment_lengths`), also all `lengths` and this rank's `index`."""

    members: tuple[int, ...]
    lengths: tuple[int, ...] = ()
    place: int = 0
    runs: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, form: Shard, group: Group) -> Self:
        """Return the ranks of `group`, over which a tensor has this placement."""
        lengths = tuple(map(sum, zip(*form.runs, strict=True))) or form.lengths
        return cls(group.ranks, lengths, group.index if lengths else 0, form.runs)

    def form(self, dim: int) -> Shard:
        """Return the placement of dimension `dim` over these ranks."""
        return in_runs(dim, self.runs) if self.runs else Shard(dim, self.lengths)

    @property
    def share(self) -> float:
        """Fraction of the dimension that is stored on this rank."""
        return self.lengths[self.place] / sum(self.lengths) if self.lengths else 1.0 / len(self.members)

    def part(self, length: int) -> int | None:
        """Return the local length of a dimension of `length`; None if it cannot be sharded like this."""
        if self.lengths:
            return self.lengths[self.place] if sum(self.lengths) == length else None
        return None if length % len(self.members) else length // len(self.members)


Cuts = tuple[tuple[int, Ranks], ...]  # sharded dimensions and their ranks; of a dimension sharded twice, the outer axis first
Form = dict[Ranks, int | float]  # a sharded dimension (int), or the share (float) by which each rank's partial sum counts


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor argument. `is_sharded`: it is a `ShardedTensor`, not a plain tensor of local shape; `requires_grad`: a full tensor does."""

    shape: tuple[int, ...]
    part: tuple[int, ...]
    cuts: Cuts
    dtype: torch.dtype
    knows: bool
    learns: bool


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor result: its global shape, shards, and partial sums still to be reduced, each with the share of this rank."""

    shape: tuple[int, ...]
    cuts: Cuts
    sums: tuple[tuple[Ranks, float], ...]


@dataclass(frozen=True)
class Verdict:
    """Shard semantics of a call: why it is unsupported (if it is), whether it is valid on full tensors and runs operators at all; how each
    full argument is sharded and over which ranks its gradient is reduced; and the spec of each result."""

    why: str = ""
    can_be: bool = True
    computes: bool = True
    cuts: tuple[Cuts, ...] = ()
    sums: tuple[tuple[Ranks, ...], ...] = ()
    results: tuple[Made, ...] = ()

    @cached_property
    def prepares(self) -> bool:
        """Return whether any argument is redistributed."""
        return any(self.cuts) or any(self.sums)


class _Unclear(Exception):
    """The function cannot run on shards, for the reason given."""


class _NeedsCut(Exception):
    """A full argument is combined with shards and has to be sharded like them."""

    def __init__(self, number: int, dim: int, ranks: Ranks) -> None:
        self.number, self.cut = number, (dim, ranks)


@dataclass(frozen=True, slots=True)
class _Call:
    """A dispatched operator with its arguments and result."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


class _Recorder(DispatchMode):  # type: ignore[no-untyped-call]
    """Record the operators that are dispatched in its block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = _Call(func, args, kwargs, None)
        self.calls.append(call)
        out = func(*args, **kwargs)
        self.calls[-1 if self.calls[-1] is call else self.calls.index(call)] = _Call(func, args, kwargs, out)
        return out


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested lists, tuples and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def replaced(value: Any, tensors: Iterator[Any]) -> Any:
    """Return the same nest with its tensors replaced, in order."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, list | tuple):
        items = [replaced(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: replaced(item, tensors) for key, item in value.items()}
    return value


def verdict(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Sequence[Given]) -> Verdict:
    """Infer how a call of `func` acts on shards; `inputs` describes its tensor arguments in order."""
    full = _record(func, args, kwargs, [spec.shape for spec in inputs], inputs)
    if not full.calls:
        part = _record(func, args, kwargs, [spec.part for spec in inputs], inputs)
        if part.calls or (part.error is None) != (full.error is None):
            return Verdict(f"the whole cannot be called so: {said(full.error or part.error or ValueError('no elements'))}", can_be=False)
        return Verdict(computes=False)  # it runs no operator
    if full.error is not None:
        return Verdict(f"the whole cannot be called so, or not without its values: {said(full.error)}", can_be=False)
    cuts = [list(spec.cuts) for spec in inputs]
    while True:
        try:
            propagation = _Forms(full, inputs, cuts)
            break
        except _NeedsCut as needed:
            cuts[needed.number].append(needed.cut)
        except _Unclear as error:
            return Verdict(str(error))
    try:
        parts = [part_of(spec.shape, tuple(c)) if not spec.cuts else spec.part for spec, c in zip(inputs, cuts, strict=True)]
        part = _record(func, args, kwargs, parts, inputs)
        if part.error is not None:
            raise _Unclear(f"it does not run on parts: {said(part.error)}")
        _compare(full, part, propagation)
        return _verdict(full, inputs, cuts, propagation)
    except _Unclear as error:
        return Verdict(str(error))


def part_of(shape: Sequence[int], cuts: Cuts) -> tuple[int, ...]:
    """Return the shape of a rank's shard."""
    local = list(shape)
    for dim, ranks in cuts:
        part = ranks.part(local[dim])
        if part is None:
            raise _Unclear(f"dimension {dim} of {list(shape)} does not divide between {len(ranks.members)} ranks")
        local[dim] = part
    return tuple(local)


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of the function on fake tensors: its inputs, the dispatched calls, and its result or error."""

    twins: list[Tensor]
    calls: list[_Call]
    result: Any = None
    error: Exception | None = None


@cache
def _mode() -> FakeMode:
    return fake_mode()


def _record(func: Any, args: Any, kwargs: Any, shapes: Sequence[Sequence[int]], inputs: Sequence[Given]) -> _Run:
    recorder = _Recorder()
    with torch.no_grad(), _mode(), unlogged():
        fake_inputs = [torch.empty(tuple(shape), dtype=spec.dtype) for shape, spec in zip(shapes, inputs, strict=True)]
        fake_iterator = iter(fake_inputs)
        args, kwargs = replaced(args, fake_iterator), replaced(kwargs, fake_iterator)
        try:
            with recorder:
                result = func(*args, **kwargs)
        except Exception as error:  # torch raises errors of many types for invalid calls
            return _Run(fake_inputs, recorder.calls, None, error)
    return _Run(fake_inputs, recorder.calls, result)


def _place(x: Tensor) -> tuple[Any, ...]:
    """Return a key of the tensor's memory: autograd and views make several objects of one tensor."""
    return (id(x.untyped_storage()), x.storage_offset(), tuple(x.shape), x.stride(), x.dtype)


@dataclass(frozen=True, slots=True)
class _Row:
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
    def makes(self) -> list[Tensor]:
        return list(tensors_in(self.out))

    def written(self) -> list[Tensor]:
        arguments = self.op._schema.arguments
        named = {a.name: v for a, v in zip(arguments, self.args, strict=False)} | self.kwargs
        return [x for a in arguments if a.alias_info is not None and a.alias_info.is_write for x in tensors_in(named.get(a.name))]


def _rows(call: _Call) -> Iterator[_Row]:
    name = call.op.__name__.partition(".")[0]
    base_name = name.removesuffix("_") if not name.endswith("__") else name
    if not base_name.startswith(("_foreach_", "_fused_")):  # foreach operators act on tensors of equal index in their lists
        yield _Row(call.op, base_name, call.args, call.kwargs, call.out)
        return
    lists = [a for a in (*call.args, *call.kwargs.values()) if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
    count = len(lists[0]) if lists else 0

    def at(value: Any, i: int) -> Any:
        return value if not isinstance(value, list | tuple) else value[i] if len(value) == count else None

    for i in range(count):
        out = at(call.out, i) if call.out is not None else None
        yield _Row(
            call.op,
            base_name.removeprefix("_foreach_"),
            tuple(at(a, i) for a in call.args),
            {k: at(a, i) for k, a in call.kwargs.items()},
            out,
        )


class _Forms:
    """The shard state of every tensor of a run, propagated from the shards of its arguments."""

    def __init__(self, run: _Run, inputs: Sequence[Given], cuts: Sequence[Sequence[tuple[int, Ranks]]]) -> None:
        self._inputs = inputs
        self._of: dict[tuple[Any, ...], Form] = {}
        self._number: dict[tuple[Any, ...], int] = {}
        self._keep = [x.untyped_storage() for x in tensors_in([(c.args, c.kwargs, c.out) for c in run.calls])]
        for number, (twin, cuts_of) in enumerate(zip(run.twins, cuts, strict=True)):
            self._of[_place(twin)] = {ranks: dim for dim, ranks in cuts_of}
            self._number[_place(twin)] = number
        for call in run.calls:
            for row in _rows(call):
                if row.makes or row.written():  # other operators return metadata only
                    self._follow(row)

    def of(self, x: Tensor) -> Form:
        return self._of.get(_place(x), {})

    def _follow(self, row: _Row) -> None:
        inputs, written = row.inputs, row.written()
        states = [self.of(x) for x in inputs]
        outs = row.makes or written
        outputs: list[Form] = [{} for _ in outs]
        axes = list(dict.fromkeys(ranks for state in states for ranks in state))
        if axes:
            rule = _rule(row, inputs, outs)
            for ranks in axes:
                self._cut(row, rule, ranks, inputs, states, outputs)
        by_place = {_place(o): state for o, state in zip(outs, outputs, strict=True)}
        for x in written:
            self._check_written(row, x, by_place.get(_place(x), outputs[0] if outputs else {}))
        for x, state in zip(outs, outputs, strict=True):
            self._of[_place(x)] = state

    def _cut(self, row: _Row, rule: Rule, ranks: Ranks, inputs: list[Tensor], placed: list[Form], outputs: list[Form]) -> None:
        """Propagate the sharding over one axis through an operator."""
        labels = set()
        for state, operand_labels in zip(placed, rule.inputs, strict=True):
            dim = state.get(ranks)
            if isinstance(dim, float):
                raise _Unclear(f"{row.name} would compute with a summand")
            if dim is not None and operand_labels is not None:
                if not operand_labels[dim]:
                    raise _Unclear(f"{row.name} needs dimension {dim} whole")
                labels.add(operand_labels[dim])
        if not labels:
            return  # it reads no sharded value
        if len(labels) > 1:
            raise _Unclear(f"{row.name} would combine parts of different dimensions")
        (label,) = labels
        for x, state, operand_labels in zip(inputs, placed, rule.inputs, strict=True):
            if ranks not in state and operand_labels is not None and label in operand_labels:
                number = self._number.get(_place(x))
                if number is None or self._inputs[number].cuts:
                    raise _Unclear(f"{row.name} would combine it with a tensor that is sharded differently")
                raise _NeedsCut(number, operand_labels.index(label), ranks)
        for state, output_state in zip(outputs, self._given_by(row, rule, label, ranks), strict=True):
            state[ranks] = output_state

    def _given_by(self, row: _Row, rule: Rule, label: str, ranks: Ranks) -> list[int | float]:
        kernel = rule.kernels.get(label)
        present = [label in labels for labels in rule.outputs]
        if all(present) and kernel is None:
            return [labels.index(label) for labels in rule.outputs]
        contracted = not any(present) and all(labels is not None and label in labels for labels in rule.inputs)
        if not contracted or kernel not in (None, "average"):
            raise _Unclear(f"{row.name} of parts is more than parts or summands of the whole")
        return [ranks.share if kernel else 1.0 for _ in rule.outputs]

    def _check_written(self, row: _Row, x: Tensor, form: Form) -> None:
        number = self._number.get(_place(x))
        if self.of(x) != form or (form and number is not None and not self._inputs[number].knows):
            raise _Unclear(
                f"{row.name} would write a part into a tensor that does not know that it is one: make it with torch.zeros_like(parameter)"
            )


def _rule(row: _Row, inputs: list[Tensor], outs: list[Tensor]) -> Rule:
    """Return the operator's factor rule at these shapes."""
    op = row.op
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise _Unclear(f"{row.name} draws random numbers, which no rank has of the whole")
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
        rule = of_elements([spec.shape for spec in read.values()], [tensors[o].shape for o in outputs])
    if rule is None or not _fits(rule.inputs, inputs) or not _fits(rule.outputs, outs):
        raise _Unclear(f"{row.name} has no rule that says what it gives of parts")
    return rule


def _fits(rows: Sequence[Labels | None], tensors: Sequence[Tensor]) -> bool:
    return len(rows) == len(tensors) and all(labels is None or len(labels) == x.dim() for labels, x in zip(rows, tensors, strict=True))


def _compare(full: _Run, part: _Run, forms: _Forms) -> None:
    """Raise if the run on shards differs from the full run in its operators, numbers or local shapes."""
    for call, local_call in zip_longest(full.calls, part.calls):
        if call is None or local_call is None or call.op is not local_call.op:
            raise _Unclear("it runs other operators on parts")
        if _numbers(call) != _numbers(local_call):
            raise _Unclear(f"{call.op.__name__.partition('.')[0]} computes with the size of what is cut")
        for x, local in zip_longest(tensors_in(call.out), tensors_in(local_call.out)):
            if x is None or local is None:
                raise _Unclear("it runs other operators on parts")
            cuts = tuple((int(dim), ranks) for ranks, dim in forms.of(x).items() if not isinstance(dim, float))
            if part_of(x.shape, cuts) != tuple(local.shape):
                raise _Unclear(f"of the whole it is {list(x.shape)}, of which a part is not {list(local.shape)}")


def _numbers(call: _Call) -> list[str]:
    """Return the arguments that are neither tensors nor lists (lists are sizes, which the results' shapes show)."""
    return [repr(a) for a in (*call.args, *call.kwargs.values()) if not isinstance(a, Tensor | list | tuple)]


def _verdict(run: _Run, inputs: Sequence[Given], cuts: Sequence[Sequence[tuple[int, Ranks]]], forms: _Forms) -> Verdict:
    axes = list(dict.fromkeys(ranks for spec in inputs for _, ranks in spec.cuts))
    results: list[Made] = []
    for x in tensors_in(run.result):
        state = forms.of(x)
        if not state and any(spec.learns for spec in inputs):
            raise _Unclear("one result depends on full tensors only, others on parts, and their gradients would be reduced differently")
        cuts_of = tuple((int(dim), ranks) for ranks, dim in state.items() if not isinstance(dim, float))
        sums = tuple((ranks, share) for ranks, share in state.items() if isinstance(share, float))
        results.append(Made(tuple(x.shape), cuts_of, sums))
    input_shards = tuple(() if spec.cuts else tuple(cuts_of) for spec, cuts_of in zip(inputs, cuts, strict=True))
    reductions = tuple(
        tuple(ranks for ranks in axes if spec.learns and ranks not in {r for _, r in cuts_of})
        for spec, cuts_of in zip(inputs, input_shards, strict=True)
    )
    return Verdict(cuts=input_shards, sums=reductions, results=tuple(results))


__all__ = ["Cuts", "Given", "Made", "Ranks", "Verdict", "part_of", "replaced", "tensors_in", "verdict"]
