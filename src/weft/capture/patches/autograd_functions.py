"""User-defined `torch.autograd.Function`s, and reentrant checkpoints.

Torch: a trace records the operators of forward and differentiates those; the user's backward is silently lost.
Wanted: one operator of the graph (`capture/functions`); torch's own functions run unrecorded if that computes the same (checkpoints,
    backwards registered for an operator), and are refused by name if not (hooks of modules, all-reduces, transforms).
Test: tests/torch/capture/test_functions.py
Until: not known
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch.utils.checkpoint import CheckpointFunction

from weft.capture.fakes import put
from weft.capture.functions import BASE, plainly, recorded, recording
from weft.capture.patches.patch import Patch, Trace
from weft.errors import ModelError

# torch.library makes it of an operator's registered backward: it belongs to the operator, which is in the graph.
_OF_AN_OPERATOR = "GeneratedBackwardFor_"
# Saves the inputs of the non-reentrant checkpoint of torch 2.11; later versions need no function for that.
_OF_A_CHECKPOINT = ("torch.utils.checkpoint", "_NoopSaveInputs")


def _apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    if cls.__name__.startswith(_OF_AN_OPERATOR) or (cls.__module__, cls.__name__) == _OF_A_CHECKPOINT:
        return plainly(cls, *args, **kwargs)
    if cls is CheckpointFunction:
        return args[0](*args[2:])  # args[1]: whether random state is preserved
    if cls.__module__.partition(".")[0] == "torch":  # hooks of modules, and functions that all-reduce
        _refuse(cls)
    return recorded(cls, *args, **kwargs)


def _refuse(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> NoReturn:
    raise ModelError(
        f"the model uses {cls.__name__}, whose backward is Python code that a captured graph does not hold; write it with operators and "
        "detach, for example x + (f(x) - x).detach()"
    )


@contextmanager
def _as_operators(trace: Trace) -> Iterator[None]:
    with ExitStack() as stack:
        # Below `Function.apply`, which a module may have saved under another name (`reverse = Reverse.apply`).
        stack.enter_context(put(BASE, "apply", classmethod(_apply)))
        stack.enter_context(put(torch.autograd.function, "custom_function_call", _refuse))  # used by vmap and grad
        stack.enter_context(recording(trace.record))
        yield


PATCH = Patch(while_called=_as_operators)
