"""Saved activations of a stage by operator and layer, and their residency under recomputation (activation checkpointing) and offload.

In: a `ShardedInventory`, the stage's operators. Out: `StageSection`, which computes `ResidencyBytes` for every choice of recomputed or
offloaded layers. A run is a sequence of operators of one numbered block, or between two blocks: recomputation and copies are by run
(`run.residency.layers`). A storage is counted once, in the first run that saves it, since it lives until that run's backward ends.
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
    """Bytes that a stage saves of one microbatch under a choice of recomputed and offloaded layers.

    By operator: `activations` on the device from its forward to its backward; `rematerialized` during its backward by recomputation, or
    `loaded` from the host on demand; `forward_transient`: in offloaded runs, bytes alive after its forward before the run is offloaded,
    and in recomputed ones after its recomputation.
    By run: `loaded_by_run`, all that is loaded of it, `layers_away`, the fraction of layers that do not save their own tensors, and
    `layers_present`, those of them present in its backward. `offloaded` goes to the host.
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
    """Operators of a stage by their numbered block; a stage without any is one block. `half`: every float tensor is 16-bit."""

    parts: Parts
    operators: Sequence[int]
    half: bool

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the blocks, in order."""
        return tuple(dict.fromkeys(name for name in self._blocks if name)) or ("",)

    @cached_property
    def _blocks(self) -> list[str]:
        return [self.parts.blocks[i] for i in self.operators]

    @cached_property
    def runs(self) -> list[tuple[str, list[int]]]:
        """The runs in order: (block, operators) of each."""
        starts = starts_of(self._blocks)
        return [(self._blocks[a], list(self.operators[a:b])) for a, b in zip(starts, [*starts[1:], len(self.operators)], strict=True)]

    @cached_property
    def where(self) -> dict[str, NDArray[np.intp]]:
        """[block] -> positions of its operators among those of the stage."""
        places: dict[str, list[int]] = {}
        for place, name in enumerate(self._blocks):
            places.setdefault(name, []).append(place)
        return {name: np.array(places[name], dtype=np.intp) for name in self.names}

    @cached_property
    def adds(self) -> dict[str, Amount]:
        """[block] -> bytes that it saves and no later block does; together these are all saved bytes.

        The output of a block is counted in the next one: it is on the device unless that one is offloaded.
        """
        counted = Seen()
        amounts = dict.fromkeys(self.names, NO_BYTES)
        for name, operators in reversed(self.runs):
            if name in amounts:
                amounts[name] += kept_bytes(self.parts, operators, self.half, counted)
        return amounts

    @cached_property
    def enters(self) -> dict[str, Amount]:
        """[block] -> bytes that enter it and no earlier block."""
        counted = Seen()
        amounts = dict.fromkeys(self.names, NO_BYTES)
        for name, operators in self.runs:
            if name in amounts:
                amounts[name] += self.entering(operators, counted)
        return amounts

    def entering(self, run: Sequence[int], seen: Seen) -> Amount:
        """Return the bytes not yet counted that a run's operators read from other runs."""
        operators = set(run)
        items = (item for i in run for maker, item in self.parts.reads[i] if maker not in operators)
        return storages_bytes(items, self.half, seen)


@dataclass(frozen=True)
class _Part:
    """Runs that are offloaded or recomputed together, mostly one: the block of the first, the blocks of all, their operators."""

    name: str
    blocks: tuple[str, ...]
    operators: list[int]
    goes: bool


