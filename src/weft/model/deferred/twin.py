"""A fake twin of a module that has real tensors: the same structure without a copy of its data, for tracing.

In: a module and a fake mode. Out: a copy whose tensors are fake CPU tensors of that mode; tied tensors stay tied.
Not modelled: tensors that share storage without being the same object are separate in the twin.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.errors import ModelError
from weft.model.deferred.fakes import Fake, FakeMode


def fake_copy(module: nn.Module, fake_mode: FakeMode) -> nn.Module:
    """A deep copy of the module on fake CPU tensors of `fake_mode`. The module is not touched and its data not copied.

    Raises:
        ModelError: something else in the module cannot be copied.
    """
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        memo[id(tensor)] = _twin(tensor, fake_mode)
    try:
        with _Twins(fake_mode):
            return copy.deepcopy(module, memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        name = type(module).__name__
        raise ModelError(f"{name} cannot be copied for tracing: {error}; make its attributes copyable, or keep them out of it") from error


def _twin(tensor: torch.Tensor, fake_mode: FakeMode) -> torch.Tensor:
    if tensor.layout != torch.strided:
        raise ModelError(f"a {tensor.layout} tensor of shape {list(tensor.shape)} cannot be traced; make it dense")
    with fake_mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


class _Twins(TorchFunctionMode):
    """Answers copies of tensors that are no parameters or buffers with fake ones too."""

    def __init__(self, fake_mode: FakeMode) -> None:
        super().__init__()
        self._fake_mode = fake_mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer one call of torch's Python interface."""
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = _twin(tensor, self._fake_mode)
            return memo[id(tensor)]
        if func is torch.Tensor.clone and not isinstance(args[0], Fake):  # a parameter in a list copies itself by a clone of its data
            return _twin(args[0], self._fake_mode)
        return func(*args, **(kwargs or {}))
