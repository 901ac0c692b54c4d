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

from shardwise.capture.fakes import DATA_DEPENDENT_ERRORS, patched_attribute
from shardwise.capture.patches.patch import CallHooks, Patch, Trace


def _watch_questions(trace: Trace) -> CallHooks:
    def compared(*_: Any, **__: Any) -> Any:
        return _or_not_implemented(trace.answers.answer_to(object()))

    def is_true(tensor: Tensor) -> Any:
        is_written = tensor._version > 0  # and may be written between two questions
        return _or_not_implemented(trace.answers.answer_to(object() if is_written else tensor)) if tensor.numel() == 1 else NotImplemented

    return CallHooks(
        replacements={Tensor.__bool__: is_true, **dict.fromkeys((Tensor.allclose, torch.allclose, Tensor.equal, torch.equal), compared)}
    )


def _or_not_implemented(answer: bool | None) -> Any:
    return NotImplemented if answer is None else answer


_SYMBOL_IS_TRUE: Callable[[torch.SymBool], bool] = torch.SymBool.__bool__  # a condition on the result of `.item()`


def _symbol_is_true_in_trace(trace: Trace) -> Callable[[torch.SymBool], bool]:
    def is_true(number: torch.SymBool) -> bool:
        try:
            return _SYMBOL_IS_TRUE(number)
        except DATA_DEPENDENT_ERRORS:
            answer = trace.answers.answer_to(number)
            if answer is None:
                raise
            return answer

    return is_true


@contextmanager
def _answer_for_symbols(trace: Trace) -> Iterator[None]:
    """A block in which results of `.item()` can be compared in conditions, and formatted in messages."""
    with ExitStack() as stack:
        stack.enter_context(patched_attribute(torch.SymBool, "__bool__", _symbol_is_true_in_trace(trace)))
        for kind in (torch.SymInt, torch.SymFloat):
            stack.enter_context(patched_attribute(kind, "__format__", lambda number, form: str(number)))
        yield


PATCH = Patch(make_call_hooks=_watch_questions, while_called=_answer_for_symbols)
