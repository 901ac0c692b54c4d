"""The one adapter to torch's fake tensors (shape, dtype and device "cpu", but no memory), to its traces, its dispatcher and its trees.

In: torch's private names, each listed once, and those that not every version has. Out: `Fake`, `fake_mode()`, `forget()`, `for_real()`, a
block without fake tensors and tracing, `without_lines()`, `NO_FAKE`, `DATA_DEPENDENT`, `DispatchMode`, `tree_flatten`, `tree_map`.
Not modelled: fake tensors of other devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import _subclasses
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx import config as fx_config
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _python_dispatch, _pytree
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._python_dispatch import _disable_current_modes as for_real
from torch.utils._pytree import tree_flatten, tree_map

__all__ = [
    "DATA_DEPENDENT",
    "NAMES",
    "NO_FAKE",
    "DispatchMode",
    "Fake",
    "FakeMode",
    "fake_mode",
    "for_real",
    "forget",
    "tree_flatten",
    "tree_map",
    "without_lines",
]

# (owner, attribute) of every private name used here, for the test.
NAMES: tuple[tuple[Any, str], ...] = (
    (_subclasses, "fake_tensor"),
    (fake_tensor, "FakeTensor"),
    (fake_tensor, "FakeTensorMode"),
    (fake_tensor, "DataDependentOutputException"),
    (fake_tensor, "DynamicOutputShapeException"),
    (fake_tensor, "UnsupportedOperatorException"),
    (symbolic_shapes, "GuardOnDataDependentSymNode"),
    (_python_dispatch, "TorchDispatchMode"),
    (_python_dispatch, "_disable_current_modes"),
    (_pytree, "tree_flatten"),
    (_pytree, "tree_map"),
)

Fake = FakeTensor
FakeMode = FakeTensorMode
# What a fake tensor raises where only real values can tell the answer: a number, a shape, or an operator without a shape rule.
NO_FAKE = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
# What a trace raises where Python code asks a tensor for a value, or a shape follows values.
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


NO_LINES = "do_not_emit_stack_traces"  # since torch 2.12


@contextmanager
def without_lines() -> Iterator[None]:
    """Traces inside do not record the lines of code that every operator comes from. Those of torch 2.11 always do: it has no such switch."""
    said = getattr(fx_config, NO_LINES, None)
    if said is None:
        yield
        return
    setattr(fx_config, NO_LINES, True)
    try:
        yield
    finally:
        setattr(fx_config, NO_LINES, said)


def fake_mode() -> FakeTensorMode:
    """A mode of its own: fake tensors of two modes never meet in one operator."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def forget(mode: FakeTensorMode) -> None:
    """Drop the mode's weak references to its tensors: while there is one, `nn.Module.to` and `.double` refuse to swap a parameter."""
    mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
