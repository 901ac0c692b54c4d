"""Saved bytes of a run whose cheap operators are recomputed (`run/residency/cheap_recompute`), and which of them run again.

A saved storage that a cheap operator of the run makes is not kept, nor what a cheap operator saves beside the graph's values. Those of
which backward needs them are made again from the nearest storages that others make, which are kept. A storage that is made again is there
from the backward of the last operator for which it, or one that is made from it, is needed, to that of the first operator that saved it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwise.cost.memory.block_runs import NO_BYTES, BatchBytes
from shardwise.cost.memory.storages import SavedStorage
from shardwise.cost.operators.sharded_inventory import CountedStorages, ShardedInventory, count_storages

_CASTS = ("bfloat16", "float16", "float32")  # copies that the layer makes by itself before an operator, named by their dtype


@dataclass
class CheapRun:
    """A run of operators by their numbers. `makers`: position in the run of the cheap operator that makes a storage, by its root."""

    parts: ShardedInventory
    operators: Sequence[int]
    makers: dict[str, int] = field(default_factory=dict)
    rerun: set[int] = field(default_factory=set)  # positions of the operators that run again
    _dropped: list[tuple[int, int, SavedStorage]] = field(default_factory=list)  # who saves it, who makes it again, what

    def __post_init__(self) -> None:
        seen = set[str]()
        for at, i in enumerate(self.operators):
            seen.update(item.root for item in self.parts.arrivals[i])
            for item in self.parts.outputs[i]:
                if item.root not in seen and self._is_cheap(at):
                    self.makers[item.root] = at
                seen.add(item.root)
        self._find_rerun()

    def _is_cheap(self, at: int) -> bool:
        return self.parts.cheap[self.operators[at]]

    def _maker_of(self, at: int, item: SavedStorage) -> int:
        """Return the cheap operator that makes what operator `at` saves; -1 where it is kept."""
        if not item.copy:
            return self.makers.get(item.root, -1)
        if self._is_cheap(at):
            return at
        return self.makers.get(item.root.rpartition(" ")[0], -1) if item.copy.startswith(_CASTS) else -1

    def _find_rerun(self) -> None:
        todo: list[int] = []
        for at, i in enumerate(self.operators):
            for item in self.parts.saved[i]:
                if (maker := self._maker_of(at, item)) >= 0:
                    self._dropped.append((at, maker, item))
                    todo.append(maker)
            if self._is_cheap(at) and i in self.parts.extra:
                todo.append(at)
        while todo:
            at = todo.pop()
            if at not in self.rerun:
                self.rerun.add(at)
                todo += [self.makers[item.root] for item in self.parts.arrivals[self.operators[at]] if item.root in self.makers]

    def saved_bytes(self, half: bool, seen: CountedStorages) -> list[BatchBytes]:
        """[operator] -> bytes that it keeps and no earlier one does, those from which others are made again included; updates `seen`."""
        extras, amounts = self.parts.extra_half if half else self.parts.extra, []
        for at, i in enumerate(self.operators):
            kept = [item for item in self.parts.saved[i] if self._maker_of(at, item) < 0]
            if at in self.rerun:
                kept += [item for item in self.parts.arrivals[i] if item.root not in self.makers]
            saved = count_storages(kept, half, seen)
            amounts.append(saved + extras[i] if i in extras and not self._is_cheap(at) else saved)
        return amounts

    def recomputed_bytes(self, half: bool, seen: CountedStorages) -> list[BatchBytes]:
        """[operator] -> bytes that were made again by its backward and are still needed."""
        extras, amounts = self.parts.extra_half if half else self.parts.extra, [NO_BYTES] * len(self.operators)
        first, last = self._first_uses(), self._last_uses()
        counted = set(seen)
        for at, maker, item in self._dropped:
            low, high = (min(first[maker], at), max(last[maker], at)) if not item.copy else (at, at)
            size = count_storages([item], half, counted)
            for place in range(low, high + 1) if any(size) else ():
                amounts[place] += size
        for at in self.rerun:
            size = extras.get(self.operators[at], NO_BYTES)
            for place in range(at, last[at] + 1) if any(size) else ():
                amounts[place] += size
        return amounts

    def _first_uses(self) -> dict[int, int]:
        """Return, by maker, the first operator that saves what it makes."""
        found: dict[int, int] = {}
        for at, maker, _ in self._dropped:
            found[maker] = min(at, found.get(maker, at))
        return found

    def _last_uses(self) -> dict[int, int]:
        """Return, by operator that runs again, the last operator in whose backward its result is needed."""
        last = dict.fromkeys(self.rerun, -1)
        for at, maker, _ in self._dropped:
            last[maker] = max(last[maker], at)
        for at in sorted(self.rerun, reverse=True):
            last[at] = max(last[at], at)
            for item in self.parts.arrivals[self.operators[at]]:
                if (maker := self.makers.get(item.root, -1)) >= 0:
                    last[maker] = max(last[maker], last[at])
        return last
