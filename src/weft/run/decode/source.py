"""Capture of a model for decoding: a graph for tokens at any positions of their sequences, or the reason why there is none.

A mask that the model computes from positions is evaluated once, for the longest sequence, and must be the causal mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from weft.capture.capture import Captured, Loss
from weft.capture.modes import Modes
from weft.errors import ModelError
from weft.lower.call import argument_of
from weft.lower.lowering import operator_of
from weft.model.graph import Graph
from weft.model.positions import at_positions
from weft.run.build import Source


@dataclass(frozen=True)
class Decoding(Source):
    """A model source whose captures take tokens at any positions. `longest_batch`: the inputs for the longest sequence."""

    longest: Any = None
    seen: dict[Modes, Captured] = field(default_factory=dict)
    causal: set[str] = field(default_factory=set)  # masks known to be causal

    def capture(self, batch: Any, loss: Loss | None, batch_size: int | None, outputs: bool = False, modes: Modes | None = None) -> Captured:
        """Capture as `ModelSource` does. Raises ModelError if outputs depend on later tokens, or on others except by attention."""
        captured = super().capture(batch, None, batch_size, True, modes)
        key = modes or ()
        if key not in self.seen:
            self.seen[key] = super().capture(self.longest, None, batch_size, True, modes)
        longest = self.seen[key]
        graph, masks = at_positions(captured.graph, longest.graph)
        for mask in masks - self.causal:
            _check_causal(mask, longest)
            self.causal.add(mask)
        return replace(captured, graph=graph)


def _check_causal(mask: str, captured: Captured) -> None:
    bias = _value(mask, captured.graph, dict(captured.constants))
    shows = bias if bias.dtype is torch.bool else bias == 0
    if not torch.equal(shows, torch.ones_like(shows).tril()) or (bias.dtype is not torch.bool and not bool((bias[~shows] < -1e4).all())):
        raise ModelError("its attention has a mask that is not the causal one: a window, documents, or padding")


def _value(value: str, graph: Graph, held: Mapping[str, Tensor]) -> Tensor:
    """Evaluate a value of a graph that depends on constants only."""
    producers, values, device = graph.producer(), dict(held), torch.device("cpu")
    pending, order = [value], []
    while pending:
        name = pending.pop()
        if name in values:
            continue
        if name not in producers:
            raise ModelError("its attention has a mask that depends on the batch or on its weights")
        order.append(producers[name])
        pending += producers[name].inputs
    places = graph.place
    for op in sorted({op.name: op for op in order}.values(), key=lambda op: places[op.outputs[0]]):
        inputs = iter([values[v] for v in op.inputs])
        args = [argument_of(a, inputs, device) for a in op.args]
        kwargs = {k: argument_of(a, inputs, device) for k, a in op.kwargs}
        out = operator_of(op.target)(*args, **kwargs)
        values.update(zip(op.outputs, out if op.multiple else (out,), strict=True))
    return values[value]
