"""Price the ways to split a plan's ranks into data x context, by sequence length (`split=lengths`), and the largest microbatch's memory.

A microbatch of r rows of a rank takes a + b r seconds, fitted to two prices, at each length and split. Gradient reductions and updates come
once a step, whatever the splits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from shardwise.cluster.cluster import Cluster
from shardwise.cost.step import Pricer
from shardwise.cost.step_time.heterogeneous import build_pricer
from shardwise.cost.step_time.timing import price
from shardwise.errors import Infeasible
from shardwise.model.dims.sequence_dims import find_sequence_dims
from shardwise.model.graph import Graph
from shardwise.model.sharding.sharding import Shards
from shardwise.plan.data_context_splits import SplitPrice, Splits, splits_of
from shardwise.plan.ir.axis import CONTEXT, axis_of, explain_unshardable
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan, Prediction
from shardwise.units import format_seconds

NUM_LENGTHS = 4  # lengths that are priced: that of the plan, half of it, and so on
FEW_ROWS, MANY_ROWS = 1, 4  # rows of a rank, to which a linear price is fitted


def position_dims(graph: Graph, num_ranks: int) -> tuple[tuple[tuple[str, int], ...], int]:
    """Return the dims of the batch's tensors, by path, that are positions of the longest sequence, and its length.

    Integers and booleans have no features: their dims of that length are positions, also where they cannot be traced (masks).

    Raises:
        Infeasible: there are none.
    """
    runs = find_sequence_dims(graph, graph.rules)
    tensors = {v.value: v for v in graph.inputs}
    sizes = {place: run.size for place, run in runs.items() if place[0] in tensors and run.inner == 1}
    longest = max(sizes.values(), default=0)
    if longest < max(2, num_ranks):
        raise Infeasible(f"split=lengths: {explain_unshardable(axis_of(CONTEXT), num_ranks)}; leave split out")
    positions = {(tensors[value].name, dim) for (value, dim), size in sizes.items() if size == longest}
    for v in graph.inputs:
        shape = v.tensor.shape
        positions |= {(v.name, d) for d, n in enumerate(shape) if d >= v.batched and n == longest and not v.tensor.is_float}
    return tuple(sorted(positions)), longest


def priced_lengths(longest: int, num_ranks: int) -> tuple[int, ...]:
    """Return the lengths to price, shortest first; none that ranks cannot share.

    >>> priced_lengths(100, 2), priced_lengths(8, 4)
    ((12, 25, 50, 100), (4, 8))
    """
    halves = (longest >> i for i in range(NUM_LENGTHS))
    return tuple(sorted({n for n in halves if n >= num_ranks}))


def with_splits(
    plan: Plan, cluster: Cluster, graph: Graph, graph_at: Callable[[int], Graph], shards: Mapping[str, Shards] | None, optimizer_states: int
) -> Plan:
    """Return the plan with prices of its splits, and memory that suffices for each. `graph_at`: the graph of the model at a length.

    Raises:
        Infeasible: a model without sequences, a microbatch that does not fit the machines.
    """
    layout = plan.layout
    ranks = layout.data * layout.context
    positions, longest = position_dims(graph, ranks)
    lengths = priced_lengths(longest, ranks)
    pricers = [build_pricer(graph if n == longest else graph_at(n), cluster, plan.batch_size, optimizer_states, shards) for n in lengths]
    max_positions = -(-plan.microbatch_sizes[0] // layout.data) * -(-longest // layout.context)
    prices = []
    for split in (each.with_microbatches(1) for each in splits_of(layout)):
        few_s, many_s = ([_microbatch_s(pricer, split, rows) for pricer in pricers] for rows in (FEW_ROWS, MANY_ROWS))
        each = [(b - a) / (MANY_ROWS - FEW_ROWS) for a, b in zip(few_s, many_s, strict=True)]
        prices.append(SplitPrice(split.data, split.context, tuple(a - FEW_ROWS * b for a, b in zip(few_s, each, strict=True)), tuple(each)))
    splits = Splits(positions, lengths, tuple(prices), max_positions)
    largest = max((_predict_largest(plan, splits, pricers), plan.prediction), key=lambda p: p.memory.total if p else 0.0)
    assert largest is not None
    pricers[-1].check_memory(layout, largest)
    prediction = replace(plan.prediction, memory=largest.memory) if plan.prediction else None
    return replace(plan, splits=splits, prediction=prediction, reasons=(*plan.reasons, ("split", _explain_splits(splits, ranks))))


def _microbatch_s(pricer: Pricer, layout: Layout, rows: int) -> float:
    """Seconds of forward and backward of a microbatch of so many rows of each replica."""
    (cost,) = price(pricer.with_changes(batch_size=rows * layout.data), layout).costs
    return cost.forward_s + cost.backward_s


def _predict_largest(plan: Plan, splits: Splits, pricers: Sequence[Pricer]) -> Prediction:
    """Predict the microbatch that takes most memory of those that fit under a split, as if it were a step by itself."""
    predicted = []
    for split_layout in (each.with_microbatches(1) for each in splits_of(plan.layout)):
        for length, pricer in zip(splits.lengths, pricers, strict=True):
            rows = min(splits.max_positions // -(-length // split_layout.context), -(-plan.batch_size // split_layout.data))
            if rows:
                predicted.append(price(pricer.with_changes(batch_size=rows * split_layout.data), split_layout).prediction)
    return max(predicted, key=lambda p: p.memory.total)


def _explain_splits(splits: Splits, num_ranks: int) -> str:
    """Explain the choice at the lengths that were priced, for as many rows as there are ranks, and for one row."""
    words = []
    for length in splits.lengths:
        for rows in dict.fromkeys((1, num_ranks)):
            by_time = sorted((splits.seconds(p, rows, length), p.data, p.context) for p in splits.prices if splits.fits(p, rows, length))
            if by_time:
                times = ", ".join(f"{format_seconds(s)} under data={data} context={context}" for s, data, context in by_time)
                words.append(f"{rows} x {length} positions take {times}")
    return "; ".join(words)
