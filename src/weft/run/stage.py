"""One rank's stage at work: forward and backward of one microbatch at a time, with what backward needs kept in between.

In: a lowered stage, its parameters and buffers, and the local microbatches. Out: tensors for other stages, gradients in the
parameters' hooks, the loss. Recomputation (`recompute=full`) keeps only the inputs of each layer and runs it again in backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module
from torch.utils.checkpoint import checkpoint

from weft.lower.kernels.randomness import Draw
from weft.lower.local import LocalStage, snapshot


@dataclass
class Kept:
    """What one microbatch leaves between forward and backward."""

    received: dict[str, Tensor]
    sent: dict[str, Tensor]
    results: dict[str, Tensor]
    inputs: dict[str, Tensor] = field(default_factory=dict)


class StageRunner:
    """Runs one lowered stage.

    `grads`: values whose gradient travels. `closed`: inputs that can have none. `dtypes`: dtype in which a value crosses to another stage.
    """

    def __init__(
        self,
        local: LocalStage,
        variables: Mapping[str, Tensor],
        grads: set[str],
        dtypes: Mapping[str, torch.dtype],
        draw: Draw,
        autocast: torch.dtype | None,
        device: torch.device,
        compile: bool = False,
        closed: frozenset[str] = frozenset(),
    ) -> None:
        self.closed = closed
        self.local, self.grads, self.dtypes, self.draw = local, grads, dtypes, draw
        self._fixed = dict(variables)
        self._autocast, self._device = autocast, device
        self.module: Callable[..., Any] = torch.compile(local.module) if compile else local.module

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast)

    def forward(self, inputs: Mapping[str, Tensor], received: Mapping[str, Tensor], want_grad: bool, input_gradients: bool = False) -> Kept:
        """Run forward. `inputs`: local batch tensors by value name; `received`: by value name, from other stages."""
        held: dict[str, Tensor] = {}
        for value in self.local.received:
            x = received[value]
            held[value] = x.detach().requires_grad_(want_grad and value in self.grads)
        given: dict[str, Tensor] = dict(inputs)
        if input_gradients:
            given = {v: x.detach().requires_grad_(x.is_floating_point() and v not in self.closed) for v, x in inputs.items()}
        args = [self._fixed[v] if v in self._fixed else given[v] for v in self.local.variables]
        with torch.set_grad_enabled(want_grad), self._context():
            out = self.module(*args, *(held[v] for v in self.local.received))
        num_sent = len(self.local.sent)
        sent = dict(zip(self.local.sent, out[:num_sent], strict=True))
        for value, x in sent.items():
            dtype = self.dtypes[value]
            if x.dtype != dtype:
                sent[value] = x.to(dtype)
        results = dict(zip(self.local.results, out[num_sent:], strict=True))
        return Kept(held, sent, results, given if input_gradients else {})

    def backward(self, kept: Kept, gradients: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
        """Run backward from the gradients of what was sent and from the loss times `scale`; gradients of what was received."""
        roots: list[Tensor] = []
        seeds: list[Tensor | None] = []
        for value, x in kept.sent.items():
            if value in gradients and x.requires_grad:
                roots.append(x)
                seeds.append(gradients[value])
        for x in kept.results.values():
            if x.requires_grad:
                roots.append(x)
                seeds.append(torch.full_like(x, scale))
        if roots:
            torch.autograd.backward(roots, seeds)
        out = {}
        for value, x in kept.received.items():
            if value in self.grads:
                out[value] = x.grad if x.grad is not None else torch.zeros_like(x)
        return out


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
