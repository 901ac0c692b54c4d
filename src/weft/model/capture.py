"""From a module, a batch and a loss to a `Graph`: one microbatch, forward, down to the loss, at global shapes.

In: a module whose parameters are fake tensors (no memory), the example batch, and optionally `loss(output, batch)`.
Out: a `Captured` graph, or `ModelError` where `torch.export` cannot follow the model (data-dependent branches).
In-place operators are made functional; only buffers (batch-norm statistics) are still written in place.
Not modelled: dynamic shapes. Another microbatch size is another capture.
"""

from __future__ import annotations

import contextlib
import io
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, islice
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.fx import config as fx_config

from weft.errors import ModelError
from weft.model.collector import uncollected
from weft.model.deferred.blame import why_not
from weft.model.deferred.fakes import Fake
from weft.model.deferred.losses import loss_of
from weft.model.functional import Memory, is_in_place, make_functional
from weft.model.graph import Arg, Graph, Operator, Ref, Tensor, Variable, Word
from weft.model.nesting import batch_size_of, leaves, rebuild
from weft.model.watched import State, changes, set_state, state_of, watched

Loss = Callable[[Any, Any], torch.Tensor]
_IGNORED = ("aten._assert_tensor_metadata.default", "aten._assert_async.msg", "aten.sym_constrain_range_for_size.default")
_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
_LAYOUT_WORDS: dict[Any, Word] = {torch.strided: Word("layout", "strided"), **{f: Word("format", str(f).split(".")[1]) for f in _FORMATS}}
_MOST_TRIES = 31  # subsets of five tensors
_Overload = type(torch.ops.aten.add.Tensor)  # the class has no public name


@dataclass(frozen=True)
class Captured:
    """A graph with the values of its constants (small tensors that the model's code made while it was traced)."""

    graph: Graph
    constants: Mapping[str, torch.Tensor]
    structure: Any = None  # the model's output with fake tensors, where it was captured without a loss


def called(model: nn.Module, batch: Any) -> Any:
    """The model's output of a batch: dicts by keyword, tuples in order."""
    return model(**batch) if isinstance(batch, Mapping) else model(*batch) if isinstance(batch, tuple | list) else model(batch)


def call(model: nn.Module, batch: Any, loss: Loss | None) -> torch.Tensor:
    """Run the model on a batch as `MODEL` says: dicts by keyword, tuples in order; then the loss, a scalar.

    Raises:
        ModelError: no loss is given and the output is neither a scalar nor has a scalar `.loss`.
    """
    output = called(model, batch)
    value: Any
    own = loss_of(loss, model)
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

    def __init__(self, model: nn.Module, batch: Any, loss: Loss | None, outputs: bool) -> None:
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
        self.structure: Callable[[], Any] = lambda: outputs_seen[-1] if outputs_seen else None
        self.left: Callable[[State], None] = states_seen.append
        self.state_left: Callable[[], State] = lambda: states_seen[-1]

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        new = {path: next(given) if isinstance(leaf, torch.Tensor) else leaf for path, leaf in leaves(self._batch)}
        batch = rebuild(self._batch, new)
        with watched(self.model):
            if self.gives_outputs:
                output = called(self.model, batch)
                self.seen(output)
                result = tuple(leaf for _, leaf in leaves(output) if isinstance(leaf, torch.Tensor))
            else:
                result = (self._call(batch),)
        self.left(state_of(self.model))
        return result


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
                return _settled(_Step(model, batch, loss, outputs), batch, batched, size, fake_mode)
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
    step.train(step.model.training)
    before = state_of(step.model)
    try:
        captured = _traced(step, batch, batched, size, fake_mode)
        after = step.state_left()
        changed = changes(before, after)
        if changed:
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


def _equal(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k] is b[k] or (not isinstance(a[k], Fake) and torch.equal(a[k], b[k])) for k in a)


def _traced(step: _Step, batch: Any, batched: frozenset[str], size: int, fake_mode: Any) -> Captured:
    with fake_mode if fake_mode is not None else contextlib.nullcontext():
        tensors = tuple(
            torch.empty((size, *leaf.shape[1:]) if path in batched else tuple(leaf.shape), dtype=leaf.dtype)
            for path, leaf in leaves(batch)
            if isinstance(leaf, torch.Tensor)
        )
    with _quiet():
        try:
            program = torch.export.export(step, tensors, strict=False)
        except ModelError:
            raise
        except Exception as error:
            cut = "" if size == batch_size_of(batch) else f" with {size} of the batch's {batch_size_of(batch)} samples (one microbatch)"
            raise ModelError(f"torch.export cannot follow the model{cut}: {why_not(error)}") from error
        _refuse_unknown_shapes(program)
        try:
            return _read(program, step, batch, batched, size)
        except _Aliased:
            program = program.run_decompositions({})
        try:
            return _read(program, step, batch, batched, size)
        except _Aliased as error:
            raise ModelError(str(error)) from error


