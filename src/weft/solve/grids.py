"""Tensor ranks of leading layouts in grids. In: what was priced with them in a line. Out: layouts worth pricing, with what none beats.

A grid changes what tensor ranks say to each other and how much, by the 2-D and 3-D parallel matrix products of Agarwal et al. 1995 as
AxoNN has them (Singh et al. SC'24). To search them with everything else would multiply the space, so only those of the best layouts of
a few meshes are tried; a layout whose time without the collectives of its tensor ranks is no better than the best is left alone. Of
grids that are larger than a node, where a line is never best, a model of compute and bytes like AxoNN's says which are worth a search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from weft.cost.step import Pricer
from weft.errors import Infeasible, LayoutError
from weft.plan.grid import grids_of, parse_grid
from weft.plan.layout import Layout
from weft.solve.bounds import check_room, least_s, least_saving_s, sent_share
from weft.solve.space import MOST_MICROBATCHES, Constraint, Space, divisors, wanted_ranks
from weft.solve.timing import Priced, waits_to_fill

LEAST, MOST_LAYOUTS, MOST_GRIDS = 4, 2, 6  # tensor ranks that are arranged, layouts whose are, and grids of each
MOST_BEYOND = 2  # meshes whose tensor ranks lie on several nodes


def in_grids(pricer: Pricer, priced: Iterable[Priced], hopeless: Callable[[Layout, float], bool]) -> Iterator[tuple[Layout, float]]:
    """Layouts with their tensor ranks in a grid, and seconds that each takes at least.

    `hopeless`: whether a layout of at least so many seconds cannot be the best.
    """
    leading: dict[tuple[int, ...], Priced] = {}
    for one in sorted(priced, key=lambda p: p.prediction.step_time_s):
        if one.layout.tensor >= LEAST and not one.layout.inner:
            leading.setdefault((one.layout.data, one.layout.tensor, one.layout.pipeline), one)
    for one in list(leading.values())[:MOST_LAYOUTS]:
        talk_s = dict(one.prediction.parts).get("tensor", 0.0)
        if hopeless(one.layout, one.prediction.step_time_s - talk_s):
            continue
        for grid in grids_of(one.layout.tensor)[:MOST_GRIDS]:
            try:
                layout = replace(one.layout, grid=grid)
                yield layout, least_saving_s(pricer, layout, not waits_to_fill(layout))
            except (Infeasible, LayoutError):
                continue


def left_out(
    pricer: Pricer, priced: Iterable[Priced], bases: Iterable[Layout], hopeless: Callable[[Layout, float], bool]
) -> Iterator[Layout]:
    """Of the leading meshes those that nobody priced: what their tensor ranks send in a line bars them, and in a grid it may be less.

    `bases`: of schedules of one stage a rank, in the order of their bounds. `hopeless` is asked as for `in_grids`.
    """
    done = {(one.layout.data, one.layout.tensor, one.layout.pipeline) for one in priced if not one.layout.inner}
    seen: set[tuple[int, ...]] = set()
    for base in bases:
        mesh = (base.data, base.tensor, base.pipeline)
        if base.tensor < LEAST or mesh in seen or base.inner:
            continue
        if hopeless(base, least_s(pricer, base, False) * (1 - sent_share(pricer, base))):
            continue
        seen.add(mesh)
        if mesh not in done:
            yield base
        if len(seen) == MOST_LAYOUTS:
            return


def more_and_fewer(space: Space, layout: Layout) -> tuple[list[int], list[int]]:
    """Twice, four times, ... and half, a quarter, ... as many microbatches as a layout has, as a replica's batch divides into."""
    each, m = -(-space.batch_size // layout.data) // layout.branch, layout.microbatches
    most = min(MOST_MICROBATCHES, space.batch_size // layout.data // layout.branch)
    counts = [k for k in divisors(each) if k <= most and space.admits("microbatches", k)]
    more, fewer = {m << j for j in range(1, 10)}, {m >> j for j in range(1, 10)}
    return [k for k in counts if k in more], [k for k in reversed(counts) if k in fewer]


def beyond(pricer: Pricer, space: Space, most_s: float) -> list[Space]:
    """The search, narrowed to each of the few meshes with a grid of tensor ranks on several nodes that may take less than `most_s`, the
    likeliest first.

    What each takes is estimated: its compute at the device's best rate, and of every product, cut over rows and columns, the sums of its
    results over one of them and of its inputs' gradients over the other (AxoNN's communication model, Singh et al. SC'24, section V-B;
    which is which alternates from layer to layer, so the mean of both counts). Most such grids send too much to be tried.
    """
    asked = {c.key for c in space.constraints if c.relation == "="}
    if pricer.cluster.kind.shares_hosts or pricer.cluster.parts or asked & {"grid", "context", "spatial", "branch"}:
        return []
    elements, zeros, spaces = _product_elements(pricer), [z for z in range(4) if space.admits("zero", z)], []
    for base in _on_nodes(space):
        with suppress(Infeasible, LayoutError):  # no state of which fits
            check_room(pricer, base, zeros, space.words("offload"))
            if (seconds := _estimated_s(pricer, base, elements)) < most_s:
                spaces.append((seconds, base))
    likeliest: dict[tuple[int, int, int], Layout] = {}
    for _, base in sorted(spaces, key=lambda one: one[0]):
        likeliest.setdefault((base.data, base.tensor, base.pipeline), base)
    return [_narrowed(space, base) for base in list(likeliest.values())[:MOST_BEYOND]]


def _on_nodes(space: Space) -> Iterator[Layout]:
    """Every mesh of all ranks with rows and columns of tensor ranks on several nodes, a sample a microbatch."""
    ranks = next(iter(wanted_ranks(space.cluster, space.constraints)), 0)
    for tensor in (n for n in divisors(ranks) if n > space.cluster.node_size and space.admits("tensor", n)):
        for pipeline in divisors(ranks // tensor):
            data = ranks // tensor // pipeline
            admitted = space.admits("pipeline", pipeline) and space.admits("data", data) and space.batch_size % data == 0
            if admitted and pipeline <= min(space.num_chunks, space.num_layers):
                for grid in (g for g in grids_of(tensor) if len(parse_grid(g)) == 2):
                    yield Layout(data, tensor, pipeline, space.batch_size // data, precision=space.precisions()[-1], grid=grid)


def _estimated_s(pricer: Pricer, base: Layout, elements: float) -> float:
    """Seconds of a step in a grid. `elements`: as `_product_elements` counts them."""
    device, ranks = pricer.cluster.device, base.num_ranks
    moved = pricer.devices.widths(base.precision).weight * elements / 2 * pricer.batch_size / base.data / base.pipeline
    rows, columns = parse_grid(base.grid)
    sent_s = sum(
        pricer.collective("all_reduce", moved / other, pricer.group(base, axis)) for axis, other in (("rows", columns), ("columns", rows))
    )
    return pricer.model_flops / (ranks * device.matmul_efficiency * device.peak(base.precision)) + sent_s


def _product_elements(pricer: Pricer) -> float:
    """Elements that the model's products with a weight read and make of one sample."""
    graph, elements = pricer.graph, 0
    for op in (one for one, is_product in zip(graph.operators, pricer.weighted, strict=True) if is_product):
        elements += max((graph.tensors[v].size for v in op.inputs if v in pricer.inventory.batched), default=0)
        elements += sum(graph.tensors[v].size for v in op.outputs if v in pricer.inventory.batched)
    return elements / graph.batch_size


def _narrowed(space: Space, base: Layout) -> Space:
    asked = (Constraint(key, "=", getattr(base, key)) for key in ("data", "tensor", "pipeline", "grid"))
    return replace(space, constraints=(*space.constraints, *asked), contexts=(), images=(), branches=())
