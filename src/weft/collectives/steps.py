"""How a collective's actions are written down: transfers between ranks, step by step. Out: a `Program`.

Values are `chunk(c)`, piece c of the tensor that all ranks have alike, except where an algorithm says otherwise. A contribution is a
rank's summand. A transfer of several chunks is one message: their sends stand side by side, and so do their receives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from weft.errors import UsageError
from weft.plan.program import Action, Held, Program, Recv, Send, Value


@dataclass(frozen=True, slots=True)
class Move:
    """`values` go from rank `source` to rank `target`, there added to what it holds where `add`."""

    source: int
    target: int
    values: tuple[Value, ...]
    add: bool = False


@dataclass
class Steps:
    """The actions of `num_ranks` ranks, in the making."""

    num_ranks: int
    rows: list[list[Action]] = field(init=False)

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise UsageError(f"a collective of {self.num_ranks} ranks; it needs at least 1")
        self.rows = [[] for _ in range(self.num_ranks)]

    def together(self, moves: Iterable[Move]) -> None:
        """One step: every rank posts what it sends before it waits for what it receives."""
        moves = [move for move in moves if move.values]
        for move in moves:
            self.rows[move.source] += [Send(value, move.target) for value in move.values]
        for move in moves:
            self.rows[move.target] += [Recv(value, move.source, move.add) for value in move.values]

    def program(self, name: str, initial: Sequence[Held], wants: Sequence[Held]) -> Program:
        """The finished program."""
        return Program(name, 0, tuple(initial), tuple(map(tuple, self.rows)), tuple(wants))


def chunk(index: int) -> Value:
    """Piece `index` of the tensor."""
    return Value("chunk", (index,))


def chunks(indices: Iterable[int]) -> tuple[Value, ...]:
    """Several pieces."""
    return tuple(map(chunk, indices))


def initial_summands(num_ranks: int, pieces: int) -> list[Held]:
    """What an all-reduce or reduce-scatter starts from: every rank has its summand of every piece."""
    return [{chunk(c): {r: 1} for c in range(pieces)} for r in range(num_ranks)]


def summed(num_ranks: int, pieces: Iterable[int]) -> Held:
    """Pieces that hold every rank's summand once."""
    return {chunk(c): dict.fromkeys(range(num_ranks), 1) for c in pieces}


def all_reduce(steps: Steps, name: str, pieces: int) -> Program:
    """The program whose steps sum `pieces` pieces on every rank."""
    n = steps.num_ranks
    return steps.program(name, initial_summands(n, pieces), [summed(n, range(pieces)) for _ in range(n)])


def reduce_scatter(steps: Steps, name: str, pieces: Sequence[Iterable[int]]) -> Program:
    """The program whose steps leave the sums of `pieces[r]` on rank r."""
    n = steps.num_ranks
    chunks = [tuple(p) for p in pieces]
    return steps.program(name, initial_summands(n, 1 + max(c for p in chunks for c in p)), [summed(n, p) for p in chunks])


def all_gather(steps: Steps, name: str, pieces: Sequence[Iterable[int]]) -> Program:
    """The program whose steps bring `pieces[r]`, which rank r has at first, to all."""
    chunks = [tuple(p) for p in pieces]
    all_chunks: Held = {chunk(c): {r: 1} for r, p in enumerate(chunks) for c in p}
    return steps.program(name, [{chunk(c): {r: 1} for c in p} for r, p in enumerate(chunks)], [all_chunks] * steps.num_ranks)


def broadcast(steps: Steps, name: str, pieces: int, root: int) -> Program:
    """The program whose steps bring every piece of rank `root` to all."""
    all_chunks: Held = {chunk(c): {root: 1} for c in range(pieces)}
    initial: list[Held] = [all_chunks if r == root else {} for r in range(steps.num_ranks)]
    return steps.program(name, initial, [all_chunks] * steps.num_ranks)
