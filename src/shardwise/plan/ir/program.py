"""`Program`: what each rank holds initially, its actions in order (computes, transfers, memory management), and what must hold at the end.

Programs of pipeline schedules and collectives (`schedules/`, `collectives/`), or of a text, are checked, simulated, drawn and executed.
`effects_of` is the only statement of what an action needs and leaves behind; `walk_actions` is the
only statement of which orders are legal. Not modelled here: how long anything takes, and how large a value is.

Values of a pipeline, for a microbatch m and stages linked src -> dst:

    x(src,dst,m)  the activation that stage src computes for stage dst; one value per link, since each has one reader
    g(dst,src,m)  the gradient of x(src,dst,m), on its way back
    saved(s,m)    tensors that stage s saves from its forward to its backward: its inputs, its outputs or loss, intermediates
    half(s,m)     saved tensors and gradients that remain after the input part I of a split backward, for W
    dw(s)         the accumulated gradient of stage s's parameters
    grad(s)       the same reduced over data replicas, where the program reduces gradients itself
    w(s)          the gathered weights of stage s, where the program gathers them itself
    host(s,m)     saved(s,m) while it is in the host's memory
    inputs(s,m)   what remains of saved(s,m) after DROP: enough to recompute it

A stage may be on several ranks (replicas), each microbatch of it on one; their dw are then sent to one another and added.

The stage's own slice of the batch is present on its rank and needs no value. A collective has values with names of its own.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from shardwise.errors import ProgramError
from shardwise.plan.ir.action import (
    Action,
    Compute,
    ComputeOp,
    Content,
    HeldValues,
    Links,
    Manage,
    ManageOp,
    Recv,
    Send,
    Value,
    chain_links,
)
from shardwise.plan.ir.text import format_program, parse_program_fields

__all__ = [
    "Action",
    "Compute",
    "ComputeOp",
    "Content",
    "Effects",
    "HeldValues",
    "Links",
    "Manage",
    "ManageOp",
    "Program",
    "Recv",
    "Send",
    "Value",
    "chain_links",
    "effects_of",
    "is_pair",
    "order_actions",
    "walk_actions",
]  # fmt: skip

_CHAIN: Links = ((-1, -1),)  # stands for "each stage feeds the next" until the number of stages is known
WEIGHTS = "w"  # holds no contribution: the same for every microbatch
# A link value has exactly one reader, so its send moves it. Any other value (a chunk, a dw) is copied by a send.
_MOVED_BY_SEND = frozenset({"x", "g"})
SAVED_VALUES = ("saved", "half")  # saved tensors of a microbatch; those that wait for W count in full


@dataclass(frozen=True)
class Program:
    """Program of all ranks: per rank, what is `initial`, the `actions` in order, and what it `wants` to hold at the end.

    `links` are pairs (producer stage, consumer stage), producer first in number; by default the chain. A collective has
    `num_stages=0`. Ranks are positions in the program (for a schedule: pipeline coordinates), not global ranks.

    >>> program = Program.parse("rank 0: 0F0 x(0,1,0)>1 g(1,0,0)<1 0B0\\nrank 1: x(0,1,0)<0 1F0 1B0 g(1,0,0)>0")
    >>> [str(action) for _, action in walk_actions(program)][:3]
    ['0F0', 'x(0,1,0)>1', 'x(0,1,0)<0']
    >>> Program.parse(str(program)) == program
    True

    Raises:
        ProgramError: it names a rank, stage or link that does not exist.
    """

    name: str
    num_stages: int
    initial: tuple[HeldValues, ...]  # [rank]
    actions: tuple[tuple[Action, ...], ...]  # [rank][step]
    wants: tuple[HeldValues, ...]  # [rank]
    links: Links = field(default=_CHAIN)

    def __post_init__(self) -> None:
        if self.links is _CHAIN:
            object.__setattr__(self, "links", chain_links(self.num_stages))
        if not len(self.initial) == len(self.actions) == len(self.wants):
            raise ProgramError(
                f"{self.name}: given, actions and wants are for {len(self.initial)}, {len(self.actions)} and {len(self.wants)} ranks"
            )
        if len(set(self.links)) != len(self.links):
            raise ProgramError(f"{self.name}: a link is named twice in {' '.join(f'{p}>{q}' for p, q in self.links)}")
        for source, target in self.links:
            if not 0 <= source < target < self.num_stages:
                raise ProgramError(
                    f"{self.name}: link {source}>{target} must go from a lower to a higher of the stages 0 to {self.num_stages - 1}"
                )
        for rank, row in enumerate(self.actions):
            for step, action in enumerate(row):
                reason = self._refuse(action, rank)
                if reason:
                    raise ProgramError(f"{self.name}: rank {rank} step {step}: {action} {reason}")

    def _refuse(self, action: Action, rank: int) -> str:
        if isinstance(action, (Compute, Manage)):
            is_valid = 0 <= action.stage < self.num_stages and (action.microbatch is None or action.microbatch >= 0)
            return "" if is_valid else f"is not of the stages 0 to {self.num_stages - 1}"
        peer = action.to if isinstance(action, Send) else action.source
        if peer == rank:
            return "is a transfer of a rank with itself, which is not needed"
        return "" if 0 <= peer < len(self.actions) else f"names a rank outside 0 to {len(self.actions) - 1}"

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_actions(self) -> int:
        return sum(map(len, self.actions))

    @cached_property
    def boundary_values(self) -> tuple[Value, ...]:
        """Return every value that some rank is given or wants, in order: of a collective, the chunks of its tensor."""
        return tuple(sorted({value for held in (*self.initial, *self.wants) for value in held}))

    @cached_property
    def microbatches(self) -> tuple[int, ...]:
        """Return every microbatch that some action names, in order."""
        return tuple(sorted({a.microbatch for row in self.actions for a in row if isinstance(a, Compute)}))

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """Return [stage] -> the stages that feed it, in order."""
        return self._neighbours([(q, p) for p, q in self.links])

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """Return [stage] -> the stages that it feeds, in order."""
        return self._neighbours(self.links)

    def _neighbours(self, links: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
        neighbours: list[list[int]] = [[] for _ in range(self.num_stages)]
        for stage, neighbour in sorted(links):
            neighbours[stage].append(neighbour)
        return tuple(map(tuple, neighbours))

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """Return [rank] -> the stages that it computes, in order."""
        return tuple(tuple(sorted({a.stage for a in row if isinstance(a, Compute)})) for row in self.actions)

    @cached_property
    def gathered_stages(self) -> frozenset[int]:
        """Return the stages whose weights the program gathers itself: their computes need `w`."""
        return frozenset(a.stage for row in self.actions for a in row if isinstance(a, Manage) and a.op is ManageOp.UNSHARD)

    @cached_property
    def effects(self) -> tuple[tuple[Effects, ...], ...]:
        """Return [rank][step] -> the effects of the action, cached for repeated walks."""
        return tuple(tuple([effects_of(action, self) for action in row]) for row in self.actions)

    def __str__(self) -> str:
        """Return the text form; `Program.parse` reads it back."""
        return format_program(self)

    @classmethod
    def parse(cls, text: str) -> Program:
        """Parse the text form, see `shardwise.plan.ir.text`."""
        return cls(**parse_program_fields(text))


class Effects(NamedTuple):
    """Effects of one action on the values that its own rank holds.

    Every value of `reads` must be held before; `frees` are not held after. `becomes` is the written value that takes over
    the memory of what is freed, so that it is not counted twice.
    """

    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    adds: tuple[Value, ...] = ()  # accumulated into; created by the first add
    frees: tuple[Value, ...] = ()
    becomes: Value | None = None


def effects_of(action: Action, program: Program) -> Effects:
    """Return what an action needs and leaves behind on its own rank. The only statement of the rules."""
    if isinstance(action, Send):
        value = (action.value,)
        return Effects(reads=value, frees=value if action.value.name in _MOVED_BY_SEND else ())
    if isinstance(action, Recv):
        value = (action.value,)
        return Effects(reads=value, adds=value) if action.add else Effects(writes=value)
    if isinstance(action, Manage):
        return _effects_of_manage(action)
    s, m = action.stage, action.microbatch
    before, after = program.predecessors[s], program.successors[s]
    weights = (Value(WEIGHTS, (s,)),) if s in program.gathered_stages else ()
    match action.op:
        case ComputeOp.F:
            inputs, saved = tuple([Value("x", (p, s, m)) for p in before]), Value("saved", (s, m))
            return Effects((*inputs, *weights), (*[Value("x", (s, q, m)) for q in after], saved), (), inputs, saved)
        case ComputeOp.B | ComputeOp.I:
            freed = (Value("saved", (s, m)), *[Value("g", (q, s, m)) for q in after])
            out = tuple([Value("g", (s, p, m)) for p in before])
            if action.op is ComputeOp.B:
                return Effects((*freed, *weights), out, (Value("dw", (s,)),), freed)
            half = Value("half", (s, m))
            return Effects((*freed, *weights), (*out, half), (), freed, half)
        case ComputeOp.W:
            freed = (Value("half", (s, m)),)
            return Effects((*freed, *weights), (), (Value("dw", (s,)),), freed)
        case ComputeOp.R:
            freed, saved = (Value("inputs", (s, m)),), Value("saved", (s, m))
            return Effects((*freed, *weights), (saved,), (), freed, saved)


def _effects_of_manage(action: Manage) -> Effects:
    if action.microbatch is not None:
        saved, host, inputs = (Value(name, (action.stage, action.microbatch)) for name in ("saved", "host", "inputs"))
        if action.op is ManageOp.DROP:
            return Effects((saved,), (inputs,), (), (saved,), inputs)
        before, after = (saved, host) if action.op is ManageOp.OFFLOAD else (host, saved)
        return Effects((before,), (after,), (), (before,))
    weights, dw = (Value(WEIGHTS, (action.stage,)),), (Value("dw", (action.stage,)),)
    if action.op is ManageOp.REDUCE_GRAD:
        return Effects(dw, (), (Value("grad", (action.stage,)),), dw)
    return Effects(writes=weights) if action.op is ManageOp.UNSHARD else Effects(weights, frees=weights)


def walk_actions(program: Program, rendezvous: bool = False) -> Iterator[tuple[int, Action]]:
    """Yield (rank, action) in a legal order, each rank's actions in their own order.

    A receive waits for its send. By default a send is posted and does not wait (gloo, or NCCL with a stream for each
    direction); with `rendezvous` it blocks its rank until its receive is reached (NCCL on one stream), and both are
    yielded together.

    Only a transfer can wait for another rank: the values of a rank change by its own actions alone, so a read of a value
    that is not held is refused at once.

    Raises:
        ProgramError: a read of a value that is not held, a value created while it is held, or a deadlock; names rank, step,
            action and what it waits for.
    """
    for rank, _, action, _ in walk_effects(program, rendezvous):
        yield rank, action


def walk_effects(program: Program, rendezvous: bool = False) -> Iterator[tuple[int, int, Action, Effects]]:
    """Yield as `walk_actions`, with each action's step and effects: (rank, step, action, effects)."""
    held_by_rank = [set(values) for values in program.initial]
    at, rows = [0] * program.num_ranks, program.effects
    for rank, action in order_actions(program, rendezvous):
        here, step = held_by_rank[rank], at[rank]
        e = rows[rank][step]
        if not here.issuperset(e.reads):
            raise ProgramError(_explain_missing_value(program, rank, step, next(v for v in e.reads if v not in here)))
        if e.writes:
            if not isinstance(action, Recv) and not here.isdisjoint(e.writes):
                duplicate = next(v for v in e.writes if v in here)
                raise ProgramError(f"{program.name}: rank {rank} step {step}: {action} makes {duplicate}, which is held already")
            here.update(e.writes)
        if e.adds:
            here.update(e.adds)
        if e.frees:
            here.difference_update(e.frees)
        at[rank] = step + 1
        yield rank, step, action, e


