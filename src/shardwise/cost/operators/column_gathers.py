"""Gathers for column-cut linear layers, and their price where a rank keeps its piece and gathers again in backward.

So `lower/column_linears` runs them: backward gathers the input beside the products for its gradient, and scatters that gradient beside
the products for the weights'. A collective shows what lasts longer than the products beside it, and takes a part of the rest from
compute. Of a transformer's layer, whose collectives are eight of equal time, T together, six show, and four run beside products, two of
them gathered anew: 6/8 T + c 4/8 T with a contention c. Not modelled: other collectives of the same ranks at that time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.devices.devices import Array, LayerCollectives
from shardwise.cost.devices.kernels import ALIGNED_FLOAT8
from shardwise.model.graph import Graph, Operator
from shardwise.model.sharding.reads import Variant, WantedVariant, choose_source, find_available, redistribution_steps
from shardwise.model.sharding.sharding import Sharding
from shardwise.ops import record_of
from shardwise.ops.vocabulary import MatmulKind
from shardwise.plan.ir.placement import Shard, has_equal_pieces, is_shard
from shardwise.plan.ir.transition import is_gathered_for_columns

Numbers = NDArray[np.intp]
NO_ENTRY = -1


@dataclass(frozen=True, slots=True)
class ColumnGather:
    """A value that ranks along `axis` gather from shards `source`, and that linear layers alone read: numbers of operators, in order."""

    value: str
    axis: str
    source: Shard
    layers: tuple[int, ...]


@dataclass(frozen=True)
class ColumnGathers:
    """All of a graph. [gather] -> `readers`: its first layer, `gathers`: the entry of its collective, `scatters`: of that of the input's
    gradient (`NO_ENTRY`: it has none), `has_equal_pieces`, and `fits_float8`: some of its layers have 8-bit products where the precision
    has. [layer] -> `gather_numbers`, `layers`: its operator, and the fractions of its backward that compute its input's and its weight's
    gradient."""

    readers: Numbers
    gathers: Numbers
    scatters: Numbers
    has_equal_pieces: NDArray[np.bool_]
    fits_float8: NDArray[np.bool_]
    gather_numbers: Numbers
    layers: Numbers
    input_fractions: Array
    weight_fractions: Array

    @classmethod
    def of(
        cls, graph: Graph, grads: frozenset[str], gathers: Sequence[ColumnGather], entries: Mapping[tuple[str, str], tuple[int, int | None]]
    ) -> ColumnGathers:
        """Build it. `grads`: values with a gradient; `entries`: of the collectives forward and backward, by value and axis."""
        priced = [gather for gather in gathers if (gather.value, gather.axis) in entries]
        pairs = [entries[gather.value, gather.axis] for gather in priced]
        layers = [(number, i) for number, gather in enumerate(priced) for i in gather.layers]
        operands = [[v in grads for v in graph.operators[i].inputs[:2]] for _, i in layers]
        fractions = np.array([[has / max(1, sum(both)) for has in both] for both in operands]).reshape(-1, 2)
        return cls(
            np.array([gather.layers[0] for gather in priced], dtype=np.intp),
            np.array([there for there, _ in pairs], dtype=np.intp),
            np.array([NO_ENTRY if back is None else back for _, back in pairs], dtype=np.intp),
            np.array([has_equal_pieces(gather.source) for gather in priced], dtype=bool),
            np.array([any(_fits_float8(graph, graph.operators[i]) for i in gather.layers) for gather in priced], dtype=bool),
            np.array([number for number, _ in layers], dtype=np.intp),
            np.array([i for _, i in layers], dtype=np.intp),
            fractions[:, 0],
            fractions[:, 1],
        )

    def without_layers(self, operators: Sequence[int]) -> ColumnGathers:
        """Return those that none of these operators reads."""
        dropped = np.isin(np.arange(len(self.readers)), self.gather_numbers[np.isin(self.layers, operators)])
        kept, renumbered = ~dropped, np.cumsum(~dropped) - 1
        rows = kept[self.gather_numbers]
        return ColumnGathers(
            self.readers[kept], self.gathers[kept], self.scatters[kept], self.has_equal_pieces[kept], self.fits_float8[kept],
            renumbered[self.gather_numbers[rows]], self.layers[rows], self.input_fractions[rows], self.weight_fractions[rows],
        )  # fmt: skip

    def backward_seconds(
        self, costs: LayerCollectives, entry_s: Array, backward_s: Array, is_fused: NDArray[np.bool_]
    ) -> tuple[Array, Array]:
        """Return, by operator, (seconds of collectives more than with scatters that are waited for and no second gather, seconds that run
        beside products).

        `entry_s`: seconds of every entry, and 0.0 last. `backward_s`: of compute, by operator. `is_fused`: [entry] -> it runs inside of the
        products, which hide no more of it.
        """
        window_s = np.zeros((2, len(self.readers)))
        for row, fractions in zip(window_s, (self.input_fractions, self.weight_fractions), strict=True):
            np.add.at(row, self.gather_numbers, fractions * backward_s[self.layers])
        has_weights = np.zeros(len(self.readers), dtype=bool)
        np.logical_or.at(has_weights, self.gather_numbers, self.weight_fractions > 0)
        eligible = ~self.fits_float8 if costs.has_float8_products else np.ones(len(self.readers), dtype=bool)
        gathered_s = entry_s[self.gathers] * (has_weights & eligible)
        scattered_s = entry_s[self.scatters] * (~is_fused[self.scatters] & eligible)
        both_s = np.stack([gathered_s, scattered_s])
        beside_s = np.minimum(both_s, costs.product_overlap * window_s) * self.has_equal_pieces
        more, hidden = (np.zeros(len(backward_s)) for _ in range(2))
        np.add.at(more, self.readers, gathered_s - (1 - costs.contention) * beside_s.sum(0))
        np.add.at(hidden, self.readers, beside_s.sum(0))
        return more, hidden


def find_column_gathers(graph: Graph, sharding: Sharding, blocks: Sequence[str]) -> tuple[ColumnGather, ...]:
    """Return the gathers that lowering joins with the linear layers that read them, by the same rules on operators in place of nodes.

    `blocks`: [operator] -> its numbered block.
    """
    values = {m.value for m in sharding.redistributions if is_gathered_for_columns(m.source, m.target)}
    reads: dict[str, list[tuple[int, int, WantedVariant]]] = {value: [] for value in values}
    axes = tuple(sharding.sizes)
    for i, op in enumerate(graph.operators if values else ()):
        for at, value in enumerate(op.inputs):
            if value in values:
                row = sharding.input_placements[op.name][at]
                reads[value].append((i, at, tuple(row[axis] for axis in axes)))
    found = (gather for value, of_value in reads.items() for gather in _gathers_of(graph, sharding, blocks, value, of_value))
    return tuple(sorted(found, key=lambda gather: gather.layers))


def _gathers_of(
    graph: Graph, sharding: Sharding, blocks: Sequence[str], value: str, reads: Sequence[tuple[int, int, WantedVariant]]
) -> Iterator[ColumnGather]:
    """Yield those of one value. `reads`: (operator, its operand, in which placements), in order."""
    axes = tuple(sharding.sizes)
    available: dict[Variant, None] = {tuple(sharding.placements[value][axis] for axis in axes): None}
    made: dict[Variant, tuple[int, Variant]] = {}  # the last axis along which it was redistributed, and from what
    readers: dict[Variant, list[tuple[int, int]]] = {}
    for i, at, wanted in reads:
        variant = find_available(available, wanted)
        if variant is None:
            variant = choose_source(axes, available, wanted)
            for number, target in redistribution_steps(axes, variant, wanted):
                before, variant = variant, (*variant[:number], target, *variant[number + 1 :])
                available[variant], made[variant] = None, (number, before)
        readers.setdefault(variant, []).append((i, at))
    moved_on = {before for _, before in made.values()}
    for variant, (number, before) in made.items():
        source, of_variant = before[number], readers.get(variant, [])
        layers = tuple(i for i, _ in of_variant)
        is_read_first = bool(layers) and all(at == 0 for _, at in of_variant) and variant not in moved_on
        if not is_read_first or not is_shard(source) or not is_gathered_for_columns(source, variant[number]):
            continue
        if _run_together(graph, sharding, blocks, layers):
            yield ColumnGather(value, axes[number], source, layers)


def _run_together(graph: Graph, sharding: Sharding, blocks: Sequence[str], layers: Sequence[int]) -> bool:
    """Return whether these are linear layers of one block, whose weights are all there for the first."""
    first, last = layers[0], layers[-1]
    if len(set(blocks[first : last + 1])) > 1 or not all(_is_plain_linear(graph.operators[i], sharding) for i in layers):
        return False
    others = ((graph.operators[i], at) for i in layers if i != first for at in range(1, len(graph.operators[i].inputs)))
    return all(
        graph.producer_index.get(op.inputs[at], -1) < first
        and all(need in (None, sharding.placements[op.inputs[at]][axis]) for axis, need in sharding.input_placements[op.name][at].items())
        for op, at in others
    )


def _is_plain_linear(op: Operator, sharding: Sharding) -> bool:
    """Return whether an operator is called as a linear layer of its operands as they are."""
    is_linear = op.function is None and record_of(op).product.kind == MatmulKind.LINEAR
    return is_linear and not op.kwargs and not op.autocast and op.name not in sharding.promoted


def _fits_float8(graph: Graph, op: Operator) -> bool:
    return all(side % ALIGNED_FLOAT8 == 0 for side in graph.tensors[op.inputs[1]].shape)
