"""Convert a program of `torch.export` to a `Graph`: parameters and buffers by name, functional operators, dead code removed.

The result is the graph and the values of its constants; a write with aliasing that is unsupported here raises `UnsupportedAliasing`.
Limits: see `shardwise.capture.fx_reader` and `shardwise.capture.functional`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shardwise.capture.autograd_functions import TraceRecord, function_of
from shardwise.capture.functional import StorageAliasing, functionalize_operators
from shardwise.capture.fx_reader import FxGraphReader, UnsupportedAliasing, operator_exists, spec_of
from shardwise.capture.nesting import tensors_of
from shardwise.capture.patching import rewrite_graph
from shardwise.errors import ModelError
from shardwise.model.dataflow import required_operators
from shardwise.model.gradients import parameters_with_gradient, values_depending_on
from shardwise.model.graph import Graph, Operator, Ref, Variable
from shardwise.ops import is_random, writes_in_place


@dataclass
class _ProgramInputs:
    """Inputs of a program, in its order: parameters and buffers by first name, inputs, constants and their values."""

    parameters: dict[str, Variable] = field(default_factory=dict)
    buffers: dict[str, Variable] = field(default_factory=dict)
    inputs: list[Variable] = field(default_factory=list)
    constants: list[Variable] = field(default_factory=list)
    values: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def buffers_and_parameters(self) -> tuple[Variable, ...]:
        return (*self.buffers.values(), *self.parameters.values())


@dataclass(frozen=True)
class ProgramReader:
    """Reads programs of a model and a batch of `batch_size` samples; `batched` inputs have these in dimension 0."""

    model: nn.Module
    record: TraceRecord
    batch: Any
    batched: frozenset[str]
    batch_size: int
    has_outputs: bool  # instead of a loss

    def read(self, program: Any) -> tuple[Graph, dict[str, torch.Tensor]]:
        """Return the graph of a program, and its constants."""
        function_cache: dict[Any, Any] = {}
        reader = FxGraphReader(lambda number, specs: function_of(self.record.calls[number], specs, function_cache))
        first_names = self._first_names()
        variables = self._read_inputs(program, reader, first_names)
        reader.read(program.graph, program.graph_module)
        _append_write_backs(program, reader, {v.name: v.value for v in variables.buffers_and_parameters}, first_names)
        ops, results = self._read_operators(reader, variables)
        in_place = {v.value for v in variables.buffers_and_parameters}
        writes = {value for op in ops if writes_in_place(op) and op.inputs[0] in in_place for value in op.outputs}
        wanted = _with_unique_sites(required_operators(ops, writes.union(results)))
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
            # In the order of creation, then the unused results of operators.
            {value: spec for value, spec in reader.tensors.items() if value in used}
            | {value: reader.tensors[value] for op in wanted for value in op.outputs}
            | {v.value: v.tensor for v in states},
            results[-1],
            self.batch_size,
            tuple(results) if self.has_outputs else (),
        )
        replaced = [(variables.parameters.get(first_names[name]), name) for name in self.record.replaced_parameters]
        _refuse_replaced_parameters({v.value: name for v, name in replaced if v is not None}, graph)
        return rewrite_graph(graph), {v: t for v, t in variables.values.items() if v in used}

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.named_parameters(remove_duplicate=False)
        yield from self.model.named_buffers(remove_duplicate=False)

    def _first_names(self) -> dict[str, str]:
        """Return the first name of every parameter and buffer name: tied ones have several."""
        owners: dict[int, str] = {}
        return {name: owners.setdefault(id(tensor), name) for name, tensor in self._named_tensors()}

    def _read_inputs(self, program: Any, reader: FxGraphReader, first_names: Mapping[str, str]) -> _ProgramInputs:
        """Return the inputs of the program, and register them with the reader."""
        names = {spec.arg.name: spec for spec in program.graph_signature.input_specs if hasattr(spec.arg, "name")}
        trainable = {name for name, p in self.model.named_parameters() if p.requires_grad}
        paths = iter(tensors_of(self.batch))
        aliases: dict[str, list[str]] = {}
        for name, first in first_names.items():
            if first != name:
                aliases.setdefault(first, []).append(name)
        variables = _ProgramInputs()
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
                    reader.renames[node.name] = table[first].value
                    continue
                table[first] = Variable(node.name, first, tensor, tuple(aliases.get(first, ())), first in trainable)
            reader.add_value(node.name, node.meta.get("val"))
        return variables

    def _read_operators(self, reader: FxGraphReader, variables: _ProgramInputs) -> tuple[list[Operator], list[str]]:
        """Return the functionalized operators and the results; buffers that the model makes are checked."""
        in_place = frozenset(v.value for v in variables.buffers_and_parameters)
        trained = {p.value for p in variables.parameters.values() if p.trainable}
        with_gradient = trained.union(v.value for v in variables.inputs if v.tensor.is_float)
        memory = StorageAliasing(reader.storages(), in_place, frozenset(with_gradient), frozenset(reader.no_grad_operators))
        functional = functionalize_operators(reader.operators, reader.tensors, memory, operator_exists)
        if functional is None:
            if reader.no_grad_operators:  # torch's own functionalization loses which operators these are
                raise ModelError(
                    "the model writes into a tensor in a way that cannot be followed, beside a block without gradients; write with "
                    "torch.where or index_put, or leave the block out"
                )
            raise UnsupportedAliasing(
                "the model writes into a tensor in a way that cannot be followed; write with torch.where or index_put"
            )
        operators, rename = functional
        results = [rename.get(v, v) for v in reader.results]
        if buffers := self.record.buffers:
            written = {op.args[0].value for op in operators if writes_in_place(op) and isinstance(op.args[0], Ref)}
            changing = written.union(v.value for v in (*variables.parameters.values(), *variables.inputs))
            _refuse_varying_buffers(dict(zip(buffers, results[-len(buffers) :], strict=True)), operators, changing)
            results = results[: -len(buffers)]
        return operators, results


def _refuse_varying_buffers(buffers: Mapping[str, str], operators: Sequence[Operator], changing: set[str]) -> None:
    """Raise ModelError if a buffer that the model makes in its first call would differ in later calls."""
    for name, value in buffers.items():
        needed = required_operators(operators, {value})
        if value in changing or any(is_random(op) or not changing.isdisjoint(op.inputs) for op in needed):
            raise ModelError(
                f"the model makes its buffer {name} in its first call, of what is not the same in every step (the batch, parameters, other "
                "buffers or random numbers), and reads it in later ones; make it when it is constructed"
            )


def _refuse_replaced_parameters(replaced: Mapping[str, str], graph: Graph) -> None:
    """Raise ModelError if a replaced parameter (value -> name), or its replacement, gets a gradient: no optimizer has it."""
    new = {op.inputs[0]: op.inputs[1] for op in graph.operators if op.target == "aten.copy_.default" and op.inputs[0] in replaced}
    trained = parameters_with_gradient(graph)
    ends = {graph.loss, *graph.outputs}
    names = sorted(name for v, name in replaced.items() if v in trained or (v in new and ends & values_depending_on(graph, {new[v]})))
    if names:
        raise ModelError(
            f"the model puts a new parameter in the place of {names[0]} while it runs, which its optimizer would not know and not train; "
            "write into it instead (with torch.no_grad(): p.copy_(new))"
        )


def _append_write_backs(program: Any, reader: FxGraphReader, values_by_name: Mapping[str, str], first_names: Mapping[str, str]) -> None:
    """Append copies of the final values into buffers and parameters, which torch's functionalization returns as outputs."""
    user_results = []
    for spec, value in zip(program.graph_signature.output_specs, list(reader.results), strict=True):
        if spec.kind.name in ("BUFFER_MUTATION", "PARAMETER_MUTATION"):
            name = first_names[spec.target.removeprefix("model.")]
            into, written = values_by_name[name], f"{value}_written"
            reader.tensors[written] = reader.tensors[into]
            reader.operators.append(Operator(written, "aten.copy_.default", (Ref(into), Ref(value)), (), (written,), f"{name}/copy_"))
        elif spec.kind.name == "USER_OUTPUT":
            user_results.append(value)
    reader.results = user_results


def _with_unique_sites(operators: Sequence[Operator]) -> list[Operator]:
    """Give every operator a site of its own: a functionalized write is several operators, and regenerates views."""
    original, assigned, renamed = {op.site for op in operators}, set[str](), []
    for op in operators:
        site, number = op.site, 0
        while site in assigned or (number and site in original):
            number += 1
            site = f"{op.site}#{number}"
        assigned.add(site)
        renamed.append(op if site == op.site else replace(op, site=site))
    return renamed
