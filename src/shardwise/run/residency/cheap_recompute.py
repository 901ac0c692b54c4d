"""Recomputation of cheap operators: layers save what products, attention and collectives need them to, and nothing else.

Norms, activations, elementwise operators, dropout and casts of a layer are run again in backward (`ops.is_cheap_to_recompute`), one by one
and only those of which backward needs a result; the results of all other operators are kept. So nothing of a matrix product's size is
computed twice, and no collective is called twice (Korthikanti et al. 2022 and torchtitan's selective checkpointing choose likewise).

`CheapLayer` runs a layer's graph operator by operator while hooks of autograd see each tensor that is saved. A tensor that a cheap
operator made is not saved: a `SavedReference` says by which operator it is made again. Results are the same bits, since the same operators
run on the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardwise.lower.call import runs_under_ambient_autocast
from shardwise.lower.kernels.randomness import DrawState, dropout
from shardwise.lower.kernels.scaled import scaled_linear
from shardwise.lower.operator_lowering import cast_to_widest
from shardwise.lower.torch_calls import function_called_by
from shardwise.ops import is_cheap_to_recompute, record_of_target
from shardwise.ops.vocabulary import AutocastPolicy
from shardwise.plan.ir.transition import LOCAL_COLLECTIVES, transition_between
from shardwise.run.residency.layer_modules import LayeredStage
from shardwise.run.residency.recompute import mark_recomputing
from shardwise.world.memory import Accounts

_CHEAP_FUNCTIONS = (dropout, cast_to_widest)


@dataclass(frozen=True, slots=True)
class _ValueSlot:
    """The place of a node's value among the values of a layer."""

    number: int


@dataclass(frozen=True, slots=True)
class _LayerCall:
    """A node of a layer: what it calls, with slots for nodes, the slots that it reads, and those that no later node reads."""

    target: Callable[..., Any]
    args: Any
    kwargs: Any
    reads: tuple[int, ...]
    last_reads: tuple[int, ...]
    is_cheap: bool


def cast_for_product(x: Tensor) -> Tensor:
    """Return an operand of a product as autocast casts it, if autocast is on."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return x
    return x.to(torch.get_autocast_dtype(device))


class _LayerProgram:
    """The calls of a layer in order. Slots are those of inputs, then those of calls."""

    def __init__(self, module: fx.GraphModule) -> None:
        nodes = list(module.graph.nodes)
        self.attributes = [node for node in nodes if node.op == "get_attr"]
        inputs = [*(node for node in nodes if node.op == "placeholder"), *self.attributes]
        self.num_inputs = len(inputs)
        self._slots = {node: number for number, node in enumerate(inputs)}
        self._cheap = set[int]()
        rows: list[tuple[Callable[..., Any], Any, Any, bool]] = []
        for node in nodes:
            if node.op in ("call_function", "call_module"):
                self._add_node(module, node, rows)
        (output,) = (node for node in nodes if node.op == "output")
        self.output = self._with_slots(output.args[0])
        last = dict.fromkeys(_slots_in(self.output), len(rows))
        reads = [tuple(dict.fromkeys(_slots_in((args, kwargs)))) for _, args, kwargs, _ in rows]
        for at in reversed(range(len(rows))):
            for slot in reads[at]:
                last.setdefault(slot, at)
        self.calls = [
            _LayerCall(
                target, args, kwargs, reads[at], tuple(slot for slot in reads[at] if last[slot] == at and self.is_cheap(slot)), is_cheap
            )
            for at, (target, args, kwargs, is_cheap) in enumerate(rows)
        ]

    def is_cheap(self, slot: int) -> bool:
        """Return whether a slot's value is made again."""
        return slot in self._cheap

    def _add_node(self, module: fx.GraphModule, node: fx.Node, rows: list[tuple[Callable[..., Any], Any, Any, bool]]) -> None:
        target: Any = getattr(module, str(node.target)) if node.op == "call_module" else node.target
        args, kwargs, is_cheap = self._with_slots(node.args), self._with_slots(node.kwargs), is_cheap_node(node)
        if _casts_operands(node):  # so that casts are made again as well
            args = [self._add_cast(a, rows) if isinstance(a, _ValueSlot) and a.number in self._cheap else a for a in args]
        self._slots[node] = self._add_call(rows, target, args, kwargs, is_cheap)

    def _add_cast(self, operand: _ValueSlot, rows: list[tuple[Callable[..., Any], Any, Any, bool]]) -> _ValueSlot:
        return _ValueSlot(self._add_call(rows, cast_for_product, [operand], {}, True))

    def _add_call(
        self, rows: list[tuple[Callable[..., Any], Any, Any, bool]], target: Callable[..., Any], args: Any, kwargs: Any, is_cheap: bool
    ) -> int:
        rows.append((target, args, kwargs, is_cheap))
        slot = self.num_inputs + len(rows) - 1
        if is_cheap:
            self._cheap.add(slot)
        return slot

    def _with_slots(self, x: Any) -> Any:
        if isinstance(x, fx.Node):
            return _ValueSlot(self._slots[x])
        if isinstance(x, slice):
            return slice(*map(self._with_slots, (x.start, x.stop, x.step)))
        if isinstance(x, tuple | list):
            return [self._with_slots(y) for y in x] if isinstance(x, list) else tuple(self._with_slots(y) for y in x)
        return {k: self._with_slots(y) for k, y in x.items()} if isinstance(x, dict) else x


