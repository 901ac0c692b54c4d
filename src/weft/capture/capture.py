"""Capture a module, a batch and a loss with torch.export as a `Graph`: the forward pass of one microbatch, at global shapes.

The module's parameters are fake tensors (no memory). In-place operators are functionalized; only buffers (batch-norm statistics) are still
written in place. A model that `torch.export` cannot trace (data-dependent branches) raises `ModelError`. Shapes are static: another
microbatch size is another capture.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any

import torch
from torch import nn

from weft.capture.answers import Answers, with_checks_passed
from weft.capture.blame import why_not
from weft.capture.exported import Reading
from weft.capture.fakes import Fake
from weft.capture.functions import Record
from weft.capture.fx_reader import Aliased
from weft.capture.init.factory_losses import loss_of
from weft.capture.nesting import batch_size_of, leaves, rebuild
from weft.capture.patched import calling, rewrite, tracing
from weft.capture.patches.patch import Trace
from weft.capture.remembered import computes_equally
from weft.capture.state import State, changes, set_state, state_of, tensors_kept
from weft.errors import ModelError
from weft.model.collector import uncollected
from weft.model.graph import Arg, Graph, Ref

Loss = Callable[[Any, Any], torch.Tensor]
_MOST_TRIES = 31  # subsets of five tensors


@dataclass(frozen=True)
class Captured:
    """A graph with the values of its constants (small tensors that the model's code made while it was traced)."""

    graph: Graph
    constants: Mapping[str, torch.Tensor]
    structure: Any = None  # the model's output with fake tensors, if captured without a loss


def called(model: nn.Module, batch: Any) -> Any:
    """Call the model on a batch: dicts by keyword, tuples in order."""
    return model(**batch) if isinstance(batch, Mapping) else model(*batch) if isinstance(batch, tuple | list) else model(batch)


def taken(model: nn.Module, batch: Any) -> Any:
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


def call(model: nn.Module, batch: Any, loss: Loss | None) -> torch.Tensor:
    """Run the model on a batch (dicts by keyword, tuples in order, see `forward_arguments`), then the loss; return the scalar.

    Raises:
        ModelError: no loss is given and the output is neither a scalar nor has a scalar `.loss`.
    """
    value: Any
    criterion = loss_of(loss, model)
    output = called(model, batch if criterion is None else taken(model, batch))
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


class _Step(nn.Module):
    """Model and loss as one module of tensor leaves, as `torch.export` requires.

    `attributes`: places in the model's state; if any, the tensors there after the call are returned instead of the loss or the outputs.
    """

    def __init__(
        self, model: nn.Module, batch: Any, loss: Loss | None, outputs: bool, answers: Answers, attributes: Sequence[tuple[Any, ...]] = ()
    ) -> None:
        super().__init__()
        self.model = model
        self.gives_outputs = outputs or bool(attributes)
        self._batch, self._attributes, self._returns = batch, attributes, outputs
        self.of_attributes: Callable[[Sequence[tuple[Any, ...]]], _Step] = lambda at: _Step(model, batch, loss, outputs, answers, at)
        # In a closure: a loss that is a module must not become a submodule.
        self._call: Callable[[Any], torch.Tensor] = lambda batch: call(model, batch, loss)
        outputs_seen: list[Any] = []
        states_seen: list[State] = []
        # In closures: export restores a module's attributes.
        self.seen: Callable[[Any], None] = outputs_seen.append
        trace = Trace(model, Record(), answers)
        self.trace: Callable[[], Trace] = lambda: trace
        self.structure: Callable[[], Any] = lambda: outputs_seen[-1] if outputs_seen else None
        self.left: Callable[[State], None] = states_seen.append
        self.state_left: Callable[[], State] = lambda: states_seen[-1]

    def forward(self, *tensors: torch.Tensor) -> Any:
        values = iter(tensors)
        new = {path: next(values) if isinstance(leaf, torch.Tensor) else leaf for path, leaf in leaves(self._batch)}
        batch = rebuild(self._batch, new)
        with calling(self.trace()), self.trace().answers.watching():
            if self._returns:
                output = called(self.model, batch)
                self.seen(output)
                result = tuple(leaf for _, leaf in leaves(output) if isinstance(leaf, torch.Tensor))
            else:
                result = (self._call(batch),)
        state = state_of(self.model)
        self.left(state)
        if self._attributes:
            tensors_by_place = tensors_kept(state)
            return tuple(tensors_by_place[place] for place in self._attributes)
        return (*result, *self.trace().record.buffers.values())


def capture(
    model: nn.Module, batch: Any, loss: Loss | None = None, *, batch_size: int | None = None, fake_mode: Any = None, outputs: bool = False
) -> Captured:
    """Capture `model` and `loss` on a batch of `batch_size` samples (default: the batch's own).

    `model` has fake parameters of `fake_mode`. With `outputs` the graph ends at the model's output tensors instead of a loss.

    Raises:
        ModelError: the model cannot be captured, with the reason.
    """
    size = batch_size or batch_size_of(batch)
    first: ModelError | None = None
    for batched in _batched(batch, size):
        try:
            with uncollected():

                def run(answers: Answers, batched: frozenset[str] = batched) -> Captured:
                    return _settled(_Step(model, batch, loss, outputs, answers), batch, batched, size, fake_mode)

                return with_checks_passed(run, _equal_captures)
        except ModelError as error:
            first = first or error
    assert first is not None
    raise first


def _batched(batch: Any, size: int) -> Iterator[frozenset[str]]:
    """Yield candidate sets of the batch's tensors with samples in dimension 0, the likeliest first: all of that length.

    A tensor may have that length by accident (class weights, a table of positions). With another number of samples the model then fails,
    and is tried with subsets left at their size.
    """
    samples = batch_size_of(batch)
    batched = [path for path, leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == samples]
    yield frozenset(batched)
    if size != samples:
        subsets = (chosen for n in range(1, len(batched)) for chosen in combinations(batched[1:], n))
        yield from (frozenset(batched) - set(chosen) for chosen in islice(subsets, _MOST_TRIES))


def _settled(step: _Step, batch: Any, batched: frozenset[str], size: int, fake_mode: Any) -> Captured:
    """Capture a step; if a call changes attributes of the module, check that the next call computes the same."""
    step.training = step.model.training  # submodules have their own modes: a batch norm may be frozen
    before = state_of(step.model)

    def traced(step: _Step) -> Captured:
        return _traced(step, batch, batched, size, fake_mode)

    try:
        captured = traced(step)
        after = step.state_left()
        changed = changes(before, after)
        if changed:
            if step.trace().record.buffers:
                raise ModelError(
                    f"the model makes its buffer {next(iter(step.trace().record.buffers))} while it runs, and changes its attribute "
                    f"{', '.join(changed[:3])} by which it knows; make it when it is constructed"
                )
            set_state(step.model, after)
            step.trace().answers.again()
            second = traced(step)
            is_equal = step.trace().answers.are_used_up and _equal_captures(second, captured)
            if not is_equal and not _reads_what_was_left(step, traced, before, captured, second):
                raise ModelError(
                    f"the model computes something else when it is called again, since it changes its attribute {', '.join(changed[:3])}; "
                    "a captured graph is the same in every step, so keep such state in a buffer"
                )
        return captured
    finally:
        set_state(step.model, before)


def _reads_what_was_left(step: _Step, traced: Callable[[_Step], Captured], before: State, first: Captured, again: Captured) -> bool:
    """Return whether call `later` equals the first one but for reading tensors that this made of constants and cached in attributes."""
    after = step.state_left()
    if not step.trace().answers.are_used_up or changes(after, state_of(step.model)):
        return False
    read = {id(x) for x in again.constants.values()}
    cached = {place: x for place, x in tensors_kept(after).items() if id(x) in read and tensors_kept(before).get(place) is not x}
    if not cached:
        return False
    set_state(step.model, before)
    attributes = step.of_attributes(tuple(cached))
    attributes.training = step.training
    captures = [(c.graph, c.constants) for c in (first, again, traced(attributes))]
    return computes_equally(captures[0], captures[1], captures[2], tuple(cached.values()), _is_equal)


def _equal_captures(first: Captured, second: Captured) -> bool:
    """Return whether two captures compute the same, up to names of operators and values."""
    constants = [tuple(c.constants[v.value] for v in c.graph.constants) for c in (first, second)]
    return _form(first.graph) == _form(second.graph) and all(a is b or _is_equal(a, b) for a, b in zip(*constants, strict=True))


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not isinstance(a, Fake) and not isinstance(b, Fake) and a.dtype == b.dtype and torch.equal(a, b)


def _form(graph: Graph) -> tuple[object, ...]:
    """Return the graph in a canonical form for comparison: values are numbered in order of appearance."""
    numbers: dict[str, int] = {}

    def number(value: str) -> int:
        return numbers.setdefault(value, len(numbers))

    def arg(a: Arg) -> object:
        return ("value", number(a.value)) if isinstance(a, Ref) else tuple(map(arg, a)) if isinstance(a, tuple) else (type(a), a)

    variables = [(v.name, number(v.value)) for v in (*graph.parameters, *graph.buffers, *graph.inputs)]
    constants = [number(v.value) for v in graph.constants]
    operators = [
        (op.target, arg(op.args), [(k, arg(a)) for k, a in op.kwargs], [(number(v), graph.tensors[v]) for v in op.outputs], op.autocast)
        for op in graph.operators
    ]
    return variables, constants, operators, number(graph.loss), [*map(number, graph.outputs)]


def _traced(step: _Step, batch: Any, batched: frozenset[str], size: int, fake_mode: Any) -> Captured:
    with fake_mode if fake_mode is not None else contextlib.nullcontext():
        tensors = tuple(
            torch.empty((size, *leaf.shape[1:]) if path in batched else tuple(leaf.shape), dtype=leaf.dtype)
            for path, leaf in leaves(batch)
            if isinstance(leaf, torch.Tensor)
        )
    with tracing():
        try:
            program = torch.export.export(step, tensors, strict=False)
        except ModelError:
            raise
        except Exception as error:
            part = "" if size == batch_size_of(batch) else f" with {size} of the batch's {batch_size_of(batch)} samples (one microbatch)"
            raise ModelError(f"torch.export cannot follow the model{part}: {why_not(error)}") from error
        rewrite(program.graph_module)
        _refuse_data_dependent_shapes(program)
        reading = Reading(step.model, step.trace().record, batch, batched, size, step.gives_outputs)
        try:
            graph, constants = reading.of(program)
        except Aliased:
            try:
                graph, constants = reading.of(program.run_decompositions({}))
            except Aliased as error:
                raise ModelError(str(error)) from error
        return Captured(graph, constants, step.structure())


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
