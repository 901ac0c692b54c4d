"""Building a decoder for inference only, without gradients or an optimizer, from a plan and a model."""

from __future__ import annotations

from typing import Any

from shardwise.capture.capture import Loss
from shardwise.errors import Infeasible
from shardwise.plan.plan import Plan
from shardwise.run.decode.decoder import Decoder, Paging
from shardwise.run.parts.rank_model import RankModel
from shardwise.run.rank_model.build import BuildRequest, build_rank_model
from shardwise.run.rank_model.model_source import ModelSource
from shardwise.run.residency.host_store import HostStore
from shardwise.run.residency.weight_gatherer import WeightGatherer
from shardwise.run.state.precision import LossScale, set_matmul_precision
from shardwise.run.step.executors import ExecutorCache
from shardwise.world.memory import Accounts
from shardwise.world.world import World


def build_decoder(
    plan: Plan, source: ModelSource, batch: Any, loss: Loss | None, world: World, *, seed: int, max_length: int, paging: Paging
) -> Decoder:
    """Build a decoder from a model's initial weights, of which each rank takes its shards. Raises Infeasible for layouts with zero."""
    layout = plan.layout
    if layout.zero:
        raise Infeasible(f"{layout}: without gradients and an optimizer zero has nothing to shard; leave zero out")
    set_matmul_precision(layout.precision, world.device)
    parts = build_rank_model(BuildRequest(plan, source, batch, loss, world, seed=seed))
    for group in sorted({world.world_group, *(parts.lowering.groups.values() if parts.lowering else ())}, key=lambda g: g.ranks):
        group.connect()
    memory, gathered = Accounts(), WeightGatherer((), ())
    host, scale = HostStore(world.device, memory, parts.variables.values()), LossScale(world.device, layout.precision)
    executors = ExecutorCache(parts, plan, world, memory, None, gathered, host, layout.compile == "on", scale, runs_backward=False)

    def build_executors(request: BuildRequest, like: RankModel | None = None) -> ExecutorCache:
        return executors.for_capture(build_rank_model(request, like or parts), gathered, runs_backward=False)

    return Decoder(plan, source, batch, build_executors, world, max_length, paging)
