"""Refuse what cannot be parallelized, before a call: parameters with gradient hooks, TorchScript modules, sparse tensors of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.capture.nesting import tensors_of
from shardwise.errors import Infeasible, ModelError


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


def refuse_sparse_batch(batch: Any) -> None:
    """Raise Infeasible for a sparse tensor of a batch, which has no rows that ranks or microbatches could take."""
    for path, x in tensors_of(batch).items():
        if x.layout is not torch.strided:
            raise Infeasible(
                f"{path} of the batch is a sparse tensor, whose rows cannot be divided; give its indices and values as tensors "
                "and compute with index_add, make it dense (to_dense()), or train it in a plain loop with data=1"
            )
