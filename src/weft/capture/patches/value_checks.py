"""Value checks: `if labels.max() >= n: raise ...`, `assert x.min().item() > 0`, Python branches on a tensor.

Torch: a trace fails there, whatever the branch does.
Wanted: checks are skipped; `capture/branch_answers` defines a check.
Test: tests/torch/model/test_checks.py::test_checks_are_no_operators
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
        is_written = tensor._version > 0  # and may be written between two questions
        return _or_torchs(trace.answers.of(object() if is_written else tensor)) if tensor.numel() == 1 else NotImplemented

    return Watch(calls={Tensor.__bool__: is_true, **dict.fromkeys((Tensor.allclose, torch.allclose, Tensor.equal, torch.equal), compared)})


def _or_torchs(answer: bool | None) -> Any:
    return NotImplemented if answer is None else answer


_ASK: Callable[[torch.SymBool], bool] = torch.SymBool.__bool__  # a condition on the result of `.item()`


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
    """A block in which results of `.item()` can be compared in conditions, and formatted in messages."""
    with ExitStack() as stack:
        stack.enter_context(put(torch.SymBool, "__bool__", _asked_in(trace)))
        for kind in (torch.SymInt, torch.SymFloat):
            stack.enter_context(put(kind, "__format__", lambda number, form: str(number)))
        yield


PATCH = Patch(watch=_watch, while_called=_numbers)
