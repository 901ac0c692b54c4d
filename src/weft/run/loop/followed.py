"""What a function gives of parts of tensors, as the factor rules of its operators say.

In: a function and how it is called, where some of its tensors are parts of larger ones. Out: a `Verdict`: how whole tensors among its
arguments are prepared, and what its results are: parts, wholes, or summands of wholes; or why that is not known.

The function is called twice, on fake tensors. With whole tensors it tells which operators run, and their rules what a cut means for each of
them, one after the other. With parts it must run the same operators with the same numbers: what divides by a number of rows that it asked
a part for is found so. Not modelled: what comes of unequal parts in a dimension of another length than the one that is cut.
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
    """Those that hold the parts along one axis of the mesh: the `members`, and where parts are unequal, or pieces of several `runs`, their
    `lengths` and number `place`, which is here."""

    members: tuple[int, ...]
    lengths: tuple[int, ...] = ()
    place: int = 0
    runs: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, form: Shard, group: Group) -> Self:
        """Those that hold what lies so."""
        lengths = tuple(map(sum, zip(*form.runs, strict=True))) or form.lengths
        return cls(group.ranks, lengths, group.index if lengths else 0, form.runs)

    def form(self, dim: int) -> Shard:
        """How they hold a dimension."""
        return in_runs(dim, self.runs) if self.runs else Shard(dim, self.lengths)

    @property
    def share(self) -> float:
        """The part that is here."""
        return self.lengths[self.place] / sum(self.lengths) if self.lengths else 1.0 / len(self.members)

    def part(self, length: int) -> int | None:
        """Of a dimension of `length` the entries that are here; None where it is not cut so."""
        if self.lengths:
            return self.lengths[self.place] if sum(self.lengths) == length else None
        return None if length % len(self.members) else length // len(self.members)


Cuts = tuple[tuple[int, Ranks], ...]  # dimensions and who has their parts; where one is cut twice, the larger parts first
Form = dict[Ranks, int | float]  # a dimension that is cut, or a share: the whole is the sum of what ranks have, each times its own


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor among the arguments: `shape` of the whole, `part` of what is here. `knows`: that it is a part; `learns`: a whole tensor that
    has gradients."""

    shape: tuple[int, ...]
    part: tuple[int, ...]
    cuts: Cuts
    dtype: torch.dtype
    knows: bool
    learns: bool


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor among the results: a part of one of `shape`, and of which ranks' summands, each times a share, it is the sum."""

    shape: tuple[int, ...]
    cuts: Cuts
    sums: tuple[tuple[Ranks, float], ...]


@dataclass(frozen=True)
class Verdict:
    """`why` it is refused, and whether the whole can be called so at all; whether it computes anything; how each whole tensor that it is
    given is cut, and between which ranks that one's gradient is summed; what each result is."""

    why: str = ""
    can_be: bool = True
    computes: bool = True
    cuts: tuple[Cuts, ...] = ()
    sums: tuple[tuple[Ranks, ...], ...] = ()
    results: tuple[Made, ...] = ()

    @cached_property
    def prepares(self) -> bool:
        """Whether a tensor is prepared."""
        return any(self.cuts) or any(self.sums)


class _Unclear(Exception):
    """Why parts would not do."""


class _NeedsCut(Exception):
    """A whole tensor among the arguments that meets parts, and is to be cut as they are."""

    def __init__(self, number: int, dim: int, ranks: Ranks) -> None:
        self.number, self.cut = number, (dim, ranks)


