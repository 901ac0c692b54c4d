"""The one adapter to torch's fake tensors: tensors with shape, dtype and device "cpu" but no memory.

In: torch's private names, each listed once. Out: `Fake`, `fake_mode()`, `forget()`, `NO_FAKE`. Not modelled: fake tensors of other devices.
"""

from __future__ import annotations

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

Fake = FakeTensor
FakeMode = FakeTensorMode
# What a fake tensor raises where only real values can tell the answer: a number, a shape, or an operator without a shape rule.
NO_FAKE = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


def fake_mode() -> FakeTensorMode:
    """A mode of its own: fake tensors of two modes never meet in one operator."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def forget(mode: FakeTensorMode) -> None:
    """Drop the mode's weak references to its tensors: while there is one, `nn.Module.to` and `.double` refuse to swap a parameter."""
    mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
