"""Whether the state has the bits that it should. In: flat groups and the optimizer's state, as they lie. Out: the ranks that have not.

A fingerprint is the sum of a buffer's 64-bit words, modulo 2^64: any one flipped bit changes it. Ranks that have the same weights compare
theirs: of more than two the few are to be doubted, of two both. What no other rank has (shards, the optimizer's state) is compared with
what it was when the last update had been made, where somebody says that nothing else writes to it (`watch`). All ranks tell in one small
message a step, beside the loss, and see alike who differs. The same message has the norm of each rank's own gradients, before they are
summed. Not modelled: several flips that cancel; those in what a step makes and drops.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weft.errors import RunError
from weft.run.state.parameters import FlatGroup
from weft.world.kept import sum_of_words
from weft.world.world import Work, World

SETS = 4  # of ranks that share weights, a rank
MOST_RANKS = 512  # beyond, the message is no longer small


class Diverged(RunError):
    """Ranks whose state has other bits than it should: `ranks`, on which it is to be doubted."""

    def __init__(self, ranks: Sequence[int], since_update: bool = False) -> None:
        names, have = ", ".join(map(str, ranks)), "has" if len(ranks) == 1 else "have"
        what = "weights or optimizer state than the last update left" if since_update else "weights than ranks that should have the same"
        why = "something beside the update writes to them" if since_update else "the model draws or writes what only one rank knows"
        super().__init__(f"rank {names} {have} other {what}: a bit was flipped in memory, or {why}; go on from the last checkpoint")
        self.ranks, self.since_update = tuple(ranks), since_update


class Doubted(RunError):
    """A step whose numbers are not as they should be, before its update."""


def fingerprint(x: Tensor) -> Tensor:
    """The sum of the 64-bit words of a tensor's memory, modulo 2^64, as int64 [].

    >>> bool(fingerprint(torch.ones(3)) == fingerprint(torch.tensor([1.0, 1.0, 1.0000001])))
    False
    """
    if (told := sum_of_words(x)) is not None:
        return wrapped(told)
    data = x.detach().reshape(-1)
    num_bytes = data.nbytes // 8 * 8
    if num_bytes == data.nbytes:
        return data.view(torch.int64).sum()
    data = data.view(torch.uint8)
    return data[:num_bytes].view(torch.int64).sum() + data[num_bytes:].sum(dtype=torch.int64)


def wrapped(x: int) -> Tensor:
    """Modulo 2^64, as int64 []."""
    return torch.tensor((x + (1 << 63)) % (1 << 64) - (1 << 63))


class Fingerprints:
    """Those of one rank; every rank makes one, and calls everything at the same places. Nothing is sent where no two ranks have the same
    weights and nothing is watched.

    `norms`: of each rank's gradients in the step that was checked last; empty where nothing is watched.
    """

    def __init__(self, groups: Sequence[FlatGroup], world: World) -> None:
        everyone = world.everyone
        shared: dict[tuple[int, ...], list[FlatGroup]] = defaultdict(list)
        for group in groups:
            if len(group.sum_ranks) > 1 and not group.gathered:
                shared[group.sum_ranks].append(group)
        self._tells = everyone.size <= MOST_RANKS
        self._shared = list(shared.items())[:SETS] if self._tells else []
        self._everyone, self._rank = everyone, world.rank
        self._any = any(world.maximum([len(self._shared)]))
        # By rank: sets of ranks with fingerprints, and the norm of its gradients with whether its state has changed.
        self._told = torch.zeros(everyone.size, SETS + 1, 2, dtype=torch.int64, device=everyone.device)
        self._work: Work | None = None
        self._state: list[Tensor] = []
        self._expected: dict[int, Tensor] = {}  # fingerprints of what is watched, after so many steps
        self.norms: list[float] = []

    def watch(self, tensors: Sequence[Tensor], step: int) -> None:
        """Compare these in each step with what they were after the one before, from `step` on."""
        self._state, self._any = list(tensors), self._tells
        self.keep(step)

    @torch.no_grad()
    def keep(self, step: int, taken: Mapping[int, int] = {}) -> None:
        """What is watched is as it should be after `step` steps. `taken`: fingerprints that are there already, by a tensor's id."""
        if self._state and self._tells:
            before = {step - 1: self._expected[step - 1]} if step - 1 in self._expected else {}
            self._expected = {**before, step: self._now(taken)}

    def _now(self, taken: Mapping[int, int] = {}) -> Tensor:
        device = self._everyone.device
        each = (wrapped(taken[id(x)]) if id(x) in taken else fingerprint(x) for x in self._state)
        return torch.stack([one.to(device) for one in each])

    @torch.no_grad()
    def start(self, step: int, norms: Sequence[Tensor] = ()) -> None:
        """Tell this rank's in the step behind `step` others. `norms`: of all parts of its gradients."""
        if not self._any:
            return
        if self._work is not None:
            self._work.wait()
        self._told.zero_()
        mine, now = self._told[self._rank], self._now() if step in self._expected else torch.empty(0)
        of = dict(zip(map(id, self._state), now, strict=False))
        for row, (ranks, groups) in zip(mine, self._shared, strict=False):
            row[0] = _name(ranks)
            row[1] = torch.stack([of[id(x)] if id(x := group.data) in of else fingerprint(x) for group in groups]).sum()
        if norms:
            mine[SETS, 0] = torch.stack([x.double() for x in norms]).square().sum().sqrt().view(torch.int64)
        if step in self._expected:
            mine[SETS, 1] = (self._expected[step] != now).any()
        self._work = self._everyone.all_reduce(self._told.view(-1), wait=False).untimed()

    def check(self) -> None:
        """Raise Diverged, on all ranks alike, where any is to be doubted."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        told = self._told.tolist()
        self.norms = self._told[:, SETS, 0].view(torch.float64).tolist() if self._state else []
        if changed := [rank for rank, row in enumerate(told) if row[SETS][1]]:
            raise Diverged(changed, since_update=True)
        if differing := doubted([row[:SETS] for row in told]):
            raise Diverged(differing)


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