def staying(groups: Groups, which: Residency, stage: int, last_stays: bool, piecewise: bool) -> Staying:
    """Return the bytes of a stage under a residency. `keeps_last_run`: offload of everything excludes the last run. `loads_by_operator`:
    offloaded tensors are loaded on demand (`loaded` and `forward_transient` are set); otherwise run by run (`loaded_by_run`)."""
    parts, half = groups.parts, groups.half
    repeated = frozenset(which.repeated(stage, groups.names))
    selective = which.recompute.kind == "selective"
    segments = _cut(groups, which, stage, last_stays, repeated)
    activations, counted = _kept_amounts(groups, segments, repeated, selective)
    there: list[Amount] = []
    back: list[Amount] = []
    forward: list[Amount] = []
    at_once: list[Amount] = []
    away: list[float] = []
    present: list[float] = []
    total, host = NO_BYTES, Seen()
    num_runs = Counter(name for name, _ in groups.runs)  # a layer interrupted by others has several
    for segment in segments:
        operators, is_offloaded = segment.operators, segment.goes
        loaded, nothing = NO_BYTES, [NO_BYTES] * len(operators)
        recomputed = on_demand = transient = nothing
        if segment.name in repeated:
            items = set(counted)
            if is_offloaded:
                total += groups.entering(operators, host)
                loaded = groups.entering(operators, items)
                if piecewise:
                    on_demand, transient = [loaded] * len(operators), _passing(groups, operators, counted, saves=False)
            elif piecewise:
                transient = _running(parts, operators, half, counted)
            recomputed = list(accumulate(keeps(parts, operators, half, items)))  # recomputed tensors of later operators are freed
        elif is_offloaded:
            total += kept_bytes(parts, operators, half, host)
            loaded = kept_bytes(parts, operators, half, set(counted))
            if piecewise:
                on_demand, transient = _asked_for(parts, operators, half, counted), _passing(groups, operators, counted, saves=True)
        elif selective:
            recomputed = _core_recomputed(groups, operators, counted)
            transient = _core_rerun(groups, operators, counted)
        there += recomputed
        back += on_demand
        forward += transient
        at_once += [loaded, *[NO_BYTES] * (len(segment.blocks) - 1)]
        fraction_away = [(segment.name in repeated or is_offloaded) * (name in groups.names) / num_runs[name] for name in segment.blocks]
        away += fraction_away
        present += accumulate(fraction_away)
    num_moved = len({segment.name for segment in segments if segment.goes and segment.name in groups.names})
    return Staying(
        Amounts.of(activations), Amounts.of(there), Amounts.of(back), Amounts.of(forward), Amounts.of(at_once), np.array(away),
        np.array(present), total, num_moved, len(groups.names),
    )  # fmt: skip


def _cut(groups: Groups, which: Residency, stage: int, last_stays: bool, repeated: frozenset[str]) -> list[_Part]:
    """Split the runs of a stage into segments."""
    runs = groups.runs
    if which.offload.picks:
        offloaded_names = set(which.moved(stage, groups.names))
        is_offloaded = [name in offloaded_names for name, _ in runs]
    else:
        is_offloaded = [which.offload.of_layers and not (last_stays and at == len(runs) - 1) for at in range(len(runs))]
    segments = []
    for first, end in joined([name in repeated for name, _ in runs], which.segment):
        blocks = tuple(name for name, _ in runs[first:end])
        segments.append(_Part(blocks[0], blocks, [i for _, operators in runs[first:end] for i in operators], is_offloaded[first]))
    return segments


def _kept_amounts(groups: Groups, cut: Sequence[_Part], repeated: frozenset[str], selective: bool) -> tuple[list[Amount], Seen]:
    """Return ([operator] -> bytes that it saves and no earlier one does, of tensors neither offloaded nor recomputed; those storages)."""
    activations: list[Amount] = []
    counted = Seen()
    for segment in cut:
        operators = segment.operators
        if segment.goes:
            activations += [NO_BYTES] * len(operators)
        elif segment.name in repeated:
            activations += [groups.entering(operators, counted), *[NO_BYTES] * (len(operators) - 1)]
        elif selective:
            activations += _around_core(groups, operators, counted)
        else:
            activations += keeps(groups.parts, operators, groups.half, counted)
    return activations, counted


def _core_operators(parts: Parts, run: Sequence[int]) -> dict[int, list[int]]:
    """Return the operators of each attention core in a run, by number."""
    by_core: dict[int, list[int]] = {}
    for i in run:
        if parts.attention_core[i] >= 0:
            by_core.setdefault(parts.attention_core[i], []).append(i)
    return by_core


def _around_core(groups: Groups, run: Sequence[int], seen: Seen) -> list[Amount]:
    """[operator of a run] -> bytes that it saves and no earlier one does, if attention cores save only their inputs."""
    parts, half, amounts = groups.parts, groups.half, []
    firsts = {operators[0]: operators for operators in _core_operators(parts, run).values()}
    for i in run:
        is_inside = parts.attention_core[i] >= 0
        entering = groups.entering(firsts[i], seen) if i in firsts else NO_BYTES
        amounts.append(entering if is_inside else kept_bytes(parts, [i], half, seen))
    return amounts


