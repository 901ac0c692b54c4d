"""Context of lowering: sharding, groups and options shared by all stages, and the `torch.fx` graph under construction.

`Lowering` also determines in which placements values are sent between stages; `bind_named` turns a function with arguments into a node
target; `groups_of` names the groups of a stage: one per sharded axis, and inner and outer ones of an axis whose ranks exchange heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from shardwise.lower.device_dtypes import DeviceDtypes, find_device_dtypes
from shardwise.lower.kernels.paged import PagedCache
from shardwise.lower.kernels.randomness import DrawState
from shardwise.lower.redistribute import redistribute
from shardwise.lower.torch_calls import called_function
from shardwise.model.batch.random_draws import SampleFold
from shardwise.model.dims.fused_dims import find_fused_dims
from shardwise.model.dims.labels import num_units_by_dim
from shardwise.model.graph import Graph
from shardwise.model.sharding.reads import Variant
from shardwise.model.sharding.sharding import Sharding, num_exchanging_ranks
from shardwise.model.strides.autocast_dtypes import apply_autocast, narrow_parameters
from shardwise.ops import is_random
from shardwise.plan.ir.axis import axis_of
from shardwise.plan.ir.mesh import Mesh
from shardwise.plan.ir.placement import D, Placement, R, across_stages, shard
from shardwise.plan.ir.precision import PRECISIONS, Precision
from shardwise.world.world import Group


@dataclass(frozen=True, slots=True)
class LocalGradientReduction:
    """Handling of a variable's gradient where it is read: axes over which to reduce it, and the factor of its share."""

    reduced_axes: tuple[str, ...] = ()
    share: float = 1.0


@dataclass
class PendingConstants:
    """The pending wait for constants still in flight when a stage begins; nothing once they have arrived."""

    finish: Callable[[], None] | None = None

    def wait(self) -> None:
        """Wait for the constants."""
        if self.finish is not None:
            finish, self.finish = self.finish, None
            finish()


