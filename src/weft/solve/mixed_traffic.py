"""Whether a model's products are so unlike that some are better cut by samples and others by features. In: a graph, a batch. Out: whether.

Cut by samples, a product talks about its weight's gradient; cut by features, about what it reads or makes. In AlexNet convolutions have
much of the latter and fully connected layers much of the former (Krizhevsky 2014), and so have experts; a transformer's layers are alike.
Not modelled: what neighbours save by lying in the same pieces.
"""

from __future__ import annotations

from weft.model.graph import Graph
from weft.model.work import operator_flops

WORTH = 0.5  # of what one way for all would move, at most, to be worth a search


def has_mixed_traffic(graph: Graph, batch_size: int) -> bool:
    """Whether each product cut its own way would move much less of a batch than all of them cut one way."""
    trained = {v.value for v in graph.parameters if v.trainable and len(v.tensor.shape) > 1}
    scale = batch_size / graph.batch_size
    weights = activations = each = 0.0
    for op in graph.operators:
        learned = [value for value in op.inputs if value in trained]
        if not learned or operator_flops(op, graph.tensors) <= 0:
            continue
        weight = float(sum(graph.tensors[value].size for value in learned))
        ends = [value for value in (*op.inputs, *op.outputs) if not graph.held.get(value)]
        moved = scale * min(graph.tensors[value].size for value in ends)
        weights, activations, each = weights + weight, activations + moved, each + min(weight, moved)
    return each < WORTH * min(weights, activations)
