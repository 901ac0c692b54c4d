"""Find the first operator whose value differs: every value of every rank, put together from its shards, against the serial run's.

In: values recorded while the stages ran (`ValueRecorder`), by rank and microbatch. Out: `WrongValue`: site, rank, placement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardwise.errors import ShardwiseError
from shardwise.model.graph import Graph
from shardwise.ops import record_of
from shardwise.ops.vocabulary import LoweringKind
from shardwise.plan.ir.placement import (  # fmt: skip
    HaloPartial,
    P,
    Placement,
    Shard,
    Strided,
    has_single_owner,
    is_halo,
    position_ranges,
)
from shardwise.run.engine import Engine
from shardwise.run.prove.field_tensor import ComplexFieldTensor, FieldTensor, have_equal_values

Values = dict[tuple[int, str, tuple[Placement, ...]], Tensor]  # (microbatch, value, placements along every axis)


class ValueRecorder(fx.Interpreter):
    """Runs a stage's module node by node, and keeps the value of each in `values`."""

    def __init__(self, module: fx.GraphModule, microbatch: Callable[[], int], values: Values) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._microbatch, self._values = microbatch, values

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor) and n.op == "call_function" and "value" in n.meta:  # a weight of ZeRO-3 may have no memory now
            value, variant = n.meta["value"]
            self._values[self._microbatch(), value, variant] = result.detach().clone()
        return result


def record_values(engine: Engine) -> Values:
    """Record every value that this rank computes from now on."""
    values: Values = {}
    draw = engine.rank_model.draw
    for runners in {id(r): r for r in engine.executor.by_microbatch.values()}.values():
        for runner in runners.runners.values():
            if isinstance(runner.local.module, nn.Module):  # a graph, or layers that wait for weights or are recomputed around graphs
                runner.module = runner.local.module
                for graph in [m for m in runner.local.module.modules() if isinstance(m, fx.GraphModule)]:
                    graph.forward = ValueRecorder(graph, lambda: draw.microbatch, values).run
    return values


@dataclass(frozen=True)
class RankPlace:
    """Where a rank is: its coordinate and its group along every axis."""

    rank: int
    axes: tuple[str, ...]
    coordinates: Mapping[str, int]
    groups: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class WrongValue:
    """The first value that differs. `placement`: by axis, as in plans."""

    site: str
    value: str
    rank: int
    placement: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        placement = " ".join(f"{axis}:{form}" for axis, form in self.placement.items())
        return f"{self.site} on rank {self.rank}" + (f" ({placement})" if placement else "")


def list_comparable_values(graph: Graph) -> list[tuple[str, str]]:
    """Return (site, value) of the values of a graph, in order, whose shards are parts of the whole. Rows that are dispatched to experts are
    not: each rank has its own tokens in the order of their experts, until they are combined."""
    dispatched, values = set[str](), list[tuple[str, str]]()
    for op in graph.operators:
        kind = record_of(op).lowering
        if kind is LoweringKind.EXPERT_DISPATCH or (kind is not LoweringKind.EXPERT_COMBINE and not dispatched.isdisjoint(op.inputs)):
            dispatched.update(op.outputs)
        else:
            values.extend((op.site, value) for value in op.outputs)
    return values


def first_wrong_value(
    order: Sequence[tuple[str, str]], serial: Mapping[tuple[int, str], Tensor], places: Sequence[RankPlace], recorded: Sequence[Values]
) -> WrongValue | None:
    """Return the first value, in the order of the serial graph's operators, that differs on a rank; None if all agree.

    `order`: (site, value). `serial`: whole values by (microbatch, value). `recorded`: of each rank.
    """
    by_value: dict[str, list[tuple[int, tuple[int, str, tuple[Placement, ...]]]]] = {}
    for rank, values in enumerate(recorded):
        for key in values:
            by_value.setdefault(key[1], []).append((rank, key))
    for site, value in order:
        for rank, key in by_value.get(value, ()):
            expected = serial.get((key[0], value))
            if expected is not None and not _is_part_of_whole(expected, key, places[rank], recorded):
                forms = {axis: str(form) for axis, form in zip(places[rank].axes, key[2], strict=True)}
                return WrongValue(site, value, rank, forms)
    return None


def _is_part_of_whole(expected: Tensor, key: tuple[int, str, tuple[Placement, ...]], place: RankPlace, recorded: Sequence[Values]) -> bool:
    """Return whether a rank's value, or the sum over ranks of partial ones, is its part of the whole."""
    summed_axes = [axis for axis, form in zip(place.axes, key[2], strict=True) if form is P]
    if any(isinstance(form, HaloPartial) for form in key[2]):
        return True  # windows overlap: compared where they have been added
    members = {place.rank}
    for axis in summed_axes:  # the ranks of a product of axes, of which this rank's group along each is a side
        members = set(place.groups[axis]) if members == {place.rank} else members | set(place.groups[axis])
    if len(summed_axes) > 1:
        return True
    parts = [recorded[member].get(key) for member in sorted(members)]
    if any(part is None for part in parts):
        return True
    total: Any = parts[0]
    for part in parts[1:]:
        total = total + part
    for axis, form in zip(place.axes, key[2], strict=True):
        if has_single_owner(form) and form.rank != place.coordinates[axis]:
            return True
    try:
        wanted = _part_of(expected, key[2], place)
    except (ShardwiseError, RuntimeError):  # a placement of a microbatch of another size
        return True
    if any(isinstance(x, FieldTensor | ComplexFieldTensor) for x in (total, wanted)):
        return have_equal_values(total, wanted)
    return total.shape == wanted.shape and torch.equal(total.to(wanted.dtype), wanted)


def _part_of(full: Tensor, variant: Sequence[Placement], place: RankPlace) -> Tensor:
    """Return a rank's part of a whole value in the given placements."""
    for axis, form in zip(place.axes, variant, strict=True):
        n, index = len(place.groups[axis]), place.coordinates[axis]
        if isinstance(form, Strided):
            shape = full.shape
            split = full.reshape(*shape[: form.dim], -1, form.size, form.inner, *shape[form.dim + 1 :])
            ranges = position_ranges(form, shape[form.dim], n, index)
            split = torch.cat([split.narrow(form.dim + 1, a, b - a) for a, b in ranges], form.dim + 1)
            full = split.reshape(*shape[: form.dim], -1, *shape[form.dim + 1 :])
        elif isinstance(form, Shard):
            spans = form.spans(full.shape[form.dim], n, index)
            full = torch.cat([full.narrow(form.dim, a, b - a) for a, b in spans], form.dim)
        elif is_halo(form):
            start, stop = form.windows[index]
            full = full.narrow(form.dim, start, stop - start)
    return full


def place_of(engine: Engine) -> RankPlace:
    """Return where an engine's rank is."""
    mesh, rank = engine.mesh, engine.world.rank
    axes = tuple(engine.rank_model.sharding.sizes)
    return RankPlace(rank, axes, mesh.coordinates(rank), {axis: mesh.group(rank, axis) for axis in axes})
