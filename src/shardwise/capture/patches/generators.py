"""Random generators that a model passes to torch.

Torch: a trace cannot have a `torch.Generator` as an argument, torch's default one included.
Wanted: draws from the default generator without the argument; a generator of the model, whose state advances with every call, is refused.
Test: tests/torch/house/test_first_contact.py
Until: not known
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.capture.patches.patch import CallHooks, Patch, Trace
from shardwise.errors import ModelError


def _watch_generators(trace: Trace) -> CallHooks:
    def before(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for key in [key for key, x in kwargs.items() if x is torch.default_generator]:
            del kwargs[key]
        generator = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)), None)
        if generator is not None and generator.device.type != "meta":
            raise ModelError(
                f"the model draws from {_describe_generator(trace.model, generator)} in forward, whose state moves on with every call; "
                "a captured graph draws what belongs to the seed and the step: leave generator= out, or draw beside the model"
            )

    return CallHooks(before=before)


def _describe_generator(model: nn.Module, generator: torch.Generator) -> str:
    """Return a description of a generator for a message."""
    for path, module in model.named_modules():
        for key, x in vars(module).items():
            if x is generator:
                return f"its torch.Generator {path}.{key}".replace(" .", " ")
    return "a torch.Generator of its own"


PATCH = Patch(make_call_hooks=_watch_generators)
