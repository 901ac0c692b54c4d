"""Detect corrupted state (bit flips, silent data corruption) by fingerprints. In: flat groups and optimizer state. Out: suspect ranks.

A fingerprint (checksum) is the sum of a buffer's 64-bit words, modulo 2^64: any single bit flip changes it. Replicas compare the
fingerprints of their weights: of more than two the minority is suspect, of two both. Sharded state (ZeRO shards, optimizer state) is
compared with its fingerprint after the last update, if the caller guarantees that nothing else writes to it (`watch`). All ranks exchange
one small all-reduce a step, concurrently with the loss, and reach the same verdict. It also carries the norm of each rank's own gradients,
before they are reduced. Not modelled: several flips that cancel; flips in temporary tensors of a step.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwise.errors import RunError
from shardwise.run.state.parameters import FlatGroup
from shardwise.world.persistent_memory import sum_of_words
from shardwise.world.world import CollectiveWork, World

MAX_RANK_SETS = 4  # sets of replicated ranks per rank
MAX_RANKS = 512  # beyond this the message is no longer small


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
    return torch.tensor((x + (1 << 63)) % (1 << 64) - (1 << 63))


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
        self._replicated_sets = list(shared.items())[:MAX_RANK_SETS] if self._is_enabled else []
        self._world_group, self._rank = everyone, world.rank
        self._is_sent = any(world.all_reduce_max([len(self._replicated_sets)]))
        # By rank: (rank set, fingerprint) pairs, then its gradient norm and whether its watched state has changed.
        self._by_rank = torch.zeros(everyone.size, MAX_RANK_SETS + 1, 2, dtype=torch.int64, device=everyone.device)
        self._work: CollectiveWork | None = None
        self._watched: list[Tensor] = []
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

    @torch.no_grad()
    def start(self, step: int, norms: Sequence[Tensor] = ()) -> None:
        """Start the exchange of this rank's fingerprints after `step` steps. `norms`: of all parts of its gradients."""
        if not self._is_sent:
            return
        if self._work is not None:
            self._work.wait()
        self._by_rank.zero_()
        local_rows, current = self._by_rank[self._rank], self._current() if step in self._expected else torch.empty(0)
        by_tensor = dict(zip(map(id, self._watched), current, strict=False))
        for row, (ranks, groups) in zip(local_rows, self._replicated_sets, strict=False):
            row[0] = _rank_set_id(ranks)
            row[1] = torch.stack([by_tensor[id(x)] if id(x := group.data) in by_tensor else fingerprint_of(x) for group in groups]).sum()
        if norms:
            local_rows[MAX_RANK_SETS, 0] = torch.stack([x.double() for x in norms]).square().sum().sqrt().view(torch.int64)
        if step in self._expected:
            local_rows[MAX_RANK_SETS, 1] = (self._expected[step] != current).any()
        self._work = self._world_group.all_reduce(self._by_rank.view(-1), wait=False).without_timing()

    def check(self) -> None:
        """Wait for the exchange; raise StateDiverged on all ranks if any is suspect."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        rows = self._by_rank.tolist()
        self.norms = self._by_rank[:, MAX_RANK_SETS, 0].view(torch.float64).tolist() if self._watched else []
        if changed := [rank for rank, row in enumerate(rows) if row[MAX_RANK_SETS][1]]:
            raise StateDiverged(changed, since_update=True)
        if differing := suspect_ranks([row[:MAX_RANK_SETS] for row in rows]):
            raise StateDiverged(differing)


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
