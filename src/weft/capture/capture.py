"""From a module, a batch and a loss to a `Graph`: one microbatch, forward, down to the loss, at global shapes.

In: a module whose parameters are fake tensors (no memory), the example batch, and optionally `loss(output, batch)`.
Out: a `Captured` graph, or `ModelError` where `torch.export` cannot follow the model (data-dependent branches).
In-place operators are made functional; only buffers (batch-norm statistics) are still written in place.
Not modelled: dynamic shapes. Another microbatch size is another capture.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import Any

import torch
from torch import nn

from weft.capture.answers import Answers, with_checks_passed
from weft.capture.blame import why_not
from weft.capture.fakes import Fake
from weft.capture.functional import Memory, make_functional
from weft.capture.functions import Record, function_of
from weft.capture.init.losses import loss_of
from weft.capture.nesting import batch_size_of, leaves, rebuild
from weft.capture.patched import calling, rewrite, rewritten, tracing
from weft.capture.patches.patch import Trace
from weft.capture.read import Aliased, Reader, exists, spec_of
from weft.capture.state import State, changes, set_state, state_of
from weft.errors import ModelError
from weft.model.collector import uncollected
from weft.model.gradients import learned, learns_by
from weft.model.graph import Arg, Graph, Operator, Ref, Variable
from weft.model.work import closure
from weft.ops import draws, writes

Loss = Callable[[Any, Any], torch.Tensor]
_MOST_TRIES = 31  # subsets of five tensors


@dataclass(frozen=True)
class Captured:
    """A graph with the values of its constants (small tensors that the model's code made while it was traced)."""

    graph: Graph
    constants: Mapping[str, torch.Tensor]
    structure: Any = None  # the model's output with fake tensors, where it was captured without a loss


def called(model: nn.Module, batch: Any) -> Any:
    """The model's output of a batch: dicts by keyword, tuples in order."""
    return model(**batch) if isinstance(batch, Mapping) else model(*batch) if isinstance(batch, tuple | list) else model(batch)


def taken(model: nn.Module, batch: Any) -> Any:
    """What of a batch the model is called with where a loss of its own has the rest: all of it if forward takes all, else as many of a
    tuple's members as it takes, or those of a dict that it knows by name."""
    if not isinstance(batch, Mapping | tuple | list):
        return batch
    try:
        signature = inspect.signature(getattr(model, "forward", model))
    except ValueError:  # no signature to see
        return batch

    def fits(some: Any) -> bool:
        try:
            signature.bind(**some) if isinstance(some, Mapping) else signature.bind(*some)
        except TypeError:
            return False
        return True

    if isinstance(batch, Mapping):
        known = {name: value for name, value in batch.items() if name in signature.parameters}
        return batch if fits(batch) or not fits(known) else known
    return next((batch[:n] for n in range(len(batch), 0, -1) if fits(batch[:n])), batch)


def call(model: nn.Module, batch: Any, loss: Loss | None) -> torch.Tensor:
    """Run the model on a batch as `MODEL` says: dicts by keyword, tuples in order; then the loss, a scalar. See `taken`.

    Raises:
        ModelError: no loss is given and the output is neither a scalar nor has a scalar `.loss`.
    """
    value: Any
    own = loss_of(loss, model)
    output = called(model, batch if own is None else taken(model, batch))
    if own is not None:
        value = own(output, batch)
    else:
        value = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
        if value is None and isinstance(output, Mapping):
            value = output.get("loss")
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        found = output if value is None else value
        got = f"a tensor of shape {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise ModelError(f"the loss must be a scalar tensor, got {got}; pass loss=f with f(output, batch) -> scalar")
    # A reshape of a scalar would be one operator more, behind which summands are no longer known as such.
    return value if value.dim() == 0 else value.reshape(())


class _Step(nn.Module):
    """Model and loss as one module of tensor leaves, which is what `torch.export` takes."""

    def __init__(self, model: nn.Module, batch: Any, loss: Loss | None, outputs: bool, answers: Answers) -> None:
        super().__init__()
        self.model = model
        self.gives_outputs = outputs
        self._batch = batch
        # In a closure: a loss that is a module is no part of the model.
        self._call: Callable[[Any], torch.Tensor] = lambda given: call(model, given, loss)
        outputs_seen: list[Any] = []
        states_seen: list[State] = []
        # Kept in closures: export puts a module's attributes back as they were.
        self.seen: Callable[[Any], None] = outputs_seen.append
        trace = Trace(model, Record(), answers)
        self.trace: Callable[[], Trace] = lambda: trace
        self.structure: Callable[[], Any] = lambda: outputs_seen[-1] if outputs_seen else None
        self.left: Callable[[State], None] = states_seen.append
        self.state_left: Callable[[], State] = lambda: states_seen[-1]

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        new = {path: next(given) if isinstance(leaf, torch.Tensor) else leaf for path, leaf in leaves(self._batch)}
        batch = rebuild(self._batch, new)
        with calling(self.trace()), self.trace().answers.watching():
            if self.gives_outputs:
                output = called(self.model, batch)
                self.seen(output)
                result = tuple(leaf for _, leaf in leaves(output) if isinstance(leaf, torch.Tensor))
            else:
                result = (self._call(batch),)
        self.left(state_of(self.model))
        return (*result, *self.trace().record.made.values())


def capture(
    model: nn.Module, batch: Any, loss: Loss | None = None, *, batch_size: int | None = None, fake_mode: Any = None, outputs: bool = False
) -> Captured:
    """Capture `model` and `loss` on a batch of `batch_size` samples (default: the batch's own).

    `model` has fake parameters of `fake_mode`. With `outputs` the graph ends at the model's output tensors instead of a loss.

    Raises:
        ModelError: the model cannot be followed, with the reason.
    """
    size = batch_size or batch_size_of(batch)
    first: ModelError | None = None
    for batched in _batched(batch, size):
        try:
            with uncollected():

                def run(answers: Answers, batched: frozenset[str] = batched) -> Captured:
                    return _settled(_Step(model, batch, loss, outputs, answers), batch, batched, size, fake_mode)

                return with_checks_passed(run, _is_same)
        except ModelError as error:
            first = first or error
    assert first is not None
    raise first


def _batched(batch: Any, size: int) -> Iterator[frozenset[str]]:
    """Which tensors of the batch have samples in dimension 0, the likeliest first: all that are as long as there are samples.

    One may be so long by accident (class weights, a table of positions). With another number of samples the model then fails, and is tried
    with one after the other kept as it is.
    """
    samples = batch_size_of(batch)
    long = [path for path, leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == samples]
    yield frozenset(long)
    if size != samples:
        kept = (chosen for n in range(1, len(long)) for chosen in combinations(long[1:], n))
        yield from (frozenset(long) - set(chosen) for chosen in islice(kept, _MOST_TRIES))


def _settled(step: _Step, batch: Any, batched: frozenset[str], size: int, fake_mode: Any) -> Captured:
    """Capture; where a call leaves the module's own attributes changed, the next call must be the same all the same."""
    step.training = step.model.training  # each of its modules keeps its own mode: a batch norm may be frozen
    before = state_of(step.model)
    try:
        captured = _traced(step, batch, batched, size, fake_mode)
        after = step.state_left()
        changed = changes(before, after)
        if changed:
            if step.trace().record.made:
                raise ModelError(
                    f"the model makes its buffer {next(iter(step.trace().record.made))} while it runs, and changes its attribute "
                    f"{', '.join(changed[:3])} by which it knows; make it when it is constructed"
                )
            set_state(step.model, after)
            again = _traced(step, batch, batched, size, fake_mode)
            if again.graph != captured.graph or not _equal(again.constants, captured.constants):
                raise ModelError(
                    f"the model computes otherwise when it is called again, since it changes its attribute {', '.join(changed[:3])}; "
                    "a captured graph is the same in every step, so keep such state in a buffer"
                )
        return captured
    finally:
        set_state(step.model, before)


def _is_same(one: Captured, other: Captured) -> bool:
    """Whether two captures compute the same, whatever their operators are called."""
    return _form(one.graph) == _form(other.graph) and [*one.constants] == [*other.constants]


def _form(graph: Graph) -> tuple[object, ...]:
    """A graph by what it computes: values by number in order of appearance."""
    numbers: dict[str, int] = {}

    def number(value: str) -> int:
        return numbers.setdefault(value, len(numbers))

    def arg(a: Arg) -> object:
        return ("value", number(a.value)) if isinstance(a, Ref) else tuple(map(arg, a)) if isinstance(a, tuple) else (type(a), a)

    variables = tuple((v.name, number(v.value)) for v in (*graph.parameters, *graph.buffers, *graph.inputs, *graph.constants))
    operators = [
        (op.target, arg(op.args), arg(tuple(a for _, a in op.kwargs)), [(number(v), graph.tensors[v]) for v in op.outputs], op.autocast)
        for op in graph.operators
    ]
    return variables, operators, number(graph.loss), tuple(map(number, graph.outputs))


def _equal(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k] is b[k] or (not isinstance(a[k], Fake) and torch.equal(a[k], b[k])) for k in a)


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
            cut = "" if size == batch_size_of(batch) else f" with {size} of the batch's {batch_size_of(batch)} samples (one microbatch)"
            raise ModelError(f"torch.export cannot follow the model{cut}: {why_not(error)}") from error
        rewrite(program.graph_module)
        _refuse_unknown_shapes(program)
        try:
            return _read(program, step, batch, batched, size)
        except Aliased:
            program = program.run_decompositions({})
        try:
            return _read(program, step, batch, batched, size)
        except Aliased as error:
            raise ModelError(str(error)) from error


