"""A call of a user's own `torch.autograd.Function` as one operator of what is traced, in place of the operators of its forward.

In: the class and what `apply` is called with. Out: a `Call`, and the operator `weft::function` in the trace, which has its number.
`torch.export` alone would take the operators of forward, differentiate those, and lose the backward that the user wrote.
Not modelled: tensors inside of lists or dicts, to which autograd gives no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.capture.fakes import DATA_DEPENDENT, NO_FAKE, tree_flatten
from weft.errors import ModelError
from weft.model.graph import Slot

BASE: Any = torch.autograd.Function.__mro__[1]  # from which every function has `apply`, also under another name that a module gave it
_LITERALS = (bool, int, float, complex, str, bytes, torch.dtype, torch.layout, torch.memory_format, torch.device, type(None))


@dataclass(frozen=True)
class Call:
    """`cls.apply(*arguments, **keywords)` with a `Slot` in place of each tensor; `key` is what two equal calls have alike."""

    cls: Any
    arguments: tuple[object, ...] = field(compare=False)
    keywords: tuple[tuple[str, object], ...] = field(compare=False)
    key: tuple[object, ...]

    def __call__(self, tensors: list[Tensor]) -> Any:
        """Call it with these tensors, as torch has it."""
        args, kwargs = self.given(tensors)
        return plainly(self.cls, *args, **kwargs)

    def given(self, tensors: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """What it is called with, with these tensors in their places."""
        args = [tensors[a.number] if isinstance(a, Slot) else a for a in self.arguments]
        return args, {k: tensors[a.number] if isinstance(a, Slot) else a for k, a in self.keywords}


class Record:
    """The calls of one trace, in order, what each of them returned (a tensor's number, or what else it is), parameters replaced, and
    buffers that the model has made in its call."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.returned: list[Any] = []
        self.replaced: list[str] = []  # names of parameters in whose place the model put others
        self.buffers: dict[str, Any] = {}  # buffers by name


_RECORD: ContextVar[Record | None] = ContextVar("weft_functions", default=None)


@contextmanager
def recording(record: Record) -> Iterator[None]:
    """While something is traced: calls of the operator belong to this record."""
    token = _RECORD.set(record)
    try:
        yield
    finally:
        _RECORD.reset(token)


def plainly(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`apply` as torch has it."""
    return super(BASE, cls).apply(*args, **kwargs)


def recorded(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """What `cls.apply` returns, in a trace that holds it as one operator.

    Raises:
        ModelError: what it is called with cannot be written down, by name.
    """
    record = _RECORD.get()
    assert record is not None, "no trace is under way"
    tensors: list[Tensor] = []

    def place(a: Any) -> object:
        if isinstance(a, Tensor):
            tensors.append(a)
            return Slot(len(tensors) - 1)
        _check(cls, a)
        return a

    arguments = tuple(place(a) for a in args)
    keywords = tuple((k, place(a)) for k, a in kwargs.items())
    key = (*(_word(a) for a in arguments), *((k, _word(a)) for k, a in keywords))
    record.calls.append(Call(cls, arguments, keywords, key))
    record.returned.append(None)
    number = len(record.calls) - 1
    if not tensors:
        raise ModelError(f"the model calls {cls.__name__} without a tensor; give it what it computes with")
    outputs = torch.ops.weft.function(tensors, number)
    returned = record.returned[number]
    if isinstance(returned, tuple):
        return tuple(outputs[r.number] if isinstance(r, Slot) else r for r in returned)
    return outputs[0]


def _check(cls: Any, a: Any) -> None:
    for item in tree_flatten(a)[0]:
        owner = getattr(item, "__self__", item)
        if isinstance(owner, nn.Module) or isinstance(item, Tensor):
            what = f"a module ({type(owner).__name__})" if isinstance(owner, nn.Module) else "a tensor inside of another argument"
            raise ModelError(
                f"the model gives {cls.__name__}, a function with a backward of its own, {what}, of which a captured graph would not know "
                "what is read; give it each tensor as an argument"
            )
        if hasattr(item, "__array__") and not isinstance(item, _LITERALS):
            raise ModelError(f"the model gives {cls.__name__} an array ({type(item).__name__}); give it a tensor")


def _word(a: Any) -> object:
    """Something that can be compared and hashed, the same for what is the same; objects that are no values are themselves alone."""
    if isinstance(a, Slot):
        return a
    if isinstance(a, tuple | list):
        return (type(a).__name__, *(_word(item) for item in a))
    if isinstance(a, dict):
        return ("dict", *((k, _word(v)) for k, v in a.items()))
    if isinstance(a, _LITERALS):
        return (type(a).__name__, repr(a) if isinstance(a, float | complex) else a)
    return (type(a).__name__, id(a))


@torch.library.custom_op("weft::function", mutates_args=())
def _function(tensors: list[Tensor], number: int) -> list[Tensor]:
    raise AssertionError("a graph that was traced calls the function itself")


def _made(tensors: list[Tensor], number: int) -> list[Tensor]:
    record = _RECORD.get()
    assert record is not None
    call = record.calls[number]
    try:
        with torch.no_grad():
            out = call(list(tensors))
    except (*NO_FAKE, *DATA_DEPENDENT) as error:
        raise refusal(call, f"asks in forward for what only values can tell ({type(error).__name__}), as item() does") from error
    except ModelError:
        raise
    except Exception as error:
        raise refusal(call, f"cannot be run on tensors without values ({told(error)})") from error
    outputs: list[Tensor] = []

    def place(y: Any) -> Any:
        if isinstance(y, Tensor):
            outputs.append(torch.empty_like(y))
            return Slot(len(outputs) - 1)
        return y

    record.returned[number] = tuple(place(y) for y in out) if isinstance(out, tuple) else place(out)
    if not outputs:
        raise refusal(call, "returns no tensor")
    if any(not isinstance(n, int) for y in outputs for n in y.shape):
        raise refusal(call, "makes tensors whose shape follows values, as a mask does that picks rows; keep shapes fixed")
    return outputs


def refusal(call: Call, why: str) -> ModelError:
    """What says that a function cannot be captured."""
    return ModelError(f"the model uses {call.cls.__name__}, a function with a backward of its own, that {why}")


def told(error: Exception) -> str:
    """The first line of what an error says."""
    return (str(error).strip().split("\n")[0] or type(error).__name__)[:160]


def _never(ctx: Any, *grads: Any) -> Any:
    raise AssertionError("a trace runs no backward")


_function.register_fake(_made)
_function.register_autograd(_never, setup_context=lambda ctx, inputs, output: None)
