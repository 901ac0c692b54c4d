"""Reshard activations and gradients between pipeline stages with different meshes: each shard is sent once, and replicas all-gather it.

In: the mesh and the sharding of every stage, the shapes of what is sent. Out: for each activation or gradient what this rank sends to and
receives from which ranks, and the all-gather after it. Not modelled: fusing several links of one value; each is sent separately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from shardwise.plan.ir.placement import D, is_shard
from shardwise.plan.ir.program import Value
from shardwise.plan.ir.resharding import ReshardEndpoint, Resharding, plan_resharding, slices_within
from shardwise.plan.layout import Layout
from shardwise.run.parts.microbatch_variants import MicrobatchVariant
from shardwise.run.step.transfers import Crossing, Crossings, PendingReceive
from shardwise.world.world import CollectiveWork, Group, World


class StageResharding:
    """Resharding messages of one rank. `variants`: by microbatch, the shapes and the sharding of each stage."""

    def __init__(self, layout: Layout, variants: Mapping[int, MicrobatchVariant], world: World, world_group: Group) -> None:
        self._layout, self._variants, self._shardings = layout, variants, next(iter(variants.values())).shardings
        self._world, self._world_group, self._rank = world, world_group, world.rank
        self._cache: dict[tuple[str, int, int, int], Resharding] = {}
        self.pipeline_index = layout.mesh_of(world.rank).coordinates(world.rank)["pipeline"]

    def is_resharded(self, value: Value) -> bool:
        """Return whether a value's two stages have different meshes."""
        return self._stages_differ(*value.index[:2])

    def _stages_differ(self, a: int, b: int) -> bool:
        # Stages with different numbers of ranks have no pipeline groups, so that even stages with equal meshes reshard.
        return bool(self._layout.begins) or self._shardings[a].sizes != self._shardings[b].sizes

    def stage_side(self, stage: int, value: str, variant: MicrobatchVariant) -> ReshardEndpoint:
        """Return the placement of a value on the ranks of a stage."""
        placements = {axis: form for axis, form in variant.shardings[stage].placements[value].items() if is_shard(form) and not form.runs}
        return ReshardEndpoint(self._layout.of_stage(stage).mesh, stage, placements)

    def resharding_of(self, name: str, variant: MicrobatchVariant, source: int, target: int) -> Resharding:
        """Return the cached resharding of one tensor from a stage to another."""
        key = name, variant.graph.batch_size, source, target
        if key not in self._cache:
            shape = variant.graph.tensors[name].shape
            self._cache[key] = plan_resharding(shape, self.stage_side(source, name, variant), self.stage_side(target, name, variant))
        return self._cache[key]

    def gather_groups(self, crossings: Crossings) -> set[Group]:
        """Return this rank's all-gather groups, in both directions."""
        groups = set()
        for (a, b), crossings_of_link in crossings.items():
            for crossing in crossings_of_link if self._stages_differ(a, b) else ():
                for sized in self._variants.values():
                    for source, target in ((a, b), (b, a)):
                        ranks = self.resharding_of(crossing.value, sized, source, target).peers.get(self._rank)
                        if ranks is not None:
                            groups.add(self._world.group(ranks))
        return groups

    def rank_pairs(self, crossings: Crossings) -> set[tuple[int, int]]:
        """Return (sender, receiver) of every message between any two ranks."""
        return {
            (piece.sender, piece.receiver)
            for (a, b), crossings_of_link in crossings.items()
            for crossing in (crossings_of_link if self._stages_differ(a, b) else ())
            for sized in self._variants.values()
            for ends in ((a, b), (b, a))
            for piece in self.resharding_of(crossing.value, sized, *ends).transfers
        }

    def sender(self, value: Value, messages: Sequence[Crossing], tags: Sequence[int]) -> Callable[[Sequence[Tensor]], list[CollectiveWork]]:
        """Return a function that sends this rank's shards of a value's tensors."""
        plans = []
        for crossing, tag in zip(messages, tags, strict=True):
            sized = self._variants[value.index[2]]
            local_box = self.stage_side(value.index[0], crossing.value, sized).box(self._rank, sized.graph.tensors[crossing.value].shape)
            pieces = [p for p in self.resharding_of(crossing.value, sized, *value.index[:2]).transfers if p.sender == self._rank]
            plans.append([(slices_within(p.box, local_box), p.receiver, tag) for p in pieces])
        isend = self._world_group.isend

        def send(tensors: Sequence[Tensor]) -> list[CollectiveWork]:
            return [
                isend(x.detach()[index].contiguous(), to, tag=tag)
                for x, shards in zip(tensors, plans, strict=True)
                for index, to, tag in shards
            ]

        return send

    def receiver(self, value: Value, messages: Sequence[Crossing], tags: Sequence[int]) -> Callable[[], PendingReceive]:
        """Return a function that posts the receives of this rank's shards of a value's tensors, to be all-gathered."""
        plans = []
        for crossing, tag in zip(messages, tags, strict=True):
            resharded = self.resharding_of(crossing.value, self._variants[value.index[2]], *value.index[:2])
            part = resharded.received_boxes[self._rank]
            pieces = [p for p in resharded.transfers if p.receiver == self._rank]
            ranks = resharded.peers.get(self._rank)
            gather = None if ranks is None else self._world.group(ranks)
            shape = tuple(stop - start for start, stop in part)
            share = self._gradient_share(value, crossing.value)
            indexed = [(slices_within(p.box, part), p.sender, tag) for p in pieces]
            plans.append((indexed, shape, crossing.dtype, gather, resharded.gather_dims.get(self._rank, 0), share))
        irecv, device = self._world_group.irecv, self._world.device

        def post() -> PendingReceive:
            pending = []
            for pieces, shape, dtype, gather, dim, share in plans:
                buffer = torch.empty(shape, dtype=dtype, device=device)
                works = [irecv(buffer[index], source, tag=tag) for index, source, tag in pieces]
                pending.append((buffer, works, gather, dim, share))

            def wait() -> list[Tensor]:
                tensors = []
                for full, works, gather, dim, share in pending:
                    for work in works:
                        work.wait()
                    tensors.append(full if gather is None else gather.all_gather(full, dim))
                    if share != 1.0:
                        tensors[-1].mul_(share)
                return tensors

            return wait

        return post

    def _gradient_share(self, value: Value, name: str) -> float:
        """Return the factor of a full gradient on a rank whose value has a partial gradient (1/n); 1 for activations."""
        if value.name == "x":
            return 1.0
        sharding = self._shardings[value.index[1]]
        return 1.0 / prod(sharding.sizes[axis] for axis, placement in sharding.placements[name].items() if placement is D)


def pipeline_group_of(layout: Layout, world: World) -> Group:
    """Return the pipeline group of this rank; all ranks if stages have different numbers of ranks."""
    return world.world_group if layout.begins else world.group(layout.mesh_of(world.rank).group(world.rank, "pipeline"))
