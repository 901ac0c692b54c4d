"""Reshard activations and gradients between pipeline stages with different meshes: each shard is sent once, and replicas all-gather it.

In: the mesh and the sharding of every stage, the shapes of what is sent. Out: for each activation or gradient what this rank sends to and
receives from which ranks, and the all-gather after it. Not modelled: fusing several links of one value; each is sent separately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from weft.plan.layout import Layout
from weft.plan.placement import D, is_shard
from weft.plan.program import Value
from weft.plan.resharding import Resharding, Side, reshard, within
from weft.run.resized import Sized
from weft.run.step.transfers import Arriving, Crossing, Crossings
from weft.world.world import Group, Work, World


class Resharded:
    """Resharding messages of one rank. `variants`: by microbatch, the shapes and the sharding of each stage."""

    def __init__(self, layout: Layout, sized: Mapping[int, Sized], world: World, everyone: Group) -> None:
        self._layout, self._sized, self._shardings = layout, sized, next(iter(sized.values())).shardings
        self._world, self._everyone, self._rank = world, everyone, world.rank
        self._cache: dict[tuple[str, int, int, int], Resharding] = {}
        self.place = layout.mesh_of(world.rank).coordinates(world.rank)["pipeline"]

    def differ(self, value: Value) -> bool:
        """Return whether a value's two stages have different meshes."""
        return self._differ(*value.index[:2])

    def _differ(self, a: int, b: int) -> bool:
        # Stages with different numbers of ranks have no pipeline groups, so that even stages with equal meshes reshard.
        return bool(self._layout.begins) or self._shardings[a].sizes != self._shardings[b].sizes

    def side(self, stage: int, value: str, sized: Sized) -> Side:
        """Return the placement of a value on the ranks of a stage."""
        placements = {axis: form for axis, form in sized.shardings[stage].forms[value].items() if is_shard(form) and not form.runs}
        return Side(self._layout.of_stage(stage).mesh, stage, placements)

    def of(self, name: str, sized: Sized, source: int, target: int) -> Resharding:
        """Return the cached resharding of one tensor from a stage to another."""
        key = name, sized.graph.batch_size, source, target
        if key not in self._cache:
            shape = sized.graph.tensors[name].shape
            self._cache[key] = reshard(shape, self.side(source, name, sized), self.side(target, name, sized))
        return self._cache[key]

    def peers(self, crossings: Crossings) -> set[Group]:
        """Return this rank's all-gather groups, in both directions."""
        groups = set()
        for (a, b), crossings_of_link in crossings.items():
            for crossing in crossings_of_link if self._differ(a, b) else ():
                for sized in self._sized.values():
                    for source, target in ((a, b), (b, a)):
                        ranks = self.of(crossing.value, sized, source, target).peers.get(self._rank)
                        if ranks is not None:
                            groups.add(self._world.group(ranks))
        return groups

    def pairs(self, crossings: Crossings) -> set[tuple[int, int]]:
        """Return (sender, receiver) of every message between any two ranks."""
        return {
            (piece.sender, piece.receiver)
            for (a, b), crossings_of_link in crossings.items()
            for crossing in (crossings_of_link if self._differ(a, b) else ())
            for sized in self._sized.values()
            for ends in ((a, b), (b, a))
            for piece in self.of(crossing.value, sized, *ends).pieces
        }

    def sender(self, value: Value, messages: Sequence[Crossing], tags: Sequence[int]) -> Callable[[Sequence[Tensor]], list[Work]]:
        """Return a function that sends this rank's shards of a value's tensors."""
        plans = []
        for crossing, tag in zip(messages, tags, strict=True):
            sized = self._sized[value.index[2]]
            local_box = self.side(value.index[0], crossing.value, sized).box(self._rank, sized.graph.tensors[crossing.value].shape)
            pieces = [p for p in self.of(crossing.value, sized, *value.index[:2]).pieces if p.sender == self._rank]
            plans.append([(within(p.box, local_box), p.receiver, tag) for p in pieces])
        isend = self._everyone.isend

        def send(tensors: Sequence[Tensor]) -> list[Work]:
            return [
                isend(x.detach()[index].contiguous(), to, tag=tag)
                for x, shards in zip(tensors, plans, strict=True)
                for index, to, tag in shards
            ]

        return send

    def receiver(self, value: Value, messages: Sequence[Crossing], tags: Sequence[int]) -> Callable[[], Arriving]:
        """Return a function that posts the receives of this rank's shards of a value's tensors, to be all-gathered."""
        plans = []
        for crossing, tag in zip(messages, tags, strict=True):
            resharded = self.of(crossing.value, self._sized[value.index[2]], *value.index[:2])
            part = resharded.parts[self._rank]
            pieces = [p for p in resharded.pieces if p.receiver == self._rank]
            ranks = resharded.peers.get(self._rank)
            gather = None if ranks is None else self._world.group(ranks)
            shape = tuple(stop - start for start, stop in part)
            share = self._share(value, crossing.value)
            indexed = [(within(p.box, part), p.sender, tag) for p in pieces]
            plans.append((indexed, shape, crossing.dtype, gather, resharded.dims.get(self._rank, 0), share))
        irecv, device = self._everyone.irecv, self._world.device

        def post() -> Arriving:
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

    def _share(self, value: Value, name: str) -> float:
        """Return the factor of a full gradient on a rank whose value has a partial gradient (1/n); 1 for activations."""
        if value.name == "x":
            return 1.0
        sharding = self._shardings[value.index[1]]
        return 1.0 / prod(sharding.sizes[axis] for axis, placement in sharding.forms[name].items() if placement is D)


def line_of(layout: Layout, world: World) -> Group:
    """Return the pipeline group of this rank; all ranks if stages have different numbers of ranks."""
    return world.everyone if layout.begins else world.group(layout.mesh_of(world.rank).group(world.rank, "pipeline"))
