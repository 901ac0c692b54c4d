"""Capture of a model for decoding: a graph for tokens at any positions of their sequences, or the reason why there is none.

A mask that the model computes from positions is evaluated once, for the longest sequence, and must be the causal mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.capture import CapturedGraph, Loss
from shardwise.capture.modes import Modes
from shardwise.errors import ModelError
from shardwise.lower.call import lower_argument
from shardwise.lower.lowering import torch_operator
from shardwise.model.graph import Graph
from shardwise.model.positions import decoder_at_positions
from shardwise.run.rank_model.build import ModelSource


@dataclass(frozen=True)
class DecodeModelSource(ModelSource):
    """A model source whose captures take tokens at any positions. `longest_batch`: the inputs for the longest sequence."""

    longest_batch: Any = None
    longest_captures: dict[Modes, CapturedGraph] = field(default_factory=dict)
    causal_masks: set[str] = field(default_factory=set)  # masks known to be causal

    def capture(
        self, batch: Any, loss: Loss | None, batch_size: int | None, outputs: bool = False, modes: Modes | None = None
    ) -> CapturedGraph:
        """Capture as `ModelSource` does. Raises ModelError if outputs depend on later tokens, or on others except by attention."""
        captured = super().capture(batch, None, batch_size, True, modes)
        key = modes or ()
        if key not in self.longest_captures:
            self.longest_captures[key] = super().capture(self.longest_batch, None, batch_size, True, modes)
        longest = self.longest_captures[key]
        graph, masks = decoder_at_positions(captured.graph, longest.graph)
        for mask in masks - self.causal_masks:
            _check_causal(mask, longest)
            self.causal_masks.add(mask)
        return replace(captured, graph=graph)


def _check_causal(mask: str, captured: CapturedGraph) -> None:
    bias = _constant_value(mask, captured.graph, dict(captured.constants))
    shows = bias if bias.dtype is torch.bool else bias == 0
    if not torch.equal(shows, torch.ones_like(shows).tril()) or (bias.dtype is not torch.bool and not bool((bias[~shows] < -1e4).all())):
        raise ModelError("its attention has a mask that is not the causal one: a window, documents, or padding")


def _constant_value(value: str, graph: Graph, constants: Mapping[str, Tensor]) -> Tensor:
    """Evaluate a value of a graph that depends on constants only."""
    producers, values, device = graph.producer(), dict(constants), torch.device("cpu")
    pending, order = [value], []
    while pending:
        name = pending.pop()
        if name in values:
            continue
        if name not in producers:
            raise ModelError("its attention has a mask that depends on the batch or on its weights")
        order.append(producers[name])
        pending += producers[name].inputs
    places = graph.producer_index
    for op in sorted({op.name: op for op in order}.values(), key=lambda op: places[op.outputs[0]]):
        inputs = iter([values[v] for v in op.inputs])
        args = [lower_argument(a, inputs, device) for a in op.args]
        kwargs = {k: lower_argument(a, inputs, device) for k, a in op.kwargs}
        out = torch_operator(op.target)(*args, **kwargs)
        values.update(zip(op.outputs, out if op.returns_sequence else (out,), strict=True))
    return values[value]
