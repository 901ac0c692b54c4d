"""Preparation of a lowered stage as its layout chooses: recomputation, activation offload, and weights gathered by layer (ZeRO-3)."""

from __future__ import annotations

from weft.lower.kernels.randomness import Draw
from weft.lower.local import LocalStage
from weft.plan.layout import Layout
from weft.run.residency.gathered import Gathered
from weft.run.residency.host import HostStore
from weft.run.residency.layer_modules import by_layer
from weft.run.residency.offloaded import offload_layers
from weft.run.residency.recompute import in_segments, recompute_attention, recompute_layers
from weft.world.memory import Accounts


def prepared(
    local: LocalStage, stage: int, layout: Layout, draw: Draw, gathered: Gathered, host: HostStore, memory: Accounts
) -> LocalStage:
    """Return the stage with the layout's `recompute` and `offload` applied, and layers that gather their sharded weights."""
    if layout.recompute == "selective":
        local = recompute_attention(local, draw, memory)
    gathers = any(s == stage for s, _ in gathered.units)
    if not layout.repeats_layers and not gathers and not layout.moves_layers:
        return local
    layered, residency = by_layer(local), layout.residency
    layers = list(dict.fromkeys(layered.layers[number] for number in sorted(layered.repeated)))
    if layout.repeats_layers:
        recomputed = layered.numbers_of(residency.repeated(stage, layers))
        if residency.segment > 1:  # then no layer is offloaded or gathered
            layered = in_segments(local, layered, recomputed, residency.segment)
        recompute_layers(layered, draw, memory, recomputed)
    if residency.offload.picks:
        offload_layers(layered, host, layered.numbers_of(residency.moved(stage, layers)))
    elif layout.moves_layers:
        numbers = sorted(layered.names)
        # Without a pipeline the last layer's backward follows at once, so it is not offloaded.
        offload_layers(layered, host, frozenset(numbers[: len(numbers) - (layout.num_stages == 1)]))
    if gathers:
        gathered.wrap(stage, layered)
    return layered.local
