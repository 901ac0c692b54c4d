"""Saved activations of a stage by operator and layer, and their residency under recomputation (activation checkpointing) and offload.

In: a `ShardedInventory`, the stage's operators. Out: `StageSection`, which computes `ResidencyBytes` for every choice of recomputed or
offloaded layers. A run is a sequence of operators of one numbered block, or between two blocks: recomputation and copies are by run
(`run.residency.layers`). A storage is counted once, in the first run that saves it, since it lives until that run's backward ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.memory.block_runs import NO_BYTES, BatchBytes, BatchBytesColumns, BlockRuns, run_starts
from shardwise.cost.memory.storages import SavedStorage
from shardwise.cost.operators.sharded_inventory import (
    CountedStorages,
    ShardedInventory,
    StageParameters,
    count_storages,
    saved_by_operator,
    total_saved,
)
from shardwise.cost.stages.cheap_recompute import CheapRun
from shardwise.plan.residency import CHEAP, Residency, split_segments

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ResidencyBytes:
    """Bytes that a stage saves of one microbatch under a choice of recomputed and offloaded layers.

    By operator: `activations` on the device from its forward to its backward; `rematerialized` during its backward by recomputation, or
    `loaded` from the host on demand; `forward_transient`: in offloaded runs, bytes alive after its forward before the run is offloaded,
    and in recomputed ones after its recomputation.
    By run: `loaded_by_run`, all that is loaded of it, `layers_away`, the fraction of layers that do not save their own tensors, and
    `layers_present`, those of them present in its backward. `offloaded` goes to the host.
    """

    activations: BatchBytesColumns
    rematerialized: BatchBytesColumns
    loaded: BatchBytesColumns
    forward_transient: BatchBytesColumns
    loaded_by_run: BatchBytesColumns
    layers_away: Array
    layers_present: Array
    offloaded: BatchBytes
    num_offloaded: int
    num_layers: int


@dataclass(frozen=True)
class BlockGroups:
    """Operators of a stage by their numbered block; a stage without any is one block. `half`: every float tensor is 16-bit."""

    parts: ShardedInventory
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
        starts = run_starts(self._blocks)
        return [(self._blocks[a], list(self.operators[a:b])) for a, b in zip(starts, [*starts[1:], len(self.operators)], strict=True)]

    @cached_property
    def positions(self) -> dict[str, NDArray[np.intp]]:
        """[block] -> positions of its operators among those of the stage."""
        places: dict[str, list[int]] = {}
        for place, name in enumerate(self._blocks):
            places.setdefault(name, []).append(place)
        return {name: np.array(places[name], dtype=np.intp) for name in self.names}

    @cached_property
    def saved_by_block(self) -> dict[str, BatchBytes]:
        """[block] -> bytes that it saves and no later block does; together these are all saved bytes.

        The output of a block is counted in the next one: it is on the device unless that one is offloaded.
        """
        counted = CountedStorages()
        amounts = dict.fromkeys(self.names, NO_BYTES)
        for name, operators in reversed(self.runs):
            if name in amounts:
                amounts[name] += total_saved(self.parts, operators, self.half, counted)
        return amounts

    @cached_property
    def entering_by_block(self) -> dict[str, BatchBytes]:
        """[block] -> bytes that enter it and no earlier block."""
        counted = CountedStorages()
        amounts = dict.fromkeys(self.names, NO_BYTES)
        for name, operators in self.runs:
            if name in amounts:
                amounts[name] += self.count_entering(operators, counted)
        return amounts

    def count_entering(self, run: Sequence[int], seen: CountedStorages) -> BatchBytes:
        """Return the bytes not yet counted that a run's operators read from other runs."""
        operators = set(run)
        items = (item for i in run for maker, item in self.parts.reads[i] if maker not in operators)
        return count_storages(items, self.half, seen)


@dataclass(frozen=True)
class _Segment:
    """Runs that are offloaded or recomputed together, mostly one: the block of the first, the blocks of all, their operators."""

    name: str
    blocks: tuple[str, ...]
    operators: list[int]
    is_offloaded: bool


