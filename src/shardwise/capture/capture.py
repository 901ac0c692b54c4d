"""Capture a module, a batch and a loss with torch.export as a `Graph`: the forward pass of one microbatch, at global shapes.

The module's parameters are fake tensors (no memory). In-place operators are functionalized; only buffers (batch-norm statistics) are still
written in place. A model that `torch.export` cannot trace (data-dependent branches) raises `ModelError`. Shapes are static: another
microbatch size is another capture.

In the field's terms: graph capture.
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

import shardwise
from shardwise.capture.attribute_reads import AttributeRead, record_attribute_reads, select_values
from shardwise.capture.autograd_functions import TraceRecord
from shardwise.capture.branch_answers import BranchAnswers, capture_past_checks
from shardwise.capture.exported import ProgramReader
from shardwise.capture.fakes import DATA_DEPENDENT_ERRORS, Fake
from shardwise.capture.fx_reader import UnsupportedAliasing
from shardwise.capture.initialization.factory_losses import loss_of
from shardwise.capture.module_state import ModuleState, changed_attributes, set_state, state_of, tensors_in_state
from shardwise.capture.nesting import batch_size_of, named_leaves, replace_leaves, tensors_of
from shardwise.capture.patches.patch import Trace
from shardwise.capture.patching import patched_for_call, patched_for_export, rewrite_program
from shardwise.errors import ModelError
from shardwise.model.dataflow import required_operators
from shardwise.model.gc_pause import gc_paused
from shardwise.model.graph import Arg, Graph, Operator, Ref
from shardwise.ops import is_random, writes_in_place

Loss = Callable[[Any, Any], torch.Tensor]
_MOST_TRIES = 31  # subsets of five tensors


@dataclass(frozen=True)
class CapturedGraph:
    """A graph with the values of its constants (small tensors that the model's code made while it was traced)."""

    graph: Graph
    constants: Mapping[str, torch.Tensor]
    structure: Any = None  # the model's output with fake tensors, if captured without a loss
    attribute_reads: frozenset[AttributeRead] = frozenset()


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model on a batch: dicts by keyword, tuples in order."""
    return model(**batch) if isinstance(batch, Mapping) else model(*batch) if isinstance(batch, tuple | list) else model(batch)


def forward_arguments(model: nn.Module, batch: Any) -> Any:
    """Return the part of a batch that the model is called with, if a separate loss takes all of it: everything if forward accepts it, else
    as many leading members of a tuple as it accepts, or the members of a dict that it has parameters for."""
    if not isinstance(batch, Mapping | tuple | list):
        return batch
    try:
        signature = inspect.signature(getattr(model, "forward", model))
    except ValueError:  # no signature to see
        return batch

    def fits(members: Any) -> bool:
        try:
            signature.bind(**members) if isinstance(members, Mapping) else signature.bind(*members)
        except TypeError:
            return False
        return True

    if isinstance(batch, Mapping):
        accepted = {name: value for name, value in batch.items() if name in signature.parameters}
        return batch if fits(batch) or not fits(accepted) else accepted
    return next((batch[:n] for n in range(len(batch), 0, -1) if fits(batch[:n])), batch)


def call_with_loss(model: nn.Module, batch: Any, loss: Loss | None) -> torch.Tensor:
    """Run the model on a batch (dicts by keyword, tuples in order, see `forward_arguments`), then the loss; return the scalar.

    Raises:
        ModelError: no loss is given and the output is neither a scalar nor has a scalar `.loss`.
    """
    value: Any
    criterion = loss_of(loss, model)
    output = call_model(model, batch if criterion is None else forward_arguments(model, batch))
    if criterion is not None:
        value = criterion(output, batch)
    else:
        value = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
        if value is None and isinstance(output, Mapping):
            value = output.get("loss")
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        result = output if value is None else value
        got = f"a tensor of shape {list(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
        raise ModelError(f"the loss must be a scalar tensor, got {got}; pass loss=f with f(output, batch) -> scalar")
    # A reshape of a scalar would be an extra operator, through which partial sums are not tracked.
    return value if value.dim() == 0 else value.reshape(())


class _ModelWithLoss(nn.Module):
    """Model and loss as one module of tensor leaves, as `torch.export` requires.

    `attributes`: places in the model's state; if any, the tensors there after the call are returned instead of the loss or the outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: Loss | None,
        outputs: bool,
        answers: BranchAnswers,
        attributes: Sequence[tuple[Any, ...]] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self.returns_tensors = outputs or bool(attributes)
        self._batch, self._attributes, self._returns_model_outputs = batch, attributes, outputs
        self.for_attributes: Callable[[Sequence[tuple[Any, ...]]], _ModelWithLoss] = lambda at: _ModelWithLoss(
            model, batch, loss, outputs, answers, at
        )
        # In a closure: a loss that is a module must not become a submodule.
        self._call: Callable[[Any], torch.Tensor] = lambda batch: call_with_loss(model, batch, loss)
        outputs_seen: list[Any] = []
        states_seen: list[ModuleState] = []
        # In closures: export restores a module's attributes.
        self.record_output: Callable[[Any], None] = outputs_seen.append
        trace = Trace(model, TraceRecord(), answers, own_parameters=dict(model.named_parameters()))
        self.trace: Callable[[], Trace] = lambda: trace
        self.structure: Callable[[], Any] = lambda: outputs_seen[-1] if outputs_seen else None
        self.record_state: Callable[[ModuleState], None] = states_seen.append
        reads: set[tuple[type, str]] = set()
        self.attribute_reads: Callable[[], set[tuple[type, str]]] = lambda: reads
        self.state_after: Callable[[], ModuleState] = lambda: states_seen[-1]

    def forward(self, *tensors: torch.Tensor) -> Any:
        values = iter(tensors)
        new = {path: next(values) if isinstance(leaf, torch.Tensor) else leaf for path, leaf in named_leaves(self._batch)}
        batch = replace_leaves(self._batch, new)
        with patched_for_call(self.trace()), self.trace().answers.watching_model(), record_attribute_reads(self.attribute_reads()):
            if self._returns_model_outputs:
                output = call_model(self.model, batch)
                self.record_output(output)
                result = tuple(leaf for _, leaf in named_leaves(output) if isinstance(leaf, torch.Tensor))
            else:
                result = (self._call(batch),)
        state = state_of(self.model)
        self.record_state(state)
        if self._attributes:
            tensors_by_place = tensors_in_state(state)
            return tuple(tensors_by_place[place] for place in self._attributes)
        return (*result, *self.trace().record.buffers.values())


def capture(
    model: nn.Module, batch: Any, loss: Loss | None = None, *, batch_size: int | None = None, fake_mode: Any = None, outputs: bool = False
) -> CapturedGraph:
    """Capture `model` and `loss` on a batch of `batch_size` samples (default: the batch's own).

    `model` has fake parameters of `fake_mode`. With `outputs` the graph ends at the model's output tensors instead of a loss.

    Raises:
        ModelError: the model cannot be captured, with the reason.
    """
    size = batch_size or batch_size_of(batch)
    first: ModelError | None = None
    for batched in _candidate_batched_inputs(batch, size):
        try:
            with gc_paused():

                def run(answers: BranchAnswers, batched: frozenset[str] = batched) -> CapturedGraph:
                    return _capture_with_stable_state(_ModelWithLoss(model, batch, loss, outputs, answers), batch, batched, size, fake_mode)

                return capture_past_checks(run, _equal_captures)
        except ModelError as error:
            first = first or error
    assert first is not None
    raise first


def _candidate_batched_inputs(batch: Any, size: int) -> Iterator[frozenset[str]]:
    """Yield candidate sets of the batch's tensors with samples in dimension 0, the likeliest first: all of that length.

    A tensor may have that length by accident (class weights, a table of positions). With another number of samples the model then fails,
    and is tried with subsets left at their size.
    """
    samples = batch_size_of(batch)
    batched = [path for path, x in tensors_of(batch).items() if x.dim() and x.shape[0] == samples]
    yield frozenset(batched)
    if size != samples:
        subsets = (chosen for n in range(1, len(batched)) for chosen in combinations(batched[1:], n))
        yield from (frozenset(batched) - set(chosen) for chosen in islice(subsets, _MOST_TRIES))


def _capture_with_stable_state(step: _ModelWithLoss, batch: Any, batched: frozenset[str], size: int, fake_mode: Any) -> CapturedGraph:
    """Capture a step; if a call changes attributes of the module, check that the next call computes the same."""
    step.training = step.model.training  # submodules have their own modes: a batch norm may be frozen
    before = state_of(step.model)

    def traced(step: _ModelWithLoss) -> CapturedGraph:
        return _export_to_graph(step, batch, batched, size, fake_mode)

    try:
        captured = traced(step)
        after = step.state_after()
        changed = changed_attributes(before, after)
        if changed:
            if step.trace().record.buffers:
                raise ModelError(
                    f"the model makes its buffer {next(iter(step.trace().record.buffers))} while it runs, and changes its attribute "
                    f"{', '.join(changed[:3])} by which it knows; make it when it is constructed"
                )
            set_state(step.model, after)
            step.trace().answers.replay()
            second = traced(step)
            is_equal = step.trace().answers.are_used_up and _equal_captures(second, captured)
            if not is_equal and not _reads_cached_attributes(step, traced, before, captured, second):
                raise ModelError(
                    f"the model computes something else when it is called again, since it changes its attribute {', '.join(changed[:3])}; "
                    "a captured graph is the same in every step, so keep such state in a buffer"
                )
        return captured
    finally:
        set_state(step.model, before)


def _reads_cached_attributes(
    step: _ModelWithLoss,
    trace_step: Callable[[_ModelWithLoss], CapturedGraph],
    before: ModuleState,
    first: CapturedGraph,
    later: CapturedGraph,
) -> bool:
    """Return whether call `later` equals the first one but for reading tensors that this made of constants and cached in attributes."""
    after = step.state_after()
    if not step.trace().answers.are_used_up or changed_attributes(after, state_of(step.model)):
        return False
    read = {id(x) for x in later.constants.values()}
    cached = {place: x for place, x in tensors_in_state(after).items() if id(x) in read and tensors_in_state(before).get(place) is not x}
    if not cached:
        return False
    set_state(step.model, before)
    attributes = step.for_attributes(tuple(cached))
    attributes.training = step.training
    captures = [(c.graph, c.constants) for c in (first, later, trace_step(attributes))]
    return computes_equally(captures[0], captures[1], captures[2], tuple(cached.values()), _has_equal_values)


def _equal_captures(first: CapturedGraph, second: CapturedGraph) -> bool:
    """Return whether two captures compute the same, up to names of operators and values."""
    constants = [tuple(c.constants[v.value] for v in c.graph.constants) for c in (first, second)]
    return _canonical_form(first.graph) == _canonical_form(second.graph) and all(
        a is b or _has_equal_values(a, b) for a, b in zip(*constants, strict=True)
    )


def _has_equal_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not isinstance(a, Fake) and not isinstance(b, Fake) and a.dtype == b.dtype and torch.equal(a, b)


def _canonical_form(graph: Graph) -> tuple[object, ...]:
    """Return the graph in a canonical form for comparison: values are numbered in order of appearance."""
    numbers: dict[str, int] = {}

    def number(value: str) -> int:
        return numbers.setdefault(value, len(numbers))

    variables = [(v.name, number(v.value)) for v in (*graph.parameters, *graph.buffers, *graph.inputs)]
    constants = [number(v.value) for v in graph.constants]
    operators = [(*_call_key(op, number), [(number(v), graph.tensors[v]) for v in op.outputs]) for op in graph.operators]
    return variables, constants, operators, number(graph.loss), [*map(number, graph.outputs)]


def _call_key(op: Operator, number: Callable[[str], int]) -> tuple[object, ...]:
    """Return a hashable key of a call, with `number(value)` in place of each value that it reads."""

    def key(a: Arg) -> object:
        return ("value", number(a.value)) if isinstance(a, Ref) else tuple(map(key, a)) if isinstance(a, tuple) else (type(a), a)

    return op.target, key(op.args), tuple((name, key(a)) for name, a in op.kwargs), op.autocast


def _export_to_graph(step: _ModelWithLoss, batch: Any, batched: frozenset[str], size: int, fake_mode: Any) -> CapturedGraph:
    with fake_mode if fake_mode is not None else contextlib.nullcontext():
        tensors = tuple(
            torch.empty((size, *x.shape[1:]) if path in batched else tuple(x.shape), dtype=x.dtype) for path, x in tensors_of(batch).items()
        )
    with patched_for_export():
        try:
            program = torch.export.export(step, tensors, strict=False)
        except ModelError:
            raise
        except Exception as error:
            part = "" if size == batch_size_of(batch) else f" with {size} of the batch's {batch_size_of(batch)} samples (one microbatch)"
            raise ModelError(f"torch.export cannot follow the model{part}: {explain_export_failure(error)}") from error
        rewrite_program(program.graph_module)
        _refuse_data_dependent_shapes(program)
        reading = ProgramReader(step.model, step.trace().record, batch, batched, size, step.returns_tensors)
        try:
            graph, constants = reading.read(program)
        except UnsupportedAliasing:
            try:
                graph, constants = reading.read(program.run_decompositions({}))
            except UnsupportedAliasing as error:
                raise ModelError(str(error)) from error
        return CapturedGraph(graph, constants, step.structure(), select_values(step.attribute_reads()))


def _refuse_data_dependent_shapes(program: Any) -> None:
    """Raise ModelError if the shape of a tensor depends on values, such as the number of rows that a mask selects."""
    graph_modules = [m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]  # blocks without gradients, too
    for node in (node for module in graph_modules for node in module.graph.nodes):
        value = node.meta.get("val")
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, torch.Tensor) and any(not isinstance(n, int) for n in item.shape):
                raise ModelError(
                    f"the shape of what {node.target} makes is data-dependent: it follows the values of a tensor (x[mask], "
                    "nonzero, unique); keep shapes fixed, for example with torch.where or weights of 0"
                )