@dataclass(frozen=True, slots=True)
class _Call:
    """An operator as it ran."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


class _Recorder(DispatchMode):  # type: ignore[no-untyped-call]
    """The operators that run in its block."""

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
    """Tensors of nested lists, tuples and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def replaced(value: Any, tensors: Iterator[Any]) -> Any:
    """The same nest with these in place of its tensors, in order."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, list | tuple):
        items = [replaced(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: replaced(item, tensors) for key, item in value.items()}
    return value


def verdict(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Sequence[Given]) -> Verdict:
    """What `func` gives when it is called so; `inputs` tells of the tensors in order."""
    full = _record(func, args, kwargs, [one.shape for one in inputs], inputs)
    if not full.calls:
        part = _record(func, args, kwargs, [one.part for one in inputs], inputs)
        if part.calls or (part.error is None) != (full.error is None):
            return Verdict(f"the whole cannot be called so: {said(full.error or part.error or ValueError('no elements'))}", can_be=False)
        return Verdict(computes=False)  # it asks or changes what is not an element
    if full.error is not None:
        return Verdict(f"the whole cannot be called so, or not without its values: {said(full.error)}", can_be=False)
    cuts = [list(one.cuts) for one in inputs]
    while True:
        try:
            forms = _Forms(full, inputs, cuts)
            break
        except _NeedsCut as needed:
            cuts[needed.number].append(needed.cut)
        except _Unclear as error:
            return Verdict(str(error))
    try:
        parts = [part_of(one.shape, tuple(c)) if not one.cuts else one.part for one, c in zip(inputs, cuts, strict=True)]
        part = _record(func, args, kwargs, parts, inputs)
        if part.error is not None:
            raise _Unclear(f"it does not run on parts: {said(part.error)}")
        _compare(full, part, forms)
        return _verdict(full, inputs, cuts, forms)
    except _Unclear as error:
        return Verdict(str(error))


def part_of(shape: Sequence[int], cuts: Cuts) -> tuple[int, ...]:
    """The shape of a rank's part."""
    local = list(shape)
    for dim, ranks in cuts:
        part = ranks.part(local[dim])
        if part is None:
            raise _Unclear(f"dimension {dim} of {list(shape)} does not divide between {len(ranks.members)} ranks")
        local[dim] = part
    return tuple(local)


@dataclass(frozen=True, slots=True)
class _Run:
    """What happened: the tensors that it began with, its calls, and its result or what it raised."""

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
        twins = [torch.empty(tuple(shape), dtype=one.dtype) for shape, one in zip(shapes, inputs, strict=True)]
        fed = iter(twins)
        args, kwargs = replaced(args, fed), replaced(kwargs, fed)
        try:
            with recorder:
                result = func(*args, **kwargs)
        except Exception as error:  # whatever torch has for a call that cannot be
            return _Run(twins, recorder.calls, None, error)
    return _Run(twins, recorder.calls, result)


def _place(x: Tensor) -> tuple[Any, ...]:
    """Where it lies: autograd and views make several objects of one tensor."""
    return (id(x.untyped_storage()), x.storage_offset(), tuple(x.shape), x.stride(), x.dtype)