def is_cheap_node(node: fx.Node) -> bool:
    """Return whether a node of a lowered stage is made again rather than kept."""
    if node.op != "call_function":
        return False
    function = function_called_by(node)
    name = str(function)
    if "redistribution" in node.meta:
        source, target, _ = node.meta["redistribution"]
        return transition_between(source, target).collective in LOCAL_COLLECTIVES
    return function in _CHEAP_FUNCTIONS or name == "<built-in function getitem>" or is_cheap_to_recompute(record_of_target(name))


def _casts_operands(node: fx.Node) -> bool:
    if function_called_by(node) is scaled_linear:
        return True
    record = record_of_target(str(function_called_by(node)))
    return record.autocast == AutocastPolicy.LOW_PRECISION and runs_under_ambient_autocast(node)


def _slots_in(x: Any) -> Iterator[int]:
    if isinstance(x, _ValueSlot):
        yield x.number
    elif isinstance(x, slice):
        yield from _slots_in((x.start, x.stop, x.step))
    elif isinstance(x, tuple | list | dict):
        for y in x.values() if isinstance(x, dict) else x:
            yield from _slots_in(y)


def _fill_slots(x: Any, value_of: Callable[[int], Any]) -> Any:
    """Return arguments with the values of their slots."""
    if isinstance(x, _ValueSlot):
        return value_of(x.number)
    if isinstance(x, tuple | list):
        return type(x)([_fill_slots(y, value_of) for y in x])
    if isinstance(x, slice):
        return slice(*(_fill_slots(y, value_of) for y in (x.start, x.stop, x.step)))
    return {k: _fill_slots(y, value_of) for k, y in x.items()} if isinstance(x, dict) else x


