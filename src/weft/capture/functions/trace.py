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

from weft.capture.apart import apart
from weft.capture.fakes import fake_mode
from weft.capture.functional import Memory, make_functional
from weft.capture.functions.recording import Call, refusal, told
from weft.capture.fx_reader import Aliased, Reader, exists, spec_of
from weft.capture.python_randomness import python_randomness
from weft.errors import ModelError
from weft.model.graph import Operator, Tensor

_LITERALS = ("lift_fresh", "lift_fresh_copy")
_ONE_AT_A_TIME = Lock()  # torch.fx has its patches in a global
_MOST = 256  # elements of a tensor literal in the function's code


@dataclass(frozen=True)
class Joint:
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
    shared: tuple[int, ...]


def joint(call: Call, specs: tuple[Tensor, ...], learns: tuple[bool, ...], only: int = -1) -> Joint:
    """Trace a call on tensors like `specs`; `requires_grad`: of each input; `only_output`: the one output with a gradient, -1 for all.

    Raises:
        ModelError: the function does something that a graph of operators does not represent; the message names it.
    """
    from weft.capture.kept.written import packed, unpacked

    traced: Joint = apart(lambda: _followed(call, specs, learns, only), packed, unpacked)
    return traced


def _followed(call: Call, specs: tuple[Tensor, ...], learns: tuple[bool, ...], only: int) -> Joint:
    before = python_randomness()
    try:
        with _ONE_AT_A_TIME:
            traced = _joint(call, specs, learns, only)
    except ModelError:
        raise
    except Exception as error:
        raise refusal(call, f"cannot be followed through its forward and backward ({told(error)})") from error
    if python_randomness() != before:
        raise refusal(call, "draws from Python's or numpy's random numbers, which a captured graph would fix; use torch's")
    return traced


def _tensors_of(out: Any) -> list[torch.Tensor]:
    return [y for y in (out if isinstance(out, tuple) else (out,)) if isinstance(y, torch.Tensor)]


def _joint(call: Call, specs: tuple[Tensor, ...], learns: tuple[bool, ...], only: int) -> Joint:
    def leaves(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [x.detach().requires_grad_(needs_grad) for x, needs_grad in zip(tensors, learns, strict=True)]

    with fake_mode(), torch.enable_grad():
        inputs = [torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for t in specs]
        outs = _tensors_of(call(leaves(inputs)))
        seeded = [y.requires_grad and only in (-1, i) for i, y in enumerate(outs)]
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
    return _read(call, module, len(specs), seeded)


def _read(call: Call, module: Any, num_inputs: int, seeded: list[bool]) -> Joint:
    reader = Reader()
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    literals: dict[str, object] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            if any(str(user.target).split(".")[1:2] not in ([x] for x in _LITERALS) for user in node.users):
                raise refusal(call, "reads a tensor that is none of its arguments; give it as an argument")
            literals[node.name] = _values(getattr(module, node.target))
        if node.op in ("placeholder", "get_attr"):
            value = node.meta.get("val")
            reader.tensors[node.name] = spec_of(value if value is not None else getattr(module, node.target))
            reader.remember(node.name, value)
    results = next(node.args[0] for node in module.graph.nodes if node.op == "output")
    num_outputs = len(seeded)
    seeds = [node.name for node in placeholders[num_inputs:]]
    in_backward = _start(module, set(seeds))
    _refuse_writes(call, module, placeholders, results[:num_outputs], in_backward)
    operators: list[Operator] | None
    try:
        reader.read(module.graph, module)
        aliasing = Memory(reader.storages(), frozenset(), frozenset(), frozenset())
        backward = {op.name for op in reader.operators if op.name in in_backward}
        functional = make_functional(reader.operators, reader.tensors, aliasing, exists)
        operators, rename = functional if functional is not None else (None, {})
    except (Aliased, ModelError):
        operators, rename, backward = None, {}, set()

    def value_of(node: Any) -> str | None:
        return None if node is None else rename.get(reader.name(node.name), reader.name(node.name))

    num_forward = 0
    if operators is not None:
        wanted = {v for v in map(value_of, results) if v is not None}
        needed = []
        for op in reversed(operators):
            if wanted.intersection(op.outputs):
                wanted.update(op.inputs)
                needed.append(op)
        operators = needed[::-1]
        num_forward = next((i for i, op in enumerate(operators) if op.name in backward), len(operators))
    seed_names = iter(seeds)
    storages = reader.storages()
    inputs = tuple(node.name for node in placeholders[:num_inputs])
    input_of_storage = {storages[v]: i for i, v in reversed(list(enumerate(inputs)))}
    outputs = tuple(str(value_of(node)) for node in results[:num_outputs])
    return Joint(
        inputs,
        outputs,
        tuple(next(seed_names) if is_seeded else None for is_seeded in seeded),
        tuple(value_of(node) for node in results[num_outputs:]),
        None if operators is None else tuple(operators),
        num_forward,
        dict(reader.tensors),
        literals,
        tuple(input_of_storage.get(storages.get(reader.name(node.name), -1), -1) for node in results[:num_outputs]),
    )


def _values(held: torch.Tensor) -> object:
    """Return the value of a tensor literal; without one, an object that equals nothing else."""
    constant = getattr(held, "constant", None)  # of a fake tensor
    held = held if constant is None else constant
    try:
        return (str(held.dtype), held.tolist()) if held.numel() <= _MOST else object()
    except Exception:
        return object()


def _start(module: Any, seeds: set[str]) -> set[str]:
    """Return the names of backward's operators: all from the first that reads a gradient of an output."""
    names: set[str] = set()
    for node in module.graph.nodes:
        if names or any(n.name in seeds for n in node.all_input_nodes):
            names.add(node.name)
    return names


def _refuse_writes(call: Call, module: Any, placeholders: list[Any], outputs: list[Any], backward: set[str]) -> None:
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
            raise refusal(call, f"communicates with other ranks ({node.target})")
        for spec, arg in zip(node.target._schema.arguments, node.args, strict=False):
            written = spec.alias_info is not None and spec.alias_info.is_write
            for item in arg if isinstance(arg, tuple | list) else (arg,):
                protected = input_memory | (output_memory if node.name in backward else set())
                if written and isinstance(item, torch.fx.Node) and memory(item) in protected:
                    raise refusal(call, f"writes into a tensor that it is given, or has handed out ({node.target}); write into a copy")
