"""Building a decoder for inference only, without gradients or an optimizer, from a plan and a model."""

from __future__ import annotations

from typing import Any

from weft.capture.capture import Loss
from weft.errors import Infeasible
from weft.plan.plan import Plan
from weft.run.build import Source, build
from weft.run.captures import Asked, captured_in
from weft.run.decode.decoder import Decoder, Paging
from weft.run.residency.gathered import Gathered
from weft.run.residency.host import HostStore
from weft.run.state.optimizer import OptimizerSpec
from weft.run.state.precision import LossScale, set_products
from weft.run.step.executors import Executors
from weft.run.training_parts import Parts
from weft.world.memory import Accounts
from weft.world.world import World


def decoder_of(
    plan: Plan, source: Source, batch: Any, loss: Loss | None, world: World, *, seed: int, longest: int, paging: Paging
) -> Decoder:
    """Build a decoder from a model's initial weights, of which each rank takes its shards. Raises Infeasible for layouts with zero."""
    layout = plan.layout
    if layout.zero:
        raise Infeasible(f"{layout}: without gradients and an optimizer zero has nothing to shard; leave zero out")
    set_products(layout.precision, world.device)
    parts = build(plan, source, batch, loss, world, OptimizerSpec(), seed)
    for group in sorted({world.everyone, *(parts.lowering.groups.values() if parts.lowering else ())}, key=lambda g: g.ranks):
        group.connect()
    memory, gathered = Accounts(), Gathered((), ())
    host, scale = HostStore(world.device, memory, parts.variables.values()), LossScale(world.device, layout.precision)
    executors = Executors(parts, plan, world, memory, None, gathered, host, layout.compile == "on", scale, trains=False)

    def build_executors(asked: Asked, source: Source, like: Parts | None = None) -> Executors:
        return executors.of_other(captured_in(asked, like or parts, plan, source, world), gathered, trains=False)

    return Decoder(plan, source, batch, build_executors, world, longest, paging)
