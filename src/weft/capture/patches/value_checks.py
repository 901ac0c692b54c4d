"""`if labels.max() >= n: raise ...`, `assert x.min().item() > 0`: Python asks whether a tensor is true.

Torch: a trace ends there, whatever hangs on it.
Wanted: checks are passed over; see `capture/answers`, which says what a check is.
Test: tests/torch/test_checks.py::test_checks_are_no_operators
Until: not known
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from weft.capture.fakes import DATA_DEPENDENT, put
from weft.capture.patches.patch import Patch, Trace, Watch


def _watch(trace: Trace) -> Watch:
    def compared(*_: Any, **__: Any) -> Any:
        return _or_torchs(trace.answers.of(object()))

    def is_true(tensor: Tensor) -> Any:
        is_written = tensor._version > 0  # and may be between two questions
        return _or_torchs(trace.answers.of(object() if is_written else tensor)) if tensor.numel() == 1 else NotImplemented

    return Watch(calls={Tensor.__bool__: is_true, **dict.fromkeys((Tensor.allclose, torch.allclose, Tensor.equal, torch.equal), compared)})


def _or_torchs(answer: bool | None) -> Any:
    return NotImplemented if answer is None else answer


_ASK: Callable[[torch.SymBool], bool] = torch.SymBool.__bool__  # of a number that `.item()` gives


def _asked_in(trace: Trace) -> Callable[[torch.SymBool], bool]:
    def is_true(number: torch.SymBool) -> bool:
        try:
            return _ASK(number)
        except DATA_DEPENDENT:
            answer = trace.answers.of(number)
            if answer is None:
                raise
            return answer

    return is_true


@contextmanager
def _numbers(trace: Trace) -> Iterator[None]:
    """Of what `.item()` gives it can be asked whether it is large, and words may hold it."""
    with ExitStack() as stack:
        stack.enter_context(put(torch.SymBool, "__bool__", _asked_in(trace)))
        for kind in (torch.SymInt, torch.SymFloat):
            stack.enter_context(put(kind, "__format__", lambda number, form: str(number)))
        yield


PATCH = Patch(watch=_watch, while_called=_numbers)
