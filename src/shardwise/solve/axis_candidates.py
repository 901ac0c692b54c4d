"""Candidate values of axes that are worth a search for some models only: `spatial`, `context`, `attention`, `branch`, `sample_parallel`.

Ranks share images or sequences where these are large: of small images halos are as large as shards, and samples or layers divide the work.
Numbers of ranks are powers of two; of an image of two or three dimensions also the grid whose shards have the smallest halos.

Ranks of a replica run different branches where branches are most of the model (Inception, towers) and balanced well enough: a transformer's
three projections of one input are branches as well, and tensor ranks do more for them.

Sharded by samples, a product reduces its weight's gradient; sharded by features, it exchanges its input or output. In AlexNet convolutions
have much of the latter and fully connected layers much of the former (Krizhevsky 2014), and so have experts; a transformer's layers are
alike. Not modelled: what adjacent operators save by an equal placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import gcd, prod

from shardwise.cluster.cluster import Cluster
from shardwise.errors import LayoutError
from shardwise.model.dims.sequence_dims import can_use_ring_attention, find_sequence_dims
from shardwise.model.graph import Graph
from shardwise.model.stages.branches import BranchRegion, balance_branches, find_regions
from shardwise.model.work import operator_flops
from shardwise.ops import record_of
from shardwise.ops.attention import heads_dim
from shardwise.plan.ir.axis import RING, ulysses_group_size
from shardwise.plan.ir.choice import AUTO

MIN_BRANCH_FRACTION = 0.5  # of the model's FLOPs are in branches, at least
MIN_BALANCE = 0.6  # of what an even division takes off the busiest rank, at least
MAX_MIXED_FRACTION = 0.5  # of the traffic of one way for all, at most, to be worth a search
MIN_IMAGE_POSITIONS = 1 << 18  # positions of an image, at least: 512 x 512
MIN_SHARD_ENTRIES = 32  # entries of a dimension of each shard, at least
MAX_SHARING_RANKS = 128  # ranks that share an image
MIN_SEQUENCE_POSITIONS = 1 << 14  # positions of a sequence, at least
MIN_SHARD_POSITIONS = 1 << 10  # positions of each shard, at least


def largest_image(graph: Graph) -> tuple[int, ...]:
    """Return the positions of the largest image that a window slides along, by dimension; empty where there is none."""
    shapes = [graph.tensors[op.inputs[0]].shape[2:] for op in graph.operators if record_of(op).windows is not None and op.inputs]
    return max(shapes, key=prod, default=())


def spatial_candidates(graph: Graph, cluster: Cluster) -> tuple[str, ...]:
    """Return values for `spatial`, fewest ranks first; none where images are small."""
    shape = largest_image(graph)
    if not shape or prod(shape) < MIN_IMAGE_POSITIONS or len(shape) > 3:
        return ()
    words = []
    ranks = 2
    while ranks <= min(MAX_SHARING_RANKS, cluster.num_devices):
        if shape[0] // ranks >= MIN_SHARD_ENTRIES:
            words.append(str(ranks))
        if len(shape) > 1 and (grid := _compact_grid(shape, ranks)) is not None:
            words.append(grid)
        ranks *= 2
    return tuple(words)


def context_candidates(graph: Graph, cluster: Cluster) -> tuple[int, ...]:
    """Return values for `context`, fewest first: powers of two; none where sequences are short. Memory and attention grow with the
    sequence, gathered weights and gradients do not."""
    longest = max((run.size for run in find_sequence_dims(graph, graph.rules).values()), default=0)
    limit = min(longest // MIN_SHARD_POSITIONS, cluster.num_devices, MAX_SHARING_RANKS) if longest >= MIN_SEQUENCE_POSITIONS else 1
    return tuple(1 << i for i in range(1, limit.bit_length()))


def attention_candidates(graph: Graph) -> tuple[str, ...]:
    """Return values for `attention` that a search compares: the fewest bytes, or ring attention where attention is one operator."""
    return (AUTO, RING) if can_use_ring_attention(graph.rules) else (AUTO,)


def min_heads(graph: Graph) -> int:
    """Number of heads of the attention that has fewest; 1 where it is no operator of its own."""
    counts = []
    for op in graph.operators:
        rule = graph.rules[op.name]
        if can_use_ring_attention({op.name: rule}):
            dim = heads_dim(rule)
            counts.append(1 if dim is None else graph.tensors[op.inputs[0]].shape[dim])
    return min(counts, default=1)


def ulysses_ring_candidates(attention_words: Sequence[str], context: int, num_heads: int, ranks_per_node: int) -> tuple[str, ...]:
    """Return values for `attention` that combine Ulysses with ring attention: as many ranks exchange heads as there are heads, or as are on
    one node; none where all could, or ring attention is not in `attention_words`.

    >>> [ulysses_ring_candidates(("auto", "ring"), *sizes) for sizes in ((32, 8, 4), (8, 8, 4), (8, 8, 1), (8, 1, 8))]
    [('ulysses:8+ring', 'ulysses:4+ring'), ('ulysses:4+ring',), (), ()]
    """
    counts = dict.fromkeys(gcd(context, 1 << (max(1, n).bit_length() - 1)) for n in (num_heads, min(num_heads, ranks_per_node)))
    return tuple(f"ulysses:{n}+ring" for n in counts if 1 < n < context and RING in attention_words)


def is_valid_attention(word: str, context: int) -> bool:
    """Return whether a value for `attention` is valid for so many ranks.

    >>> is_valid_attention("ulysses:4+ring", 8), is_valid_attention("ulysses:4+ring", 2)
    (True, False)
    """
    with suppress(LayoutError):
        return ulysses_group_size(word, context) >= 0
    return False


def _compact_grid(shape: tuple[int, ...], ranks: int) -> str | None:
    """Return the grid of so many ranks, over two dimensions at least, whose shards have the smallest halos; None where none fits.

    >>> _compact_grid((512, 512), 8), _compact_grid((512, 512), 2), _compact_grid((64, 64, 64), 8)
    ('4x2', None, '2x2x2')
    """
    counts = [1 << i for i in range(ranks.bit_length())]
    grids: list[tuple[int, ...]] = [()]
    for _ in shape:
        grids = [(*grid, n) for grid in grids for n in counts if prod(grid) * n <= ranks]
    fitting = [
        g
        for g in grids
        if prod(g) == ranks
        and sum(n > 1 for n in g) > 1
        and all(n == 1 or size // n >= MIN_SHARD_ENTRIES for n, size in zip(g, shape, strict=True))
    ]
    border = {g: sum(n / size for n, size in zip(g, shape, strict=True) if n > 1) for g in fitting}  # halo of a shard over its volume
    best = min(fitting, key=lambda g: (border[g], [-n for n in g]), default=None)
    return None if best is None else "x".join(map(str, best))


def has_mixed_traffic(graph: Graph, batch_size: int) -> bool:
    """Return whether sharding each product its own way would send much less for a batch than sharding all of them one way."""
    trained = {v.value for v in graph.parameters if v.trainable and len(v.tensor.shape) > 1}
    scale = batch_size / graph.batch_size
    weights = activations = cheapest = 0.0
    for op in graph.operators:
        trainable = [value for value in op.inputs if value in trained]
        if not trainable or operator_flops(op, graph.tensors) <= 0:
            continue
        weight = float(sum(graph.tensors[value].size for value in trainable))
        tensors = [value for value in (*op.inputs, *op.outputs) if not graph.is_state.get(value)]
        activation = scale * min(graph.tensors[value].size for value in tensors)
        weights, activations, cheapest = weights + weight, activations + activation, cheapest + min(weight, activation)
    return cheapest < MAX_MIXED_FRACTION * min(weights, activations)


def branch_rank_counts(graph: Graph, cluster: Cluster) -> tuple[int, ...]:
    """Return powers of two, and as many ranks as a region has branches; none where branches are little of the model.

    >>> from shardwise.cluster.cluster import Cluster
    >>> branch_rank_counts(Graph((), (), (), (), (), {}, "loss", 1), Cluster.parse("1xdgx-h100"))
    ()
    """
    flops = [operator_flops(op, graph.tensors) for op in graph.operators]
    outer: list[BranchRegion] = []
    covered: set[int] = set()
    for region in find_regions(graph):
        if covered.isdisjoint(region.operators):
            outer.append(region)
            covered |= region.operators
    if not outer or sum(flops[i] for i in covered) < MIN_BRANCH_FRACTION * sum(flops):
        return ()
    work = [[sum(flops[i] for i in branch) for branch in region.branches] for region in outer]
    max_branches = max(map(len, work))
    sizes = {1 << k for k in range(1, max_branches.bit_length())} | {max_branches}
    return tuple(
        n
        for n in sorted(sizes)
        if n <= cluster.num_devices and _flops_taken_off(work, n) >= MIN_BALANCE * MIN_BRANCH_FRACTION * (1 - 1 / n) * sum(flops)
    )


def _flops_taken_off(work: list[list[float]], n: int) -> float:
    """FLOPs that n ranks take off the busiest one."""
    taken_off = 0.0
    for branches in work:
        loads = [0.0] * n
        for flops, rank in zip(branches, balance_branches(branches, n), strict=True):
            loads[rank] += flops
        taken_off += sum(loads) - max(loads)
    return taken_off
