"""Decide whether a model's products are so unlike that some are better sharded by samples and others by features (`sample_parallel`).

Sharded by samples, a product reduces its weight's gradient; sharded by features, it exchanges its input or output. In AlexNet convolutions
have much of the latter and fully connected layers much of the former (Krizhevsky 2014), and so have experts; a transformer's layers are
alike. Not modelled: what adjacent operators save by an equal placement.
"""

from __future__ import annotations

from shardwise.model.graph import Graph
from shardwise.model.work import operator_flops

MAX_MIXED_FRACTION = 0.5  # of the traffic of one way for all, at most, to be worth a search


def has_mixed_traffic(graph: Graph, batch_size: int) -> bool:
    """Return whether sharding each product its own way would send much less for a batch than sharding all of them one way."""
    trained = {v.value for v in graph.parameters if v.trainable and len(v.tensor.shape) > 1}
    scale = batch_size / graph.batch_size
    weights = activations = cheapest = 0.0
    for op in graph.operators:
        trainable = [value for value in op.inputs if value in trained]
        if not trainable or operator_flops(op, graph.tensors) <= 0:
            continue
        weight = float(sum(graph.tensors[value].size for value in trainable))
        tensors = [value for value in (*op.inputs, *op.outputs) if not graph.is_state.get(value)]
        activation = scale * min(graph.tensors[value].size for value in tensors)
        weights, activations, cheapest = weights + weight, activations + activation, cheapest + min(weight, activation)
    return cheapest < MAX_MIXED_FRACTION * min(weights, activations)
