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

from shardwise.errors import RunError
from shardwise.world import recorder
from shardwise.world.comm.group import Group
from shardwise.world.comm.pending import DTYPES, PEER_LOSS_MESSAGES, CollectiveWork, LostPeer
from shardwise.world.comm.worker import BackgroundWorker

FIRST_TAG = 1 << 30  # first tag: no other message has one above
TAGS_PER_COLLECTIVE = 1 << 18  # tags of one collective, for messages between two members
_SALTS = 1 << 12

ReportWait = Callable[[int, int], None]  # (step, member) that is waited for from now on


class CollectiveSignature(NamedTuple):
    """The part of a call that must be equal on all members: collective, checksum of the algorithm, and sizes."""

    op: int
    name: str
    checksum: int
    sizes: tuple[int, ...]


class CollectiveRunner:
    """Runs collectives of `group`; `side_group`: the same members, with connections for this purpose only."""

    def __init__(self, group: Group, side_group: Group) -> None:
        self.group, self.side_group = group, side_group
        self._worker = BackgroundWorker()
        self._agreed: set[tuple[int, ...]] = set()
        self._count = 0
        self._failure: RunError | None = None

    def start(self, call: CollectiveSignature, x: Tensor, work: Callable[[ReportWait, int], None], wait: bool) -> CollectiveWork:
        """Run `work(note, tag)`, which reports in `note` what it waits for; `tag`: the first of NUMBERS tags of this collective only."""
        group, dtype, count = self.group, DTYPES.get(x.dtype, 0), self._count
        self._count += 1
        signature = (call.op, call.checksum, dtype, *call.sizes)
        what = f"{recorder.OPS[call.op]} of {str(x.dtype).removeprefix('torch.')} {list(x.shape)} by {call.name}"
        at = group.recorder.start(call.op, group.slot, dtype, tuple(x.shape), x.nbytes)
        group.recorder.set_algorithm(at, call.name)
        awaited = [0, -1]  # step, member

        def note(step: int, member: int) -> None:
            awaited[:] = step, member
            group.recorder.set_step(at, group.ranks[member] if member >= 0 else -1, step)

        def run() -> None:
            if self._failure is not None:
                raise type(self._failure)(f"{self._failure}; this group runs nothing after it")
            try:
                self._check_agreement(signature, what)
                work(note, FIRST_TAG + zlib.crc32(repr((count, signature)).encode()) % _SALTS * TAGS_PER_COLLECTIVE)
            except torch.OutOfMemoryError as error:  # raised unchanged, for its own handlers
                self._failure = RunError(f"rank {group.ranks[group.index]} had no memory for {what}: {error}")
                self.side_group.close()
                raise
            except (RunError, RuntimeError) as error:
                self._failure = self._explain_error(error, what, *awaited)
                self.side_group.close()
                raise self._failure from error

        result = CollectiveWork(group, self._worker.submit(run, inline=wait), at, None, None)
        if wait:
            result.wait()
        return result

    def _explain_error(self, error: Exception, what: str, step: int, member: int) -> RunError:
        if isinstance(error, RunError) and not isinstance(error, LostPeer) and step == 0:
            return error
        group = self.group
        text = str(error.__cause__ or error).split("\n")[0]
        me = group.ranks[group.index]
        at = f"{what} (ranks {recorder.group_name(group.ranks)})" + (f", in step {step}" if step else "")
        peer = f"rank {group.ranks[member]}" if member >= 0 else "another rank"
        if isinstance(error, LostPeer) or any(part in text for part in PEER_LOSS_MESSAGES):
            timed_out = "imed out" in text or "imeout" in text
            hint = f"; it is late, stopped, or in another collective, size or type than rank {me}" if timed_out else ""
            return LostPeer(f"rank {me} lost {peer} in {at}: {text}{hint}")
        return RunError(f"rank {me} failed in {at}, with {peer}: {text}")

    def _check_agreement(self, signature: tuple[int, ...], what: str) -> None:
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


def runner_of(group: Group) -> CollectiveRunner:
    """Return the group's one runner of multi-step collectives, which all members make at their first call."""
    if group.collective_runner is None:
        group.collective_runner = CollectiveRunner(group, group.side_group("programs"))
    runner: CollectiveRunner = group.collective_runner
    return runner
