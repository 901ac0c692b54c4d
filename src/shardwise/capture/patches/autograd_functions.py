"""User-defined `torch.autograd.Function`s, and reentrant checkpoints.

Torch: a trace records the operators of forward and differentiates those; the user's backward is silently lost.
Wanted: one operator of the graph (`capture/autograd_functions`); torch's own functions run unrecorded if that computes the same
    (checkpoints,
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

from shardwise.capture.autograd_functions import FUNCTION_BASE, apply_recorded, apply_unrecorded, recording_calls
from shardwise.capture.fakes import patched_attribute
from shardwise.capture.patches.patch import Patch, Trace
from shardwise.errors import ModelError

# torch.library makes it of an operator's registered backward: it belongs to the operator, which is in the graph.
_REGISTERED_BACKWARD_PREFIX = "GeneratedBackwardFor_"
# Saves the inputs of the non-reentrant checkpoint of torch 2.11; later versions need no function for that.
_CHECKPOINT_FUNCTION = ("torch.utils.checkpoint", "_NoopSaveInputs")


def _apply_as_operator(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    if cls.__name__.startswith(_REGISTERED_BACKWARD_PREFIX) or (cls.__module__, cls.__name__) == _CHECKPOINT_FUNCTION:
        return apply_unrecorded(cls, *args, **kwargs)
    if cls is CheckpointFunction:
        return args[0](*args[2:])  # args[1]: whether random state is preserved
    if cls.__module__.partition(".")[0] == "torch":  # hooks of modules, and functions that all-reduce
        _refuse_function(cls)
    return apply_recorded(cls, *args, **kwargs)


def _refuse_function(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> NoReturn:
    raise ModelError(
        f"the model uses {cls.__name__}, whose backward is Python code that a captured graph does not hold; write it with operators and "
        "detach, for example x + (f(x) - x).detach()"
    )


@contextmanager
def _as_operators(trace: Trace) -> Iterator[None]:
    with ExitStack() as stack:
        # Below `Function.apply`, which a module may have saved under another name (`reverse = Reverse.apply`).
        stack.enter_context(patched_attribute(FUNCTION_BASE, "apply", classmethod(_apply_as_operator)))
        stack.enter_context(patched_attribute(torch.autograd.function, "custom_function_call", _refuse_function))  # used by vmap and grad
        stack.enter_context(recording_calls(trace.record))
        yield


PATCH = Patch(while_called=_as_operators)
