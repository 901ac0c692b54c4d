"""Recomputation (activation checkpointing, Chen et al. 2016): parts of a stage save only their inputs and run again in backward.

`full` recomputes every layer, singly or in segments of several (`merge_segments`); `selective` recomputes the core of attention where it
would save its scores (`model.stages.core_attention`). A fused attention kernel saves no scores and recomputes them in backward itself; with
dropout there is no such kernel on CPUs, and the core is recomputed.

In the field's terms: activation recomputation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions
from torch.utils.checkpoint import checkpoint

from shardwise.lower.kernels.randomness import DrawState
from shardwise.lower.local import LocalStage, snapshot_buffer
from shardwise.lower.torch_calls import call_in_full_precision, call_in_operand_dtype
from shardwise.model.stages.core_attention import CoreAttention
from shardwise.plan.residency import split_segments
from shardwise.run.residency.layer_modules import LayeredStage, split_by_layer
from shardwise.world.memory import Accounts

_CORE = "attention_core_"


def recompute_layers(layered: LayeredStage, draw: DrawState, memory: Accounts, only: Collection[int] | None = None) -> None:
    """Recompute every layer of a stage, or those whose numbers are in `only`.

    Operators outside of layers are not recomputed. Nor is a layer that reads a buffer written while the model runs: it would read what
    later microbatches wrote.
    """
    for number in sorted(layered.layer_numbers - layered.reads_written_buffers):
        if only is None or number in only:
            setattr(layered.local.module, layered.names[number], RecomputedModule(layered.child(number), draw, memory))


def merge_segments(local: LocalStage, layered: LayeredStage, recomputed: Collection[int], length: int) -> LayeredStage:
    """Split the stage so that `length` consecutive recomputed layers are one child.

    Operators between two layers end a segment, and so does a layer that `recompute_layers` does not recompute.
    """
    numbers, recomputable = sorted(layered.names), layered.layer_numbers - layered.reads_written_buffers
    segments = split_segments([number in recomputed and number in recomputable for number in numbers], length)
    return split_by_layer(local, {number: numbers[start] for start, behind in segments for number in numbers[start:behind]})


def recompute_attention(local: LocalStage, draw: DrawState, memory: Accounts) -> LocalStage:
    """Return the stage with the core of every attention that would save its scores recomputed."""
    assert isinstance(local.module, fx.GraphModule)  # only a captured model is lowered
    module = fx.GraphModule(local.module, fx.Graph())
    copied: dict[fx.Node, fx.Node] = {}
    module.graph.output(module.graph.graph_copy(local.module.graph, copied))
    core_nodes = [[copied[node] for node in core] for core in find_core_attention(local.module.graph)]
    if not core_nodes:
        return local
    metadata = [{key: core[-1].meta[key] for key in ("part", "layer", "in_region")} for core in core_nodes]
    module.recompile()
    fuse_by_partitions(module, [dict.fromkeys(core) for core in core_nodes], prefix=_CORE)
    calls = [node for node in module.graph.nodes if node.op == "call_module" and str(node.target).startswith(_CORE)]
    for node in calls:
        node.meta.update(metadata[int(str(node.target).removeprefix(_CORE))])
        setattr(module, str(node.target), RecomputedModule(getattr(module, str(node.target)), draw, memory))
    return replace(local, module=module)


def find_core_attention(graph: fx.Graph) -> list[list[fx.Node]]:
    """Find the operators of each attention that would save its scores; no other operator is on a path between two of one core."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    nodes = set(calls)
    return CoreAttention(
        calls,
        _operator_name,
        lambda node: [n for n in node.all_input_nodes if n in nodes],
        lambda node: [n for n in node.users if n in nodes],
        lambda node: node.meta["part"],
        lambda node: node.target is snapshot_buffer,
    ).find()


def _operator_name(node: fx.Node) -> str:
    """Return an operator's name (`softmax`), also if it is called in a region of another autocast."""
    target = node.target
    if target in (call_in_full_precision, call_in_operand_dtype):
        target = node.args[0]  # type: ignore[assignment]
    return str(getattr(target, "__name__", target)).partition(".")[0]


class RecomputedModule(nn.Module):
    """`inner`, recomputed in backward if gradients are enabled; tensors saved during recomputation count as activations."""

    def __init__(self, inner: nn.Module, draw: DrawState, memory: Accounts) -> None:
        super().__init__()
        self.inner, self._draw, self._memory = inner, draw, memory

    def forward(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args)
        # torch's checkpoint saves its arguments, and backward would refuse buffers that were written since.
        differentiable = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.requires_grad]

        def run(*inputs: Tensor) -> Any:
            full_args = list(args)
            for i, x in zip(differentiable, inputs, strict=True):
                full_args[i] = x
            return self.inner(*full_args)

        learned_args = [args[i] for i in differentiable]
        return checkpoint(run, *learned_args, use_reentrant=False, preserve_rng_state=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[Any, Any]:
        return contextlib.nullcontext(), mark_recomputing(self._draw, self._memory)


@contextlib.contextmanager
def mark_recomputing(draw: DrawState, memory: Accounts) -> Iterator[None]:
    """Mark recomputation within a block: buffers are not written a second time."""
    draw.is_recomputing = True
    try:
        with memory.counting("activations"):
            yield
    finally:
        draw.is_recomputing = False
