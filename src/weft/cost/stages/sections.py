"""A stage's share of `Parts`: what its operators and its layers keep, whatever the batch, and what of it stays under a choice of residency.

In: `Parts`, the stage's operators. Out: `Section`, which tells `Staying` for every choice of layers that are repeated or moved. A run is
what stands in one numbered block, or between two: checkpointing and copies are by run (`run.residency.layers`). A storage is counted once:
by the first run that keeps it, since it is there until that one's backward is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from weft.cost.memory.places import Stored
from weft.cost.memory.runs import NO_BYTES, Amount, Amounts, Runs, starts_of
from weft.cost.operators.parts import Held, Parts, Seen, keeps, kept_bytes, storages_bytes
from weft.plan.residency import Residency, joined

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Staying:
    """What becomes of what a stage keeps of one microbatch for backward, under a choice of layers that are repeated or moved.

    By operator: `activations` on the device from its forward to its backward; `there` besides in its backward, since it was made again, or
    came `back` from the host as it was asked for; `forward`: of runs that are moved, what is there when it has run, before the run's goes,
    and of those that are repeated, when it has run again.
    By run: `at_once`, all that comes back of it, `away`, the layers that do not keep their own, in parts, and `present`, those of them that
    are there in its backward. `moved` goes to the host.
    """

    activations: Amounts
    there: Amounts
    back: Amounts
    forward: Amounts
    at_once: Amounts
    away: Array
    present: Array
    moved: Amount
    num_moved: int
    num_layers: int


@dataclass(frozen=True)
class Groups:
    """A stage's operators by their numbered block; a stage without any is one block. `half` as for `keeps`."""

    parts: Parts
    operators: Sequence[int]
    half: bool

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the blocks, in order."""
        return tuple(dict.fromkeys(name for name in self._blocks if name)) or ("",)

    @cached_property
    def _blocks(self) -> list[str]:
        return [self.parts.blocks[i] for i in self.operators]

    @cached_property
    def runs(self) -> list[tuple[str, list[int]]]:
        """(block, operators) of every run, in order."""
        starts = starts_of(self._blocks)
        return [(self._blocks[a], list(self.operators[a:b])) for a, b in zip(starts, [*starts[1:], len(self.operators)], strict=True)]

    @cached_property
    def where(self) -> dict[str, NDArray[np.intp]]:
        """By block: its operators' places among those of the stage."""
        places: dict[str, list[int]] = {}
        for place, name in enumerate(self._blocks):
            places.setdefault(name, []).append(place)
        return {name: np.array(places[name], dtype=np.intp) for name in self.names}

    @cached_property
    def adds(self) -> dict[str, Amount]:
        """By block: what it keeps that none behind it does; together they are what all keep.

        What one hands to the next is counted there: it is on the device unless that one moves.
        """
        seen = Seen()
        amounts = dict.fromkeys(self.names, NO_BYTES)
        for name, mine in reversed(self.runs):
            if name in amounts:
                amounts[name] += kept_bytes(self.parts, mine, self.half, seen)
        return amounts

    @cached_property
    def enters(self) -> dict[str, Amount]:
        """By block: what comes into it that comes into none before it."""
        seen = Seen()
        amounts = dict.fromkeys(self.names, NO_BYTES)
        for name, mine in self.runs:
            if name in amounts:
                amounts[name] += self.entering(mine, seen)
        return amounts

    def entering(self, run: Sequence[int], seen: Seen) -> Amount:
        """What the operators of a run read that others made, and nobody has counted."""
        mine = set(run)
        items = (item for i in run for maker, item in self.parts.reads[i] if maker not in mine)
        return storages_bytes(items, self.half, seen)


@dataclass(frozen=True)
class _Part:
    """Runs that are moved or repeated together, mostly one: the block of the first, the blocks of all, their operators."""

    name: str
    blocks: tuple[str, ...]
    operators: list[int]
    goes: bool