def _tensors_in(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [x for x in value if isinstance(x, Tensor)] if isinstance(value, tuple | list) else []


@dataclass(frozen=True, slots=True)
class SavedReference:
    """A saved tensor that is made again: the `index`-th tensor of a slot's value, or the `index`-th that its call saves (`is_internal`).
    `shape`, `stride` and `offset`: where it lies in the memory of the former."""

    results: RecomputedResults
    slot: int
    index: int
    is_internal: bool
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0


@dataclass(eq=False)
class RecomputedResults:
    """Results of one forward's cheap calls, made in backward when the first is needed and freed after the last need of each."""

    program: _LayerProgram
    draw: DrawState
    memory: Accounts
    autocast: tuple[str, torch.dtype] | None
    kept: dict[int, Any] = field(default_factory=dict)
    num_uses: dict[int, int] = field(default_factory=dict)  # references, and calls that run again, by slot
    saved_at: dict[int, set[int]] = field(default_factory=dict)  # which of a call's saved tensors are needed
    requires_grad: set[int] = field(default_factory=set)
    _uses_left: dict[int, int] = field(default_factory=dict)
    _values: dict[int, Any] = field(default_factory=dict)
    _saved: dict[int, dict[int, Tensor]] = field(default_factory=dict)

    def keep_sources(self, values: Sequence[Any], references: Sequence[SavedReference]) -> None:
        """Keep, after forward, those of the layer's values from which the referenced tensors are made."""
        program, todo = self.program, []
        for reference in references:
            self.num_uses[reference.slot] = self.num_uses.get(reference.slot, 0) + 1
            if reference.is_internal:
                self.saved_at.setdefault(reference.slot, set()).add(reference.index)
            todo.append(reference.slot)
        rerun = set[int]()
        while todo:
            slot = todo.pop()
            if slot in rerun:
                continue
            rerun.add(slot)
            for read in program.calls[slot - program.num_inputs].reads:
                if program.is_cheap(read):
                    self.num_uses[read] = self.num_uses.get(read, 0) + 1
                    todo.append(read)
                else:
                    self.kept[read] = _detach_value(values[read])

    def take_saved(self, reference: SavedReference) -> Tensor:
        """Return a saved tensor, made again if it is not there."""
        slot = reference.slot
        if slot not in self._values:
            with mark_recomputing(self.draw, self.memory), self._restore_autocast(), torch.enable_grad():
                self._run_up_to(slot)
        if reference.is_internal:
            found = self._saved[slot][reference.index]
        else:
            found = _view_as_saved(_tensors_in(self._values[slot])[reference.index], reference)
        self._count_use(slot)
        return found

    def _restore_autocast(self) -> Any:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.autocast[0], self.autocast[1])

    def _run_up_to(self, slot: int) -> None:
        """Run the calls that a slot's value is made by, in order, except those whose values are there."""
        program, missing, todo = self.program, set[int](), [slot]
        while todo:
            at = todo.pop()
            if at in missing or at in self._values:
                continue
            missing.add(at)
            todo += [read for read in program.calls[at - program.num_inputs].reads if program.is_cheap(read)]
        for at in sorted(missing):
            call = program.calls[at - program.num_inputs]
            self._uses_left[at] = self.num_uses[at]
            self._run_call(at, call)
            for read in call.reads:
                if program.is_cheap(read):
                    self._count_use(read)

    def _run_call(self, slot: int, call: _LayerCall) -> None:
        wanted, saved = self.saved_at.get(slot, ()), dict[int, Tensor]()
        number = 0

        def keep_wanted(x: Tensor) -> None:
            nonlocal number
            if number in wanted:
                saved[number] = x.detach()
            number += 1

        with torch.autograd.graph.saved_tensors_hooks(keep_wanted, _refuse_unpacking):
            value = call.target(*_fill_slots(call.args, self._operand_of), **_fill_slots(call.kwargs, self._operand_of))
        self._values[slot], self._saved[slot] = _detach_value(value), saved

    def _operand_of(self, slot: int) -> Any:
        if slot not in self._values and slot not in self.kept:  # of a second backward
            self._run_up_to(slot)
        value = self._values[slot] if slot in self._values else self.kept[slot]
        if slot not in self.requires_grad:
            return value
        if isinstance(value, Tensor):
            return value.detach().requires_grad_() if value.is_floating_point() or value.is_complex() else value
        return type(value)([x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in value])

    def _count_use(self, slot: int) -> None:
        self._uses_left[slot] -= 1
        if self._uses_left[slot] <= 0:
            self._values.pop(slot, None)
            self._saved.pop(slot, None)


def _refuse_unpacking(_: object) -> Tensor:
    raise AssertionError("what runs again has no backward")


def _detach_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return type(value)([_detach_value(x) for x in value]) if isinstance(value, tuple | list) else value


def _view_as_saved(x: Tensor, reference: SavedReference) -> Tensor:
    """Return the tensor that lay in the memory of `x` as the reference says."""
    if tuple(x.shape) == reference.shape and x.stride() == reference.stride and x.storage_offset() == reference.offset:
        return x
    return x.as_strided(reference.shape, reference.stride, reference.offset)


class CheapLayer(nn.Module):
    """A layer whose cheap operators run again in backward, if gradients are enabled."""

    def __init__(self, inner: fx.GraphModule, draw: DrawState, memory: Accounts) -> None:
        super().__init__()
        self.inner, self._draw, self._memory, self._program = inner, draw, memory, _LayerProgram(inner)
        self._attributes = [node.target for node in self._program.attributes]

    def forward(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args)
        inputs = [*args, *(getattr(self.inner, str(name)) for name in self._attributes)]
        device = next((x.device.type for x in inputs if isinstance(x, Tensor)), "cpu")
        autocast = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
        return _RecordedForward(self._program, RecomputedResults(self._program, self._draw, self._memory, autocast)).run_calls(inputs)


