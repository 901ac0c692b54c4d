"""Whether ranks that have the same weights have the same bits. In: flat groups, as forward used them. Out: the ranks that differ.

A fingerprint is the sum of a buffer's 64-bit words, modulo 2^64: any one flipped bit changes it. All ranks tell theirs in one small message
a step, beside the loss, and see alike who differs: of more than two the few, of two both. Not modelled: several flips that cancel; ZeRO-3,
under which no two ranks have the same weights.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.errors import RunError
from weft.run.state.parameters import FlatGroup
from weft.world.world import Work, World

SETS = 4  # of ranks that share weights, a rank
MOST_RANKS = 512  # beyond, the message is no longer small


class Diverged(RunError):
    """Ranks that have the same weights have other bits: `ranks`, on which they are to be doubted."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(
            f"rank {', '.join(map(str, ranks))} {'has' if len(ranks) == 1 else 'have'} other weights than ranks that should have the same: "
            "a bit was flipped in memory, or the model draws or writes what only one rank knows; go on from the last checkpoint"
        )
        self.ranks = tuple(ranks)


def fingerprint(x: Tensor) -> Tensor:
    """The sum of the 64-bit words of a tensor's memory, modulo 2^64, as int64 [].

    >>> bool(fingerprint(torch.ones(3)) == fingerprint(torch.tensor([1.0, 1.0, 1.0000001])))
    False
    """
    data = x.detach().reshape(-1).view(torch.uint8)
    num_bytes = data.numel() // 8 * 8
    return data[:num_bytes].view(torch.int64).sum() + data[num_bytes:].sum(dtype=torch.int64)


class Fingerprints:
    """Those of one rank; every rank makes one, and calls `start` and `differing` at the same places. Nothing is sent where no two ranks
    have the same weights."""

    def __init__(self, groups: Sequence[FlatGroup], world: World) -> None:
        everyone = world.everyone
        shared: dict[tuple[int, ...], list[FlatGroup]] = defaultdict(list)
        for group in groups:
            if len(group.sum_ranks) > 1 and not group.gathered:
                shared[group.sum_ranks].append(group)
        self._shared = list(shared.items())[:SETS] if everyone.size <= MOST_RANKS else []
        self._everyone, self._rank = everyone, world.rank
        self._any = any(world.maximum([len(self._shared)]))
        self._told = torch.zeros(everyone.size, SETS, 2, dtype=torch.int64, device=everyone.device)
        self._work: Work | None = None

    @torch.no_grad()
    def start(self) -> None:
        """Tell this rank's."""
        if not self._any:
            return
        if self._work is not None:
            self._work.wait()
        self._told.zero_()
        for row, (ranks, groups) in zip(self._told[self._rank], self._shared, strict=False):
            row[0] = _name(ranks)
            row[1] = torch.stack([fingerprint(group.data) for group in groups]).sum()
        self._work = self._everyone.all_reduce(self._told.view(-1), wait=False).untimed()

    def differing(self) -> list[int]:
        """The ranks to be doubted, the same on every rank; none where all agree, or nothing was told."""
        if self._work is None:
            return []
        self._work.wait()
        self._work = None
        return doubted(self._told.tolist())


def doubted(told: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """Of (set of ranks, fingerprint) by rank: the ranks whose fingerprint is not that of most of their set.

    >>> doubted([[(7, 1)], [(7, 1)], [(7, 5)]]), doubted([[(7, 1)], [(7, 2)]]), doubted([[(7, 1)], [(7, 1)], [(0, 0)]])
    ([2], [0, 1], [])
    """
    by_set: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, pairs in enumerate(told):
        for name, value in pairs:
            if name:
                by_set[name][rank] = value
    ranks: set[int] = set()
    for values in by_set.values():
        (most, count), *others = Counter(values.values()).most_common()
        if others:
            ranks.update(rank for rank, value in values.items() if value != most or count == others[0][1])
    return sorted(ranks)


def _name(ranks: tuple[int, ...]) -> int:
    return 1 + int.from_bytes(hashlib.sha256(repr(ranks).encode()).digest()[:7], "little")


def parameter_at(groups: Sequence[FlatGroup], number: int, element: int) -> str:
    """The parameter that has an element of the memory of group `number`; empty where that is no group, or padding."""
    if number >= len(groups):
        return ""
    group = groups[number]
    if group.gathered:
        return next((member.name for member, at, (first, last) in group.shares() if at <= element < at + last - first), "")
    placed = zip(group.starts, group.members, strict=True)
    return next((member.name for start, member in placed if start <= element < start + member.size), "")
