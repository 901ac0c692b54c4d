"""The share of a model that each axis of a layout shards: of its parameters and of its FLOPs.

One definition for every axis: of a total W, the rank with most along the axis has h, if the other axes shard nothing; an even split over n
ranks would leave it W / n. The sharded share is (1 - h / W) / (1 - 1 / n): 1 if all ranks along the axis have equally much, 0 if one of
them has everything.

`parameters` counts elements. `tensor` shards parameters over tensor ranks; a grid also has an entry for each of its axes. `pipeline`
distributes them over stages. `data` shards none except with ZeRO, which shards their optimizer state, then gradients, then the weights. Of
operators owned by single ranks (branches) the rank with most counts. `flops` counts the matrix products of forward as `model.work` does, or
the bytes that operators move if a model has none; an operator is sharded over an axis if each rank computes its shard of it, and a pipeline
distributes operators over stages. Unequal shards count as sharded.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from shardwise.model.work import operator_bytes, operator_flops
from shardwise.plan.ir.axis import DATA, axis_of
from shardwise.plan.ir.grid import GRID_AXES as GRID
from shardwise.plan.ir.placement import R, has_single_owner, is_shard
from shardwise.plan.plan import Plan
from shardwise.run.parts.rank_model import RankModel

ShardedSize = tuple[float, int, int | None]  # size, number of shards, the single rank that owns it
SharesByAxis = dict[str, dict[str, float]]  # axis -> {"parameters": share, "flops": share}


def shares_by_axis(plan: Plan, rank_model: RankModel) -> SharesByAxis:
    """Return the shares of every axis with more than one rank, outermost first; equal on all ranks."""
    layout, graph = plan.layout, rank_model.graph
    shardings = rank_model.shardings or (rank_model.sharding,)
    stages_of = rank_model.program.stages_of
    sizes = {name: max(s.sizes.get(name, 1) for s in shardings) for name in dict.fromkeys(name for s in shardings for name in s.sizes)}
    tensor = [name for name in sizes if axis_of(name).shards_weights and not axis_of(name).shards_channels]
    axes = {name: (name,) for name in sizes if name not in tensor or len(tensor) > 1} | {"tensor": tuple(tensor)}
    axes = {name: those for name, those in axes.items() if prod(sizes.get(a, 1) for a in those) > 1}
    division: SharesByAxis = {}
    costs = {op.name: operator_flops(op, graph.tensors) for op in graph.operators}
    if not any(costs.values()):
        costs = {op.name: float(operator_bytes(op, graph.tensors)) for op in graph.operators}
    ranks_of = {stage.index: [r for r, those in enumerate(stages_of) if stage.index in those] for stage in rank_model.stages}
    holders = {v.value: rank_model.pipeline_ranks_reading(v.value) for v in graph.parameters}
    # A value without inputs that several stages read (a mask) is computed by each; it counts once.
    stage_of = {op.name: stage.index for stage in reversed(rank_model.stages) for op in stage.operators}
    if layout.pipeline > 1:
        stored = [float(sum(v.tensor.size for v in graph.parameters if r in holders[v.value])) for r in range(layout.pipeline)]
        computed = [sum(costs[name] / len(ranks_of[s]) for name, s in stage_of.items() if r in ranks_of[s]) for r in range(layout.pipeline)]
        division["pipeline"] = {
            "parameters": _normalised_share(max(stored), graph.num_parameters, layout.pipeline),
            "flops": _normalised_share(max(computed), sum(costs[name] for name in stage_of), layout.pipeline),
        }

    def parameters(over: tuple[str, ...]) -> Iterable[ShardedSize]:
        for v in graph.parameters:
            sharding = shardings[holders[v.value][0]]
            placements = {axis: sharding.placements[v.value].get(axis, R) for axis in over}
            sharded_axes = [axis for axis, placement in placements.items() if is_shard(placement)]
            if layout.zero and v.trainable:
                sharded_axes += [axis for axis in over if axis_of(axis).shards_samples and axis in sharding.gradient_axes.get(v.value, ())]
            owner = next((placement.rank for placement in placements.values() if has_single_owner(placement)), None)
            yield float(v.tensor.size), prod(sharding.sizes[axis] for axis in sharded_axes), owner

    def flops(over: tuple[str, ...]) -> Iterable[ShardedSize]:
        for name, stage in stage_of.items():
            sharding = shardings[ranks_of[stage][0]]
            owner = next((region.rank_of[name] for region in sharding.regions if region.axis in over and name in region.rank_of), None)
            yield costs[name], prod(sharding.sizes[axis] for axis in over if sharding.labels[name].get(axis, "")), owner

    for name, over in axes.items():
        n = prod(sizes[a] for a in over)
        is_replicated = plan.uncaptured and name == DATA  # every rank runs the full module on its own samples
        division[name] = {
            "parameters": _normalised_share(*_largest_and_total(parameters(over)), n),
            "flops": 1.0 if is_replicated else _normalised_share(*_largest_and_total(flops(over)), n),
        }
    return division


def unproven_axes(plan: Plan, shares: SharesByAxis, cut_everything: bool = False) -> tuple[str, ...]:
    """Return a sentence for every axis whose ranks all compute the same, so that equality does not verify it."""
    sentences = []
    layout = plan.layout
    for axis, share in shares.items():
        if axis in GRID:
            continue
        number = dict(layout.axes).get(axis) or layout.tensor
        if axis_of(axis).shards_samples and layout.zero and not share["parameters"] and share["flops"]:
            sentences.append(f"zero={layout.zero} divides no parameter over {axis}={number}, so nothing is proven about it")
        if share["flops"]:
            continue
        what = "no product" if share["parameters"] else "no parameter and no product"
        if not axis_of(axis).shards:  # stages
            remedy = "choose other stage boundaries (stages in a plan file)"
        elif axis_of(axis).shards_samples:
            remedy = "see which operators are replicated for lack of a rule"
        elif cut_everything:
            remedy = "no rule shards this model so; verify sizes divisible by it"
        else:
            remedy = "--cut-everything (cut_everything=True) shards wherever the rules allow"
        sentences.append(f"{axis}={number} divides {what} of this model (0 %), so that it is equal proves nothing about {axis}: {remedy}")
    return tuple(sentences)


def _largest_and_total(sizes: Iterable[ShardedSize]) -> tuple[float, float]:
    """Return (size on the rank with most, total size)."""
    items = list(sizes)
    owned: dict[int, float] = {}
    for size, n, owner in items:
        if owner is not None:
            owned[owner] = owned.get(owner, 0.0) + size / n
    return sum(size / n for size, n, owner in items if owner is None) + max(owned.values(), default=0.0), sum(s for s, *_ in items)


def _normalised_share(largest: float, total: float, n: int) -> float:
    """Return (1 - h / W) / (1 - 1 / n), clamped and rounded."""
    if not total:
        return 0.0
    return min(1.0, max(0.0, round((1 - largest / total) / (1 - 1 / n), 12)))
