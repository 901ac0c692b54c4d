"""Detect corrupted state (bit flips, silent data corruption) by fingerprints. In: flat groups and optimizer state. Out: suspect ranks.

A fingerprint (checksum) is the sum of a buffer's 64-bit words, modulo 2^64: any single bit flip changes it. Replicas compare the
fingerprints of their weights: of more than two the minority is suspect, of two both. Sharded state (ZeRO shards, optimizer state) is
compared with its fingerprint after the last update, if the caller guarantees that nothing else writes to it (`watch`). All ranks exchange
one small message a step, an all-reduce that runs beside those of gradients, and reach the same verdict. It also carries each rank's summand
of the loss, and the norm of its own gradients before they are reduced. Not modelled: several flips that cancel; flips in temporary tensors
of a step.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import RunError
from shardwise.run.state.parameters import FlatGroup
from shardwise.world.comm.pending import DONE
from shardwise.world.persistent_memory import sum_of_words
from shardwise.world.world import CollectiveWork, World

MAX_RANK_SETS = 4  # sets of replicated ranks per rank
MAX_RANKS = 512  # beyond this the message is no longer small
_WATCHED, _LOSS, _NUM_ROWS = MAX_RANK_SETS, MAX_RANK_SETS + 1, MAX_RANK_SETS + 2  # rows of a rank in the message, after its rank sets


class StateDiverged(RunError):
    """Corrupted state: `ranks` are the suspect ones."""

    def __init__(self, ranks: Sequence[int], since_update: bool = False) -> None:
        rank_list, have = ", ".join(map(str, ranks)), "has" if len(ranks) == 1 else "have"
        what = "weights or optimizer state than after the last update" if since_update else "weights than their replicas"
        cause = "something other than the update writes to them" if since_update else "the model has random numbers or buffers that differ"
        super().__init__(f"rank {rank_list} {have} other {what}: a bit was flipped in memory, or {cause}; go on from the last checkpoint")
        self.ranks, self.since_update = tuple(ranks), since_update


class SuspectStep(RunError):
    """A step with suspect numbers, found before its update."""


def fingerprint_of(x: Tensor) -> Tensor:
    """Sum of the 64-bit words of a tensor's memory, modulo 2^64, as int64 [].

    >>> bool(fingerprint_of(torch.ones(3)) == fingerprint_of(torch.tensor([1.0, 1.0, 1.0000001])))
    False
    """
    if (words_sum := sum_of_words(x)) is not None:
        return wrap_to_int64(words_sum)
    data = x.detach().reshape(-1)
    num_bytes = data.nbytes // 8 * 8
    if num_bytes == data.nbytes:
        return data.view(torch.int64).sum()
    data = data.view(torch.uint8)
    return data[:num_bytes].view(torch.int64).sum() + data[num_bytes:].sum(dtype=torch.int64)


def wrap_to_int64(x: int) -> Tensor:
    """Return an integer modulo 2^64 as int64 []."""
    return torch.tensor(_wrap_integer(x))


def _wrap_integer(x: int) -> int:
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


class Fingerprints:
    """Fingerprints of one rank; every rank builds one and makes the same calls. Nothing is sent without replicas and watched tensors.

    `norms`: gradient norm of each rank in the last checked step; empty if nothing is watched.
    """

    def __init__(self, groups: Sequence[FlatGroup], world: World) -> None:
        everyone = world.world_group
        shared: dict[tuple[int, ...], list[FlatGroup]] = defaultdict(list)
        for group in groups:
            if len(group.sum_ranks) > 1 and not group.is_gathered:
                shared[group.sum_ranks].append(group)
        self._is_enabled = everyone.size <= MAX_RANKS
        sets = list(shared.items())[:MAX_RANK_SETS] if self._is_enabled else []
        self._replicated_sets = [(_rank_set_id(ranks), [group.data for group in groups]) for ranks, groups in sets]
        self._world_group, self._rank = everyone, world.rank
        self._is_sent = any(world.all_reduce_max([len(self._replicated_sets)]))
        # By rank: (rank set, fingerprint) pairs, then its gradient norm and whether its watched state has changed, then its loss summand.
        self._by_rank = torch.zeros(everyone.size, _NUM_ROWS, 2, dtype=torch.int64, device=everyone.device)
        self._work: CollectiveWork | None = None
        self._watched: list[Tensor] = []
        self.reads_later = everyone.device.type == "cuda"
        self._unread: TensorOnHost | None = None
        self._expected: dict[int, Tensor] = {}  # step -> fingerprints of watched tensors
        self.norms: list[float] = []

    def watch(self, tensors: Sequence[Tensor], step: int) -> None:
        """Check in each step from `step` on that these tensors are unchanged since the previous update."""
        self._watched, self._is_sent = list(tensors), self._is_enabled
        self.record_expected(step)

    @torch.no_grad()
    def record_expected(self, step: int, known: Mapping[int, int] = {}) -> None:
        """Record the watched tensors' fingerprints after `step` steps. `known`: fingerprints computed already, by tensor id."""
        if self._watched and self._is_enabled:
            previous = {step - 1: self._expected[step - 1]} if step - 1 in self._expected else {}
            self._expected = {**previous, step: self._current(known)}

    def _current(self, known: Mapping[int, int] = {}) -> Tensor:
        device = self._world_group.device
        values = (wrap_to_int64(known[id(x)]) if id(x) in known else fingerprint_of(x) for x in self._watched)
        return torch.stack([value.to(device) for value in values])

    def carries(self, loss: Tensor) -> bool:
        """Return whether the message of a step carries a loss of this type, as all ranks' do."""
        return self._is_sent and type(loss) is Tensor and loss.dtype is torch.float64

    def start(self, step: int, norms: Sequence[Tensor] = (), loss: Tensor | None = None) -> CollectiveWork:
        """Start the exchange of this rank's fingerprints after `step` steps. `norms`: of all parts of its gradients. `loss`: this rank's
        summands, [] or [2], which are the sums over ranks once the returned work has been waited for; only if `carries`."""
        if not self._is_sent:
            return DONE
        if self._work is not None:
            self._work.wait()
        by_rank = self._by_rank = torch.zeros_like(self._by_rank)  # the message of an earlier step may be unread
        local_rows, current = by_rank[self._rank], self._current() if step in self._expected else None
        if self._replicated_sets:
            by_tensor = {} if current is None else dict(zip(map(id, self._watched), current, strict=True))
            local_rows[: len(self._replicated_sets)] = _pairs_of(self._replicated_sets, by_tensor)
        if norms:
            local_rows[_WATCHED, 0] = torch.stack([x.double() for x in norms]).square().sum().sqrt().view(torch.int64)
        if current is not None:
            local_rows[_WATCHED, 1] = (self._expected[step] != current).any()
        if loss is not None:
            local_rows[_LOSS, : loss.numel()] = loss.view(torch.int64)
        self._work = self._world_group.all_reduce(by_rank.view(-1), wait=False).without_timing()
        if loss is not None:
            self._work.call_after(lambda: _add_losses(by_rank, loss))
        return self._work

    def check(self) -> None:
        """Wait for the exchange; raise StateDiverged on all ranks if any is suspect. On a GPU without watched tensors it reads the message
        of the step before, which has come to the host, so that the host does not wait for this step."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        if not self.reads_later or self._watched:
            self._judge(self._by_rank)
            return
        earlier, self._unread = self._unread, copy_to_host(self._by_rank)
        if earlier is not None:
            self._judge(earlier.wait())

    def finish(self) -> None:
        """Read the message of the last step; before its weights are handed out. Raises as `check` does."""
        unread, self._unread = self._unread, None
        if unread is not None:
            self._judge(unread.wait())

    def forget(self) -> None:
        """Forget the message of the last step, whose weights are not the current ones."""
        self._unread = None

    def _judge(self, by_rank: Tensor) -> None:
        rows = by_rank.tolist()
        self.norms = by_rank[:, _WATCHED, 0].view(torch.float64).tolist() if self._watched else []
        if changed := [rank for rank, row in enumerate(rows) if row[_WATCHED][1]]:
            raise StateDiverged(changed, since_update=True)
        if differing := suspect_ranks([row[:MAX_RANK_SETS] for row in rows]):
            raise StateDiverged(differing)


@dataclass(frozen=True)
class TensorOnHost:
    """A tensor on its way to the host. `arrived`: a CUDA event, None where it was on the host."""

    tensor: Tensor
    arrived: Any

    @property
    def is_there(self) -> bool:
        """Return whether reading it would not wait."""
        return self.arrived is None or bool(self.arrived.query())

    def wait(self) -> Tensor:
        """Return the tensor, once it has come."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.tensor


