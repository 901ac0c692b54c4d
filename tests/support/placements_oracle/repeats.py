"""Layers that repeat. In: a graph. Out: runs of structurally identical consecutive blocks of operators.

Blocks are identical where their operators agree one by one in target, constants, shapes and dtypes, where what is made within a
block is read at the same places, and where every block after the first reads the same of the blocks before it. Weights may differ, or
be shared. Something must pass through every block to the next: the queries, keys and values of one layer are alike, but no layers.

A block holds at least two operators with weights, so that two products of a chain of equal ones can still be cut as a pair.

Not modelled: nested runs, and blocks that are alike but not consecutive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.errors import LayoutError
from shardwise.model.graph import Graph
from shardwise.model.sharding.fold import operator_classes

WEIGHTED = 2  # operators with a weight matrix that a block has at least
NEAR = 64  # occurrences of an operator's like that are tried as the beginning of the next block
LONG = 3  # blocks of a run that is taken for what it is, and not for the beginning of one with longer blocks

_Reads = tuple[tuple[int, int], ...]  # (place of the operator that made it, which output) of all that is read but weights; -1: the batch's
_BlockReads = tuple[tuple[int, int, int], ...]  # (blocks back, place in the block, output), or (-1, place in the graph, output)


@dataclass(frozen=True, slots=True)
class Run:
    """`count` blocks of `length` operators each, the first at operator number `start`."""

    start: int
    length: int
    count: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.length < 1 or self.count < 2:
            raise LayoutError(f"a run of {self.count} blocks of {self.length} operators from {self.start}; it needs 2 blocks of 1 or more")

    @property
    def stop(self) -> int:
        return self.start + self.length * self.count


def runs(graph: Graph) -> tuple[Run, ...]:
    """The graph's runs in order, none overlapping; at every place the one that saves most operators."""
    kinds = operator_classes(graph)
    weights = {v.value for v in graph.parameters if len(v.tensor.shape) > 1}
    heavy = [any(value in weights for value in op.inputs) for op in graph.operators]
    made = {v.value: (-1, i) for i, v in enumerate((*graph.inputs, *graph.constants))}
    made |= {value: (i, k) for i, op in enumerate(graph.operators) for k, value in enumerate(op.outputs)}
    reads = [tuple(made[value] for value in op.inputs if value in made) for op in graph.operators]
    later: dict[int, list[int]] = {}
    for i, kind in enumerate(kinds):
        later.setdefault(kind, []).append(i)
    nth = {i: k for places in later.values() for k, i in enumerate(places)}
    found = []
    at = 0
    while at < len(kinds):
        near = later[kinds[at]][nth[at] + 1 : nth[at] + 1 + NEAR]
        tried: list[Run] = []
        for length in (other - at for other in near):
            if any(length % run.length == 0 and run.count > LONG for run in tried):
                continue  # several layers together save less than each
            run = _run(kinds, reads, heavy, at, length)
            if run is not None:
                tried.append(run)
        if tried:
            found.append(max(tried, key=lambda run: run.length * (run.count - 1)))
            at = found[-1].stop
        else:
            at += 1
    return tuple(found)


def representatives(graph: Graph) -> dict[str, str]:
    """[operator's name] -> the operator of its run's first block that stands at its place; itself outside of runs."""
    names = [op.name for op in graph.operators]
    found = dict(zip(names, names, strict=True))
    for run in runs(graph):
        for i in range(run.start, run.stop):
            found[names[i]] = names[run.start + (i - run.start) % run.length]
    return found


def _run(kinds: Sequence[int], reads: Sequence[_Reads], heavy: Sequence[bool], start: int, length: int) -> Run | None:
    """The longest run of blocks of this length from `start`; None where there is none."""
    block = kinds[start : start + length]
    if sum(heavy[start : start + length]) < WEIGHTED:
        return None
    count = 1
    before = _block_reads(reads, start, length, 0)
    while kinds[start + count * length : start + (count + 1) * length] == block:
        now = _block_reads(reads, start, length, count)
        if not _follows(before, now, count):
            break
        before = now
        count += 1
    return Run(start, length, count) if count > 1 else None


def _block_reads(reads: Sequence[_Reads], start: int, length: int, block: int) -> list[_BlockReads]:
    """What every operator of a block reads."""
    found = []
    for i in range(start + block * length, start + (block + 1) * length):
        row = []
        for place, output in reads[i]:
            back, at = divmod(place - start, length)
            row.append((block - back, at, output) if place >= start else (-1, place, output))
        found.append(tuple(row))
    return found


def _follows(before: Sequence[_BlockReads], now: Sequence[_BlockReads], block: int) -> bool:
    """Whether block number `block` reads as the one before it did, and passes on something of what this one made."""
    for a, b in zip(before, now, strict=True):
        # What is read from as many blocks back as there are was still read from outside by the block before.
        if len(a) != len(b) or not all(x == y or (x[0] == -1 and y[0] == block) for x, y in zip(a, b, strict=True)):
            return False
    passing: set[int] = set()
    for i, row in enumerate(now):
        if any(back == 1 or (back == 0 and at in passing) for back, at, _ in row):
            passing.add(i)
    return any(back == 1 and at in passing for row in now for back, at, _ in row)