def _refuse_unknown_shapes(program: Any) -> None:
    """Raise ModelError where a tensor has a shape that depends on values: as many rows as a mask picks."""
    inside = [m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]  # blocks without gradients, too
    for node in (node for module in inside for node in module.graph.nodes):
        value = node.meta.get("val")
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, torch.Tensor) and any(not isinstance(n, int) for n in item.shape):
                raise ModelError(
                    f"the shape of what {node.target} makes is data-dependent: it follows the values of a tensor (x[mask], "
                    "nonzero, unique); keep shapes fixed, for example with torch.where or weights of 0"
                )


def _read(program: Any, step: _Step, batch: Any, batched: frozenset[str], size: int) -> Captured:
    signature = program.graph_signature
    names = {spec.arg.name: spec for spec in signature.input_specs if hasattr(spec.arg, "name")}
    owners: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    by_name: dict[str, str] = {}
    for name, held in (*step.model.named_parameters(remove_duplicate=False), *step.model.named_buffers(remove_duplicate=False)):
        first = by_name[name] = owners.setdefault(id(held), name)
        if first != name:
            aliases.setdefault(first, []).append(name)
    trainable = {name for name, p in step.model.named_parameters() if p.requires_grad}
    paths = [path for path, leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
    outputs = step.gives_outputs

    known: dict[Any, Any] = {}
    reader = Reader(lambda number, specs: function_of(step.trace().record.calls[number], specs, known))
    parameters: dict[str, Variable] = {}
    buffers: dict[str, Variable] = {}
    inputs: list[Variable] = []
    constants: dict[str, torch.Tensor] = {}
    constant_variables: list[Variable] = []
    num_inputs = 0
    for node in program.graph.nodes:
        if node.op != "placeholder":
            continue
        spec = names[node.name]
        kind = spec.kind.name
        target = (spec.target or "").removeprefix("model.")
        tensor = spec_of(node.meta.get("val"))
        if kind == "USER_INPUT":
            path = paths[num_inputs]
            num_inputs += 1
            inputs.append(Variable(node.name, path, tensor, batched=path in batched))
        elif kind == "CONSTANT_TENSOR" or target not in by_name:
            constants[node.name] = program.constants[spec.target]
            constant_variables.append(Variable(node.name, spec.target, tensor))
        else:
            first = by_name[target]
            table = parameters if kind == "PARAMETER" else buffers
            if first in table:
                reader.rename[node.name] = table[first].value
                continue
            table[first] = Variable(node.name, first, tensor, tuple(aliases.get(first, ())), first in trainable)
        reader.tensors[node.name] = tensor
        reader.remember(node.name, node.meta.get("val"))
    reader.read(program.graph, program.graph_module)
    _write_back(program, reader, {name: v.value for name, v in (*buffers.items(), *parameters.items())}, by_name)
    in_place = {v.value for v in (*buffers.values(), *parameters.values())}
    with_gradient = {p.value for p in parameters.values() if p.trainable} | {v.value for v in inputs if v.tensor.is_float}
    memory = Memory(reader.storages(), frozenset(in_place), frozenset(with_gradient), frozenset(reader.silent))
    operators = make_functional(reader.operators, reader.tensors, memory, exists)
    if operators is None:
        if reader.silent:  # torch's own functionalisation forgets which operators those are
            raise ModelError(
                "the model writes into a tensor in a way that cannot be followed, beside a block without gradients; write with torch.where "
                "or index_put, or leave the block out"
            )
        raise Aliased("the model writes into a tensor in a way that cannot be followed; write with torch.where or index_put")
    ops, rename = operators
    results = [rename.get(v, v) for v in reader.results]
    if made := step.trace().record.made:
        written = {op.args[0].value for op in ops if writes(op) and isinstance(op.args[0], Ref)}
        changing = written.union(v.value for v in (*parameters.values(), *inputs))
        _refuse_changing(dict(zip(made, results[-len(made) :], strict=True)), ops, changing)
        results = results[: -len(made)]
    wanted = _apart(_keep(ops, results, in_place))
    if outputs and not results:
        raise ModelError("the model's output holds no tensor; it must return tensors")
    used = {value for op in wanted for value in op.inputs} | set(results)
    tensors = {value: spec for value, spec in reader.tensors.items() if value in used}
    for op in wanted:
        tensors.update({value: reader.tensors[value] for value in op.outputs})
    read = tuple(v for v in constant_variables if v.value in used)
    tensors.update({v.value: v.tensor for v in (*parameters.values(), *buffers.values(), *inputs, *read)})
    graph = Graph(
        tuple(parameters.values()),
        tuple(buffers.values()),
        tuple(inputs),
        read,
        tuple(wanted),
        tensors,
        results[-1],
        size,
        tuple(results) if outputs else (),
    )
    _refuse_replaced({parameters[by_name[name]].value: name for name in step.trace().record.replaced if by_name[name] in parameters}, graph)
    return Captured(rewritten(graph), {v: t for v, t in constants.items() if v in used}, step.structure())


def _refuse_changing(made: Mapping[str, str], operators: Sequence[Operator], changing: set[str]) -> None:
    """Raise ModelError where a buffer that the model makes in its first call, and keeps, is not the same in every call."""
    for name, value in made.items():
        needed = {value}
        for op in reversed(operators):
            if needed.intersection(op.outputs):
                needed.update(op.inputs)
                if draws(op):
                    needed.update(changing)
        if needed & changing:
            raise ModelError(
                f"the model makes its buffer {name} in its first call, of what is not the same in every step (the batch, parameters, other "
                "buffers or random numbers), and reads it in later ones; make it when it is constructed"
            )


def _refuse_replaced(replaced: Mapping[str, str], graph: Graph) -> None:
    """Raise ModelError where a parameter (value -> name) or the one that is put in its place, which no optimizer knows, has a gradient."""

    def reads(op: Operator) -> Sequence[str]:
        return learns_by(op) if graph.tensors[op.outputs[0]].dtype.startswith(("float", "bfloat", "complex")) else ()

    new = {op.inputs[0]: op.inputs[1] for op in graph.operators if op.target == "aten.copy_.default" and op.inputs[0] in replaced}
    trained = learned(graph)
    ends = {graph.loss, *graph.outputs}
    lost = sorted(name for v, name in replaced.items() if v in trained or (v in new and ends & closure(graph, {new[v]}, reads)))
    if lost:
        raise ModelError(
            f"the model puts a new parameter in the place of {lost[0]} while it runs, which its optimizer would not know and not train; "
            "write into it instead (with torch.no_grad(): p.copy_(new))"
        )


def _write_back(program: Any, reader: Reader, held: Mapping[str, str], first_names: Mapping[str, str]) -> None:
    """Where torch made the graph functional, it hands out what buffers and parameters hold at the end: write that into them."""
    kept = []
    for spec, value in zip(program.graph_signature.output_specs, list(reader.results), strict=True):
        if spec.kind.name in ("BUFFER_MUTATION", "PARAMETER_MUTATION"):
            name = first_names[spec.target.removeprefix("model.")]
            into, made = held[name], f"{value}_written"
            reader.tensors[made] = reader.tensors[into]
            reader.operators.append(Operator(made, "aten.copy_.default", (Ref(into), Ref(value)), (), (made,), f"{name}/copy_"))
        elif spec.kind.name == "USER_OUTPUT":
            kept.append(value)
    reader.results = kept


def _keep(operators: list[Operator], results: list[str], held: set[str]) -> list[Operator]:
    """Operators that a result, a buffer or a parameter needs, in order."""
    needed = set(results)
    kept = []
    for op in reversed(operators):
        if (writes(op) and op.inputs[0] in held) or any(value in needed for value in op.outputs):
            needed.update(op.inputs)
            kept.append(op)
    return kept[::-1]


def _apart(operators: list[Operator]) -> list[Operator]:
    """Each at a site of its own: a write that was made functional is several operators, and takes views again, where there was one."""
    taken, seen, found = {op.site for op in operators}, set[str](), []
    for op in operators:
        site, number = op.site, 0
        while site in seen or (number and site in taken):
            number += 1
            site = f"{op.site}#{number}"
        seen.add(site)
        found.append(op if site == op.site else replace(op, site=site))
    return found
