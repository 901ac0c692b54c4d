"""Collective algorithms (all-reduce, reduce-scatter, all-gather, broadcast, all-to-all, halo): from sizes to a `Program`.

The program is proven, timed, drawn and run like a pipeline's. A new algorithm is a function and a line in `ALGORITHMS`. None imports torch.

In the field's terms: all-reduce algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from shardwise.collectives import all_to_all, bruck, butterfly, halo, hierarchical, naive, parameter_server, ring, tree
from shardwise.errors import UsageError, did_you_mean
from shardwise.plan.ir.choice import SYNONYMS
from shardwise.plan.ir.program import Program

__all__ = ["ALGORITHMS", "COLLECTIVES", "NESTED", "build"]

ALGORITHMS: dict[str, dict[str, Callable[..., Program]]] = {
    "all_reduce": {
        "parameter_server": parameter_server.all_reduce,
        "naive": naive.all_reduce,
        "ring": ring.all_reduce,
        "tree": tree.all_reduce,
        "double_tree": tree.double_tree,
        "recursive_doubling": butterfly.recursive_doubling,
        "halving_doubling": butterfly.halving_doubling,
        "hierarchical": hierarchical.all_reduce,
    },
    "reduce_scatter": {"naive": naive.reduce_scatter, "ring": ring.reduce_scatter, "halving": butterfly.reduce_scatter},
    "all_gather": {"naive": naive.all_gather, "ring": ring.all_gather, "doubling": butterfly.all_gather, "bruck": bruck.all_gather},
    "broadcast": {"naive": naive.broadcast, "ring": ring.broadcast, "tree": tree.broadcast},
    "all_to_all": {"direct": all_to_all.direct_exchange, "two_level": all_to_all.two_level},
    "halo": {"exchange": halo.halo_exchange},
}
COLLECTIVES = tuple(ALGORITHMS)
NESTED = ("hierarchical", "two_level", "exchange")  # take sizes of levels instead of a number of ranks


def build(collective: str, name: str, ranks: int | Sequence[int], **options: int) -> Program:
    """Return the program of an algorithm by name, over `ranks` ranks, or for nested ones over the sizes of levels, innermost first.

    >>> build("all_reduce", "ring", 4).num_actions
    48

    Raises:
        UsageError: an unknown collective or algorithm, an unknown option, unsupported sizes.
    """
    if collective not in ALGORITHMS:
        raise UsageError(f"unknown collective {collective}{did_you_mean(collective, COLLECTIVES, 0.4)}; known: {', '.join(COLLECTIVES)}")
    algorithms = ALGORITHMS[collective]
    if collective == "all_reduce":
        name = SYNONYMS.get(name, name)
    if name not in algorithms:
        raise UsageError(f"{collective} has no algorithm {name}{did_you_mean(name, algorithms, 0.4)}; known: {', '.join(algorithms)}")
    sizes: int | Sequence[int] = ranks
    if name in NESTED:
        sizes = [ranks] if isinstance(ranks, int) else ranks
    elif not isinstance(ranks, int):
        sizes = prod(ranks)
    try:
        return algorithms[name](sizes, **options)
    except TypeError:
        raise UsageError(f"{name} takes no {' or '.join(options)}") from None