_LIBRARY_FOLDERS = tuple(str(Path(package.__file__).parent) for package in (torch, shardwise) if package.__file__)

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def explain_export_failure(error: Exception) -> str:
    """Return the reason in one line; for data-dependent control flow a plain explanation instead of torch's symbols."""
    lines = str(error).strip().splitlines()
    where = _user_line_of(error)
    if any(isinstance(x, PackedSequence) for frame, _ in traceback.walk_tb(error.__traceback__) for x in frame.f_locals.values()):
        return (
            f"packed sequences{where}: their shapes follow the values of the lengths; give the layer the padded batch, and mask what it "
            "makes of the padding"
        )
    if isinstance(error, DATA_DEPENDENT_ERRORS):
        for frame, _ in traceback.walk_tb(error.__traceback__):
            module = frame.f_locals.get("self")
            if isinstance(module, _BATCH_NORMS) and module.momentum is None:
                return (
                    f"{type(module).__name__} with momentum=None{where} weighs its statistics by the value of a counter, which a graph "
                    "that is the same in every step does not hold; give it a momentum, for example 0.1"
                )
        return f"data-dependent{where}: what it does there depends on the values of a tensor (if, float(), int(), .item(), a mask)"
    return f"{type(error).__name__}: {lines[0] if lines else ''}{where}"