def residency_bytes(groups: BlockGroups, residency: Residency, stage: int, keeps_last_run: bool, loads_by_operator: bool) -> ResidencyBytes:
    """Return the bytes of a stage under a residency. `keeps_last_run`: offload of everything excludes the last run. `loads_by_operator`:
    offloaded tensors are loaded on demand (`loaded` and `forward_transient` are set); otherwise run by run (`loaded_by_run`)."""
    parts, half = groups.parts, groups.half
    repeated, cheap = _split_recomputed(groups, residency, stage)
    selective = residency.recompute.kind == "selective"
    segments = _split_segments(groups, residency, stage, keeps_last_run, repeated)
    cheap_runs = {at: CheapRun(parts, one.operators) for at, one in enumerate(segments) if one.name in cheap and not one.is_offloaded}
    activations, counted = _saved_amounts(groups, segments, repeated, selective, cheap_runs)
    there: list[BatchBytes] = []
    back: list[BatchBytes] = []
    forward: list[BatchBytes] = []
    at_once: list[BatchBytes] = []
    away: list[float] = []
    present: list[float] = []
    total, host = NO_BYTES, CountedStorages()
    num_runs = Counter(name for name, _ in groups.runs)  # a layer interrupted by others has several
    for at, segment in enumerate(segments):
        operators, is_offloaded = segment.operators, segment.is_offloaded
        loaded, nothing = NO_BYTES, [NO_BYTES] * len(operators)
        recomputed = on_demand = transient = nothing
        if segment.name in repeated:
            items = set(counted)
            if is_offloaded:
                total += groups.count_entering(operators, host)
                loaded = groups.count_entering(operators, items)
                if loads_by_operator:
                    on_demand, transient = [loaded] * len(operators), _forward_bytes(groups, operators, counted, is_saved=False)
            elif loads_by_operator:
                transient = _rerun_bytes(parts, operators, half, counted)
            recomputed = list(accumulate(saved_by_operator(parts, operators, half, items)))  # those of later operators are freed
        elif is_offloaded:
            total += total_saved(parts, operators, half, host)
            loaded = total_saved(parts, operators, half, set(counted))
            if loads_by_operator:
                on_demand, transient = (
                    _loaded_bytes(parts, operators, half, counted),
                    _forward_bytes(groups, operators, counted, is_saved=True),
                )
        elif at in cheap_runs:
            recomputed = cheap_runs[at].recomputed_bytes(half, counted)
        elif selective:
            recomputed = _core_recomputed_bytes(groups, operators, counted)
            transient = _core_rerun_bytes(groups, operators, counted)
        there += recomputed
        back += on_demand
        forward += transient
        at_once += [loaded, *[NO_BYTES] * (len(segment.blocks) - 1)]
        fraction_away = [(segment.name in repeated or is_offloaded) * (name in groups.names) / num_runs[name] for name in segment.blocks]
        away += fraction_away
        present += accumulate(fraction_away)
    num_moved = len({segment.name for segment in segments if segment.is_offloaded and segment.name in groups.names})
    return ResidencyBytes(
        BatchBytesColumns.of(activations), BatchBytesColumns.of(there), BatchBytesColumns.of(back), BatchBytesColumns.of(forward),
            BatchBytesColumns.of(at_once), np.array(away),
        np.array(present), total, num_moved, len(groups.names),
    )  # fmt: skip


def _split_recomputed(groups: BlockGroups, residency: Residency, stage: int) -> tuple[frozenset[str], frozenset[str]]:
    """Return the layers that are recomputed as a whole, and those of which cheap operators are."""
    chosen = frozenset(residency.recomputed_layers(stage, groups.names))
    return (frozenset(), chosen) if residency.recompute.kind == CHEAP else (chosen, frozenset())


def _split_segments(
    groups: BlockGroups, residency: Residency, stage: int, keeps_last_run: bool, repeated: frozenset[str]
) -> list[_Segment]:
    """Split the runs of a stage into segments."""
    runs = groups.runs
    if residency.offload.is_partial:
        offloaded_names = set(residency.offloaded_layers(stage, groups.names))
        is_offloaded = [name in offloaded_names for name, _ in runs]
    else:
        is_offloaded = [residency.offload.applies_to_layers and not (keeps_last_run and at == len(runs) - 1) for at in range(len(runs))]
    segments = []
    for first, end in split_segments([name in repeated for name, _ in runs], residency.segment):
        blocks = tuple(name for name, _ in runs[first:end])
        segments.append(_Segment(blocks[0], blocks, [i for _, operators in runs[first:end] for i in operators], is_offloaded[first]))
    return segments


