"""Lower the order of computes per rank to a `Program`: passes over lists, one a file, each from a program to a program.

`transfers`: sends and receives. `gradient_exchange`: gradients of a stage on several ranks. `receive`: receives early enough for
blocking sends. `split`: backward in two parts. `gather`: weights gathered for use only (ZeRO-3). `reduce`: gradients reduced over data
replicas as early as they are complete (ZeRO-2). `offload_recompute`: saved activations offloaded to the host, or dropped and recomputed.

In: per rank a list of `Compute`, links between stages, a name. A rank may have several stages and a stage several ranks, as long as
each microbatch of a stage runs on one of them. Out: a `Program`. Not modelled: times; orders follow from the order of the computes alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.plan.ir.program import Compute, Links, Program, Recv, Send, chain_links
from shardwise.plan.ir.text import default_wants
from shardwise.schedules.lower.gather import gather_layers, gather_weights, overlap_zero
from shardwise.schedules.lower.gradient_exchange import exchange_gradients
from shardwise.schedules.lower.offload_recompute import offload, recompute
from shardwise.schedules.lower.receive import advance_receives
from shardwise.schedules.lower.reduce import reduce_gradients
from shardwise.schedules.lower.split import split_backward
from shardwise.schedules.lower.transfers import add_transfers

__all__ = [
    "Rows",
    "add_transfers",
    "advance_receives",
    "complete_with_transfers",
    "exchange_gradients",
    "gather_layers",
    "gather_weights",
    "offload",
    "overlap_zero",
    "pipeline_program",
    "recompute",
    "reduce_gradients",
    "split_backward",
]  # fmt: skip

Rows = Sequence[Sequence[Compute]]  # [rank] -> its computes, in order


def pipeline_program(name: str, rows: Rows, links: Links | None = None, rendezvous: bool = False) -> Program:
    """Return the program of these computes with transfers, and with the gradient exchange of stages that are on several ranks.

    A send comes right after its producer, the nearest consumer's first, and a receive right before its consumer, the farthest
    producer's first: the order in which values are needed and produced. With `rendezvous` some receives come earlier, see
    `advance_receives`.

    >>> from shardwise.plan.ir.program import ComputeOp
    >>> print(pipeline_program("one", [[Compute(ComputeOp.F, 0, 0), Compute(ComputeOp.B, 0, 0)], [Compute(ComputeOp.F, 1, 0), Compute(ComputeOp.B, 1, 0)]]))
    program one
    rank 0: 0F0 x(0,1,0)>1 g(1,0,0)<1 0B0
    rank 1: x(0,1,0)<0 1F0 1B0 g(1,0,0)>0

    Raises:
        ProgramError: two ranks have the same compute.
    """  # noqa: E501
    num_stages = 1 + max((a.stage for row in rows for a in row), default=-1)
    computes = tuple(tuple(row) for row in rows)
    bare = Program(
        name, num_stages, ({},) * len(rows), computes, default_wants(computes), chain_links(num_stages) if links is None else links
    )
    return complete_with_transfers(bare, rendezvous)


def complete_with_transfers(program: Program, rendezvous: bool = False) -> Program:
    """Return a program that has no transfers with transfers added; any other unchanged.

    >>> print(complete_with_transfers(Program.parse("0F0 0B0\\n1F0 1B0")))
    program program
    rank 0: 0F0 x(0,1,0)>1 g(1,0,0)<1 0B0
    rank 1: x(0,1,0)<0 1F0 1B0 g(1,0,0)>0

    Raises:
        ProgramError: two ranks have the same compute.
    """
    if any(isinstance(action, (Send, Recv)) for row in program.actions for action in row):
        return program
    program = add_transfers(program)
    return exchange_gradients(advance_receives(program) if rendezvous else program, rendezvous)
