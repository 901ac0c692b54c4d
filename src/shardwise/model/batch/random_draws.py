"""Random draws of a model, and where samples are in them.

Draws with a known path from the batch (`samples`) are resolved directly. Others (`torch.rand(x.shape[0], 1)`) are compared with a capture
with another number of samples: the dimension that has grown counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardwise.errors import ModelError
from shardwise.model.batch.samples import sample_dimensions
from shardwise.model.graph import Graph, Operator, Tensor
from shardwise.ops import is_random, record_of

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SampleFold:
    """Dimension `dim` of a tensor is `outer` x samples x `inner`: rows of (batch, positions), heads of (batch, heads)."""

    dim: int
    outer: int = 1
    inner: int = 1


def drawn_shape(op: Operator, tensors: Mapping[str, Tensor]) -> Shape:
    """Return the shape for which an operator draws numbers, one per element."""
    shape = record_of(op).draw.shape
    return shape(op, tensors) if shape is not None else tensors[op.outputs[0]].shape


def find_sample_folds(graph: Graph, capture_larger: Callable[[], Graph]) -> tuple[SampleFold | None, ...]:
    """Return, for every draw in order, the location of its samples; None where it has none. `other`: captures the model with more samples.

    A draw with samples in several dimensions belongs to a model that couples them: there no two microbatches are parts of one batch.
    """
    drawing = [op for op in graph.operators if is_random(op)]
    places = sample_dimensions(graph)
    folds: list[SampleFold | None] = []
    unplaced: list[int] = []
    for i, op in enumerate(drawing):
        shape, place = drawn_shape(op, graph.tensors), places.get(op.outputs[0])
        is_placed = place is not None and place.dim < len(shape) and place.size == graph.batch_size
        if place is None or not is_placed or shape[place.dim] % (place.inner * place.size):
            unplaced.append(i)
            folds.append(None)
        else:
            folds.append(SampleFold(place.dim, shape[place.dim] // (place.inner * place.size), place.inner))
    if not unplaced:
        return tuple(folds)
    shapes: list[Shape] | None = None
    samples = graph.batch_size
    try:
        larger = capture_larger()
        shapes, samples = [drawn_shape(op, larger.tensors) for op in larger.operators if is_random(op)], larger.batch_size
    except ModelError:  # the model works with one number of samples only
        pass
    for i in unplaced:
        shape = drawn_shape(drawing[i], graph.tensors)
        if shapes is None or len(shapes) != len(drawing):
            folds[i] = SampleFold(0) if shape[:1] == (graph.batch_size,) else None
            continue
        grown = [dim for dim, (n, m) in enumerate(zip(shape, shapes[i], strict=True)) if n != m]
        if len(grown) == 1 and shape[grown[0]] * samples == shapes[i][grown[0]] * graph.batch_size:
            inner, remainder = divmod(shape[grown[0]], graph.batch_size)
            folds[i] = None if remainder else SampleFold(grown[0], 1, inner)
    return tuple(folds)
