"""Recomputation: parts of a stage keep only their inputs, and run again in backward.

In: a lowered stage. Out: the same stage with the chosen parts under checkpointing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module
from torch.utils.checkpoint import checkpoint

from weft.lower.kernels.randomness import Draw
from weft.lower.local import LocalStage, snapshot


def with_recomputation(local: LocalStage, draw: Draw) -> LocalStage:
    """The same stage with every layer under checkpointing: only a layer's inputs are kept, and it runs again in backward.

    Layers are told apart by the number of the run that lowering wrote on each node; what stands outside of layers is kept. So is a layer
    that reads a buffer which is written while the model runs: run again it would read what later microbatches wrote.
    """
    assert isinstance(local.module, fx.GraphModule)  # only a captured model is lowered
    calls = [node for node in local.module.graph.nodes if node.op == "call_function"]
    parts = {node.meta["part"] for node in calls}
    if not any(repeated for _, repeated in parts):
        parts = {(0, True)}
    split = split_module(local.module, local.module, lambda node: node.meta["part"][0] if len(parts) > 1 else 0, keep_original_order=True)
    kept = {node.meta["part"][0] if len(parts) > 1 else 0 for node in calls if node.target is snapshot}
    repeated = {number for number, is_layer in parts if is_layer} - kept
    for name, child in list(split.named_children()):
        if name.startswith("submod_") and int(name.removeprefix("submod_")) in repeated:
            setattr(split, name, _Recomputed(child, draw))
    return LocalStage(split, local.variables, local.received, local.sent, local.results, local.forms)


class _Recomputed(nn.Module):
    def __init__(self, inner: nn.Module, draw: Draw) -> None:
        super().__init__()
        self.inner, self._draw = inner, draw

    def forward(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args)
        # torch's checkpoint saves what it is called with, and backward would refuse buffers that were written since.
        learned = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.requires_grad]

        def run(*given: Tensor) -> Any:
            whole = list(args)
            for i, x in zip(learned, given, strict=True):
                whole[i] = x
            return self.inner(*whole)

        given = [args[i] for i in learned]
        return checkpoint(run, *given, use_reentrant=False, preserve_rng_state=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[Any, Any]:
        return contextlib.nullcontext(), _recomputing(self._draw)


@contextlib.contextmanager
def _recomputing(draw: Draw) -> Iterator[None]:
    draw.recomputing = True
    try:
        yield
    finally:
        draw.recomputing = False