@dataclass(frozen=True, slots=True)
class _Row:
    """An operator on tensors, as rules know operators: one of lists is several of these."""

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
    bare = name.removesuffix("_") if not name.endswith("__") else name
    if not bare.startswith(("_foreach_", "_fused_")):  # which do to tensors at one place of several lists what they do to tensors
        yield _Row(call.op, bare, call.args, call.kwargs, call.out)
        return
    lists = [a for a in (*call.args, *call.kwargs.values()) if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
    count = len(lists[0]) if lists else 0

    def at(value: Any, i: int) -> Any:
        return value if not isinstance(value, list | tuple) else value[i] if len(value) == count else None

    for i in range(count):
        out = at(call.out, i) if call.out is not None else None
        yield _Row(
            call.op,
            bare.removeprefix("_foreach_"),
            tuple(at(a, i) for a in call.args),
            {k: at(a, i) for k, a in call.kwargs.items()},
            out,
        )


class _Forms:
    """How every tensor of a run lies when its arguments are cut so."""

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
                if row.makes or row.written():  # others ask for a device
                    self._follow(row)

    def of(self, x: Tensor) -> Form:
        return self._of.get(_place(x), {})

    def _follow(self, row: _Row) -> None:
        inputs, written = row.inputs, row.written()
        placed = [self.of(x) for x in inputs]
        outs = row.makes or written
        outputs: list[Form] = [{} for _ in outs]
        axes = list(dict.fromkeys(ranks for form in placed for ranks in form))
        if axes:
            rule = _rule(row, inputs, outs)
            for ranks in axes:
                self._cut(row, rule, ranks, inputs, placed, outputs)
        by_place = {_place(o): form for o, form in zip(outs, outputs, strict=True)}
        for x in written:
            self._check_written(row, x, by_place.get(_place(x), outputs[0] if outputs else {}))
        for x, form in zip(outs, outputs, strict=True):
            self._of[_place(x)] = form

    def _cut(self, row: _Row, rule: Rule, ranks: Ranks, inputs: list[Tensor], placed: list[Form], outputs: list[Form]) -> None:
        """What comes of a cut over one axis."""
        labels = set()
        for form, labelled in zip(placed, rule.inputs, strict=True):
            at = form.get(ranks)
            if isinstance(at, float):
                raise _Unclear(f"{row.name} would compute with a summand")
            if at is not None and labelled is not None:
                if not labelled[at]:
                    raise _Unclear(f"{row.name} needs dimension {at} whole")
                labels.add(labelled[at])
        if not labels:
            return  # no value is read
        if len(labels) > 1:
            raise _Unclear(f"{row.name} would meet parts of other dimensions")
        (label,) = labels
        for x, form, labelled in zip(inputs, placed, rule.inputs, strict=True):
            if ranks not in form and labelled is not None and label in labelled:
                number = self._number.get(_place(x))
                if number is None or self._inputs[number].cuts:
                    raise _Unclear(f"{row.name} would meet a tensor that is cut otherwise")
                raise _NeedsCut(number, labelled.index(label), ranks)
        for form, form_of in zip(outputs, self._given_by(row, rule, label, ranks), strict=True):
            form[ranks] = form_of

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
    """Its factor rule at these shapes."""
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
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # a call that no model's graph has
        rule = None
    if rule is None and torch.Tag.pointwise in op.tags and outs:
        rule = of_elements([spec.shape for spec in read.values()], [tensors[o].shape for o in outputs])
    if rule is None or not _fits(rule.inputs, inputs) or not _fits(rule.outputs, outs):
        raise _Unclear(f"{row.name} has no rule that says what it gives of parts")
    return rule


def _fits(rows: Sequence[Labels | None], tensors: Sequence[Tensor]) -> bool:
    return len(rows) == len(tensors) and all(labels is None or len(labels) == x.dim() for labels, x in zip(rows, tensors, strict=True))


def _compare(full: _Run, part: _Run, forms: _Forms) -> None:
    """Raise where parts do not run the same operators, with the same numbers, to parts of the same tensors."""
    for one, other in zip_longest(full.calls, part.calls):
        if one is None or other is None or one.op is not other.op:
            raise _Unclear("parts take another way through it")
        if _numbers(one) != _numbers(other):
            raise _Unclear(f"{one.op.__name__.partition('.')[0]} computes with the size of what is cut")
        for x, local in zip_longest(tensors_in(one.out), tensors_in(other.out)):
            if x is None or local is None:
                raise _Unclear("parts take another way through it")
            cuts = tuple((int(dim), ranks) for ranks, dim in forms.of(x).items() if not isinstance(dim, float))
            if part_of(x.shape, cuts) != tuple(local.shape):
                raise _Unclear(f"of the whole it is {list(x.shape)}, of which a part is not {list(local.shape)}")


def _numbers(call: _Call) -> list[str]:
    """Arguments that are neither tensors nor lists (sizes, which the results' shapes show)."""
    return [repr(a) for a in (*call.args, *call.kwargs.values()) if not isinstance(a, Tensor | list | tuple)]


def _verdict(run: _Run, inputs: Sequence[Given], cuts: Sequence[Sequence[tuple[int, Ranks]]], forms: _Forms) -> Verdict:
    axes = list(dict.fromkeys(ranks for one in inputs for _, ranks in one.cuts))
    results: list[Made] = []
    for x in tensors_in(run.result):
        form = forms.of(x)
        if not form and any(one.learns for one in inputs):
            raise _Unclear("a result of whole tensors alone would stand beside parts, and learn otherwise")
        cuts_of = tuple((int(dim), ranks) for ranks, dim in form.items() if not isinstance(dim, float))
        sums = tuple((ranks, share) for ranks, share in form.items() if isinstance(share, float))
        results.append(Made(tuple(x.shape), cuts_of, sums))
    taken = tuple(() if one.cuts else tuple(cuts_of) for one, cuts_of in zip(inputs, cuts, strict=True))
    summed = tuple(
        tuple(ranks for ranks in axes if one.learns and ranks not in {r for _, r in cuts_of})
        for one, cuts_of in zip(inputs, taken, strict=True)
    )
    return Verdict(cuts=taken, sums=summed, results=tuple(results))


__all__ = ["Cuts", "Given", "Made", "Ranks", "Verdict", "part_of", "replaced", "tensors_in", "verdict"]