def _refuse_unknown_shapes(program: Any) -> None:
    """Raise ModelError where a tensor has a shape that depends on values: as many rows as a mask picks."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, torch.Tensor) and any(not isinstance(n, int) for n in item.shape):
                raise ModelError(
                    f"the shape of what {node.target} makes is data-dependent: it follows the values of a tensor (x[mask], "
                    "nonzero, unique); keep shapes fixed, for example with torch.where or weights of 0"
                )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's own warnings: what stands in the way of a capture is said once, in the error. And without a record of the lines of
    code that every operator comes from, which takes an eighth of the time and is not read.
    """
    before = logging.root.manager.disable
    said = fx_config.do_not_emit_stack_traces
    logging.disable(logging.CRITICAL)
    fx_config.do_not_emit_stack_traces = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(io.StringIO()):
                yield
    finally:
        fx_config.do_not_emit_stack_traces = said
        logging.disable(before)


class _Aliased(Exception):
    """An in-place write whose aliases cannot be followed here, or a function's transform (vmap); torch's decomposition is asked instead."""


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

    reader = _Reader()
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
        tensor = _spec(node.meta.get("val"))
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
    _write_back(program, reader, {name: v.value for name, v in buffers.items()}, by_name)
    written = {b.value for b in buffers.values()}
    named = {p.value: p.name for p in parameters.values()}
    learned = {p.value for p in parameters.values() if p.trainable} | {v.value for v in inputs if v.tensor.is_float}
    memory = Memory(reader.storages(), frozenset(written), named, frozenset(learned), frozenset(reader.silent))
    operators = make_functional(reader.operators, reader.tensors, memory, _exists)
    if operators is None:
        if reader.silent:  # torch's own functionalisation forgets which operators those are
            raise ModelError(
                "the model writes into a tensor in a way that cannot be followed, beside a block without gradients; write with torch.where "
                "or index_put, or leave the block out"
            )
        raise _Aliased("the model writes into a tensor in a way that cannot be followed; write with torch.where or index_put")
    ops, rename = operators
    results = [rename.get(v, v) for v in reader.results]
    wanted = _keep(ops, results, {b.value for b in buffers.values()})
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
    return Captured(graph, {v: t for v, t in constants.items() if v in used}, step.structure())


def _write_back(program: Any, reader: _Reader, buffers: Mapping[str, str], first_names: Mapping[str, str]) -> None:
    """Where torch made the graph functional, it hands out what buffers hold at the end: write that into them, and keep the rest."""
    kept = []
    for spec, value in zip(program.graph_signature.output_specs, list(reader.results), strict=True):
        if spec.kind.name == "BUFFER_MUTATION":
            name = first_names[spec.target.removeprefix("model.")]
            buffer, made = buffers[name], f"{value}_written"
            reader.tensors[made] = reader.tensors[buffer]
            reader.operators.append(Operator(made, "aten.copy_.default", (Ref(buffer), Ref(value)), (), (made,), f"{name}/copy_"))
        elif spec.kind.name == "USER_OUTPUT":
            kept.append(value)
    reader.results = kept


def _exists(target: str) -> bool:
    namespace, packet, overload = target.split(".")
    return hasattr(getattr(getattr(torch.ops, namespace), packet, None), overload)


def _keep(operators: list[Operator], results: list[str], buffers: set[str]) -> list[Operator]:
    """Operators that a result or a buffer needs, in order."""
    needed = set(results)
    kept = []
    for op in reversed(operators):
        if op.target in _IGNORED:
            continue
        writes = op.target.split(".")[1].endswith("_") and op.args and isinstance(op.args[0], Ref) and op.args[0].value in buffers
        if writes or any(value in needed for value in op.outputs) or (any(value in buffers for value in op.inputs[:1]) and writes):
            needed.update(op.inputs)
            kept.append(op)
    return kept[::-1]


def _spec(value: Any) -> Tensor:
    if isinstance(value, torch.Tensor):
        return Tensor(tuple(int(n) for n in value.shape), str(value.dtype).removeprefix("torch."))
    return Tensor((), {bool: "bool", int: "int64", float: "float64"}.get(type(value), "int64"))


