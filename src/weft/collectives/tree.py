"""Trees: up to a root and down again, whole or in pieces that follow one another. In: numbers of ranks. Out: programs.

`tree` is binomial: 2·log2 n steps of M, each rank sending once up. `double_tree` has two binary trees, each for half of the tensor, in
which no rank is inside both (Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009), and
sends it in pieces, so that all ranks send and receive at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.collectives import steps as spec
from weft.collectives.steps import Move, Steps, chunks
from weft.plan.program import Program


@dataclass(frozen=True)
class Tree:
    """[rank] -> its parent (None for the root), and its children, the one that takes longest first."""

    parent: tuple[int | None, ...]
    children: tuple[tuple[int, ...], ...]

    @property
    def root(self) -> int:
        return self.parent.index(None)

    def depth(self) -> list[int]:
        """[rank] -> links to the root."""
        depths = [0] * len(self.parent)
        todo = [self.root]
        while todo:
            rank = todo.pop()
            for child in self.children[rank]:
                depths[child] = depths[rank] + 1
                todo.append(child)
        return depths

    def height(self) -> list[int]:
        """[rank] -> links to the farthest leaf below."""
        heights, depth = [0] * len(self.parent), self.depth()
        for rank in sorted(range(len(depth)), key=depth.__getitem__, reverse=True):
            parent = self.parent[rank]
            if parent is not None:
                heights[parent] = max(heights[parent], heights[rank] + 1)
        return heights


def _tree(parent: Sequence[int | None]) -> Tree:
    children: list[list[int]] = [[] for _ in parent]
    for rank, above in enumerate(parent):
        if above is not None:
            children[above].append(rank)
    return Tree(tuple(parent), tuple(tuple(sorted(c, reverse=True)) for c in children))


def binomial(num_ranks: int) -> Tree:
    """Rank r hangs on r without its lowest bit: after k steps 2^k ranks have sent, or been reached."""
    return _tree([None, *(r & (r - 1) for r in range(1, num_ranks))])


def binary(num_ranks: int, shift: int = 0) -> Tree:
    """In order: even ranks are leaves, and rank r's height is how many ones its number ends with. Ranks are shifted by `shift`."""
    parent: list[int | None] = [None] * num_ranks

    def hang(node: int, level: int, above: int | None) -> None:
        parent[(node + shift) % num_ranks] = None if above is None else (above + shift) % num_ranks
        if level:
            hang(node - (1 << (level - 1)), level - 1, node)
            for lower in range(level - 1, -1, -1):
                if node + (1 << lower) < num_ranks:
                    hang(node + (1 << lower), lower, node)
                    break

    top = num_ranks.bit_length() - 1
    hang((1 << top) - 1, top, None)
    return _tree(parent)


def all_reduce(num_ranks: int, pieces: int = 1) -> Program:
    """2·log2 n steps of M at least; with `pieces` they follow one another, and it is log2 n + pieces steps of M/pieces each way.

    >>> from weft.plan.check import check
    >>> check(all_reduce(6)), check(all_reduce(7, pieces=3))
    (None, None)
    """
    steps = Steps(num_ranks)
    _up_and_down(steps, [(binomial(num_ranks), range(pieces))])
    return spec.all_reduce(steps, "tree", pieces)


def double_tree(num_ranks: int, pieces: int = 8) -> Program:
    """Two binary trees of `pieces` pieces each, at once.

    >>> from weft.plan.check import check
    >>> check(double_tree(9, pieces=4))
    """
    steps = Steps(num_ranks)
    _up_and_down(steps, [(binary(num_ranks), range(pieces)), (binary(num_ranks, 1), range(pieces, 2 * pieces))])
    return spec.all_reduce(steps, "double_tree", 2 * pieces)


def broadcast(num_ranks: int, pieces: int = 1) -> Program:
    """From rank 0 down the binomial tree: log2 n steps of M."""
    steps = Steps(num_ranks)
    tree = binomial(num_ranks)
    depth = _arrivals(tree)
    for _, _, move in sorted(_down(tree, range(pieces), lambda rank, number: depth[rank] + number), key=lambda item: item[:2]):
        steps.together([move])
    return spec.broadcast(steps, "tree", pieces, 0)


def _up_and_down(steps: Steps, trees: Sequence[tuple[Tree, range]]) -> None:
    """Pieces up to the roots, summed on the way, and down again: in the order of the step at which each can go."""
    moves: list[tuple[int, int, Move]] = []
    for tree, pieces in trees:
        ready = _readiness(tree)
        down = _arrivals(tree)
        top = ready[tree.root]
        for number, piece in enumerate(pieces):
            for rank, parent in enumerate(tree.parent):
                if parent is not None:
                    moves.append((ready[rank] + number, piece, Move(rank, parent, chunks([piece]), add=True)))
        # Down comes after up where both could go: what is summed must have arrived.
        moves += _down(tree, pieces, lambda rank, number, top=top, down=down: top + down[rank] + number)  # type: ignore[misc]
    for _, _, move in sorted(moves, key=lambda item: item[:2]):
        steps.together([move])


def _down(tree: Tree, pieces: range, when: Callable[[int, int], int]) -> list[tuple[int, int, Move]]:
    return [
        (when(rank, number), piece, Move(parent, rank, chunks([piece])))
        for number, piece in enumerate(pieces)
        for rank, parent in enumerate(tree.parent)
        if parent is not None
    ]


def _readiness(tree: Tree) -> list[int]:
    """[rank] -> the step after which it has the sum of all below, where a rank takes one message a step, the earliest first."""
    steps_of, depth = [0] * len(tree.parent), tree.depth()
    for rank in sorted(range(len(depth)), key=depth.__getitem__, reverse=True):
        at = 0
        for child in sorted(tree.children[rank], key=steps_of.__getitem__):
            at = max(at, steps_of[child]) + 1
        steps_of[rank] = at
    return steps_of


def _arrivals(tree: Tree) -> list[int]:
    """[rank] -> the step in which it is reached from the root, where a rank sends one message a step, to the highest child first."""
    steps_of, height, depth = [0] * len(tree.parent), tree.height(), tree.depth()
    for rank in sorted(range(len(depth)), key=depth.__getitem__):
        for place, child in enumerate(sorted(tree.children[rank], key=height.__getitem__, reverse=True)):
            steps_of[child] = steps_of[rank] + place + 1
    return steps_of