def _saved_amounts(
    groups: BlockGroups, cut: Sequence[_Segment], repeated: frozenset[str], selective: bool, cheap_runs: Mapping[int, CheapRun]
) -> tuple[list[BatchBytes], CountedStorages]:
    """Return ([operator] -> bytes that it saves and no earlier one does, of tensors neither offloaded nor recomputed; those storages)."""
    activations: list[BatchBytes] = []
    counted = CountedStorages()
    for at, segment in enumerate(cut):
        operators = segment.operators
        if segment.is_offloaded:
            activations += [NO_BYTES] * len(operators)
        elif at in cheap_runs:
            activations += cheap_runs[at].saved_bytes(groups.half, counted)
        elif segment.name in repeated:
            activations += [groups.count_entering(operators, counted), *[NO_BYTES] * (len(operators) - 1)]
        elif selective:
            activations += _saved_outside_cores(groups, operators, counted)
        else:
            activations += saved_by_operator(groups.parts, operators, groups.half, counted)
    return activations, counted


def _core_operators(parts: ShardedInventory, run: Sequence[int]) -> dict[int, list[int]]:
    """Return the operators of each attention core in a run, by number."""
    by_core: dict[int, list[int]] = {}
    for i in run:
        if parts.attention_core[i] >= 0:
            by_core.setdefault(parts.attention_core[i], []).append(i)
    return by_core


def _saved_outside_cores(groups: BlockGroups, run: Sequence[int], seen: CountedStorages) -> list[BatchBytes]:
    """[operator of a run] -> bytes that it saves and no earlier one does, if attention cores save only their inputs."""
    parts, half, amounts = groups.parts, groups.half, []
    firsts = {operators[0]: operators for operators in _core_operators(parts, run).values()}
    for i in run:
        is_inside = parts.attention_core[i] >= 0
        entering = groups.count_entering(firsts[i], seen) if i in firsts else NO_BYTES
        amounts.append(entering if is_inside else total_saved(parts, [i], half, seen))
    return amounts


def _core_recomputed_bytes(groups: BlockGroups, run: Sequence[int], seen: CountedStorages) -> list[BatchBytes]:
    """[operator of a run] -> bytes that its attention core has recomputed during its backward."""
    parts, amounts = groups.parts, dict.fromkeys(run, NO_BYTES)
    for operators in _core_operators(parts, run).values():
        amounts.update(zip(operators, accumulate(saved_by_operator(parts, operators, groups.half, set(seen))), strict=True))
    return [amounts[i] for i in run]


def _core_rerun_bytes(groups: BlockGroups, run: Sequence[int], seen: CountedStorages) -> list[BatchBytes]:
    """[operator of a run] -> bytes alive when its attention core has been recomputed up to it."""
    parts, amounts = groups.parts, dict.fromkeys(run, NO_BYTES)
    for operators in _core_operators(parts, run).values():
        amounts.update(zip(operators, _rerun_bytes(parts, operators, groups.half, seen), strict=True))
    return [amounts[i] for i in run]


def _forward_bytes(groups: BlockGroups, run: Sequence[int], seen: CountedStorages, is_saved: bool) -> list[BatchBytes]:
    """[operator of a run] -> bytes alive after its forward, besides those in `seen`: saved up to it (if the run saves nothing, its inputs),
    and its own operands and results."""
    parts, half, counted = groups.parts, groups.half, set(seen)
    entering, amounts = NO_BYTES if is_saved else groups.count_entering(run, counted), []
    for i in run:
        if is_saved:
            entering += total_saved(parts, [i], half, counted)
        values = (*(item for _, item in parts.reads[i]), *parts.outputs[i])
        amounts.append(entering + count_storages(values, half, set(), counted))
    return amounts


def _rerun_bytes(parts: ShardedInventory, run: Sequence[int], half: bool, seen: CountedStorages) -> list[BatchBytes]:
    """[operator of a run] -> bytes alive after its recomputation, besides those in `seen`: saved up to it, and results that later operators
    will read."""
    amounts = list(accumulate(saved_by_operator(parts, run, half, set(seen))))
    first: dict[tuple[str, str], int] = {}
    last: dict[tuple[str, str], int] = {}
    sizes: dict[tuple[str, str], int] = {}
    items: dict[tuple[str, str], SavedStorage] = {}
    for at, i in enumerate(run):
        for item in parts.saved[i]:
            sizes.setdefault((item.root, item.copy), at)
        for item in (*(item for _, item in parts.reads[i]), *parts.outputs[i]):
            key = item.root, item.copy
            first.setdefault(key, at)
            last[key], items[key] = at, item
    for key, item in items.items():
        size = count_storages([item], half, set(), seen)
        for at in range(first[key], min(last[key] + 1, sizes.get(key, len(run)))) if any(size) else ():
            amounts[at] += size
    return amounts


