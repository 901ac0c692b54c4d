"""Run a group's multi-step collectives in sequence in its worker thread. In: a function. Out: `CollectiveWork`, with a recorder entry.

The first call with a new size, type or algorithm compares the members' calls. Later mismatched calls never match: messages have other
tags, and the wait times out. After a failure nothing runs any more, and closed connections notify the ranks that wait for this one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from weft.errors import RunError
from weft.world import recorder
from weft.world.group import Group
from weft.world.pending import DTYPES, LOST, LostPeer, Work
from weft.world.worker import Worker

TAGS = 1 << 30  # first tag: no other message has one above
NUMBERS = 1 << 18  # tags of one collective, for messages between two members
_SALTS = 1 << 12

Note = Callable[[int, int], None]  # (step, member) that is waited for from now on


class Call(NamedTuple):
    """The part of a call that must be equal on all members: collective, checksum of the algorithm, and sizes."""

    op: int
    name: str
    mark: int
    sizes: tuple[int, ...]


class Runner:
    """Runs collectives of `group`; `side_group`: the same members, with connections for this purpose only."""

    def __init__(self, group: Group, side_group: Group) -> None:
        self.group, self.side_group = group, side_group
        self._worker = Worker()
        self._agreed: set[tuple[int, ...]] = set()
        self._count = 0
        self._broken: RunError | None = None

    def start(self, call: Call, x: Tensor, work: Callable[[Note, int], None], wait: bool) -> Work:
        """Run `work(note, tag)`, which reports in `note` what it waits for; `tag`: the first of NUMBERS tags of this collective only."""
        group, dtype, count = self.group, DTYPES.get(x.dtype, 0), self._count
        self._count += 1
        signature = (call.op, call.mark, dtype, *call.sizes)
        what = f"{recorder.OPS[call.op]} of {str(x.dtype).removeprefix('torch.')} {list(x.shape)} by {call.name}"
        at = group.recorder.start(call.op, group.slot, dtype, tuple(x.shape), x.nbytes)
        group.recorder.programmed(at, call.name)
        awaited = [0, -1]  # step, member

        def note(step: int, member: int) -> None:
            awaited[:] = step, member
            group.recorder.step(at, group.ranks[member] if member >= 0 else -1, step)

        def run() -> None:
            if self._broken is not None:
                raise type(self._broken)(f"{self._broken}; this group runs nothing after it")
            try:
                self._agree(signature, what)
                work(note, TAGS + zlib.crc32(repr((count, signature)).encode()) % _SALTS * NUMBERS)
            except torch.OutOfMemoryError as error:  # raised unchanged, for its own handlers
                self._broken = RunError(f"rank {group.ranks[group.index]} had no memory for {what}: {error}")
                self.side_group.close()
                raise
            except (RunError, RuntimeError) as error:
                self._broken = self._explained(error, what, *awaited)
                self.side_group.close()
                raise self._broken from error

        result = Work(group, self._worker.do(run, now=wait), at, None, None)
        if wait:
            result.wait()
        return result

    def _explained(self, error: Exception, what: str, step: int, member: int) -> RunError:
        if isinstance(error, RunError) and not isinstance(error, LostPeer) and step == 0:
            return error
        group = self.group
        text = str(error.__cause__ or error).split("\n")[0]
        me = group.ranks[group.index]
        at = f"{what} (ranks {recorder.group_name(group.ranks)})" + (f", in step {step}" if step else "")
        peer = f"rank {group.ranks[member]}" if member >= 0 else "another rank"
        if isinstance(error, LostPeer) or any(part in text for part in LOST):
            timed_out = "imed out" in text or "imeout" in text
            hint = f"; it is late, stopped, or in another collective, size or type than rank {me}" if timed_out else ""
            return LostPeer(f"rank {me} lost {peer} in {at}: {text}{hint}")
        return RunError(f"rank {me} failed in {at}, with {peer}: {text}")

    def _agree(self, signature: tuple[int, ...], what: str) -> None:
        """Compare a new call with those of the other members. Raises RunError on all members if one differs."""
        if signature in self._agreed:
            return
        own = torch.tensor((*signature, -1, -1)[:4], dtype=torch.int64)
        gathered = self.side_group.all_gather(own.to(self.side_group.device)).cpu().view(self.group.size, -1)
        differing = [self.group.ranks[i] for i, row in enumerate(gathered) if not torch.equal(row, own)]
        if differing:
            me, peers = self.group.ranks[self.group.index], ", ".join(map(str, differing))
            raise RunError(f"rank {me} is in {what}, and rank {peers} in another collective, size, type or algorithm")
        self._agreed.add(signature)
