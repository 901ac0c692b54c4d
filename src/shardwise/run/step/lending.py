"""Lend the cores of idle pipeline ranks to busy ranks of the same host. In: a layout, its program, a world. Out: threads by action index.

Applies `shardwise.plan.ir.lending` to the hosts that ranks really run on. Not modelled: several pipelines on one host that are not
synchronous.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from shardwise.model.graph import Graph
from shardwise.model.stages.stages import Stage
from shardwise.model.work import operator_work, stage_work
from shardwise.plan.ir.lending import concurrent_ranks, threads_per_rank
from shardwise.plan.ir.program import Program
from shardwise.plan.layout import Layout
from shardwise.world.world import Group, World

__all__ = ["lent_threads"]


def lent_threads(
    layout: Layout, program: Program, graph: Graph, stages: Sequence[Stage], sizes: Sequence[int], pipeline: Group, world: World
) -> Mapping[int, int]:
    """Return [action index of this rank] -> threads, for its computes that get more threads than the rank has.

    Args:
        sizes: samples of every microbatch. pipeline: this rank's pipeline group.
    """
    if layout.lend != "on" or world.device.type != "cpu" or not world.may_add_threads:
        return {}
    near = next(box for box in world.ranks_by_host(pipeline.ranks) if world.rank in box)  # this pipeline's ranks on this host
    host_ranks = next(box for box in world.ranks_by_host(tuple(range(world.num_ranks))) if world.rank in box)
    positions = {pipeline.ranks.index(rank) for rank in near}
    num_cores = (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) * len(near) // len(host_ranks)
    rank_threads = torch.get_num_threads()
    shares = {m: float(size) for m, size in zip(program.microbatches, sizes, strict=True)}
    idle_ranks = concurrent_ranks(program, stage_work(operator_work(graph), [stage.operators for stage in stages]), shares)[pipeline.index]
    by_step = {step: threads_per_rank(1 + len(idle & positions), rank_threads, len(near), num_cores) for step, idle in idle_ranks.items()}
    return {step: threads for step, threads in by_step.items() if threads > rank_threads}
