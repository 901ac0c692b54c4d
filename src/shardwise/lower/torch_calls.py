"""Calls of torch's operators as a graph has them: the operator of a name, its arguments, and the autocast under which it runs.

In: an operator of a graph and its input tensors, or nodes that stand for them. Out: callables that nodes of a local graph may name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.model.graph import Arg, Operator, Ref, Word
from shardwise.world import private


def torch_operator(target: str) -> Callable[..., Any]:
    """Return torch's operator of a name such as "aten.linear.default"."""
    namespace, packet, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)  # type: ignore[no-any-return]


def _lower_argument(arg: Arg, nodes: Iterator[Any], device: torch.device) -> Any:
    """Return an argument of an operator for torch. `nodes`: nodes of its input tensors, in order."""
    if isinstance(arg, Ref):
        return next(nodes)
    if isinstance(arg, tuple):
        return [_lower_argument(a, nodes, device) for a in arg]
    if isinstance(arg, Word):
        return device if arg.kind == "device" else getattr(torch, arg.name)
    return arg


def lower_arguments(op: Operator, inputs: Iterable[Any], device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """Return an operator's arguments for torch, positional and named. `inputs`: its input tensors, or nodes for them, in order."""
    values = iter(inputs)
    return [_lower_argument(a, values, device) for a in op.args], {name: _lower_argument(a, values, device) for name, a in op.kwargs}


def describe_constants(arguments: tuple[Arg, ...]) -> str:
    """Return an operator's arguments as text, without the names of its operands."""
    return repr([describe_constants(a) if isinstance(a, tuple) else "" if isinstance(a, Ref) else a for a in arguments])


def call_under_autocast(device: str, dtype: torch.dtype, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call under an autocast of the model's own."""
    with torch.autocast(device, dtype):
        return target(*args, **kwargs)


def call_in_full_precision(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call without autocast, which the model switches off."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        return target(*args, **kwargs)


def call_in_operand_dtype(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call without autocast if all floating-point operands have one dtype, and under that of the stage otherwise."""
    operands = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
    if len({x.dtype for x in operands}) != 1:
        return target(*args, **kwargs)
    with torch.autocast(operands[0].device.type, enabled=False):
        return target(*args, **kwargs)


def called_function(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that bound arguments are added to."""
    return getattr(target, "called", target)


def function_called_by(node: fx.Node) -> Callable[..., Any]:
    """Return the operator or function that a node calls, without bound arguments and autocast regions."""
    target: Any = node.args[0] if node.target in (call_in_full_precision, call_in_operand_dtype) else node.target
    return called_function(target)


def is_operator_call(node: fx.Node) -> bool:
    """Return whether a node calls an operator of torch's, under the autocast of its stage or in its operands' dtype."""
    target = node.args[0] if node.target is call_in_operand_dtype else node.target
    return node.op == "call_function" and private.is_operator(target)
