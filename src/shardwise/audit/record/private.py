"""What the recorder needs of torch and has no public name: the one file of the audit with such names.

The recorder runs in scripts that need not have shardwise, so it cannot take them from `world/private`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils import _pytree

NAMES: tuple[tuple[Any, str], ...] = (
    (torch, "_C"),
    (torch._C, "DisableTorchFunctionSubclass"),
    (torch._C, "_current_graph_task_id"),
    (torch.utils, "_pytree"),
    (_pytree, "tree_leaves"),
)

tree_leaves = _pytree.tree_leaves


def is_in_backward() -> bool:
    """Return whether a backward pass is running in this thread."""
    return torch._C._current_graph_task_id() != -1


def without_overrides() -> AbstractContextManager[Any]:
    """Return a context in which subclasses of tensors are treated as plain tensors."""
    return torch._C.DisableTorchFunctionSubclass()
