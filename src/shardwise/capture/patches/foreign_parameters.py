"""Parameters outside of the model.

Torch: a trace has them as constants.
Wanted: a parameter of another module, or one that the model makes in forward, is refused by name: no optimizer would train it.
Test: tests/torch/capture/test_capture.py::test_a_parameter_that_is_none_of_the_models_is_refused
Until: not known
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardwise.capture.patches.patch import CallHooks, Patch, Trace
from shardwise.capture.patches.tensor_data import ASSIGNS, READS
from shardwise.errors import ModelError

CREATES_PARAMETER = (
    "the model makes {} while it runs, which an optimizer that was made before does not know; let it make and choose its parts when it is "
    "constructed"
)
_READ_GRAD_FN = Tensor.grad_fn.__get__  # type: ignore[union-attr]  # read by a module when a parameter is registered
_NOT_A_READ = (READS, ASSIGNS, _READ_GRAD_FN)


def _watch_parameters(trace: Trace) -> CallHooks:
    registered = {id(p) for p in trace.model.parameters()}
    foreign: list[Tensor] = []

    def before(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func in _NOT_A_READ:
            return
        for x in (*args, *kwargs.values()):
            if isinstance(x, nn.Parameter) and x.requires_grad and id(x) not in registered and not _owns_parameter(trace.model, x):
                if any(x is parameter for parameter in foreign):
                    raise ModelError(CREATES_PARAMETER.format(f"a parameter of shape {list(x.shape)}"))
                raise ModelError(
                    f"a parameter of shape {list(x.shape)} is read that is none of the model's, so that it would not be trained; make it "
                    "(and the loss, where that reads it) a part of the model"
                )
        if func is Tensor.requires_grad_:
            foreign.append(args[0])  # a traced tensor becomes a parameter here

    return CallHooks(before=before)


def _owns_parameter(model: nn.Module, parameter: Tensor) -> bool:
    """Return whether the model has this parameter now: it may have replaced one in forward."""
    return any(p is parameter for p in model.parameters())


PATCH = Patch(make_call_hooks=_watch_parameters)