class _Reader:
    """Walks an fx graph, sub-graphs of gradient and autocast blocks included, into operators."""

    def __init__(self) -> None:
        self.operators: list[Operator] = []
        self.tensors: dict[str, Tensor] = {}
        self.rename: dict[str, str] = {}
        self.results: list[str] = []
        self.silent: set[str] = set()  # operators in blocks without gradients
        self._sites: dict[str, int] = {}
        self._tuples: dict[str, tuple[str, ...]] = {}
        self._memory: dict[str, torch.UntypedStorage] = {}

    def remember(self, name: str, value: Any) -> None:
        """Note which memory a value has."""
        if isinstance(value, torch.Tensor):
            self._memory[name] = value.untyped_storage()

    def storages(self) -> dict[str, int]:
        """Values that have the same number share memory."""
        return {name: id(storage) for name, storage in self._memory.items()}

    def read(self, graph: Any, owner: nn.Module) -> None:
        for node in graph.nodes:
            if node.op == "call_function":
                self._call(node, owner, "", node.name, full_precision=False)
            elif node.op == "output":
                self.results = [self._name(n.name) for n in node.args[0] if hasattr(n, "name")]

    def _name(self, name: str) -> str:
        while name in self.rename:
            name = self.rename[name]
        return name

    def _call(self, node: Any, owner: nn.Module, prefix: str, name: str, full_precision: bool) -> None:
        target = node.target
        if target is operator.getitem:
            source = self._tuples[prefix + node.args[0].name]
            self.rename[prefix + node.name] = source[node.args[1]]
            return
        if not isinstance(target, _Overload):
            self._block(node, owner, prefix)
            return
        value = node.meta.get("val")
        if str(target) in ("aten.as_strided.default", "aten.as_strided_scatter.default"):
            source = node.args[0].meta["val"]
            if not source.is_contiguous() or source.storage_offset() or "scatter" in str(target):
                raise ModelError(
                    f"{self._site(node, str(target))} goes by how its tensor lies in memory; use views, unfold or indices instead"
                )
        multiple = isinstance(value, tuple | list)
        full = prefix + node.name
        outputs = tuple(f"{full}.{i}" for i in range(len(value))) if multiple else (full,)
        for output, item in zip(outputs, value if multiple else (value,), strict=True):
            self.tensors[output] = _spec(item)
            self.remember(output, item)
        if multiple:
            self._tuples[full] = outputs
        self.operators.append(
            Operator(
                full,
                str(target),
                tuple(self._arg(a, prefix) for a in node.args),
                tuple((k, self._arg(a, prefix)) for k, a in node.kwargs.items() if k != "pin_memory"),
                outputs,
                self._site(node, str(target)),
                multiple,
                full_precision,
            )
        )

    def _block(self, node: Any, owner: nn.Module, prefix: str) -> None:
        """Inline `with torch.no_grad()` (its outputs are detached) and `with torch.autocast(...)` blocks."""
        kind = str(node.target)
        if "set_grad_enabled" in kind:
            keep_grad, body, operands, full_precision = node.args[0], node.args[1], node.args[2:], False
        elif "autocast" in kind:
            keep_grad, body, operands, full_precision = True, node.args[4], node.args[5:], not node.args[2]
        else:
            if isinstance(node.target, FunctionType):
                raise _Aliased(f"the model calls {node.target.__name__}, which weft cannot take apart")
            raise ModelError(f"the model calls {kind}, which weft cannot take apart")
        inner = getattr(owner, body.target)
        start = len(self.operators)
        within = f"{prefix}{node.name}."
        given = iter(operands)
        for child in inner.graph.nodes:
            if child.op == "placeholder":
                self.rename[within + child.name] = self._name(prefix + next(given).name)
            elif child.op == "call_function":
                made_here = len(self.operators)
                self._call(child, inner, within, child.name, full_precision)
                if not keep_grad:
                    self.silent.update(op.name for op in self.operators[made_here:])
            elif child.op == "output":
                results = child.args[0] if isinstance(child.args[0], tuple | list) else (child.args[0],)
                made = []
                for i, result in enumerate(results):
                    value = self._name(within + result.name)
                    if not keep_grad and self.tensors[value].is_float and self._made_in(value, start):
                        out = f"{within}detach{i}"
                        self.tensors[out] = self.tensors[value]
                        if value in self._memory:
                            self._memory[out] = self._memory[value]
                        self.operators.append(
                            Operator(out, "aten.detach.default", (Ref(value),), (), (out,), self._site(node, "aten.detach.default"))
                        )
                        value = out
                    made.append(value)
                self._tuples[prefix + node.name] = tuple(made)
                if not isinstance(child.args[0], tuple | list):
                    self.rename[prefix + node.name] = made[0]

    def _made_in(self, value: str, start: int) -> bool:
        """Whether a value is made by the operators from number `start` on; what a write hands back is what was written."""
        by = {output: op for op in self.operators[start:] for output in op.outputs}
        while value in by:
            into = dict(by[value].kwargs).get("out", by[value].args[0] if is_in_place(by[value]) else None)
            if not isinstance(into, Ref):
                return True
            value = self._name(into.value)
        return False

    def _arg(self, arg: Any, prefix: str) -> Arg:
        if isinstance(arg, torch.fx.Node):
            return Ref(self._name(prefix + arg.name))
        if isinstance(arg, tuple | list):
            return tuple(self._arg(a, prefix) for a in arg)
        if isinstance(arg, torch.dtype):
            return Word("dtype", str(arg).removeprefix("torch."))
        if isinstance(arg, torch.device):
            return Word("device", "run")
        if isinstance(arg, torch.layout | torch.memory_format):
            return _LAYOUT_WORDS[arg]
        if arg is None or isinstance(arg, bool | int | float | str | complex):
            return arg
        raise ModelError(f"the model passes {type(arg).__name__} to an operator; weft knows numbers, text, dtypes and tensors")

    def _site(self, node: Any, target: str) -> str:
        stack = node.meta.get("nn_module_stack") or {}
        path = next(reversed(stack.values()))[0] if stack else ""
        path = path.removeprefix("model").removeprefix(".")
        base = f"{path}/{target.split('.')[1]}"
        count = self._sites[base] = self._sites.get(base, -1) + 1
        return base if not count else f"{base}#{count}"
