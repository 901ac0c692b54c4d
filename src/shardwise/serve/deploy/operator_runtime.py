"""The runtime of an operator: a batched function from requests to answers, made of a variant's `model` or `call`.

A request is a value for each of the operator's inputs, in their order; a value is an array or tensor, a tuple of such, or any result of a
user function. A model receives tensors with one request a row; its output is split into rows on the CPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.capture.capture import forward_arguments
from shardwise.errors import ConfigError, ModelError, UsageError, format_error
from shardwise.serve.placement.workflow import OperatorVariant, WorkflowOperator
from shardwise.zoo.from_file import load_factory
from shardwise.zoo.resolve import resolve
from shardwise.zoo.resolved import ResolvedModel

Request = tuple[Any, ...]
Compute = Callable[[Sequence[Request]], list[Any]]
EXPORT = "export:"


@dataclass(frozen=True)
class OperatorRuntime:
    """`run` answers a batch of requests. `module`: its model, None for a function; `resolved`: the MODEL that built it."""

    run: Compute
    module: nn.Module | None = None
    resolved: ResolvedModel | None = None


def resolve_in_folder(text: str, folder: str) -> str:
    """Return a MODEL or `file.py:name` with the full path if its file is in the workflow's folder.

    >>> resolve_in_folder("resnet-18", "/tmp"), resolve_in_folder("hf:/a/config.json", "/tmp")
    ('resnet-18', 'hf:/a/config.json')
    """
    kind = next((k for k in ("hf:", EXPORT) if text.startswith(k)), "")
    path = Path(folder) / text.removeprefix(kind).partition(".py:")[0]
    file = path if kind else Path(f"{path}.py")
    return f"{kind}{folder}/{text.removeprefix(kind)}" if folder and file.exists() else text


def load_function(text: str, folder: str) -> Callable[..., Any]:
    """Load the function or class of `file.py:name`."""
    return load_factory(resolve_in_folder(text, folder))[1]


def load_operator(op: WorkflowOperator, variant: OperatorVariant, folder: str) -> OperatorRuntime:
    """Load the function or model of a variant, in evaluation mode and with the weights of its factory or folder.

    Raises:
        ConfigError: the variant has neither model nor call. ModelError: it cannot be built.
    """
    where = f"{op.name}.{variant.name}"
    if variant.call:
        return OperatorRuntime(_wrap_function(where, variant.call, folder))
    if not variant.model:
        raise ConfigError(f'{where} has neither model nor call, so it cannot be run; give model = "resnet-18", say')
    name = resolve_in_folder(variant.model, folder)
    if name.startswith(EXPORT):
        module, resolved = _load_exported(name.removeprefix(EXPORT)), None
    else:
        resolved = resolve(name)
        module = resolved.make().eval()
    return OperatorRuntime(lambda requests: split_rows(_run_model(where, module, requests)), module, resolved)


def example_requests(computer: OperatorRuntime, size: int) -> list[Request] | None:
    """Return requests of MODEL's own example batch; None for a function or an exported program."""
    if computer.resolved is None or computer.module is None:
        return None
    batch = forward_arguments(computer.module, computer.resolved.batch(size))
    if isinstance(batch, Mapping):
        batch = tuple(value for name, value in batch.items() if name != "labels")
    tensors = [t for t in (batch if isinstance(batch, tuple | list) else (batch,)) if isinstance(t, Tensor)]
    return [tuple(tensor[i] for tensor in tensors) for i in range(size)]


def stack_inputs(requests: Sequence[Request], module: nn.Module) -> tuple[Tensor, ...]:
    """Stack requests to a module's arguments: tuples are flattened, floats converted to the module's dtype."""
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    flat = [[member for value in request for member in (value if isinstance(value, tuple) else (value,))] for request in requests]
    columns = zip(*flat, strict=True)
    stacked = (torch.stack([torch.as_tensor(np.array(v) if isinstance(v, list) else v) for v in column]) for column in columns)
    return tuple(t.to(dtype) if t.is_floating_point() else t for t in stacked)


def split_rows(output: Any) -> list[Any]:
    """Split a model's output into one value a request, copied so that each can be freed independently."""
    if isinstance(output, Mapping):  # a library's output with named fields
        output = next((output[k] for k in ("logits", "last_hidden_state") if k in output), output)
    if isinstance(output, Tensor):
        return [row.copy() for row in output.detach().float().numpy()] if output.is_floating_point() else list(output.numpy())
    if isinstance(output, tuple | list) and output and all(isinstance(t, Tensor) for t in output):
        return list(zip(*(split_rows(t) for t in output), strict=True))
    raise ModelError(f"a model of a workflow returned {type(output).__name__}; it returns a tensor, or a tuple of tensors, a row a request")


def value_bytes(value: Any) -> int:
    """Bytes of a value's arrays and text, as sent to the next operator."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(value_bytes(v) for v in value.values())
    if isinstance(value, tuple | list):
        return sum(value_bytes(v) for v in value)
    return len(value) if isinstance(value, bytes | str) else 8


def _wrap_function(where: str, call: str, folder: str) -> Compute:
    function: Any = load_function(call, folder)
    if inspect.isclass(function):
        function = function()

    def run(requests: Sequence[Request]) -> list[Any]:
        answers = [function(*request) for request in requests]
        if any(inspect.isawaitable(a) for a in answers):
            raise UsageError(f"{where}: {call} is asynchronous; write a plain function of one request")
        return answers

    return run


def _run_model(where: str, module: nn.Module, requests: Sequence[Request]) -> Any:
    try:
        with torch.inference_mode():
            return module(*stack_inputs(requests, module))
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        shapes = [str(tuple(getattr(v, "shape", ())) or type(v).__name__) for v in requests[0]]
        raise ModelError(f"{where} does not take a request of {', '.join(shapes)}: {format_error(error)[:300]}") from error


def _load_exported(file: str) -> nn.Module:
    try:
        module: nn.Module = torch.export.load(file).module()
    except Exception as error:
        raise ModelError(f"{file} is no program of torch.export: {format_error(error)}; torch.export.save writes one") from error
    return module
