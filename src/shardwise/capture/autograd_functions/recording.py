"""Record calls of a user's `torch.autograd.Function` as one operator of the trace, in place of the operators of its forward.

`apply` becomes a `FunctionCall`, and the operator `shardwise::function` in the trace, which has its number. `torch.export` alone would
trace and differentiate the operators of forward, and lose the user's backward. Tensors inside of lists or dicts, to which autograd gives no
gradient, are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.capture.fakes import DATA_DEPENDENT_ERRORS, FAKE_TENSOR_ERRORS, tree_flatten
from shardwise.errors import ModelError
from shardwise.model.graph import Slot

# The owner of `apply` of every function, also if a module saved it under another name.
FUNCTION_BASE: Any = torch.autograd.Function.__mro__[1]
_LITERALS = (bool, int, float, complex, str, bytes, torch.dtype, torch.layout, torch.memory_format, torch.device, type(None))


@dataclass(frozen=True)
class FunctionCall:
    """`cls.apply(*arguments, **keywords)` with a `Slot` in place of each tensor; `key` compares calls."""

    cls: Any
    arguments: tuple[object, ...] = field(compare=False)
    keywords: tuple[tuple[str, object], ...] = field(compare=False)
    key: tuple[object, ...]

    def __call__(self, tensors: list[Tensor]) -> Any:
        """Call the function with these tensors by torch's own `apply`."""
        args, kwargs = self.arguments_with(tensors)
        return apply_unrecorded(self.cls, *args, **kwargs)

    def arguments_with(self, tensors: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments and keywords with these tensors in their slots."""
        args = [tensors[a.number] if isinstance(a, Slot) else a for a in self.arguments]
        return args, {k: tensors[a.number] if isinstance(a, Slot) else a for k, a in self.keywords}


class TraceRecord:
    """Record of one trace: function calls in order, their results (a `Slot` for a tensor, any other value itself), replaced parameters, and
    buffers that the model made in its call."""

    def __init__(self) -> None:
        self.calls: list[FunctionCall] = []
        self.returned: list[Any] = []
        self.replaced_parameters: list[str] = []  # names of parameters that the model replaced
        self.buffers: dict[str, Any] = {}  # buffers by name


_RECORD: ContextVar[TraceRecord | None] = ContextVar("shardwise_functions", default=None)


@contextmanager
def recording_calls(record: TraceRecord) -> Iterator[None]:
    """A block of a trace, in which calls of the operator are added to this record."""
    token = _RECORD.set(record)
    try:
        yield
    finally:
        _RECORD.reset(token)


def apply_unrecorded(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Call torch's own `apply`."""
    return super(FUNCTION_BASE, cls).apply(*args, **kwargs)


def apply_recorded(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the result of `cls.apply`, recorded in the trace as one operator.

    Raises:
        ModelError: an argument cannot be recorded; the message names it.
    """
    record = _RECORD.get()
    assert record is not None, "no trace is under way"
    tensors: list[Tensor] = []

    def to_slot(a: Any) -> object:
        if isinstance(a, Tensor):
            tensors.append(a)
            return Slot(len(tensors) - 1)
        _check_argument(cls, a)
        return a

    arguments = tuple(to_slot(a) for a in args)
    keywords = tuple((k, to_slot(a)) for k, a in kwargs.items())
    key = (*(_comparison_key(a) for a in arguments), *((k, _comparison_key(a)) for k, a in keywords))
    record.calls.append(FunctionCall(cls, arguments, keywords, key))
    record.returned.append(None)
    number = len(record.calls) - 1
    if not tensors:
        raise ModelError(f"the model calls {cls.__name__} without a tensor; give it what it computes with")
    outputs = torch.ops.shardwise.function(tensors, number)
    returned = record.returned[number]
    if isinstance(returned, tuple):
        return tuple(outputs[r.number] if isinstance(r, Slot) else r for r in returned)
    return outputs[0]


def _check_argument(cls: Any, a: Any) -> None:
    for item in tree_flatten(a)[0]:
        owner = getattr(item, "__self__", item)
        if isinstance(owner, nn.Module) or isinstance(item, Tensor):
            kind = f"a module ({type(owner).__name__})" if isinstance(owner, nn.Module) else "a tensor inside of another argument"
            raise ModelError(
                f"the model gives {cls.__name__}, a function with a backward of its own, {kind}, of which a captured graph would not know "
                "what is read; give it each tensor as an argument"
            )
        if hasattr(item, "__array__") and not isinstance(item, _LITERALS):
            raise ModelError(f"the model gives {cls.__name__} an array ({type(item).__name__}); give it a tensor")


def _comparison_key(a: Any) -> object:
    """Return a hashable key, equal for equal plain values; other objects are compared by identity."""
    if isinstance(a, Slot):
        return a
    if isinstance(a, tuple | list):
        return (type(a).__name__, *(_comparison_key(item) for item in a))
    if isinstance(a, dict):
        return ("dict", *((k, _comparison_key(v)) for k, v in a.items()))
    if isinstance(a, _LITERALS):
        return (type(a).__name__, repr(a) if isinstance(a, float | complex) else a)
    return (type(a).__name__, id(a))


@torch.library.custom_op("shardwise::function", mutates_args=())
def _function_operator(tensors: list[Tensor], number: int) -> list[Tensor]:
    raise AssertionError("a graph that was traced calls the function itself")


def _fake_outputs(tensors: list[Tensor], number: int) -> list[Tensor]:
    record = _RECORD.get()
    assert record is not None
    call = record.calls[number]
    try:
        with torch.no_grad():
            out = call(list(tensors))
    except (*FAKE_TENSOR_ERRORS, *DATA_DEPENDENT_ERRORS) as error:
        raise refusal_error(call, f"reads values of tensors in forward ({type(error).__name__}), as item() does") from error
    except ModelError:
        raise
    except Exception as error:
        raise refusal_error(call, f"cannot be run on tensors without values ({first_line_of(error)})") from error
    outputs: list[Tensor] = []

    def to_slot(y: Any) -> Any:
        if isinstance(y, Tensor):
            outputs.append(torch.empty_like(y))
            return Slot(len(outputs) - 1)
        return y

    record.returned[number] = tuple(to_slot(y) for y in out) if isinstance(out, tuple) else to_slot(out)
    if not outputs:
        raise refusal_error(call, "returns no tensor")
    if any(not isinstance(n, int) for y in outputs for n in y.shape):
        raise refusal_error(call, "makes tensors whose shape follows values, as a mask does that picks rows; keep shapes fixed")
    return outputs


def refusal_error(call: FunctionCall, why: str) -> ModelError:
    """Make the error for a function that cannot be captured."""
    return ModelError(f"the model uses {call.cls.__name__}, a function with a backward of its own, that {why}")


def first_line_of(error: Exception) -> str:
    """Return the first line of an error message."""
    return (str(error).strip().split("\n")[0] or type(error).__name__)[:160]


def _refuse_backward(ctx: Any, *grads: Any) -> Any:
    raise AssertionError("a trace runs no backward")


_function_operator.register_fake(_fake_outputs)
_function_operator.register_autograd(_refuse_backward, setup_context=lambda ctx, inputs, output: None)
