"""Graphs of GPTs as shardwise captures them, each once, and stages of whole layers, as Megatron-LM divides them."""

from __future__ import annotations

from functools import cache

from shardwise.model.graph import Graph
from shardwise.run.rank_model.model_source import ModelSource
from shardwise.zoo.resolve import resolve


@cache
def gpt(hidden: int, layers: int, heads: int, sequence: int = 1024, vocabulary: int = 50257, batch: int = 8) -> Graph:
    """`batch` samples; a `Pricer` scales to any other batch."""
    model = resolve(f"gpt:layers={layers},hidden={hidden},heads={heads},sequence={sequence},vocabulary={vocabulary}", batch, None)
    return ModelSource.from_model(model.make).capture(model.batch(batch), model.loss, batch).graph


def even(layers: int, stages: int) -> tuple[str, ...]:
    """Where stages of equally many layers begin."""
    return tuple(f"layers.{layers * i // stages}.attention_norm/layer_norm" for i in range(1, stages))


def padded(vocabulary: int, tensor: int) -> int:
    """Rows of the table of embeddings, a multiple of 128 a tensor rank, as Megatron-LM pads them."""
    return -(-vocabulary // (128 * tensor)) * 128 * tensor