class _RecordedForward:
    """One forward of a layer: its values by slot, and which of them a tensor's memory belongs to."""

    def __init__(self, program: _LayerProgram, results: RecomputedResults) -> None:
        self._program, self._results = program, results
        self._references: list[SavedReference] = []
        self._makers: dict[int, tuple[int, int, torch.dtype]] = {}  # address -> slot, which of its tensors, dtype
        self._num_aliases: dict[int, int] = {}
        self._running, self._num_saved = -1, 0  # the slot of the call that runs, and how many tensors it has saved

    def run_calls(self, inputs: Sequence[Any]) -> Any:
        program = self._program
        values: list[Any] = [*inputs, *[None] * len(program.calls)]
        for slot, value in enumerate(inputs):
            self._note_value(slot, value)
        with torch.autograd.graph.saved_tensors_hooks(self._pack_saved, _unpack_saved_tensor):
            for at, call in enumerate(program.calls):
                slot = program.num_inputs + at
                self._running, self._num_saved = slot, 0
                value = values[slot] = call.target(
                    *_fill_slots(call.args, values.__getitem__), **_fill_slots(call.kwargs, values.__getitem__)
                )
                self._note_value(slot, value)
                for read in call.last_reads:
                    self._forget_value(values[read])
                    values[read] = None
        out = _fill_slots(program.output, values.__getitem__)
        self._results.keep_sources(values, self._references)
        return out

    def _note_value(self, slot: int, value: Any) -> None:
        for index, x in enumerate(_tensors_in(value)):
            if x.requires_grad:
                self._results.requires_grad.add(slot)
            if address := x.untyped_storage().data_ptr():
                self._makers.setdefault(address, (slot, index, x.dtype))
                self._num_aliases[address] = self._num_aliases.get(address, 0) + 1

    def _forget_value(self, value: Any) -> None:
        """Forget a value that nothing reads any more, so that its memory may become another's."""
        for x in _tensors_in(value):
            if address := x.untyped_storage().data_ptr():
                self._num_aliases[address] -= 1
                if not self._num_aliases[address]:
                    del self._num_aliases[address], self._makers[address]

    def _pack_saved(self, x: Tensor) -> Tensor | SavedReference:
        program, slot, number = self._program, self._running, self._num_saved
        self._num_saved += 1
        address = x.untyped_storage().data_ptr()
        maker = self._makers.get(address) if address else None
        if maker is None:
            if not program.is_cheap(slot):
                return x.detach()
            reference = SavedReference(self._results, slot, number, is_internal=True)
        elif program.is_cheap(maker[0]) and x.dtype is maker[2] and not (x.is_conj() or x.is_neg()):
            shape, offset = tuple(x.shape), int(x.storage_offset())
            reference = SavedReference(self._results, maker[0], maker[1], False, shape, x.stride(), offset)
        else:
            return x.detach()
        self._references.append(reference)
        return reference


def _unpack_saved_tensor(saved: Tensor | SavedReference) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.results.take_saved(saved)


def recompute_cheap_operators(layered: LayeredStage, draw: DrawState, memory: Accounts, only: frozenset[int]) -> None:
    """Recompute the cheap operators of the layers whose numbers are in `only`.

    Those that read a buffer written while the model runs are left as they are: they would read what later microbatches wrote. So are
    those in which an operator writes its operand, which can be made again only with what it overwrote.
    """
    for number in sorted(only & layered.layer_numbers - layered.reads_written_buffers):
        child = layered.child(number)
        if not any(_writes_operand(node) for node in child.graph.nodes):
            setattr(layered.local.module, layered.names[number], CheapLayer(child, draw, memory))


def _writes_operand(node: fx.Node) -> bool:
    name = str(function_called_by(node)).split(".")[1:2] if node.op == "call_function" else []
    return any(word.endswith("_") and not word.endswith("__") for word in name)


__all__ = ["CheapLayer", "recompute_cheap_operators"]
