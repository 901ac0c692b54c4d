"""What a layout adds to a lowered stage before it runs: recomputation, offload, and weights that come and go.

In: a lowered stage, its number, the layout's choices. Out: the stage that runs.
"""

from __future__ import annotations

from weft.lower.kernels.randomness import Draw
from weft.lower.local import LocalStage
from weft.plan.layout import Layout
from weft.run.gathered import Gathered
from weft.run.host import HostStore
from weft.run.layers import by_layer
from weft.run.offloaded import offload_layers
from weft.run.recompute import recompute_attention, recompute_layers
from weft.world.memory import Accounts


def prepared(
    local: LocalStage, stage: int, layout: Layout, draw: Draw, gathered: Gathered, host: HostStore, memory: Accounts
) -> LocalStage:
    """The stage under a layout's `recompute` and `offload`, with layers that gather their weights where those lie as pieces."""
    if layout.recompute == "selective":
        local = recompute_attention(local, draw, memory)
    gathers = any(s == stage for s, _ in gathered.units)
    offloads = layout.offload in ("activations", "all")
    if not layout.repeats_layers and not gathers and not offloads:
        return local
    layered = by_layer(local)
    if layout.repeats_layers:
        layers = [layered.layers[number] for number in sorted(layered.repeated)]
        chosen = layout.recomputation.chosen(stage, list(dict.fromkeys(layers)))
        recompute_layers(layered, draw, memory, {number for number in layered.repeated if layered.layers[number] in chosen})
    if offloads:
        offload_layers(layered, host, keeps_last=layout.num_stages == 1)
    if gathers:
        gathered.wrap(stage, layered)
    return layered.local