def order_actions(program: Program, rendezvous: bool = False) -> Iterator[tuple[int, Action]]:
    """Yield as `walk_actions` without tracking what is held: for programs that have been checked, at a fraction of the cost.

    Raises:
        ProgramError: a deadlock.
    """
    at = yield from _order_rendezvous(program) if rendezvous else _order_posted(program)
    if any(step < len(row) for step, row in zip(at, program.actions, strict=True)):
        raise ProgramError(_explain_deadlock(program, at, rendezvous))


Steps = Generator[tuple[int, Action], None, list[int]]  # returns how many steps each rank did


def _order_posted(program: Program) -> Steps:
    wire: Counter[tuple[int, int, Value]] = Counter()
    waits: dict[tuple[int, int, Value], int] = {}  # message -> the rank that is blocked on it
    at = [0] * program.num_ranks
    ready = deque(range(program.num_ranks))
    while ready:
        rank = ready.popleft()
        row = program.actions[rank]
        for step in range(at[rank], len(row)):
            action = row[step]
            if isinstance(action, Send):
                key = (rank, action.to, action.value)
                wire[key] += 1
                if key in waits:
                    ready.append(waits.pop(key))
            elif isinstance(action, Recv):
                key = (action.source, rank, action.value)
                if not wire[key]:
                    waits[key] = rank
                    break
                wire[key] -= 1
            at[rank] = step + 1
            yield rank, action
    return at


