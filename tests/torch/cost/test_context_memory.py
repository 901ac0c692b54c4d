"""Bytes that a rank keeps where `context` and `sequence_parallel` divide the same positions: by count of tokens, whatever divides them."""

from __future__ import annotations

from shardwise.cli.pricing_context import PricingContext
from shardwise.cluster.cluster import Cluster
from shardwise.plan.layout import Layout

HIDDEN, TENSOR, TOKENS = 128, 4, 512
MODEL = f"llama:hidden={HIDDEN},heads=8,kv_heads=4,inner=256,vocabulary=256,sequence="
COMMON = f"tensor={TENSOR} sequence_parallel=on recompute=full precision=float32"


def layer_bytes(sequence: int, batch: int, layout: str) -> float:
    """Activations that one layer more adds: its input, since all else of it is computed again."""
    more, fewer = (
        PricingContext(f"{MODEL}{sequence},layers={layers}", Cluster.parse("2xdgx-h100"), batch).price(Layout.parse(f"{layout} {COMMON}"))
        for layers in (3, 2)
    )
    assert more.prediction is not None
    assert fewer.prediction is not None
    return more.prediction.memory.activations - fewer.prediction.memory.activations


def test_context_keeps_what_sequence_parallelism_divides() -> None:
    """The same tokens a rank: of each layer tokens x hidden x 4 bytes / tensor."""
    assert layer_bytes(TOKENS, 4, "data=4") == TOKENS * HIDDEN * 4 / TENSOR
    assert layer_bytes(4 * TOKENS, 1, "context=4") == TOKENS * HIDDEN * 4 / TENSOR