def _loaded_bytes(parts: ShardedInventory, run: Sequence[int], half: bool, seen: CountedStorages) -> list[BatchBytes]:
    """[operator of an offloaded run] -> bytes loaded during its backward, besides those in `seen`: its own saved tensors, and those loaded
    for later operators that it or an earlier one will read."""
    first: dict[tuple[str, str], int] = {}
    last: dict[tuple[str, str], int] = {}
    items: dict[tuple[str, str], SavedStorage] = {}
    for at, i in enumerate(run):
        for item in parts.saved[i]:
            key = item.root, item.copy
            first.setdefault(key, at)
            last[key], items[key] = at, item
    amounts = [total_saved(parts, [i], half, set(items)) for i in run]  # saved tensors that are no value of the graph
    counted = set(seen)
    for key, item in items.items():
        size = count_storages([item], half, counted)
        for at in range(first[key], last[key] + 1) if any(size) else ():
            amounts[at] += size
    return amounts


def is_recomputed(parts: ShardedInventory, operators: NDArray[np.intp], residency: Residency, stage: int) -> NDArray[np.bool_]:
    """[operator of a stage] -> whether recomputation runs it twice."""
    if not residency.recompute.applies_to_layers:
        return np.zeros(len(operators), dtype=bool)
    is_cheap = residency.recompute.kind == CHEAP
    if not residency.recompute.is_partial and not residency.offload.is_partial and not is_cheap:
        return parts.recomputed[operators]
    names = [parts.blocks[i] for i in operators.tolist()]
    layers = list(dict.fromkeys(name for name in names if name)) or [""]
    chosen = set(residency.recomputed_layers(stage, layers))
    if is_cheap:
        return _is_recomputed_cheaply(parts, operators.tolist(), names if any(names) else [""] * len(names), chosen)
    return np.array([name in chosen for name in names], dtype=bool)


def _is_recomputed_cheaply(parts: ShardedInventory, operators: Sequence[int], names: Sequence[str], chosen: Set[str]) -> NDArray[np.bool_]:
    found = np.zeros(len(operators), dtype=bool)
    starts = run_starts(names)
    for first, end in zip(starts, [*starts[1:], len(operators)], strict=True):
        if names[first] in chosen:
            found[[first + at for at in CheapRun(parts, operators[first:end]).rerun]] = True
    return found


@dataclass(frozen=True)
class StageSection:
    """Batch-independent data of a stage: its operators by number, their parameters and saved bytes."""

    operators: NDArray[np.intp]
    parameters: StageParameters
    activations: BatchBytesColumns  # by operator, saved by no earlier one
    score_bytes: BatchBytes  # float32
    runs: Callable[[float, float], BlockRuns]  # by the number of expert shards and the elements of a bucket
    groups: BlockGroups
    residency_bytes: Callable[[Residency, int, bool, bool], ResidencyBytes]  # computed on first use


def build_section(
    parts: ShardedInventory, operators: NDArray[np.intp], held: StageParameters, half: bool, runs: Callable[[float, float], BlockRuns]
) -> StageSection:
    """Build the section of a stage's `operators`. `half`: every float tensor is 16-bit."""

    def score_bytes(is_data_sharded: bool) -> float:
        of_kind = [int(i) for i in operators if bool(parts.data_sharded[i]) is is_data_sharded]
        return float(sum(4.0 * parts.compute[parts.index[i]].kernel.scores for i in of_kind if parts.attention[i]))

    numbers, scores = operators.tolist(), BatchBytes(data_sharded=score_bytes(True), batched=score_bytes(False))
    activations = BatchBytesColumns.of(saved_by_operator(parts, numbers, half))
    return StageSection(operators, held, activations, scores, runs, *group_by_block(parts, numbers, half))


def group_by_block(
    parts: ShardedInventory, operators: Sequence[int], half: bool
) -> tuple[BlockGroups, Callable[[Residency, int, bool, bool], ResidencyBytes]]:
    """Group a stage's operators by block, and return the groups with the cached function of their residency bytes."""
    groups = BlockGroups(parts, operators, half)
    return groups, cache(partial(residency_bytes, groups))
