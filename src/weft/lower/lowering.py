"""What every operator of a stage is lowered with, and the `torch.fx` graph that it is lowered to.

In: the sharding of the whole graph, and the group of each mesh axis. Out: `Lowering`, the same for all stages, which knows the forms that
values cross between them in; `Nodes`, a graph under construction; and how a node is made to call what has a name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from weft.lower.arrival import Arrival
from weft.lower.kernels.paged import Pages
from weft.lower.kernels.randomness import Draw
from weft.lower.redistribute import redistribute
from weft.model.batch.drawn import Fold
from weft.model.graph import Graph
from weft.model.sharding.sharding import Sharding
from weft.model.storage.autocast import autocast
from weft.ops import draws
from weft.plan.axis import axis_of
from weft.plan.placement import D, Placement, R, crossing, shard
from weft.plan.precision import PRECISIONS, Precision
from weft.world.world import Group

Variant = tuple[Placement, ...]  # a value's form along every axis, in the order of `Lowering.axes`


@dataclass(frozen=True, slots=True)
class Entering:
    """Of a variable's gradient: axes over which it is summed here, and by how much it then counts."""

    summed: tuple[str, ...] = ()
    share: float = 1.0


@dataclass(frozen=True)
class Lowering:
    """What every operator is lowered with. `rows`: of the model's outputs, which dimension follows the samples. `shares`: of variables
    whose gradients are summed over ranks that have the same, the part of each that counts. `apart`: what comes from stages that arrange
    their ranks differently: its gradient goes back whole. `folds`: where samples lie in what is drawn, draw by draw. `awaited`: constants
    that may still be on their way when a stage begins, which `arrival` waits for where they are first read. `local_statistics`:
    axes along which each rank's statistics of batch norm are of its own samples. `precision`: how products are computed,
    which autocast casts where it says so. `entering`: of variables, what is done to their gradients beside, where nobody sums over the axes
    over which this graph leaves summands. `pages`: of a decoder, where attention finds the keys of earlier tokens."""

    graph: Graph
    sharding: Sharding
    groups: Mapping[str, Group]
    device: torch.device
    draw: Draw
    rows: Mapping[str, int] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    apart: frozenset[str] = frozenset()
    folds: Sequence[Fold | None] = ()
    awaited: frozenset[str] = frozenset()
    arrival: Arrival = field(default_factory=Arrival)
    local_statistics: tuple[str, ...] = ()
    precision: Precision = PRECISIONS["float32"]
    entering: Mapping[str, Entering] = field(default_factory=dict)
    pages: Pages | None = None
    tried: set[object] = field(default_factory=set)  # functions of the user's own on pieces that they have been tried on

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.sharding.sizes)

    @property
    def at(self) -> dict[str, int]:
        """This rank's place along each axis."""
        return {axis: self.groups[axis].index for axis in self.axes}

    def variant(self, forms: Mapping[str, Placement]) -> Variant:
        return tuple(forms[axis] for axis in self.axes)

    def lies(self, value: str) -> Variant:
        """The form in which a value is there: as it is made; behind a region of branches, as it has left that."""
        return self.variant(self.sharding.lies(value))

    def crossing(self, value: str) -> Variant:
        """The form in which a value crosses to another stage: as it is there, summands summed and pieces of several runs put together."""
        return tuple(map(crossing, self.lies(value)))

    def arriving(self, value: str) -> Variant:
        """The form in which a value comes from another stage."""
        crossing = self.crossing(value)
        return tuple(R if form is D else form for form in crossing) if value in self.apart else crossing

    def handed_out(self, value: str) -> Variant:
        """The form in which the user's own code gets an output: this rank's samples, and of those everything."""
        return tuple(self._local_rows(value, axis) if axis_of(axis).cuts_samples and value in self.rows else R for axis in self.axes)

    def _local_rows(self, value: str, axis: str) -> Placement:
        """Of an output, this rank's samples."""
        dim, n = self.rows[value], self.sharding.sizes[axis]
        length = self.graph.tensors[value].shape[dim]
        count = self.graph.granules[False].get((value, dim), length)
        return shard(dim, length, n, length // count if length % count == 0 else 1)

    def dtype(self, value: str) -> torch.dtype:
        """Of a value as the run has it."""
        return getattr(torch, self.precision.products if value in self._narrow else self.graph.tensors[value].dtype)  # type: ignore[no-any-return]

    @cached_property
    def _narrow(self) -> frozenset[str]:
        """Values that autocast makes narrow. On GPUs its lists are others, and what is not known to be narrow goes as it was traced."""
        casted = autocast(self.graph).tensors if self.precision.products and self.device.type == "cpu" else {}
        return frozenset(value for value, t in casted.items() if t.dtype != self.graph.tensors[value].dtype)

    @cached_property
    def ordinal(self) -> dict[str, int]:
        """Number of each operator."""
        return {op.name: i for i, op in enumerate(self.graph.operators)}

    @cached_property
    def drawing(self) -> dict[str, int]:
        """Of the operators that draw, number of each among them."""
        return {op.name: i for i, op in enumerate(op for op in self.graph.operators if draws(op))}


class Nodes:
    """The graph of a stage while it is made. Every node knows the layer that it stands in."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.part = (0, False)  # number of the run of operators of one layer, and whether it is a repeated layer
        self.layer = ""  # the layer itself
        self.in_region = False  # among parallel branches, each of which one rank has

    def add(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        """A node that calls `target`."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta["part"], node.meta["layer"], node.meta["in_region"] = self.part, self.layer, self.in_region
        return node

    def move(self, node: fx.Node, group: Group, source: Placement, target: Placement) -> fx.Node:
        """A redistribution. Groups are bound, since generated code can only name numbers and text."""
        return self.add(bind(redistribute, source=source, target=target, group=group), (node,))


def operator_of(target: str) -> Callable[..., Any]:
    namespace, packet, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)  # type: ignore[no-any-return]


def bind(function: Callable[..., Any], *first: Any, **named: Any) -> Callable[..., Any]:
    """`functools.partial`, with the name that fx writes into the code it generates."""

    def bound(*args: Any, **kwargs: Any) -> Any:
        return function(*first, *args, **named, **kwargs)

    bound.__name__ = bound.__qualname__ = function.__name__.lstrip("_")
    bound.__module__ = function.__module__
    return bound
