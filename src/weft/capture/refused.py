"""Models that are refused before they are called. In: a model. Out: nothing, or `ModelError` by name."""

from __future__ import annotations

import torch
from torch import nn

from weft.errors import ModelError


def refuse_hooks(model: nn.Module) -> None:
    """Raise ModelError where a parameter has a gradient hook: weft gives the module other parameters, and the hook would be lost."""
    for name, p in model.named_parameters():
        if p._backward_hooks:  # the only place where torch shows them
            raise ModelError(f"parameter {name} has a gradient hook, which weft would lose; change gradients after backward instead")


def refuse_scripts(model: nn.Module) -> None:
    """Raise ModelError where torch.jit has compiled the model or a part of it, which can be neither traced nor given other parameters."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            part = f"its part {path}" if path else "the model"
            raise ModelError(f"{part} is compiled by torch.jit, which cannot be divided; give the module as it was before torch.jit.script")
