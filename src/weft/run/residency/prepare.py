"""What a layout adds to a lowered stage before it runs: recomputation, offload, and weights that come and go.

In: a lowered stage, its number, the layout's choices. Out: the stage that runs.
"""

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
    """The stage under a layout's `recompute` and `offload`, with layers that gather their weights where those lie as pieces."""
    if layout.recompute == "selective":
        local = recompute_attention(local, draw, memory)
    gathers = any(s == stage for s, _ in gathered.units)
    if not layout.repeats_layers and not gathers and not layout.moves_layers:
        return local
    layered, which = by_layer(local), layout.residency
    layers = list(dict.fromkeys(layered.layers[number] for number in sorted(layered.repeated)))
    if layout.repeats_layers:
        again = layered.numbers_of(which.repeated(stage, layers))
        if which.segment > 1:  # nothing is moved or gathered by layer then
            layered = in_segments(local, layered, again, which.segment)
        recompute_layers(layered, draw, memory, again)
    if which.offload.picks:
        offload_layers(layered, host, layered.numbers_of(which.moved(stage, layers)))
    elif layout.moves_layers:
        every = sorted(layered.names)
        # Without a pipeline the last one's backward follows at once, so it stays.
        offload_layers(layered, host, frozenset(every[: len(every) - (layout.num_stages == 1)]))
    if gathers:
        gathered.wrap(stage, layered)
    return layered.local
