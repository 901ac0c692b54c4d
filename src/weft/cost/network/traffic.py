"""What the all-reduce programs move, in closed form: bytes, messages and steps. In: an algorithm, numbers of ranks. Out: `Moved`.

The same as counted on the programs (`weft.simulate.messages`), which `tests/pure/test_cost_traffic.py` holds it against; for numbers of
ranks of which no program can be built. Steps of ranks that are no power of two are within two of the program's, those of `double_tree`
within six (from three ranks on), and it has fewer messages where pieces go the same way at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.collectives import tree
from weft.cost.network.collectives import DOUBLE_PIECES, double_counts
from weft.errors import UsageError


@dataclass(frozen=True, slots=True)
class Moved:
    """In tensors: `total` over all ranks, `busiest` sent by the rank that sends most; `balance`: bytes through the busiest rank over the
    mean one's; `steps` of one message after another; `messages` in all."""

    total: float
    busiest: float
    balance: float
    steps: int
    messages: int


def moved(name: str, num_ranks: int, inside: int = 0) -> Moved:
    """Of the program `name` with its default pieces over `num_ranks` ranks (hierarchical: boxes of `inside`).

    >>> moved("ring", 4)
    Moved(total=6.0, busiest=1.5, balance=1.0, steps=6, messages=24)

    Raises:
        UsageError: an algorithm that is not known, fewer than two ranks, boxes that do not divide them.
    """
    n = num_ranks
    if n < 2:
        raise UsageError(f"{n} ranks move nothing; give 2 or more")
    core = 1 << (n.bit_length() - 1)
    folded, log = n - core, core.bit_length() - 1
    mean = 4 * (n - 1) / n  # bytes through a rank where 2(n-1) tensors are sent
    match name:
        case "ring":
            return Moved(2.0 * (n - 1), 2 * (n - 1) / n, 1.0, 2 * (n - 1), 2 * n * (n - 1))
        case "hierarchical":
            if inside < 1 or n % inside:
                raise UsageError(f"boxes of {inside} ranks do not divide {n}")
            steps = 2 * (inside - 1) + 2 * (n // inside - 1)
            return Moved(2.0 * (n - 1), 2 * (n - 1) / n, 1.0, steps, n * steps)
        case "naive":
            return Moved(float(n * (n - 1)), float(n - 1), 1.0, n - 1, n * (n - 1))
        case "parameter_server":
            return Moved(2.0 * (n - 1), float(n - 1), n / 2, 2 * (n - 1), 2 * (n - 1))
        case "tree":
            height = (n - 1).bit_length()
            return Moved(2.0 * (n - 1), float(height), 2 * height / mean, 2 * height, 2 * (n - 1))
        case "double_tree":
            busiest, through = _double_tree(n)
            return Moved(2.0 * (n - 1), busiest, through / mean, round(double_counts(n)[0]), 2 * DOUBLE_PIECES * (n - 1))
        case "recursive_doubling":
            total = float(core * log + 2 * folded)
            most = float(log + (folded > 0))
            return Moved(total, most, 2 * most * n / (2 * total), log + 3 * (folded > 0), int(total))
        case "halving_doubling":
            total = 2.0 * (core - 1) + 2 * folded
            most = 2 * (core - 1) / core + (folded > 0)
            return Moved(total, most, 2 * most * n / (2 * total), 2 * log + 3 * (folded > 0), 2 * log * core + 2 * folded)
    raise UsageError(f"no closed form of what {name} moves")


def _double_tree(num_ranks: int) -> tuple[float, float]:
    """(sent by the rank that sends most, through the rank that has most): each tree carries half of the tensor up and down."""
    sent = [0.0] * num_ranks
    for one in (tree.binary(num_ranks), tree.binary(num_ranks, 1)):
        for rank in range(num_ranks):
            sent[rank] += (len(one.children[rank]) + (one.parent[rank] is not None)) / 2
    return max(sent), 2 * max(sent)  # what goes up a link comes down it
