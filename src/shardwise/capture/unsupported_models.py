"""Refuse models that cannot be parallelized, before they are called: parameters with gradient hooks, TorchScript modules."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.errors import ModelError


def refuse_hooks(model: nn.Module) -> None:
    """Raise ModelError if a parameter has a gradient hook: shardwise replaces the module's parameters, and the hook would be lost."""
    for name, p in model.named_parameters():
        if p._backward_hooks:  # torch exposes them nowhere else
            raise ModelError(f"parameter {name} has a gradient hook, which shardwise would lose; change gradients after backward instead")


def refuse_scripts(model: nn.Module) -> None:
    """Raise ModelError if torch.jit compiled the model or a submodule, which can neither be traced nor given other parameters."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            part = f"its part {path}" if path else "the model"
            raise ModelError(f"{part} is compiled by torch.jit, which cannot be divided; give the module as it was before torch.jit.script")
