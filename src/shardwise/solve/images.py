"""Candidate sizes of spatial parallelism (`spatial=`) and context parallelism (`context=`, `attention=`), where ranks share an image or
sequence.

Searched where images or sequences are large: of small images halos are as large as shards, and samples or layers divide the work. Numbers
of ranks are powers of two; of an image of two or three dimensions also the grid whose shards have the smallest halos.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import gcd, prod

from shardwise.cluster.cluster import Cluster
from shardwise.errors import LayoutError
from shardwise.model.dims.sequence_dims import can_use_ring_attention, find_sequence_dims
from shardwise.model.graph import Graph
from shardwise.ops import record_of
from shardwise.ops.attention import heads_dim
from shardwise.plan.ir.axis import RING, ulysses_group_size
from shardwise.plan.ir.choice import AUTO

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