def _user_line_of(error: Exception) -> str:
    """Return ` at model.py:12, "if x.sum() > 0:"`, the innermost line outside of torch and shardwise; empty without one."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        if not file.startswith((*_LIBRARY_FOLDERS, "<")):
            source = linecache.getline(file, line).strip()
            return f" at {Path(file).name}:{line}" + (f', "{source}"' if source else "")
    return ""


Equal = Callable[[Tensor, Tensor], bool]


class _ValueNumbering:
    """Value numbering: equal numbers for values that are provably equal."""

    def __init__(self, equal: Equal) -> None:
        self._equal = equal
        self._numbers: dict[object, int] = {}
        self._constants: list[tuple[Tensor, int]] = []

    def number_of(self, key: object) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def add_constant(self, x: Tensor, number: int) -> None:
        """Give a constant the number of a value that it equals."""
        self._constants.append((x, number))

    def number_of_constant(self, x: Tensor) -> int:
        for constant, number in self._constants:
            if x is constant or self._equal(x, constant):
                return number
        self.add_constant(x, self.number_of(("constant", len(self._constants))))
        return self._constants[-1][1]

    def number_graph(self, graph: Graph, constants: Mapping[str, Tensor]) -> tuple[dict[str, int], list[int]]:
        """Return the numbers of a graph's values, and of its random draws and writes in order."""
        numbers = {v.value: self.number_of_constant(constants[v.value]) for v in graph.constants}
        numbers |= {v.value: self.number_of(("given", v.name)) for v in (*graph.parameters, *graph.buffers, *graph.inputs)}
        effects: list[int] = []
        for op in graph.operators:
            key: object = (*_call_key(op, numbers.__getitem__), *(graph.tensors[v] for v in op.outputs))
            if is_random(op) or writes_in_place(op):
                key = (key, "effect", len(effects))
                effects.append(self.number_of(key))
            numbers |= {v: self.number_of((key, "result", i)) for i, v in enumerate(op.outputs)}
            if writes_in_place(op):
                numbers[op.inputs[0]] = self.number_of((key, "written"))
        return numbers, effects


