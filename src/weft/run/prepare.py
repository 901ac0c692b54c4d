"""What a layout adds to a lowered stage before it runs: recomputation, and weights that come and go.

In: a lowered stage, its number, the layout's choices. Out: the stage that runs.
"""

from __future__ import annotations

from weft.lower.kernels.randomness import Draw
from weft.lower.local import LocalStage
from weft.run.gathered import Gathered
from weft.run.layers import by_layer
from weft.run.recompute import recompute_attention, recompute_layers
from weft.world.memory import Accounts


def prepared(local: LocalStage, stage: int, recompute: str, draw: Draw, gathered: Gathered, memory: Accounts) -> LocalStage:
    """The stage under a layout's `recompute`, with layers that gather their weights where those lie as pieces."""
    if recompute == "selective":
        local = recompute_attention(local, draw, memory)
    gathers = any(s == stage for s, _ in gathered.units)
    if recompute != "full" and not gathers:
        return local
    layered = by_layer(local)
    if recompute == "full":
        recompute_layers(layered, draw, memory)
    if gathers:
        gathered.wrap(stage, layered)
    return layered.local