def staying(groups: Groups, which: Residency, stage: int, last_stays: bool, piecewise: bool) -> Staying:
    """`last_stays`: of offload of everything, the last run is not moved. `piecewise`: what was moved comes back as it is asked for, and
    `back` and `forward` are told; otherwise `at_once` says it all."""
    parts, half = groups.parts, groups.half
    repeated = frozenset(which.repeated(stage, groups.names))
    selective = which.recompute.kind == "selective"
    cut = _cut(groups, which, stage, last_stays, repeated)
    activations, seen = _kept_amounts(groups, cut, repeated, selective)
    there: list[Amount] = []
    back: list[Amount] = []
    forward: list[Amount] = []
    at_once: list[Amount] = []
    away: list[float] = []
    present: list[float] = []
    total, host = NO_BYTES, Seen()
    num_runs = Counter(name for name, _ in groups.runs)  # of a layer that others interrupt there are several
    for part in cut:
        mine, goes = part.operators, part.goes
        come, none = NO_BYTES, [NO_BYTES] * len(mine)
        again = asked = passing = none
        if part.name in repeated:
            items = set(seen)
            if goes:
                total += groups.entering(mine, host)
                come = groups.entering(mine, items)
                if piecewise:
                    asked, passing = [come] * len(mine), _passing(groups, mine, seen, saves=False)
            elif piecewise:
                passing = _running(parts, mine, half, seen)
            again = list(accumulate(keeps(parts, mine, half, items)))  # those behind an operator have given back what they made
        elif goes:
            total += kept_bytes(parts, mine, half, host)
            come = kept_bytes(parts, mine, half, set(seen))
            if piecewise:
                asked, passing = _asked_for(parts, mine, half, seen), _passing(groups, mine, seen, saves=True)
        elif selective:
            again = _core_recomputed(groups, mine, seen)
            passing = _core_rerun(groups, mine, seen)
        there += again
        back += asked
        forward += passing
        at_once += [come, *[NO_BYTES] * (len(part.blocks) - 1)]
        gone = [(part.name in repeated or goes) * (name in groups.names) / num_runs[name] for name in part.blocks]
        away += gone
        present += accumulate(gone)
    num_moved = len({part.name for part in cut if part.goes and part.name in groups.names})
    return Staying(
        Amounts.of(activations), Amounts.of(there), Amounts.of(back), Amounts.of(forward), Amounts.of(at_once), np.array(away),
        np.array(present), total, num_moved, len(groups.names),
    )  # fmt: skip


def _cut(groups: Groups, which: Residency, stage: int, last_stays: bool, repeated: frozenset[str]) -> list[_Part]:
    """The runs of a stage, those of a segment together."""
    runs = groups.runs
    if which.offload.picks:
        gone = set(which.moved(stage, groups.names))
        moved = [name in gone for name, _ in runs]
    else:
        moved = [which.offload.of_layers and not (last_stays and at == len(runs) - 1) for at in range(len(runs))]
    parts = []
    for first, behind in joined([name in repeated for name, _ in runs], which.segment):
        blocks = tuple(name for name, _ in runs[first:behind])
        parts.append(_Part(blocks[0], blocks, [i for _, mine in runs[first:behind] for i in mine], moved[first]))
    return parts


def _kept_amounts(groups: Groups, cut: Sequence[_Part], repeated: frozenset[str], selective: bool) -> tuple[list[Amount], Seen]:
    """By operator: what it keeps and none before it, of what neither moves nor is made again; and those storages."""
    activations: list[Amount] = []
    seen = Seen()
    for part in cut:
        mine = part.operators
        if part.goes:
            activations += [NO_BYTES] * len(mine)
        elif part.name in repeated:
            activations += [groups.entering(mine, seen), *[NO_BYTES] * (len(mine) - 1)]
        elif selective:
            activations += _around_core(groups, mine, seen)
        else:
            activations += keeps(groups.parts, mine, groups.half, seen)
    return activations, seen


def _core_operators(parts: Parts, run: Sequence[int]) -> dict[int, list[int]]:
    """By number: the operators of each core of attention in a run."""
    by_core: dict[int, list[int]] = {}
    for i in run:
        if parts.attention_core[i] >= 0:
            by_core.setdefault(parts.attention_core[i], []).append(i)
    return by_core


def _around_core(groups: Groups, run: Sequence[int], seen: Seen) -> list[Amount]:
    """By operator of a run: what it keeps and none before it, where cores of attention keep what enters them alone."""
    parts, half, amounts = groups.parts, groups.half, []
    firsts = {mine[0]: mine for mine in _core_operators(parts, run).values()}
    for i in run:
        inside = parts.attention_core[i] >= 0
        entering = groups.entering(firsts[i], seen) if i in firsts else NO_BYTES
        amounts.append(entering if inside else kept_bytes(parts, [i], half, seen))
    return amounts


def _core_recomputed(groups: Groups, run: Sequence[int], seen: Seen) -> list[Amount]:
    """By operator of a run: what its core has made again while its backward is at it."""
    parts, amounts = groups.parts, dict.fromkeys(run, NO_BYTES)
    for mine in _core_operators(parts, run).values():
        amounts.update(zip(mine, accumulate(keeps(parts, mine, groups.half, set(seen))), strict=True))
    return [amounts[i] for i in run]


def _core_rerun(groups: Groups, run: Sequence[int], seen: Seen) -> list[Amount]:
    """By operator of a run: what is there when its core has run again up to it."""
    parts, amounts = groups.parts, dict.fromkeys(run, NO_BYTES)
    for mine in _core_operators(parts, run).values():
        amounts.update(zip(mine, _running(parts, mine, groups.half, seen), strict=True))
    return [amounts[i] for i in run]


