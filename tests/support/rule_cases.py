"""One operator whole, and the same operator cut by one of its labels and lowered, on ranks that are threads; their results compared.

What is compared: outputs, gradients of all inputs, and what the operator writes (running statistics), in float64.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.autograd_functions import FunctionCall, call_of, function_of
from shardwise.lower.kernels.randomness import DrawState
from shardwise.lower.local import LocalStage, Lowering, lower
from shardwise.model import graph as data
from shardwise.model.graph import FUNCTION, Graph, Operator, Ref, Slot, Variable, Word
from shardwise.model.sharding.axis_problem import AxisProblem, OperatorStrategy
from shardwise.model.sharding.axis_values import FixedShards, OtherAxes
from shardwise.model.sharding.sharding import Prices, Sharding
from shardwise.model.stages.stages import Stage
from shardwise.plan.ir.placement import D, P, Placement, R, Shard, is_halo, is_shard, shard

TOLERANCE = 1e-10


class Meeting:
    """Where the threads of one group hand each other tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.slots: list[Any] = [None] * size

    def swap(self, index: int, x: Any) -> list[Any]:
        self.slots[index] = x
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found


@dataclass
class ThreadGroup:
    """`shardwise.world.comm.group.Group`'s collectives, by their definitions, between threads of this process."""

    meeting: Meeting
    index: int

    @property
    def size(self) -> int:
        return self.meeting.size

    def _all(self, x: Tensor) -> list[Tensor]:
        return self.meeting.swap(self.index, x.detach().clone())  # type: ignore[no-any-return]

    def all_reduce(self, x: Tensor, op: str = "sum", wait: bool = True) -> None:
        parts = torch.stack(self._all(x))
        with torch.no_grad():
            x.copy_(parts.sum(0) if op == "sum" else parts.amax(0) if op == "max" else parts.amin(0))

    def all_gather(self, x: Tensor, dim: int = 0, length: Any = None) -> Tensor:
        return torch.cat(self._all(x), dim)

    def reduce_scatter(self, x: Tensor, dim: int = 0, lengths: tuple[int, ...] = ()) -> Tensor:
        return _part(torch.stack(self._all(x)).sum(0), Shard(dim, lengths), self.size, self.index).contiguous()

    def all_to_all(
        self, x: Tensor, split_dim: int, concat_dim: int, concat_length: Any = None, split_lengths: tuple[int, ...] = ()
    ) -> Tensor:
        return torch.cat([_part(part, Shard(split_dim, split_lengths), self.size, self.index) for part in self._all(x)], concat_dim)

    def exchange(self, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """As shardwise's; what comes must have the shapes that are waited for."""
        everyone = self.meeting.swap(self.index, [x.detach().clone() for x in sent])
        arrived = [row[self.index] for row in everyone]
        assert [list(x.shape) for x in arrived] == [list(shape) for shape in shapes]
        return arrived


def _part(x: Tensor, form: Shard, n: int, index: int) -> Tensor:
    """Piece `index` of n: of the lengths that a shard has, or without some with the first one longer where it does not divide."""
    return (x.split(list(form.lengths), form.dim) if form.lengths else x.tensor_split(n, form.dim))[index]  # type: ignore[no-untyped-call,no-any-return]


@dataclass(frozen=True)
class Case:
    """One call: `case("linear.default", x, w)`. `constants`: tensors that torch has no gradient for, or whose gradient is not asked."""

    graph: Graph
    tensors: dict[str, Tensor]
    constants: frozenset[str] = frozenset()

    @property
    def op(self) -> Operator:
        return self.graph.operators[0]


def case(target: str, *args: Any, buffers: Sequence[int] = (), **kwargs: Any) -> Case:
    """Run the call once for its outputs' shapes and write it down as a graph of one operator.

    `buffers`: which of its tensors (in order) the operator may write.
    """
    tensors: dict[str, Tensor] = {}

    def arg(a: Any) -> Any:
        if isinstance(a, Tensor):
            name = next((n for n, t in tensors.items() if t is a), f"x{len(tensors)}")
            tensors[name] = a
            return Ref(name)
        if isinstance(a, tuple | list):
            return tuple(arg(item) for item in a)
        return Word("dtype", str(a).removeprefix("torch.")) if isinstance(a, torch.dtype) else a

    written = tuple(arg(a) for a in args), tuple((k, arg(a)) for k, a in kwargs.items())
    with torch.no_grad():
        out = _call(target, [_fresh(a) for a in args], {k: _fresh(a) for k, a in kwargs.items()})
    multiple = isinstance(out, tuple | list)
    outs = list(out) if multiple else [out]
    names = tuple(f"y.{i}" for i in range(len(outs))) if multiple else ("y",)
    held = (*tensors.items(), *zip(names, outs, strict=True))
    spec = {n: data.Tensor(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in held}
    op = Operator("y", _full(target), *written, names, "y", multiple)
    variables = [Variable(n, n, spec[n]) for n in tensors]
    kept = tuple(v for i, v in enumerate(variables) if i in buffers)
    given = tuple(v for i, v in enumerate(variables) if i not in buffers)
    return Case(Graph((), kept, given, (), (op,), spec, names[0], 0, names), tensors)


def function_case(cls: Any, *args: Any) -> Case:
    """`cls.apply(*args)` as a graph of one operator, with the rule that is followed through it."""
    tensors = {f"x{i}": a for i, a in enumerate(a for a in args if isinstance(a, Tensor))}
    numbers = iter(range(len(tensors)))
    given = tuple(Slot(next(numbers)) if isinstance(a, Tensor) else a for a in args)
    spec = {n: data.Tensor(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()}
    function, does = function_of(FunctionCall(cls, given, (), tuple(map(str, given))), tuple(spec.values()), {})
    names = tuple(f"y.{i}" for i in range(len(does.outputs)))
    spec.update({n: does.tensors[v] for n, v in zip(names, does.outputs, strict=True)})
    op = Operator("y", FUNCTION, (function, *map(Ref, tensors)), (), names, cls.__name__, True)
    return Case(Graph((), (), tuple(Variable(n, n, spec[n]) for n in tensors), (), (op,), spec, names[0], 0, names), tensors)


def _fresh(a: Any) -> Any:
    if isinstance(a, tuple | list):
        return type(a)(_fresh(item) for item in a)
    return a.clone() if isinstance(a, Tensor) else a


def _call(target: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    namespace, packet, overload = _full(target).split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)(*args, **kwargs)


def _full(target: str) -> str:
    """The operator's name with its namespace, which is torch's own where none is given."""
    return target if target.count(".") == 2 else f"aten.{target}"


def choices(case: Case, n: int, axis: str = "tensor", taken: dict[str, set[int]] | None = None, rule: Any = None) -> list[OperatorStrategy]:
    """Every cut of the operator into n parts that its rule allows; by `rule` instead of its own, where one is given."""
    problem = AxisProblem(case.graph, axis, n, Prices(), FixedShards(), OtherAxes(taken or {}))
    problem.weight_label_meanings = None  # what an axis is for does not matter here
    if rule is not None:
        problem.rules[case.op.name] = rule
    return [choice for choice in problem.strategies(case.op) if choice.label]


def difference(case: Case, cuts: dict[str, tuple[int, OperatorStrategy]]) -> str:
    """What the cut operator gets wrong, "" where nothing. `cuts`: axis -> (number of parts, choice)."""
    want, want_grads, want_left, seeds = _whole(case)
    op, sizes = case.op, {axis: n for axis, (n, _) in cuts.items()}
    forms: dict[str, dict[str, Placement]] = {v.value: {} for v in case.graph.variables}
    for axis, (n, choice) in cuts.items():
        for value, need in zip(op.inputs, choice.input_placements, strict=True):
            forms[value].setdefault(axis, _stored(case, value, need, n))
        for value, made in zip(op.outputs, choice.output_placements, strict=True):
            forms.setdefault(value, {})[axis] = made
    rows = tuple({axis: choice.input_placements[i] for axis, (_, choice) in cuts.items()} for i in range(len(op.inputs)))
    labels = {axis: choice.label for axis, (_, choice) in cuts.items()}
    sharding = Sharding(sizes, {op.name: labels}, forms, {op.name: rows}, {}, (), ())
    # Sent, not handed out: then they come in the form in which they are made.
    stage = Stage(0, (op,), tuple(v.value for v in case.graph.variables), (), ((1, op.outputs),), ())
    places = [dict(zip(sizes, at, strict=True)) for at in product(*(range(n) for n in sizes.values()))]
    meetings: dict[Any, Meeting] = {}
    for axis, n in sizes.items():
        for at in places:
            meetings.setdefault((axis, _without(at, axis)), Meeting(n))

    def rank(at: dict[str, int]) -> Any:
        groups = {axis: ThreadGroup(meetings[axis, _without(at, axis)], at[axis]) for axis in sizes}
        try:
            local = lower(stage, Lowering(case.graph, sharding, groups, torch.device("cpu"), DrawState()))  # type: ignore[arg-type]
            return _piece(case, sharding, local, at, seeds)
        except BaseException:
            for meeting in meetings.values():
                meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(len(places)) as pool:
        futures = [pool.submit(rank, at) for at in places]
        errors = [error for f in futures if (error := f.exception()) is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        got = [f.result() for f in futures]
    outs = {value: dict(zip(sizes, (R if f is P else f for f in forms[value].values()), strict=True)) for value in op.outputs}
    for value in op.outputs:
        if wrong := _compare(f"output {value}", [g[0][value] for g in got], outs[value], places, want[value]):
            return wrong
    for value, gradient in want_grads.items():
        if wrong := _compare(f"gradient of {value}", [g[1].get(value) for g in got], forms[value], places, gradient):
            return wrong
    for value, left in want_left.items():
        form = {a: R if f is D else f for a, f in forms[value].items()}
        if wrong := _compare(f"what is left in {value}", [g[2][value] for g in got], form, places, left):
            return wrong
    return ""


def _stored(case: Case, value: str, need: Placement | None, n: int) -> Placement:
    """How a value lies that is read so: a halo is fetched."""
    return shard(need.dim, case.tensors[value].shape[need.dim], n) if is_halo(need) else need or R


def _without(at: dict[str, int], axis: str) -> tuple[tuple[str, int], ...]:
    return tuple((a, i) for a, i in at.items() if a != axis)


def _whole(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Outputs, gradients, what is left in the inputs, and the gradients of the outputs that they are made with."""
    op = case.op
    fixed = case.constants | {b.value for b in case.graph.buffers}
    mine = {n: t.clone().requires_grad_(t.is_floating_point() and n not in fixed) for n, t in case.tensors.items()}

    def arg(a: Any) -> Any:
        if isinstance(a, Ref):
            return mine[a.value]
        return [arg(i) for i in a] if isinstance(a, tuple) else getattr(torch, a.name) if isinstance(a, Word) else a

    if op.function is not None:
        called = call_of(op.function)([mine[v] for v in op.inputs])
        out = called if isinstance(called, tuple) else (called,)
    else:
        out = _call(op.target.removeprefix("aten."), [arg(a) for a in op.args], {k: arg(a) for k, a in op.kwargs})
    outs = dict(zip(op.outputs, out if op.returns_sequence else [out], strict=True))
    generator = torch.Generator().manual_seed(1)
    seeds = {n: torch.randn(y.shape, dtype=y.dtype, generator=generator) for n, y in outs.items() if y.requires_grad}
    if seeds:
        torch.autograd.backward([outs[n] for n in seeds], list(seeds.values()))
    grads = {n: t.grad for n, t in mine.items() if t.grad is not None}
    return {n: y.detach() for n, y in outs.items()}, grads, {n: t.detach() for n, t in mine.items()}, seeds


def _local(x: Tensor, form: dict[str, Placement], sizes: Any, at: dict[str, int]) -> Tensor:
    for axis, f in form.items():
        if is_shard(f):
            x = _part(x, f, sizes[axis], at[axis])
    return x.detach().clone()


def _piece(case: Case, sharding: Sharding, local: LocalStage, at: dict[str, int], seeds: dict[str, Tensor]) -> Any:
    fixed = case.constants | {b.value for b in case.graph.buffers}
    mine = {}
    for v in case.graph.variables:
        x = _local(case.tensors[v.value], dict(sharding.placements[v.value]), sharding.sizes, at)
        mine[v.value] = x.requires_grad_(x.is_floating_point() and v.value not in fixed)
    out = dict(zip(case.op.outputs, local.module(*(mine[v] for v in local.variables)), strict=True))
    roots = {n: _local(seeds[n], dict(local.placements[n]), sharding.sizes, at) for n in seeds}
    if roots:
        torch.autograd.backward([out[n] for n in roots], list(roots.values()))
    return (
        {n: y.detach() for n, y in out.items()},
        {n: t.grad for n, t in mine.items() if t.grad is not None},
        {n: t.detach() for n, t in mine.items()},
    )


def _compare(what: str, parts: list[Tensor | None], form: dict[str, Placement], places: list[dict[str, int]], want: Tensor) -> str:
    """Put the pieces together: joined where cut, summed where summands, and where whole every rank has it."""
    some = next((p for p in parts if p is not None), None)
    if some is None:
        return "" if not want.any() else f"{what}: no rank has one"
    held = [torch.zeros_like(some) if p is None else p.to_dense() if p.is_sparse else p for p in parts]
    for axis in reversed(list(form)):
        grouped: dict[Any, list[Tensor]] = {}
        for at, part in zip(places, held, strict=True):
            grouped.setdefault(_without(at, axis), []).append(part)
        places = [dict(key) for key in grouped]
        held = []
        for members in grouped.values():
            f = form[axis]
            if f is R:
                if any(not _same(m, members[0]) for m in members):
                    return f"{what}: ranks of {axis} differ where each has it whole"
                held.append(members[0])
            else:
                held.append(torch.stack(members).sum(0) if f is D else torch.cat(members, f.dim))
    got = held[0]
    if got.shape != want.shape:
        return f"{what}: shape {list(got.shape)}, whole {list(want.shape)}"
    return "" if _same(got, want) else f"{what}: differs by {(got.double() - want.double()).abs().max().item():.2e}"


def _same(a: Tensor, b: Tensor) -> bool:
    a, b = (x.to_dense() if x.is_sparse else x for x in (a, b))
    if a.shape != b.shape:
        return False
    return torch.equal(a, b) if not a.is_floating_point() else torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def check(case: Case, parts: Sequence[int] = (2, 3), axis: str = "tensor") -> list[str]:
    """Labels that are cut wrong, with what is wrong, over all labels and numbers of parts."""
    found = []
    for n in parts:
        for choice in choices(case, n, axis):
            try:
                wrong = difference(case, {axis: (n, choice)})
            except Exception as error:  # whatever it is, a cut that a rule offers must run
                wrong = f"raises {type(error).__name__}: {error}"
            if wrong:
                found.append(f"{case.op.target} {_shapes(case)} cut by {choice.label} into {n}: {wrong}")
    return found


def _shapes(case: Case) -> str:
    return ", ".join(str(list(t.shape)) for t in case.tensors.values())
