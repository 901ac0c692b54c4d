"""Traffic of all-reduce algorithms in closed form: bytes, messages and steps. In: an algorithm, numbers of ranks.

Equal to the counts on the programs (`shardwise.simulate.messages`), as `tests/pure/cost/test_cost_traffic.py` checks, and available for
numbers of ranks too large to build programs. Steps of ranks that are no power of two are within two of the program's, those of
`double_tree` within six (from three ranks on), and it has fewer messages if chunks take the same link at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.collectives import tree
from shardwise.cost.network.collectives import DOUBLE_PIECES, double_tree_counts
from shardwise.errors import UsageError


@dataclass(frozen=True, slots=True)
class AllReduceTraffic:
    """Traffic in sizes of the tensor: `total` over all ranks, `busiest` sent by the rank that sends most; `balance`: bytes through the
    busiest rank over the mean; `steps` of sequential messages; `messages` in all."""

    total: float
    busiest: float
    balance: float
    steps: int
    messages: int


def all_reduce_traffic(name: str, num_ranks: int, inside: int = 0) -> AllReduceTraffic:
    """Return the traffic of algorithm `name` with its default chunks over `num_ranks` ranks (hierarchical: `inside` ranks per node).

    >>> [(t.total, t.busiest, t.balance, t.steps, t.messages) for t in [all_reduce_traffic("ring", 4)]]
    [(6.0, 1.5, 1.0, 6, 24)]

    Raises:
        UsageError: an unknown algorithm, fewer than two ranks, nodes that do not divide them.
    """
    n = num_ranks
    if n < 2:
        raise UsageError(f"{n} ranks move nothing; give 2 or more")
    core = 1 << (n.bit_length() - 1)
    folded, log = n - core, core.bit_length() - 1
    mean = 4 * (n - 1) / n  # bytes through a rank where 2(n-1) tensors are sent
    match name:
        case "ring":
            return AllReduceTraffic(2.0 * (n - 1), 2 * (n - 1) / n, 1.0, 2 * (n - 1), 2 * n * (n - 1))
        case "hierarchical":
            if inside < 1 or n % inside:
                raise UsageError(f"nodes of {inside} ranks do not divide {n}")
            steps = 2 * (inside - 1) + 2 * (n // inside - 1)
            return AllReduceTraffic(2.0 * (n - 1), 2 * (n - 1) / n, 1.0, steps, n * steps)
        case "naive":
            return AllReduceTraffic(float(n * (n - 1)), float(n - 1), 1.0, n - 1, n * (n - 1))
        case "parameter_server":
            return AllReduceTraffic(2.0 * (n - 1), float(n - 1), n / 2, 2 * (n - 1), 2 * (n - 1))
        case "tree":
            height = (n - 1).bit_length()
            return AllReduceTraffic(2.0 * (n - 1), float(height), 2 * height / mean, 2 * height, 2 * (n - 1))
        case "double_tree":
            busiest, through = _double_tree_traffic(n)
            return AllReduceTraffic(2.0 * (n - 1), busiest, through / mean, round(double_tree_counts(n)[0]), 2 * DOUBLE_PIECES * (n - 1))
        case "recursive_doubling":
            total = float(core * log + 2 * folded)
            most = float(log + (folded > 0))
            return AllReduceTraffic(total, most, 2 * most * n / (2 * total), log + 3 * (folded > 0), int(total))
        case "halving_doubling":
            total = 2.0 * (core - 1) + 2 * folded
            most = 2 * (core - 1) / core + (folded > 0)
            return AllReduceTraffic(total, most, 2 * most * n / (2 * total), 2 * log + 3 * (folded > 0), 2 * log * core + 2 * folded)
    raise UsageError(f"no closed form of what {name} moves")


def _double_tree_traffic(num_ranks: int) -> tuple[float, float]:
    """Return (sent by the rank that sends most, through the busiest rank): each tree carries half of the tensor up and down."""
    sent = [0.0] * num_ranks
    for binary_tree in (tree.binary_tree(num_ranks), tree.binary_tree(num_ranks, 1)):
        for rank in range(num_ranks):
            sent[rank] += (len(binary_tree.children[rank]) + (binary_tree.parent[rank] is not None)) / 2
    return max(sent), 2 * max(sent)  # every link carries as much down as up