def _core_recomputed(groups: Groups, run: Sequence[int], seen: Seen) -> list[Amount]:
    """[operator of a run] -> bytes that its attention core has recomputed during its backward."""
    parts, amounts = groups.parts, dict.fromkeys(run, NO_BYTES)
    for operators in _core_operators(parts, run).values():
        amounts.update(zip(operators, accumulate(keeps(parts, operators, groups.half, set(seen))), strict=True))
    return [amounts[i] for i in run]


def _core_rerun(groups: Groups, run: Sequence[int], seen: Seen) -> list[Amount]:
    """[operator of a run] -> bytes alive when its attention core has been recomputed up to it."""
    parts, amounts = groups.parts, dict.fromkeys(run, NO_BYTES)
    for operators in _core_operators(parts, run).values():
        amounts.update(zip(operators, _running(parts, operators, groups.half, seen), strict=True))
    return [amounts[i] for i in run]


def _passing(groups: Groups, run: Sequence[int], seen: Seen, saves: bool) -> list[Amount]:
    """[operator of a run] -> bytes alive after its forward, besides those in `seen`: saved up to it (if the run saves nothing, its inputs),
    and its own operands and results."""
    parts, half, counted = groups.parts, groups.half, set(seen)
    entering, amounts = NO_BYTES if saves else groups.entering(run, counted), []
    for i in run:
        if saves:
            entering += kept_bytes(parts, [i], half, counted)
        values = (*(item for _, item in parts.reads[i]), *parts.makes[i])
        amounts.append(entering + storages_bytes(values, half, set(), counted))
    return amounts


def _running(parts: Parts, run: Sequence[int], half: bool, seen: Seen) -> list[Amount]:
    """[operator of a run] -> bytes alive after its recomputation, besides those in `seen`: saved up to it, and results that later operators
    will read."""
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
    """[operator of an offloaded run] -> bytes loaded during its backward, besides those in `seen`: its own saved tensors, and those loaded
    for later operators that it or an earlier one will read."""
    first: dict[tuple[str, str], int] = {}
    last: dict[tuple[str, str], int] = {}
    items: dict[tuple[str, str], Stored] = {}
    for at, i in enumerate(run):
        for item in parts.stored[i]:
            key = item.root, item.copy
            first.setdefault(key, at)
            last[key], items[key] = at, item
    amounts = [kept_bytes(parts, [i], half, set(items)) for i in run]  # saved tensors that are no value of the graph
    counted = set(seen)
    for key, item in items.items():
        size = storages_bytes([item], half, counted)
        for at in range(first[key], last[key] + 1) if any(size) else ():
            amounts[at] += size
    return amounts


def repeated(parts: Parts, operators: NDArray[np.intp], which: Residency, stage: int) -> NDArray[np.bool_]:
    """[operator of a stage] -> whether recomputation runs it twice."""
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
    """Batch-independent data of a stage: its operators by number, their parameters and saved bytes."""

    operators: NDArray[np.intp]
    held: Held
    activations: Amounts  # by operator, saved by no earlier one
    score_bytes: Amount  # float32
    runs: Callable[[float], Runs]  # by the number of expert shards
    groups: Groups
    staying: Callable[[Residency, int, bool, bool], Staying]  # computed on first use


def section(parts: Parts, operators: NDArray[np.intp], held: Held, half: bool, runs: Callable[[float], Runs]) -> Section:
    """Build the section of a stage's `operators`. `half`: every float tensor is 16-bit."""
    scores = []
    for shared in (True, False):
        operators_ = [int(i) for i in operators if bool(parts.shared[i]) is shared]
        scores.append(sum(4.0 * parts.compute[parts.index[i]].kernel.scores for i in operators_ if parts.attention[i]))
    numbers = operators.tolist()
    activations = Amounts.of(keeps(parts, numbers, half))
    return Section(operators, held, activations, Amount(*scores), runs, *grouped(parts, numbers, half))


def grouped(parts: Parts, operators: Sequence[int], half: bool) -> tuple[Groups, Callable[[Residency, int, bool, bool], Staying]]:
    """Group a stage's operators by block, and return the groups with the cached function of their residency bytes."""
    groups = Groups(parts, operators, half)
    return groups, cache(partial(staying, groups))