def _order_rendezvous(program: Program) -> Steps:
    at = [0] * program.num_ranks
    ready = deque(range(program.num_ranks))
    while ready:
        rank = ready.popleft()
        row = program.actions[rank]
        while at[rank] < len(row):
            action = row[at[rank]]
            if isinstance(action, (Send, Recv)):
                peer = action.to if isinstance(action, Send) else action.source
                peer_row = program.actions[peer]
                if at[peer] == len(peer_row) or not is_pair(rank, action, peer_row[at[peer]]):
                    break
                other = peer_row[at[peer]]
                at[rank] += 1
                at[peer] += 1
                ready.append(peer)
                pair = [(rank, action), (peer, other)]
                yield from pair if isinstance(action, Send) else pair[::-1]
                continue
            at[rank] += 1
            yield rank, action
    return at


def is_pair(rank: int, action: Send | Recv, other: Action) -> bool:
    """Return whether `other`, an action of the peer that `action` names, is the other end of the same transfer."""
    if isinstance(action, Send):
        return isinstance(other, Recv) and other.source == rank and other.value == action.value
    return isinstance(other, Send) and other.to == rank and other.value == action.value


def _explain_missing_value(program: Program, rank: int, step: int, value: Value) -> str:
    row = program.actions[rank]
    freed = [i for i in range(step) if value in effects_of(row[i], program).frees]
    later = [i for i in range(step, len(row)) if value in (*(e := effects_of(row[i], program)).writes, *e.adds)]
    if freed:
        reason = f"{row[freed[-1]]} at step {freed[-1]} freed it"
    elif later:
        reason = f"it comes only at step {later[0]} with {row[later[0]]}"
    else:
        reason = "no action of this rank makes or receives it"
    return f"{program.name}: rank {rank} step {step}: {row[step]} reads {value}, which is not held: {reason}"


def _explain_deadlock(program: Program, at: list[int], rendezvous: bool) -> str:
    """Describe which ranks wait for which, for the first few."""
    heads = {rank: row[at[rank]] for rank, row in enumerate(program.actions) if at[rank] < len(row)}
    lines = []
    for rank, action in heads.items():
        if isinstance(action, (Compute, Manage)):
            continue
        peer, verb = (action.to, "receive") if isinstance(action, Send) else (action.source, "send")
        peer_state = f"is at step {at[peer]}: {heads[peer]}" if peer in heads else "has ended"
        lines.append(f"rank {rank} step {at[rank]}: {action} waits for rank {peer} to {verb} it; rank {peer} {peer_state}")
    more = [f"and {len(lines) - 8} more ranks wait"] if len(lines) > 8 else []
    rule = "no rank can move, where a send waits for its receive" if rendezvous else "no rank can move"
    return f"{program.name}: {rule}\n  " + "\n  ".join(lines[:8] + more)
