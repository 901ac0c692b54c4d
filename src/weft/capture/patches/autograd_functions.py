"""Functions with a backward of the user's own (`torch.autograd.Function`), and reentrant checkpoints.

Torch: a trace takes the operators of forward and differentiates those; the backward that the user wrote is lost without a word.
Wanted: one operator of the graph (`capture/functions`); what torch builds on such functions is run plainly where that computes the same
    (checkpoints, backwards registered for an operator), and refused by name where not (hooks of modules, sums over ranks, transforms).
Test: tests/torch/test_functions.py
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

# What torch.library makes of an operator's registered backward: it belongs to the operator, which the graph holds.
_OF_AN_OPERATOR = "GeneratedBackwardFor_"
# How the checkpoint of torch 2.11 that is not reentrant holds on to its inputs; later ones need no function for that.
_OF_A_CHECKPOINT = ("torch.utils.checkpoint", "_NoopSaveInputs")


def _apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    if cls.__name__.startswith(_OF_AN_OPERATOR) or (cls.__module__, cls.__name__) == _OF_A_CHECKPOINT:
        return plainly(cls, *args, **kwargs)
    if cls is CheckpointFunction:
        return args[0](*args[2:])  # after it comes whether random state is kept
    if cls.__module__.partition(".")[0] == "torch":  # hooks of modules, and what sums over ranks by itself
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
        # Below `Function.apply`, which a module may have kept under another name (`reverse = Reverse.apply`).
        stack.enter_context(put(BASE, "apply", classmethod(_apply)))
        stack.enter_context(put(torch.autograd.function, "custom_function_call", _refuse))  # by which vmap and grad call one
        stack.enter_context(recording(trace.record))
        yield


PATCH = Patch(while_called=_as_operators)
