"""Refusal of torch's own parallel wrappers (DataParallel, DDP, FSDP) for sharded modules, whose gradients they would reduce twice.

torch has no hook for the wrapping of a module, so the wrappers' constructors are patched, once a process and not before a model is sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch import nn

from shardwise.errors import UsageError
from shardwise.run.loop.module import sharded_modules_of


@cache
def patch_wrappers() -> None:
    """Patch torch's parallel wrappers to refuse sharded modules."""
    kinds: list[Any] = [nn.DataParallel, nn.parallel.DistributedDataParallel]
    try:
        from torch.distributed.fsdp import FullyShardedDataParallel

        kinds.append(FullyShardedDataParallel)
    except ImportError:  # a torch without it
        pass
    for kind in kinds:
        kind.__init__ = _guard_constructor(kind.__init__, kind.__name__)


def _guard_constructor(constructor: Callable[..., None], name: str) -> Callable[..., None]:
    @wraps(constructor)
    def __init__(self: Any, module: Any = None, *args: Any, **kwargs: Any) -> None:
        if isinstance(module, nn.Module) and sharded_modules_of(module):
            raise UsageError(
                f"{name} is given {type(module).__name__}, which shardwise has divided, and whose gradients are summed over ranks already. "
                f"Leave {name} out; Accelerate, transformers' Trainer and Lightning leave it out with shardwise.adapters (docs/scripts.md)"
            )
        constructor(self, module, *args, **kwargs)

    return __init__
