"""From what `torch.export` made to a `Graph`: parameters and buffers by name, operators that write nothing, what is needed of them.

In: an exported program, and the model and the batch that it was made of. Out: the graph and the values of its constants; `Aliased` where a
write cannot be followed here. Not modelled: see `weft.capture.fx_reader` and `weft.capture.functional`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from weft.capture.functional import Memory, make_functional
from weft.capture.functions import Record, function_of
from weft.capture.fx_reader import Aliased, Reader, exists, spec_of
from weft.capture.nesting import leaves
from weft.capture.patched import rewritten
from weft.errors import ModelError
from weft.model.gradients import learned, learns_by
from weft.model.graph import Graph, Operator, Ref, Variable
from weft.model.work import closure
from weft.ops import draws, writes


@dataclass
class _Variables:
    """What a program is given, in its order: parameters and buffers by first name, inputs, constants and the values of these."""

    parameters: dict[str, Variable] = field(default_factory=dict)
    buffers: dict[str, Variable] = field(default_factory=dict)
    inputs: list[Variable] = field(default_factory=list)
    constants: list[Variable] = field(default_factory=list)
    values: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def held(self) -> tuple[Variable, ...]:
        return (*self.buffers.values(), *self.parameters.values())


@dataclass(frozen=True)
class Reading:
    """How programs of a model and a batch of `size` samples are read; `batched` inputs have these in dimension 0."""

    model: nn.Module
    record: Record
    batch: Any
    batched: frozenset[str]
    size: int
    has_outputs: bool  # and no loss

    def of(self, program: Any) -> tuple[Graph, dict[str, torch.Tensor]]:
        """The graph of a program, and its constants."""
        memory: dict[Any, Any] = {}
        reader = Reader(lambda number, specs: function_of(self.record.calls[number], specs, memory))
        first_names = self._first_names()
        variables = self._variables(program, reader, first_names)
        reader.read(program.graph, program.graph_module)
        _write_back(program, reader, {v.name: v.value for v in variables.held}, first_names)
        ops, results = self._operators(reader, variables)
        wanted = _apart(_keep(ops, results, {v.value for v in variables.held}))
        if self.has_outputs and not results:
            raise ModelError("the model's output holds no tensor; it must return tensors")
        used = {value for op in wanted for value in op.inputs} | set(results)
        read = tuple(v for v in variables.constants if v.value in used)
        states = (*variables.parameters.values(), *variables.buffers.values(), *variables.inputs, *read)
        graph = Graph(
            tuple(variables.parameters.values()),
            tuple(variables.buffers.values()),
            tuple(variables.inputs),
            read,
            tuple(wanted),
            # In the order in which they came to be, and what nobody reads of an operator's results behind them.
            {value: spec for value, spec in reader.tensors.items() if value in used}
            | {value: reader.tensors[value] for op in wanted for value in op.outputs}
            | {v.value: v.tensor for v in states},
            results[-1],
            self.size,
            tuple(results) if self.has_outputs else (),
        )
        replaced = [(variables.parameters.get(first_names[name]), name) for name in self.record.replaced]
        _refuse_replaced({v.value: name for v, name in replaced if v is not None}, graph)
        return rewritten(graph), {v: t for v, t in variables.values.items() if v in used}

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.named_parameters(remove_duplicate=False)
        yield from self.model.named_buffers(remove_duplicate=False)

    def _first_names(self) -> dict[str, str]:
        """By name of a parameter or a buffer, the first that it has: tied ones have several."""
        owners: dict[int, str] = {}
        return {name: owners.setdefault(id(held), name) for name, held in self._named()}

    def _variables(self, program: Any, reader: Reader, first_names: Mapping[str, str]) -> _Variables:
        """What the program is given. The reader learns of it, too."""
        names = {spec.arg.name: spec for spec in program.graph_signature.input_specs if hasattr(spec.arg, "name")}
        trainable = {name for name, p in self.model.named_parameters() if p.requires_grad}
        paths = iter([path for path, leaf in leaves(self.batch) if isinstance(leaf, torch.Tensor)])
        aliases: dict[str, list[str]] = {}
        for name, first in first_names.items():
            if first != name:
                aliases.setdefault(first, []).append(name)
        variables = _Variables()
        for node in program.graph.nodes:
            if node.op != "placeholder":
                continue
            spec, tensor = names[node.name], spec_of(node.meta.get("val"))
            kind, target = spec.kind.name, (spec.target or "").removeprefix("model.")
            if kind == "USER_INPUT":
                path = next(paths)
                variables.inputs.append(Variable(node.name, path, tensor, batched=path in self.batched))
            elif kind == "CONSTANT_TENSOR" or target not in first_names:
                variables.values[node.name] = program.constants[spec.target]
                variables.constants.append(Variable(node.name, spec.target, tensor))
            else:
                first = first_names[target]
                table = variables.parameters if kind == "PARAMETER" else variables.buffers
                if first in table:
                    reader.rename[node.name] = table[first].value
                    continue
                table[first] = Variable(node.name, first, tensor, tuple(aliases.get(first, ())), first in trainable)
            reader.tensors[node.name] = tensor
            reader.remember(node.name, node.meta.get("val"))
        return variables

    def _operators(self, reader: Reader, variables: _Variables) -> tuple[list[Operator], list[str]]:
        """The operators that were read, without writes, and the results; buffers that the model makes are looked at."""
        in_place = frozenset(v.value for v in variables.held)
        trained = {p.value for p in variables.parameters.values() if p.trainable}
        with_gradient = trained.union(v.value for v in variables.inputs if v.tensor.is_float)
        memory = Memory(reader.storages(), in_place, frozenset(with_gradient), frozenset(reader.silent))
        functional = make_functional(reader.operators, reader.tensors, memory, exists)
        if functional is None:
            if reader.silent:  # torch's own functionalisation forgets which operators those are
                raise ModelError(
                    "the model writes into a tensor in a way that cannot be followed, beside a block without gradients; write with "
                    "torch.where or index_put, or leave the block out"
                )
            raise Aliased("the model writes into a tensor in a way that cannot be followed; write with torch.where or index_put")
        operators, rename = functional
        results = [rename.get(v, v) for v in reader.results]
        if buffers := self.record.buffers:
            written = {op.args[0].value for op in operators if writes(op) and isinstance(op.args[0], Ref)}
            changing = written.union(v.value for v in (*variables.parameters.values(), *variables.inputs))
            _refuse_changing(dict(zip(buffers, results[-len(buffers) :], strict=True)), operators, changing)
            results = results[: -len(buffers)]
        return operators, results


def _refuse_changing(buffers: Mapping[str, str], operators: Sequence[Operator], changing: set[str]) -> None:
    """Raise ModelError where a buffer that the model makes in its first call, and keeps, is not the same in every call."""
    for name, value in buffers.items():
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
    left = []
    for spec, value in zip(program.graph_signature.output_specs, list(reader.results), strict=True):
        if spec.kind.name in ("BUFFER_MUTATION", "PARAMETER_MUTATION"):
            name = first_names[spec.target.removeprefix("model.")]
            into, written = held[name], f"{value}_written"
            reader.tensors[written] = reader.tensors[into]
            reader.operators.append(Operator(written, "aten.copy_.default", (Ref(into), Ref(value)), (), (written,), f"{name}/copy_"))
        elif spec.kind.name == "USER_OUTPUT":
            left.append(value)
    reader.results = left


def _keep(operators: list[Operator], results: list[str], held: set[str]) -> list[Operator]:
    """Operators that a result, a buffer or a parameter needs, in order."""
    needed = set(results)
    operators_left = []
    for op in reversed(operators):
        if (writes(op) and op.inputs[0] in held) or any(value in needed for value in op.outputs):
            needed.update(op.inputs)
            operators_left.append(op)
    return operators_left[::-1]


def _apart(operators: list[Operator]) -> list[Operator]:
    """Each at a site of its own: a write that was made functional is several operators, and takes views again, where there was one."""
    taken, seen, renamed = {op.site for op in operators}, set[str](), []
    for op in operators:
        site, number = op.site, 0
        while site in seen or (number and site in taken):
            number += 1
            site = f"{op.site}#{number}"
        seen.add(site)
        renamed.append(op if site == op.site else replace(op, site=site))
    return renamed
