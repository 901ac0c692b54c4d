"""Build the program of a collective from transfers between ranks, step by step. Out: a `Program`.

Values are `chunk(c)`, chunk c of a tensor that has the same shape on all ranks, unless an algorithm says otherwise. A contribution is a
rank's summand. A transfer of several chunks is one message: their sends are consecutive, and so are their receives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardwise.errors import UsageError
from shardwise.plan.ir.program import Action, HeldValues, Program, Recv, Send, Value


@dataclass(frozen=True, slots=True)
class ChunkTransfer:
    """A message of `values` from rank `source` to rank `target`, which adds them to its own where `add`."""

    source: int
    target: int
    values: tuple[Value, ...]
    add: bool = False


@dataclass
class CollectiveBuilder:
    """The actions of `num_ranks` ranks, added step by step."""

    num_ranks: int
    rows: list[list[Action]] = field(init=False)

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise UsageError(f"a collective of {self.num_ranks} ranks; it needs at least 1")
        self.rows = [[] for _ in range(self.num_ranks)]

    def add_step(self, moves: Iterable[ChunkTransfer]) -> None:
        """Add one step, in which every rank posts its sends before it waits for its receives."""
        moves = [move for move in moves if move.values]
        for move in moves:
            self.rows[move.source] += [Send(value, move.target) for value in move.values]
        for move in moves:
            self.rows[move.target] += [Recv(value, move.source, move.add) for value in move.values]

    def program(self, name: str, initial: Sequence[HeldValues], wants: Sequence[HeldValues]) -> Program:
        """Return the finished program."""
        return Program(name, 0, tuple(initial), tuple(map(tuple, self.rows)), tuple(wants))


def chunk_value(index: int) -> Value:
    """Return the value of chunk `index` of the tensor."""
    return Value("chunk", (index,))


def chunk_values(indices: Iterable[int]) -> tuple[Value, ...]:
    """Return the values of several chunks."""
    return tuple(map(chunk_value, indices))


def initial_summands(num_ranks: int, pieces: int) -> list[HeldValues]:
    """Return the initial state of an all-reduce or reduce-scatter: every rank holds its summand of every chunk."""
    return [{chunk_value(c): {r: 1} for c in range(pieces)} for r in range(num_ranks)]


def fully_reduced(num_ranks: int, pieces: Iterable[int]) -> HeldValues:
    """Return the state in which each of these chunks contains every rank's summand once."""
    return {chunk_value(c): dict.fromkeys(range(num_ranks), 1) for c in pieces}


def all_reduce_program(steps: CollectiveBuilder, name: str, pieces: int) -> Program:
    """Return the program whose steps reduce `pieces` chunks on every rank."""
    n = steps.num_ranks
    return steps.program(name, initial_summands(n, pieces), [fully_reduced(n, range(pieces)) for _ in range(n)])


def reduce_scatter_program(steps: CollectiveBuilder, name: str, pieces: Sequence[Iterable[int]]) -> Program:
    """Return the program whose steps leave the sums of the chunks `pieces[r]` on rank r."""
    n = steps.num_ranks
    chunks = [tuple(p) for p in pieces]
    return steps.program(name, initial_summands(n, 1 + max(c for p in chunks for c in p)), [fully_reduced(n, p) for p in chunks])


def all_gather_program(steps: CollectiveBuilder, name: str, pieces: Sequence[Iterable[int]]) -> Program:
    """Return the program whose steps send the chunks `pieces[r]`, initially on rank r, to all ranks."""
    chunks = [tuple(p) for p in pieces]
    all_chunks: HeldValues = {chunk_value(c): {r: 1} for r, p in enumerate(chunks) for c in p}
    return steps.program(name, [{chunk_value(c): {r: 1} for c in p} for r, p in enumerate(chunks)], [all_chunks] * steps.num_ranks)


def broadcast_program(steps: CollectiveBuilder, name: str, pieces: int, root: int) -> Program:
    """Return the program whose steps send every chunk of rank `root` to all ranks."""
    all_chunks: HeldValues = {chunk_value(c): {root: 1} for c in range(pieces)}
    initial: list[HeldValues] = [all_chunks if r == root else {} for r in range(steps.num_ranks)]
    return steps.program(name, initial, [all_chunks] * steps.num_ranks)