GraphWithConstants = tuple[Graph, Mapping[str, Tensor]]  # with the values of its constants


def computes_equally(
    first: GraphWithConstants,
    later: GraphWithConstants,
    attribute_capture: GraphWithConstants,
    cached_tensors: Sequence[Tensor],
    equal: Equal,
) -> bool:
    """Return whether both calls compute the same. `attribute_capture`: a capture of the first call with outputs `cached_tensors`."""
    graph = attribute_capture[0]
    if not _is_constant(graph):
        return False
    numbers = _ValueNumbering(equal)
    values, _ = numbers.number_graph(*attribute_capture)
    for x, value in zip(cached_tensors, graph.outputs, strict=True):
        numbers.add_constant(x, values[value])
    call_numbers = []
    for graph, constants in (first, later):
        values, effects = numbers.number_graph(graph, constants)
        call_numbers.append((values[graph.loss], [values[v] for v in graph.outputs], effects))
    return call_numbers[0] == call_numbers[1]


def _is_constant(graph: Graph) -> bool:
    """Return whether the outputs depend on constants only."""
    varying = {v.value for v in (*graph.parameters, *graph.buffers, *graph.inputs)}
    needed = required_operators(graph.operators, graph.outputs)
    return varying.isdisjoint(graph.outputs) and not any(is_random(op) or not varying.isdisjoint(op.inputs) for op in needed)
