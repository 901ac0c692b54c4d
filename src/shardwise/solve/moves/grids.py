"""2-D and 3-D tensor parallelism: arrange the tensor ranks of leading layouts in grids.

A grid changes what tensor ranks send to each other and how much, by the 2-D and 3-D parallel matrix products of Agarwal et al. 1995 as
AxoNN has them (Singh et al. SC'24). To search them with everything else would multiply the space, so only those of the best layouts of
a few meshes are tried; a layout whose time without the collectives of its tensor ranks is no better than the best is skipped. Of
grids larger than a node, where a line is never best, a model of compute and bytes like AxoNN's selects those worth a search.

Also leading pipelines with each replica's stages on adjacent ranks (`neighbours=pipeline`), instead of its replicas. Sends between stages
then cross a node's network ports less often, and gradient reductions cross them once for each stage of a node instead of once: it pays
where activations outweigh weights (large images, boundaries of small microbatches), as for GEMS (Jain et al., SC'20).

Also leading layouts with ZeRO inside nodes (`shard=N`): weights are gathered over a node's links, at the memory of N shards in place of
all. It pays where rings over all replicas are long, as InternEvo's (arXiv 2401.09149) and MiCS (Zhang et al., VLDB 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product

from shardwise.cluster.cluster import Cluster
from shardwise.cost.step import Pricer
from shardwise.cost.step_time.timing import PricedLayout, has_fill_drain_bubble
from shardwise.errors import Infeasible, LayoutError
from shardwise.plan.ir.axis import BRANCH, PIPELINE
from shardwise.plan.ir.grid import grids_of, parse_grid
from shardwise.plan.layout import Layout
from shardwise.solve.bounds import base_lower_bound_s, check_base_state_fits, collective_fraction, layout_lower_bound_s
from shardwise.solve.constraints import Constraint
from shardwise.solve.space import MAX_MICROBATCHES, SearchSpace, admitted_rank_counts, divisors_of

MAX_SHARDED_LAYOUTS = 3  # layouts with ZeRO inside nodes, before those that the mesh repeats
MAX_ADJACENT_LAYOUTS = 4  # layouts with stages on adjacent ranks
MIN_TENSOR_RANKS, MAX_LAYOUTS, MAX_GRIDS = 4, 2, 6  # tensor ranks at least; layouts, and grids of each, at most
MAX_MULTI_NODE_MESHES = 2  # meshes with tensor ranks on several nodes


def arrange_in_grids(
    pricer: Pricer, space: SearchSpace, priced: Iterable[PricedLayout], cannot_win: Callable[[Layout, float], bool]
) -> Iterator[tuple[Layout, float]]:
    """Yield layouts with their tensor ranks in a grid, and a lower bound in seconds of each: with sequences whole or divided between
    products, since what is best in a line need not be in a grid.

    `cannot_win`: whether a layout of at least so many seconds cannot be the best.
    """
    leading: dict[tuple[int, ...], PricedLayout] = {}
    for candidate in sorted(priced, key=lambda p: p.prediction.step_time_s):
        if candidate.layout.tensor >= MIN_TENSOR_RANKS and not candidate.layout.inner:
            leading.setdefault((candidate.layout.data, candidate.layout.tensor, candidate.layout.pipeline), candidate)
    for candidate in list(leading.values())[:MAX_LAYOUTS]:
        collectives_s = dict(candidate.prediction.parts).get("tensor", 0.0)
        if cannot_win(candidate.layout, candidate.prediction.step_time_s - collectives_s):
            continue
        sequences = [each for each in ("off", "on") if space.admits("sequence_parallel", each)]
        for grid, sequence in product(grids_of(candidate.layout.tensor)[:MAX_GRIDS], sequences):
            try:
                layout = replace(candidate.layout, grid=grid, sequence_parallel=sequence)
                yield layout, layout_lower_bound_s(pricer, layout, not has_fill_drain_bubble(layout))
            except (Infeasible, LayoutError):
                continue


def unpriced_meshes(
    pricer: Pricer, priced: Iterable[PricedLayout], bases: Iterable[Layout], cannot_win: Callable[[Layout, float], bool]
) -> Iterator[Layout]:
    """Yield a base of each leading mesh that nobody priced: its traffic with tensor ranks in a line bars it, and in a grid it may be less.

    `bases`: of schedules of one stage a rank, in the order of their bounds. `cannot_win` as for `arrange_in_grids`.
    """
    priced_meshes = {(p.layout.data, p.layout.tensor, p.layout.pipeline) for p in priced if not p.layout.inner}
    visited: set[tuple[int, ...]] = set()
    for base in bases:
        mesh = (base.data, base.tensor, base.pipeline)
        if base.tensor < MIN_TENSOR_RANKS or mesh in visited or base.inner:
            continue
        if cannot_win(base, base_lower_bound_s(pricer, base, False) * (1 - collective_fraction(pricer, base))):
            continue
        visited.add(mesh)
        if mesh not in priced_meshes:
            yield base
        if len(visited) == MAX_LAYOUTS:
            return


def other_microbatch_counts(space: SearchSpace, layout: Layout) -> tuple[list[int], list[int]]:
    """Return twice, four times, ... and half, a quarter, ... as many microbatches as a layout has, if they divide a replica's batch."""
    batch_per_replica, m = -(-space.batch_size // layout.data) // layout.branch, layout.microbatches
    limit = min(MAX_MICROBATCHES, space.batch_size // layout.data // layout.branch)
    counts = [k for k in divisors_of(batch_per_replica) if k <= limit and space.admits("microbatches", k)]
    more, fewer = {m << j for j in range(1, 10)}, {m >> j for j in range(1, 10)}
    return [k for k in counts if k in more], [k for k in reversed(counts) if k in fewer]


def multi_node_grid_spaces(pricer: Pricer, space: SearchSpace, time_limit_s: float) -> list[SearchSpace]:
    """Narrow the search to each of the few meshes with a multi-node grid that may take less than `time_limit_s`, the most promising first.

    Each is estimated: its compute at the device's best rate, and for every product, sharded over rows and columns, the all-reduce of its
    results over one of them and of its inputs' gradients over the other (AxoNN's communication model, Singh et al. SC'24, section V-B;
    which is which alternates from layer to layer, so the mean of both counts). Most such grids send too much to be tried.
    """
    fixed_keys = {c.key for c in space.constraints if c.relation == "="}
    if pricer.cluster.kind.shares_hosts or pricer.cluster.parts or fixed_keys & {"grid", "context", "spatial", "branch"}:
        return []
    elements, zeros, spaces = _product_elements(pricer), [z for z in range(4) if space.admits("zero", z)], []
    for base in _multi_node_grids(space):
        with suppress(Infeasible, LayoutError):  # its state alone does not fit
            check_base_state_fits(pricer, base, zeros, space.admitted_words("offload"))
            if (seconds := _estimated_s(pricer, base, elements)) < time_limit_s:
                spaces.append((seconds, base))
    likeliest: dict[tuple[int, int, int], Layout] = {}
    for _, base in sorted(spaces, key=lambda one: one[0]):
        likeliest.setdefault((base.data, base.tensor, base.pipeline), base)
    return [_with_mesh_constraints(space, base) for base in list(likeliest.values())[:MAX_MULTI_NODE_MESHES]]


def _multi_node_grids(space: SearchSpace) -> Iterator[Layout]:
    """Yield every mesh of all ranks with rows and columns of tensor ranks on several nodes, one sample a microbatch."""
    ranks = next(iter(admitted_rank_counts(space.cluster, space.constraints)), 0)
    for tensor in (n for n in divisors_of(ranks) if n > space.cluster.node_size and space.admits("tensor", n)):
        for pipeline in divisors_of(ranks // tensor):
            data = ranks // tensor // pipeline
            admitted = space.admits("pipeline", pipeline) and space.admits("data", data) and space.batch_size % data == 0
            if admitted and pipeline <= min(space.num_chunks, space.num_layers):
                for grid in (g for g in grids_of(tensor) if len(parse_grid(g)) == 2):
                    yield Layout(data, tensor, pipeline, space.batch_size // data, precision=space.precisions()[-1], grid=grid)


def _estimated_s(pricer: Pricer, base: Layout, elements: float) -> float:
    """Seconds of a step in a grid. `elements`: as `_product_elements` counts them."""
    device, ranks = pricer.cluster.device, base.num_ranks
    traffic_bytes = pricer.devices.widths(base).weight * elements / 2 * pricer.batch_size / base.data / base.pipeline
    rows, columns = parse_grid(base.grid)
    sent_s = sum(
        pricer.collective("all_reduce", traffic_bytes / n, pricer.group(base, axis)) for axis, n in (("rows", columns), ("columns", rows))
    )
    return pricer.model_flops / (ranks * device.matmul_efficiency * device.peak(base.precision)) + sent_s


def _product_elements(pricer: Pricer) -> float:
    """Number of elements that the model's products with a weight read and write for one sample."""
    graph, elements = pricer.graph, 0
    for op in (operator for operator, is_product in zip(graph.operators, pricer.weighted, strict=True) if is_product):
        elements += max((graph.tensors[v].size for v in op.inputs if v in pricer.inventory.batched), default=0)
        elements += sum(graph.tensors[v].size for v in op.outputs if v in pricer.inventory.batched)
    return elements / graph.batch_size


def _with_mesh_constraints(space: SearchSpace, base: Layout) -> SearchSpace:
    fixed = (Constraint(key, "=", getattr(base, key)) for key in ("data", "tensor", "pipeline", "grid"))
    return replace(space, constraints=(*space.constraints, *fixed), context_sizes=(), spatial_words=(), branch_sizes=())


def with_adjacent_stages(cluster: Cluster, priced: Iterable[PricedLayout], cannot_win: Callable[[Layout, float], bool]) -> Iterator[Layout]:
    """Yield the leading layouts for which it may pay, each mesh once.

    `cannot_win`: whether a layout of at least so many seconds cannot be the best.
    """
    visited: set[tuple[tuple[str, int], ...]] = set()
    for candidate in sorted(priced, key=lambda p: p.prediction.step_time_s):
        layout = candidate.layout
        is_eligible = layout.neighbours == BRANCH and layout.branch == 1 and min(layout.pipeline, layout.data) > 1 and not layout.inner
        if not is_eligible or cluster.parts or layout.replica_ranks >= cluster.node_size or layout.num_ranks <= cluster.node_size:
            continue
        sends_s = dict(candidate.prediction.parts).get("pipeline", 0.0)
        if layout.axes in visited or len(visited) == MAX_ADJACENT_LAYOUTS or cannot_win(layout, candidate.prediction.step_time_s - sends_s):
            continue
        visited.add(layout.axes)
        yield replace(layout, neighbours=PIPELINE)


def with_shards_in_nodes(cluster: Cluster, priced: Iterable[PricedLayout]) -> Iterator[Layout]:
    """Yield leading layouts under ZeRO whose replicas are on several nodes, with state sharded among those of one node, or of two."""
    visited: set[tuple[object, ...]] = set()
    for candidate in sorted(priced, key=lambda p: p.prediction.step_time_s):
        layout = candidate.layout
        key = (layout.axes, layout.zero)
        per_node = cluster.node_size // layout.replica_ranks
        if not layout.zero or layout.shard or cluster.parts or per_node < 1 or key in visited or layout.neighbours == PIPELINE:
            continue
        if len(visited) == MAX_SHARDED_LAYOUTS:
            return
        visited.add(key)
        for size in (per_node, 2 * per_node):
            if 1 < size < layout.data and layout.data % size == 0:
                with suppress(LayoutError):  # keys that do not go with it
                    yield replace(layout, shard=size)
