"""The type that every way of naming a model resolves to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class ResolvedModel:
    """A model by name. `make()` builds the module anew each time, in train mode, as a plain constructor call.

    `batch(n)` is an example batch of n samples on the CPU, the same at every call; a dict is the module's keyword arguments, a
    tuple its positional ones. `loss(output, batch)` is a scalar; without it the output is the scalar loss or has `.loss`.
    `classes`: the number of classes, where known.
    `form(n)` is a batch of the same shapes with undefined values, to be called under a fake mode; by default `batch` is called there.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Loss | None
    default_batch: int
    empty_batch: Callable[[int], Any] | None = None
    classes: int | None = None

    def example(self) -> Any:
        """Return the example batch of the default size."""
        return self.batch(self.default_batch)
