"""Messages between stages that arrange their ranks differently: each piece once, and what replicas need alike they gather among themselves.

In: the mesh and the sharding of every stage, the shapes of what crosses. Out: for each activation or gradient what this rank sends to and
receives from which ranks, and the gathers after it. Not modelled: several links of one value at once; each is sent by itself.
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
    """One rank's messages of this kind. `sized`: by microbatch its shapes, and how each stage arranges them."""

    def __init__(self, layout: Layout, sized: Mapping[int, Sized], world: World, everyone: Group) -> None:
        self._layout, self._sized, self._shardings = layout, sized, next(iter(sized.values())).shardings
        self._world, self._everyone, self._rank = world, everyone, world.rank
        self._cache: dict[tuple[str, int, int, int], Resharding] = {}
        self.place = layout.mesh_of(world.rank).coordinates(world.rank)["pipeline"]

    def differ(self, value: Value) -> bool:
        """Whether a value's two stages arrange their ranks differently."""
        return self._differ(*value.index[:2])

    def _differ(self, a: int, b: int) -> bool:
        # Stages of unlike numbers of ranks have no lines of ranks over which those that are arranged alike could send.
        return bool(self._layout.begins) or self._shardings[a].sizes != self._shardings[b].sizes

    def side(self, stage: int, value: str, sized: Sized) -> Side:
        """How a value lies on the ranks of a stage."""
        forms = {axis: form for axis, form in sized.shardings[stage].forms[value].items() if is_shard(form) and not form.runs}
        return Side(self._layout.of_stage(stage).mesh, stage, forms)

    def of(self, name: str, sized: Sized, source: int, target: int) -> Resharding:
        """What moves one tensor from a stage to another."""
        key = name, sized.graph.batch_size, source, target
        if key not in self._cache:
            shape = sized.graph.tensors[name].shape
            self._cache[key] = reshard(shape, self.side(source, name, sized), self.side(target, name, sized))
        return self._cache[key]

    def peers(self, crossings: Crossings) -> set[Group]:
        """Groups of this rank that gather after a message, either way."""
        groups = set()
        for (a, b), those in crossings.items():
            for c in those if self._differ(a, b) else ():
                for sized in self._sized.values():
                    for source, target in ((a, b), (b, a)):
                        ranks = self.of(c.value, sized, source, target).peers.get(self._rank)
                        if ranks is not None:
                            groups.add(self._world.group(ranks))
        return groups

    def pairs(self, crossings: Crossings) -> set[tuple[int, int]]:
        """(sender, receiver) of every message between any two ranks."""
        return {
            (piece.sender, piece.receiver)
            for (a, b), those in crossings.items()
            for c in (those if self._differ(a, b) else ())
            for sized in self._sized.values()
            for ends in ((a, b), (b, a))
            for piece in self.of(c.value, sized, *ends).pieces
        }

    def sender(self, value: Value, messages: Sequence[Crossing], tags: Sequence[int]) -> Callable[[Sequence[Tensor]], list[Work]]:
        """What sends this rank's pieces of a value's tensors."""
        plans = []
        for c, tag in zip(messages, tags, strict=True):
            sized = self._sized[value.index[2]]
            mine = self.side(value.index[0], c.value, sized).box(self._rank, sized.graph.tensors[c.value].shape)
            pieces = [p for p in self.of(c.value, sized, *value.index[:2]).pieces if p.sender == self._rank]
            plans.append([(within(p.box, mine), p.receiver, tag) for p in pieces])
        isend = self._everyone.isend

        def send(tensors: Sequence[Tensor]) -> list[Work]:
            return [
                isend(x.detach()[where].contiguous(), to, tag=tag)
                for x, those in zip(tensors, plans, strict=True)
                for where, to, tag in those
            ]

        return send

    def receiver(self, value: Value, messages: Sequence[Crossing], tags: Sequence[int]) -> Callable[[], Arriving]:
        """What posts the receives of this rank's part of a value's tensors, which then are gathered."""
        plans = []
        for c, tag in zip(messages, tags, strict=True):
            moved = self.of(c.value, self._sized[value.index[2]], *value.index[:2])
            part = moved.parts[self._rank]
            pieces = [p for p in moved.pieces if p.receiver == self._rank]
            ranks = moved.peers.get(self._rank)
            over = None if ranks is None else self._world.group(ranks)
            room = tuple(stop - start for start, stop in part)
            share = self._share(value, c.value)
            plans.append(
                ([(within(p.box, part), p.sender, tag) for p in pieces], room, c.dtype, over, moved.dims.get(self._rank, 0), share)
            )
        irecv, device = self._everyone.irecv, self._world.device

        def post() -> Arriving:
            under_way = []
            for pieces, room, dtype, over, dim, share in plans:
                room_flat = torch.empty(room, dtype=dtype, device=device)
                works = [irecv(room_flat[where], source, tag=tag) for where, source, tag in pieces]
                under_way.append((room_flat, works, over, dim, share))

            def arrived() -> list[Tensor]:
                tensors = []
                for full, works, over, dim, share in under_way:
                    for work in works:
                        work.wait()
                    tensors.append(full if over is None else over.all_gather(full, dim))
                    if share != 1.0:
                        tensors[-1].mul_(share)
                return tensors

            return arrived

        return post

    def _share(self, value: Value, name: str) -> float:
        """The part of a whole gradient that each rank takes which made its value as one whose gradient comes in summands."""
        if value.name == "x":
            return 1.0
        sharding = self._shardings[value.index[1]]
        return 1.0 / prod(sharding.sizes[axis] for axis, form in sharding.forms[name].items() if form is D)


def line_of(layout: Layout, world: World) -> Group:
    """The ranks with this rank's place in every stage, over which stages that are arranged alike send; all ranks, where stages have unlike
    numbers of them."""
    return world.everyone if layout.begins else world.group(layout.mesh_of(world.rank).group(world.rank, "pipeline"))
