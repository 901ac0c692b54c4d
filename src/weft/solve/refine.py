"""The best layout with its operators placed by integer programming. In: what the search chose. Out: the same or something faster.

Propagation finds Megatron-LM's cuts for chains of products. Where a model has convolutions, experts or products of two activations
there are more ways than it follows, so the integer programme is asked for the layout that was chosen, and its answer kept if
the same pricing finds it faster and it fits. Not tried: other layouts, which better placements might have favoured.
"""

from __future__ import annotations

from weft.cost.placed import placed_sizes
from weft.cost.step import Pricer
from weft.errors import Infeasible, LayoutError
from weft.ops import record_of
from weft.solve.mixed import pricer_of
from weft.solve.placements import available, solve_placements
from weft.solve.timing import Priced, clocked, price

LIMIT_S = 5.0  # for the solver


def wanted(pricer: Pricer, best: Priced) -> bool:
    """Whether the integer programme may place operators better than propagation did."""
    if best.layout.tensor == 1 or best.layout.grid or pricer.shards is not None or not available():
        return False
    return any(record_of(op).many_ways for op in pricer.graph.operators)


def refined(pricer: Pricer, best: Priced) -> tuple[Pricer, Priced]:
    """The pricer and the price of the better placement of `best.layout`; what was given where there is none."""
    layout = best.layout
    sizes = placed_sizes(layout, pricer.graph.batch_size)
    try:
        placement = solve_placements(
            pricer.graph, sizes, prices=pricer.prices(layout), sequence=layout.sequence_parallel == "on", limit_s=LIMIT_S,
            batch_cut=("tensor",) if layout.sample_parallel == "on" and layout.data == 1 else (),
        )  # fmt: skip
        other = pricer_of(pricer.graph, pricer.cluster, pricer.batch_size, pricer.optimizer_states, placement.shards)
        priced = price(other, layout)
        other.check_memory(layout, priced.prediction)
        priced = clocked(other, priced)
    except (Infeasible, LayoutError):
        return pricer, best
    if priced.prediction.step_time_s < 0.995 * best.prediction.step_time_s:
        return other, priced
    return pricer, best