def copy_to_host(x: Tensor) -> TensorOnHost:
    """Start to copy a tensor to the host; one that is there is not copied."""
    if not x.is_cuda:
        return TensorOnHost(x, None)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    received = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    event.record()
    return TensorOnHost(received, event)


def suspect_ranks(fingerprints_by_rank: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """Return the ranks whose fingerprint is not the majority's, given (rank set id, fingerprint) pairs by rank.

    >>> suspect_ranks([[(7, 1)], [(7, 1)], [(7, 5)]]), suspect_ranks([[(7, 1)], [(7, 2)]]), suspect_ranks([[(7, 1)], [(7, 1)], [(0, 0)]])
    ([2], [0, 1], [])
    """
    by_set: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, pairs in enumerate(fingerprints_by_rank):
        for name, value in pairs:
            if name:
                by_set[name][rank] = value
    ranks: set[int] = set()
    for values in by_set.values():
        (majority, count), *minorities = Counter(values.values()).most_common()
        if minorities:
            ranks.update(rank for rank, value in values.items() if value != majority or count == minorities[0][1])
    return sorted(ranks)


def _add_losses(by_rank: Tensor, loss: Tensor) -> None:
    """Write the sum of all ranks' summands, which a message carries bit by bit."""
    loss.copy_(by_rank[:, _LOSS, : loss.numel()].view(torch.float64).sum(0).view(loss.shape))


def _pairs_of(replicated_sets: Sequence[tuple[int, Sequence[Tensor]]], known: Mapping[int, Tensor]) -> Tensor:
    """Return (id of a rank set, sum of its tensors' fingerprints) [set, 2]. `known`: fingerprints computed already, by tensor id."""
    by_set = [(set_id, [sum_of_words(x) for x in tensors]) for set_id, tensors in replicated_sets] if not known else []
    if by_set and not any(None in sums for _, sums in by_set):  # on the host: one tensor in place of four a set
        return torch.tensor([(set_id, _wrap_integer(sum(x for x in sums if x is not None))) for set_id, sums in by_set])
    pairs = []
    for set_id, tensors in replicated_sets:
        total = torch.stack([known[id(x)] if id(x) in known else fingerprint_of(x) for x in tensors]).sum()
        pairs.append(torch.stack((torch.full_like(total, set_id), total)))
    return torch.stack(pairs)


def _rank_set_id(ranks: tuple[int, ...]) -> int:
    return 1 + int.from_bytes(hashlib.sha256(repr(ranks).encode()).digest()[:7], "little")


def parameter_at_element(groups: Sequence[FlatGroup], number: int, element: int) -> str:
    """Return the parameter at an element of group `number`'s memory; empty if there is no such group, or it is padding."""
    if number >= len(groups):
        return ""
    group = groups[number]
    if group.is_gathered:
        return next((member.name for member, at, (first, last) in group.members_of_shards() if at <= element < at + last - first), "")
    starts_and_members = zip(group.starts, group.members, strict=True)
    return next((member.name for start, member in starts_and_members if start <= element < start + member.size), "")