def _passing(groups: Groups, run: Sequence[int], seen: Seen, saves: bool) -> list[Amount]:
    """By operator of a run: what is there when it has run forward, beside what `seen` has: what those up to it keep (where it `saves`
    nothing, what enters it), and what it reads and makes."""
    parts, half, counted = groups.parts, groups.half, set(seen)
    entering, amounts = NO_BYTES if saves else groups.entering(run, counted), []
    for i in run:
        if saves:
            entering += kept_bytes(parts, [i], half, counted)
        values = (*(item for _, item in parts.reads[i]), *parts.makes[i])
        amounts.append(entering + storages_bytes(values, half, set(), counted))
    return amounts


def _running(parts: Parts, run: Sequence[int], half: bool, seen: Seen) -> list[Amount]:
    """By operator of a run: what is there when it has run again, beside what `seen` has: what those up to it keep, and what they made that
    operators behind them will read."""
    amounts = list(accumulate(keeps(parts, run, half, set(seen))))
    first: dict[tuple[str, str], int] = {}
    last: dict[tuple[str, str], int] = {}
    sizes: dict[tuple[str, str], int] = {}
    items: dict[tuple[str, str], Stored] = {}
    for at, i in enumerate(run):
        for item in parts.stored[i]:
            sizes.setdefault((item.root, item.copy), at)
        for item in (*(item for _, item in parts.reads[i]), *parts.makes[i]):
            key = item.root, item.copy
            first.setdefault(key, at)
            last[key], items[key] = at, item
    for key, item in items.items():
        size = storages_bytes([item], half, set(), seen)
        for at in range(first[key], min(last[key] + 1, sizes.get(key, len(run)))) if any(size) else ():
            amounts[at] += size
    return amounts


def _asked_for(parts: Parts, run: Sequence[int], half: bool, seen: Seen) -> list[Amount]:
    """By operator of a run that was moved: what is back while its backward is at it, of what `seen` does not have already: what it keeps
    itself, and what operators behind it asked for and it or one before it will read."""
    first: dict[tuple[str, str], int] = {}
    last: dict[tuple[str, str], int] = {}
    items: dict[tuple[str, str], Stored] = {}
    for at, i in enumerate(run):
        for item in parts.stored[i]:
            key = item.root, item.copy
            first.setdefault(key, at)
            last[key], items[key] = at, item
    amounts = [kept_bytes(parts, [i], half, set(items)) for i in run]  # what is no value of the graph
    counted = set(seen)
    for key, item in items.items():
        size = storages_bytes([item], half, counted)
        for at in range(first[key], last[key] + 1) if any(size) else ():
            amounts[at] += size
    return amounts


def repeated(parts: Parts, operators: NDArray[np.intp], which: Residency, stage: int) -> NDArray[np.bool_]:
    """By operator of a stage: whether recomputation runs it twice."""
    if not which.recompute.of_layers:
        return np.zeros(len(operators), dtype=bool)
    if not which.recompute.picks and not which.offload.picks:
        return parts.again[operators]
    names = [parts.blocks[i] for i in operators.tolist()]
    layers = list(dict.fromkeys(name for name in names if name)) or [""]
    chosen = set(which.repeated(stage, layers))
    return np.array([name in chosen for name in names], dtype=bool)


@dataclass(frozen=True)
class Section:
    """A stage's share of `Parts`: its operators by number, and what follows from them whatever the batch."""

    operators: NDArray[np.intp]
    held: Held
    activations: Amounts  # by operator, what none before it keeps
    score_bytes: Amount  # float32
    runs: Callable[[float], Runs]  # by how many pieces experts are in
    groups: Groups
    staying: Callable[[Residency, int, bool, bool], Staying]  # worked out when it is first asked for


def section(parts: Parts, operators: NDArray[np.intp], held: Held, half: bool, runs: Callable[[float], Runs]) -> Section:
    """`half` as for `keeps`."""
    scores = []
    for shared in (True, False):
        mine = [int(i) for i in operators if bool(parts.shared[i]) is shared]
        scores.append(sum(4.0 * parts.compute[parts.index[i]].kernel.scores for i in mine if parts.attention[i]))
    numbers = operators.tolist()
    activations = Amounts.of(keeps(parts, numbers, half))
    return Section(operators, held, activations, Amount(*scores), runs, *grouped(parts, numbers, half))


def grouped(parts: Parts, operators: Sequence[int], half: bool) -> tuple[Groups, Callable[[Residency, int, bool, bool], Staying]]:
    """A stage's operators by their block, and what of theirs stays, see `Section`. `half` as for `keeps`."""
    groups = Groups(parts, operators, half)
    return groups, cache(partial(staying, groups))
