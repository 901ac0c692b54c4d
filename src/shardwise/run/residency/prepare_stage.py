"""Preparation of a lowered stage as its layout chooses: recomputation, activation offload, and weights gathered by layer (ZeRO-3)."""

from __future__ import annotations

from shardwise.lower.kernels.randomness import DrawState
from shardwise.lower.local import LocalStage
from shardwise.plan.layout import Layout
from shardwise.run.residency.host_store import HostStore
from shardwise.run.residency.layer_modules import split_by_layer
from shardwise.run.residency.offload import offload_layers
from shardwise.run.residency.recompute import merge_segments, recompute_attention, recompute_layers
from shardwise.run.residency.weight_gatherer import WeightGatherer
from shardwise.world.memory import Accounts


def prepare_stage(
    local: LocalStage, stage: int, layout: Layout, draw: DrawState, weight_gatherer: WeightGatherer, host_store: HostStore, memory: Accounts
) -> LocalStage:
    """Return the stage with the layout's `recompute` and `offload` applied, and layers that gather their sharded weights."""
    if layout.recompute == "selective":
        local = recompute_attention(local, draw, memory)
    gathers = any(s == stage for s, _ in weight_gatherer.buckets_by_layer)
    if not layout.recomputes_layers and not gathers and not layout.offloads_layers:
        return local
    layered, residency = split_by_layer(local), layout.residency
    layers = list(dict.fromkeys(layered.layers[number] for number in sorted(layered.layer_numbers)))
    if layout.recomputes_layers:
        recomputed = layered.numbers_of_layers(residency.recomputed_layers(stage, layers))
        if residency.segment > 1:  # then no layer is offloaded or gathered
            layered = merge_segments(local, layered, recomputed, residency.segment)
        recompute_layers(layered, draw, memory, recomputed)
    if residency.offload.is_partial:
        offload_layers(layered, host_store, layered.numbers_of_layers(residency.offloaded_layers(stage, layers)))
    elif layout.offloads_layers:
        numbers = sorted(layered.names)
        # Without a pipeline the last layer's backward follows at once, so it is not offloaded.
        offload_layers(layered, host_store, frozenset(numbers[: len(numbers) - (layout.num_stages == 1)]))
    if gathers:
        weight_gatherer.wrap(stage, layered)
    return layered.local