@dataclass(frozen=True)
class Lowering:
    """Everything shared by the lowering of all operators. `output_sample_dims`: of the model's outputs, the dimension of samples.
    `gradient_shares`: of variables whose equal gradients several ranks sum, the fraction that counts. `from_other_meshes`: values from
    stages with another mesh, whose gradient is returned replicated. `sample_folds`: location of samples in every draw. `awaited_constants`:
    constants possibly in flight when a stage begins, for which `pending_constants` waits where they are first read. `local_statistics`:
    axes along which batch norm statistics are per rank. `precision`: of products, with autocast where it says so. `local_reductions`: of
    variables, gradient handling where nobody else reduces over the axes over which this graph leaves partial sums. `pages`: of a decoder,
    the paged cache of earlier keys and values. `training_graph`: that with which parameters were allocated, if it is another one.
    `loss_chunks`: chunks of rows in which logits and their loss are computed."""

    graph: Graph
    sharding: Sharding
    groups: Mapping[str, Group]
    device: torch.device
    draw_state: DrawState
    output_sample_dims: Mapping[str, int] = field(default_factory=dict)
    gradient_shares: Mapping[str, float] = field(default_factory=dict)
    from_other_meshes: frozenset[str] = frozenset()
    sample_folds: Sequence[SampleFold | None] = ()
    awaited_constants: frozenset[str] = frozenset()
    pending_constants: PendingConstants = field(default_factory=PendingConstants)
    local_statistics: tuple[str, ...] = ()
    precision: Precision = PRECISIONS["float32"]
    local_reductions: Mapping[str, LocalGradientReduction] = field(default_factory=dict)
    pages: PagedCache | None = None
    training_graph: Graph | None = None
    loss_chunks: int = 1
    tried_functions: set[object] = field(default_factory=set)  # users' autograd functions with the shards on which they were checked

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.sharding.sizes)

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's coordinate along each axis."""
        return {axis: self.groups[axis].index for axis in self.axes}

    def variant(self, forms: Mapping[str, Placement]) -> Variant:
        return tuple(forms[axis] for axis in self.axes)

    def read_variant(self, value: str) -> Variant:
        """Return the placements in which a value is available: as computed, or as it left a region of branches."""
        return self.variant(self.sharding.read_placements(value))

    def sent_variant(self, value: str) -> Variant:
        """Return the placements in which a value is sent to another stage: partial sums reduced and runs gathered."""
        return tuple(map(across_stages, self.read_variant(value)))

    def received_variant(self, value: str) -> Variant:
        """Return the placements in which a value is received from another stage."""
        sent = self.sent_variant(value)
        return tuple(R if form is D else form for form in sent) if value in self.from_other_meshes else sent

    def output_variant(self, value: str) -> Variant:
        """Return the placements in which user code gets an output: this rank's samples, replicated otherwise."""
        return tuple(
            self._sample_shard(value, axis) if axis_of(axis).shards_samples and value in self.output_sample_dims else R
            for axis in self.axes
        )

    def _sample_shard(self, value: str, axis: str) -> Placement:
        """Return the placement of an output's samples."""
        dim, n = self.output_sample_dims[value], self.sharding.sizes[axis]
        length = self.graph.tensors[value].shape[dim]
        count = num_units_by_dim(self.graph, False).get((value, dim), length)
        return shard(dim, length, n, length // count if length % count == 0 else 1)

    def dtype(self, value: str) -> torch.dtype:
        """Return the dtype of a value in the run."""
        return getattr(torch, self.precision.product_dtype if value in self._narrow_values else self.graph.tensors[value].dtype)  # type: ignore[no-any-return]

    @cached_property
    def _held_narrow(self) -> frozenset[str]:
        """Names of the parameters that are read in fewer bits than the optimizer updates."""
        return narrow_parameters(self.training_graph or self.graph) if self.precision.held_dtype else frozenset()

    @cached_property
    def held_dtypes(self) -> dict[str, torch.dtype]:
        """Dtype in which these parameters are read, by graph value."""
        names = self._held_narrow
        return {v.value: getattr(torch, self.precision.held_dtype) for v in self.graph.parameters if v.name in names}

    @cached_property
    def _narrow_values(self) -> frozenset[str]:
        """Values that autocast narrows. GPUs have other lists of operators: there torch's own autocast must agree. Values not known to be
        narrow are sent in their traced dtype."""
        traced, found = self.graph.tensors, self._on_device
        narrow = {value for value, dtype in self._on_processors.items() if dtype.itemsize < getattr(torch, traced[value].dtype).itemsize}
        if found is None:
            return frozenset(narrow if self.device.type == "cpu" else ())
        return frozenset(value for value in narrow if found.dtypes[value] == self._on_processors[value])

    @cached_property
    def _on_processors(self) -> dict[str, torch.dtype]:
        """Dtypes of values under the autocast of processors; none where nothing is cast."""
        if not self.precision.product_dtype:
            return {}
        traced, casted = self.graph.tensors, apply_autocast(self.graph, self._held_narrow).tensors
        narrow = self.precision.product_dtype
        return {value: getattr(torch, t.dtype if t.dtype == traced[value].dtype else narrow) for value, t in casted.items()}

    @cached_property
    def _on_device(self) -> DeviceDtypes | None:
        """Dtypes of values under another device's autocast."""
        if self.device.type == "cpu" or not self.precision.product_dtype or not torch.amp.is_autocast_available(self.device.type):
            return None
        return find_device_dtypes(self.graph, self._on_processors, self.precision, self.device)

    @property
    def kept_operators(self) -> frozenset[str]:
        """Names of the operators that run in their operands' dtype, which autocast on this device would cast to float32."""
        return self._on_device.kept_operators if self._on_device is not None else frozenset()

    @cached_property
    def operator_index(self) -> dict[str, int]:
        """Index of each operator."""
        return {op.name: i for i, op in enumerate(self.graph.operators)}

    @cached_property
    def draw_index(self) -> dict[str, int]:
        """Index of each random operator among the random ones."""
        return {op.name: i for i, op in enumerate(op for op in self.graph.operators if is_random(op))}


class Nodes:
    """The graph of a stage under construction. Every node records its layer."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.layer_run = (0, False)  # index of the run of operators of one layer, and whether it is a repeated layer
        self.layer = ""  # the layer itself
        self.in_region = False  # inside of parallel branches, each on one rank

    def add(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        """Add a node that calls `target`."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta["part"], node.meta["layer"], node.meta["in_region"] = self.layer_run, self.layer, self.in_region
        return node

    def redistribute(self, node: fx.Node, group: Group, source: Placement, target: Placement) -> fx.Node:
        """Add a redistribution. Groups are bound, since generated code can only name numbers and text."""
        added = self.add(bind_named(redistribute, source=source, target=target, group=group), (node,))
        added.meta["redistribution"] = (source, target, group)
        return added


def bind_named(function: Callable[..., Any], *first: Any, **named: Any) -> Callable[..., Any]:
    """Bind arguments as `functools.partial` does, with a name that fx can write into generated code. `bound`: those by name."""

    def bound(*args: Any, **kwargs: Any) -> Any:
        return function(*first, *args, **named, **kwargs)

    bound.__name__ = bound.__qualname__ = function.__name__.lstrip("_")
    bound.__module__ = function.__module__
    bound.__dict__.update(bound=named, called=called_function(function))
    return bound


def wait_for_constant(arrival: PendingConstants, x: Tensor) -> Tensor:
    """Return `x` after the wait, where it is first read."""
    arrival.wait()
    return x


class RankGroups(Protocol):
    """A rank, and its groups."""

    @property
    def rank(self) -> int: ...
    def group(self, ranks: tuple[int, ...]) -> Group: ...


def groups_of(graph: Graph, sharding: Sharding, mesh: Mesh, world: RankGroups) -> dict[str, Group]:
    """Return this rank's group of each axis by name; also those that `inner_group_name` and `outer_group_name` name."""
    groups = {}
    for axis in sharding.sizes:
        ranks = mesh.group(world.rank, axis)
        groups[axis], at = world.group(ranks), ranks.index(world.rank)
        rows = find_fused_dims(graph).rules
        reading = (op for op in graph.operators if op.inputs)
        counts = {num_exchanging_ranks(sharding, op, rows[op.name], axis, graph.tensors[op.inputs[0]].shape) for op in reading}
        for n in counts - {1}:
            groups[inner_group_name(axis, n)] = world.group(ranks[at - at % n : at - at % n + n])
            groups[outer_group_name(axis, n)] = world.group(ranks[at % n :: n])
    return groups


def inner_group_name(axis: str, n: int) -> str:
    """Return the name of the inner group: n adjacent ranks of an axis."""
    return f"{n} of {axis}"


def outer_group_name(axis: str, n: int) -> str:
    """Return the name of the outer group: ranks with equal index within their inner group of size n."""
    return f"{axis} by {n}"
