"""Run graphs by code that calls torch's operators directly.

In: a graph module, of which others may be parts. Out: a function of its inputs. The code that `torch.fx` writes finds each operator by four
names at every call, and calls it through a frame of Python: between kernels of a few microseconds that is a tenth of forward. Here
operators are names of the function's own. What is computed, and in which order, stays.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import fx, nn

from shardwise.world import private

_OPERATOR_CALL = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)\(")


def call_operators_directly(module: nn.Module) -> Callable[..., Any]:
    """Let the graphs in a module, which have been compiled neither by torch nor by others, call operators directly. Returns what runs it: a
    graph's function, or the module itself, which calls its hooks."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            _replace_code(part)
    return module.forward if isinstance(module, fx.GraphModule) and not any(private.module_tables(module)[1]) else module


def _replace_code(module: fx.GraphModule) -> None:
    """Replace the function of a graph, which its class has for it alone."""
    kind: Any = type(module)
    if getattr(kind.forward, "calls_directly", False):
        return
    names: dict[str, Any] = dict(kind.forward.__globals__)

    def name_directly(found: re.Match[str]) -> str:
        call = private.direct_call_of(reduce(getattr, found.groups(), torch.ops))
        if call is None:
            return found.group()
        name = f"call_{'_'.join(found.groups())}"
        names[name] = call
        return f"{name}("

    source = _OPERATOR_CALL.sub(name_directly, module.code)
    exec(compile(source, kind.forward.__code__.co_filename, "exec", dont_inherit=True), names)
    kind.forward = names.pop("forward")
    kind.forward.calls_directly = True
