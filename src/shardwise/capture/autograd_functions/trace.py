"""Trace forward and backward of a user's torch.autograd.Function to a joint graph of operators, at given shapes.

torch's own autograd runs forward and then backward on fake tensors, and every operator of both is recorded. So all of autograd is covered:
saved tensors, gradients that are needed or not, several outputs, either style of context. Data-dependent functions are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from shardwise.capture.autograd_functions.recording import FunctionCall, first_line_of, refusal_error
from shardwise.capture.fakes import fake_mode, written_arguments
from shardwise.capture.functional import StorageAliasing, functionalize_operators
from shardwise.capture.fx_reader import FxGraphReader, UnsupportedAliasing, operator_exists, spec_of
from shardwise.capture.in_fork import in_fork
from shardwise.capture.json_values import from_json_value, to_json_value
from shardwise.capture.python_randomness import python_random_state
from shardwise.errors import ModelError
from shardwise.model.dataflow import required_operators
from shardwise.model.graph import Operator, Tensor

_LITERALS = ("lift_fresh", "lift_fresh_copy")
_TRACE_LOCK = Lock()  # torch.fx has its patches in a global
_MAX_LITERAL_SIZE = 256  # elements of a tensor literal in the function's code


@dataclass(frozen=True)
class JointGraph:
    """One call, forward and backward. `operators` are functional, or None if they could not be functionalized.

    `seeds`: the gradients of outputs, None for those without; `gradients`: the gradients of inputs, None for those without.
    The first `num_forward` operators are forward's; `literals` are values of small tensors that the code makes of numbers.
    `aliased_inputs`: for each output, the number of the input that it aliases, -1 for none.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    seeds: tuple[str | None, ...]
    gradients: tuple[str | None, ...]
    operators: tuple[Operator, ...] | None
    num_forward: int
    tensors: Mapping[str, Tensor]
    literals: Mapping[str, object]
    aliased_inputs: tuple[int, ...]


def trace_joint_graph(call: FunctionCall, specs: tuple[Tensor, ...], requires_grad: tuple[bool, ...], only_output: int = -1) -> JointGraph:
    """Trace a call on tensors like `specs`; `requires_grad`: of each input; `only_output`: the one output with a gradient, -1 for all.

    Raises:
        ModelError: the function does something that a graph of operators does not represent; the message names it.
    """
    traced: JointGraph = in_fork(lambda: _trace_checked(call, specs, requires_grad, only_output), to_json_value, from_json_value)
    return traced


def _trace_checked(call: FunctionCall, specs: tuple[Tensor, ...], requires_grad: tuple[bool, ...], only_output: int) -> JointGraph:
    before = python_random_state()
    try:
        with _TRACE_LOCK:
            traced = _trace_forward_backward(call, specs, requires_grad, only_output)
    except ModelError:
        raise
    except Exception as error:
        raise refusal_error(call, f"cannot be followed through its forward and backward ({first_line_of(error)})") from error
    if python_random_state() != before:
        raise refusal_error(call, "draws from Python's or numpy's random numbers, which a captured graph would fix; use torch's")
    return traced


def _tensors_of(out: Any) -> list[torch.Tensor]:
    return [y for y in (out if isinstance(out, tuple) else (out,)) if isinstance(y, torch.Tensor)]


