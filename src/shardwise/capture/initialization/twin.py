"""Copy a real module onto fake CPU tensors for tracing: the same structure without its data.

Tied tensors stay tied; tensors that share storage without being the same object are separate in the copy.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwise.capture.fakes import Fake, FakeMode
from shardwise.capture.nesting import named_leaves
from shardwise.errors import ModelError


def fake_copy(module: nn.Module, fake_mode: FakeMode, originals: dict[int, torch.Tensor] | None = None) -> nn.Module:
    """Return a deep copy of the module on fake CPU tensors of `fake_mode`. The module is not changed and its data not copied.

    `originals` is filled with the real tensor by `id` of each fake one, plain attributes included: a trace needs them as constants.

    Raises:
        ModelError: something else in the module cannot be copied.
    """
    twins = _FakeCopies(fake_mode, {} if originals is None else originals)
    memo: dict[int, Any] = {id(t): twins.fake_of(t) for t in (*module.parameters(), *module.buffers())}
    # A generator is not copied, since its state is a real tensor; a trace refuses draws from it.
    memo.update({id(g): g for part in module.modules() for _, g in named_leaves(dict(vars(part))) if isinstance(g, torch.Generator)})
    try:
        with twins:
            return copy.deepcopy(module, memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        name = type(module).__name__
        raise ModelError(f"{name} cannot be copied for tracing: {error}; make its attributes copyable, or keep them out of it") from error


class _FakeCopies(TorchFunctionMode):
    """Makes copies of tensors that are no parameters or buffers fake, too."""

    def __init__(self, fake_mode: FakeMode, originals: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self._fake_mode = fake_mode
        self._originals = originals

    def fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor for a real one."""
        if tensor.layout != torch.strided:
            raise ModelError(f"a {tensor.layout} tensor of shape {list(tensor.shape)} cannot be traced; make it dense")
        with self._fake_mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, tensor.requires_grad)
        fake.requires_grad_(tensor.requires_grad)
        self._originals[id(fake)] = tensor
        return fake

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle one call of torch's Python interface."""
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self.fake_of(tensor)
            return memo[id(tensor)]
        if func is torch.Tensor.clone and not isinstance(args[0], Fake):  # a parameter in a list is copied by a clone of its data
            return self.fake_of(args[0])
        return func(*args, **(kwargs or {}))
