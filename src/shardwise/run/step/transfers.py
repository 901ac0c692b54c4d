"""Point-to-point transfers between pipeline stages: the tensors of a value, their tags, and when receives are posted.

In: a program's sends and receives. Out: asynchronous messages. Not modelled: how long one takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardwise.plan.ir.action import RECEIVE_LOOKAHEAD
from shardwise.plan.ir.program import Action, Compute, Program, Recv, Send, Value
from shardwise.world.world import CollectiveWork, Group


def rank_pairs_of(program: Program) -> set[tuple[int, int]]:
    """Return (sender, receiver) of every message between stages.

    >>> sorted(rank_pairs_of(Program.parse("rank 0: 0F0 x(0,1,0)>1 g(1,0,0)<1 0B0\\nrank 1: x(0,1,0)<0 1F0 1B0 g(1,0,0)>0")))
    [(0, 1), (1, 0)]
    """
    return {(rank, a.to) for rank, row in enumerate(program.actions) for a in row if isinstance(a, Send) and a.value.name in ("x", "g")}


@dataclass(frozen=True)
class Crossing:
    """One tensor sent between stages: its graph value, local shape and dtype, and whether its gradient is sent back."""

    value: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool


Crossings = Mapping[tuple[int, int], Sequence[Crossing]]  # by link: producer and consumer stage
PendingReceive = Callable[[], list[Tensor]]  # waits for a message's tensors


class ReshardingTransfers(Protocol):
    """Messages between stages with different meshes: `run/step/stage_resharding.StageResharding`."""

    @property
    def pipeline_index(self) -> int: ...
    def is_resharded(self, value: Value) -> bool: ...

    def sender(
        self, value: Value, messages: Sequence[Crossing], tags: Sequence[int]
    ) -> Callable[[Sequence[Tensor]], list[CollectiveWork]]: ...

    def receiver(self, value: Value, messages: Sequence[Crossing], tags: Sequence[int]) -> Callable[[], PendingReceive]: ...


class Transfers:
    """Messages of one pipeline rank. `crossings`: by microbatch and link. `group`: pipeline group, in pipeline order. `resharding`:
    messages between stages with different meshes."""

    def __init__(
        self,
        program: Program,
        crossings: Mapping[int, Crossings],
        group: Group,
        device: torch.device,
        resharding: ReshardingTransfers | None = None,
    ) -> None:
        self._program, self._crossings, self._group, self._device, self._resharding = program, crossings, group, device, resharding
        self._width = max((len(c) for links in crossings.values() for c in links.values()), default=1)

    def messages(self, value: Value) -> list[Crossing]:
        """Return the tensors of an activation x(src, dst, m) or of its gradient g(dst, src, m), in order."""
        a, b, m = value.index
        links = self._crossings[m]
        return list(links[a, b]) if value.name == "x" else [c for c in links[b, a] if c.has_gradient]

    def _tags(self, value: Value) -> list[int]:
        """Return one tag for each tensor, unique by kind, stages and microbatch."""
        a, b, m = value.index
        stages = self._program.num_stages
        first = (((m * 2 + (value.name == "g")) * stages + a) * stages + b) * self._width
        return list(range(first, first + len(self.messages(value))))

    def sender(self, value: Value, to: int) -> Callable[[Sequence[Tensor]], list[CollectiveWork]]:
        """Return a function that sends a value's tensors to rank `to`."""
        tags, isend = self._tags(value), self._group.isend
        if self._resharding is not None and self._resharding.is_resharded(value):
            return self._resharding.sender(value, self.messages(value), tags)
        return lambda tensors: [isend(x.detach().contiguous(), to, tag=tag) for x, tag in zip(tensors, tags, strict=True)]

    def receiver(self, value: Value, source: int) -> Callable[[], PendingReceive]:
        """Return a function that posts the receives of a value's tensors from rank `source`."""
        tags, irecv, device = self._tags(value), self._group.irecv, self._device
        if self._resharding is not None and self._resharding.is_resharded(value):
            return self._resharding.receiver(value, self.messages(value), tags)
        shapes = [(c.shape, c.dtype) for c in self.messages(value)]

        def post() -> PendingReceive:
            tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
            works = [irecv(x, source, tag=tag) for x, tag in zip(tensors, tags, strict=True)]

            def wait() -> list[Tensor]:
                for work in works:
                    work.wait()
                return tensors

            return wait

        return post


def receives_posted_before(actions: Sequence[Action]) -> list[list[int]]:
    """Return [action] -> the receives to post right before it: those up to `RECEIVE_LOOKAHEAD` computes later, by index.

    >>> from shardwise.plan.ir.program import Program
    >>> program = Program.parse("rank 0: 0F0 x(0,1,0)>1 g(1,0,0)<1 0B0\\nrank 1: x(0,1,0)<0 1F0 1B0 g(1,0,0)>0")
    >>> receives_posted_before(program.actions[0])
    [[2], [], [], []]
    """
    posted: list[list[int]] = []
    at = computes = 0
    for step, action in enumerate(actions):
        if not isinstance(action, Compute | Recv):
            posted.append([])
            continue
        at = max(at, step)
        computes = sum(isinstance(a, Compute) for a in actions[step:at])
        posts = []
        while at < len(actions) and computes <= RECEIVE_LOOKAHEAD:
            if isinstance(actions[at], Recv):
                posts.append(at)
            computes += isinstance(actions[at], Compute)
            at += 1
        posted.append(posts)
    return posted