def _trace_forward_backward(call: FunctionCall, specs: tuple[Tensor, ...], requires_grad: tuple[bool, ...], only_output: int) -> JointGraph:
    def leaves(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [x.detach().requires_grad_(needs_grad) for x, needs_grad in zip(tensors, requires_grad, strict=True)]

    with fake_mode(), torch.enable_grad():
        inputs = [torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for t in specs]
        outs = _tensors_of(call(leaves(inputs)))
        seeded = [y.requires_grad and only_output in (-1, i) for i, y in enumerate(outs)]
        seeds = [torch.empty_like(y) if is_seeded else None for y, is_seeded in zip(outs, seeded, strict=True)]

    def both(tensors: list[torch.Tensor], seeds: list[torch.Tensor]) -> tuple[list[Any], list[Any]]:
        with torch.enable_grad():
            inputs = leaves(tensors)
            outputs = _tensors_of(call(inputs))
        roots = [y for y, is_seeded in zip(outputs, seeded, strict=True) if is_seeded]
        trained = [x for x in inputs if x.requires_grad]
        aliases = [torch.ops.aten.alias.default(seed) for seed in seeds]  # they mark where backward begins
        grads = iter(torch.autograd.grad(roots, trained, aliases, allow_unused=True) if roots and trained else [None] * len(trained))
        return outputs, [next(grads) if x.requires_grad else None for x in inputs]

    module = make_fx(both)(inputs, [seed for seed in seeds if seed is not None])
    return _read_joint_graph(call, module, len(specs), seeded)


def _read_joint_graph(call: FunctionCall, module: Any, num_inputs: int, seeded: list[bool]) -> JointGraph:
    reader = FxGraphReader()
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    literals: dict[str, object] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            if any(str(user.target).split(".")[1:2] not in ([x] for x in _LITERALS) for user in node.users):
                raise refusal_error(call, "reads a tensor that is none of its arguments; give it as an argument")
            literals[node.name] = _literal_value(getattr(module, node.target))
        if node.op in ("placeholder", "get_attr"):
            value = node.meta.get("val")
            reader.add_value(node.name, value)
            if value is None:
                reader.tensors[node.name] = spec_of(getattr(module, node.target))
    results = next(node.args[0] for node in module.graph.nodes if node.op == "output")
    num_outputs = len(seeded)
    seeds = [node.name for node in placeholders[num_inputs:]]
    in_backward = _backward_node_names(module, set(seeds))
    _refuse_writes(call, module, placeholders, results[:num_outputs], in_backward)
    operators: list[Operator] | None
    try:
        reader.read(module.graph, module)
        aliasing = StorageAliasing(reader.storages(), frozenset(), frozenset(), frozenset())
        backward = {op.name for op in reader.operators if op.name in in_backward}
        functional = functionalize_operators(reader.operators, reader.tensors, aliasing, operator_exists)
        operators, rename = functional if functional is not None else (None, {})
    except (UnsupportedAliasing, ModelError):
        operators, rename, backward = None, {}, set()

    def value_of(node: Any) -> str | None:
        return None if node is None else rename.get(reader.resolve_name(node.name), reader.resolve_name(node.name))

    num_forward = 0
    if operators is not None:
        operators = [*required_operators(operators, {v for v in map(value_of, results) if v is not None})]
        num_forward = next((i for i, op in enumerate(operators) if op.name in backward), len(operators))
    seed_names = iter(seeds)
    storages = reader.storages()
    inputs = tuple(node.name for node in placeholders[:num_inputs])
    input_of_storage = {storages[v]: i for i, v in reversed(list(enumerate(inputs)))}
    outputs = tuple(str(value_of(node)) for node in results[:num_outputs])
    return JointGraph(
        inputs,
        outputs,
        tuple(next(seed_names) if is_seeded else None for is_seeded in seeded),
        tuple(value_of(node) for node in results[num_outputs:]),
        None if operators is None else tuple(operators),
        num_forward,
        dict(reader.tensors),
        literals,
        tuple(input_of_storage.get(storages.get(reader.resolve_name(node.name), -1), -1) for node in results[:num_outputs]),
    )


def _literal_value(literal: torch.Tensor) -> object:
    """Return the value of a tensor literal; without one, an object that equals nothing else."""
    constant = getattr(literal, "constant", None)  # of a fake tensor
    literal = literal if constant is None else constant
    try:
        return (str(literal.dtype), literal.tolist()) if literal.numel() <= _MAX_LITERAL_SIZE else object()
    except Exception:
        return object()


def _backward_node_names(module: Any, seeds: set[str]) -> set[str]:
    """Return the names of backward's operators: all from the first that reads a gradient of an output."""
    names: set[str] = set()
    for node in module.graph.nodes:
        if names or any(n.name in seeds for n in node.all_input_nodes):
            names.add(node.name)
    return names


def _refuse_writes(call: FunctionCall, module: Any, placeholders: list[Any], outputs: list[Any], backward: set[str]) -> None:
    """Raise ModelError if the function writes its inputs or returned outputs in place, or communicates."""

    def memory(node: Any) -> int:
        value = node.meta.get("val")
        return id(value.untyped_storage()) if isinstance(value, torch.Tensor) else 0

    input_memory = {memory(node) for node in placeholders}
    output_memory = {memory(node) for node in outputs}
    for node in module.graph.nodes:
        if node.op != "call_function" or not hasattr(node.target, "_schema"):
            continue
        if str(node.target).split(".")[0] in ("c10d", "_c10d_functional", "_dtensor"):
            raise refusal_error(call, f"communicates with other ranks ({node.target})")
        protected = input_memory | (output_memory if node.name in backward else set())
        for arg in (node.args[place] for place, _ in written_arguments(node.target) if place < len(node.args)):
            for item in arg if isinstance(arg, tuple | list) else (arg,):
                if isinstance(item, torch.fx.Node) and memory(item) in protected:
                    raise refusal_error(
                        call, f"writes into a tensor that it is given, or has handed out ({node.target}); write into a copy"
                    )
