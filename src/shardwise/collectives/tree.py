"""Tree all-reduce: reduce to a root and broadcast from it, whole or pipelined in chunks. In: numbers of ranks. Out: programs.

`tree` is binomial: 2·log2 n steps of M, each rank sending once up. `double_tree` has two binary trees, each for half of the tensor, in
which no rank is an inner node of both (Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
2009), and sends chunks, so that all ranks send and receive at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.collectives import steps as spec
from shardwise.collectives.steps import ChunkTransfer, CollectiveBuilder, chunk_values
from shardwise.plan.ir.program import Program


@dataclass(frozen=True)
class Tree:
    """[rank] -> its parent (None for the root), and its children, the slowest subtree first."""

    parent: tuple[int | None, ...]
    children: tuple[tuple[int, ...], ...]

    @property
    def root(self) -> int:
        return self.parent.index(None)

    def depth(self) -> list[int]:
        """Return [rank] -> number of links to the root."""
        depths = [0] * len(self.parent)
        todo = [self.root]
        while todo:
            rank = todo.pop()
            for child in self.children[rank]:
                depths[child] = depths[rank] + 1
                todo.append(child)
        return depths

    def height(self) -> list[int]:
        """Return [rank] -> number of links to the farthest leaf below."""
        heights, depth = [0] * len(self.parent), self.depth()
        for rank in sorted(range(len(depth)), key=depth.__getitem__, reverse=True):
            parent = self.parent[rank]
            if parent is not None:
                heights[parent] = max(heights[parent], heights[rank] + 1)
        return heights


def _tree_from_parents(parent: Sequence[int | None]) -> Tree:
    children: list[list[int]] = [[] for _ in parent]
    for rank, above in enumerate(parent):
        if above is not None:
            children[above].append(rank)
    return Tree(tuple(parent), tuple(tuple(sorted(c, reverse=True)) for c in children))


def binomial_tree(num_ranks: int) -> Tree:
    """Return the tree in which rank r's parent is r without its lowest set bit: after k steps 2^k ranks have sent, or been reached."""
    return _tree_from_parents([None, *(r & (r - 1) for r in range(1, num_ranks))])


def binary_tree(num_ranks: int, shift: int = 0) -> Tree:
    """Return the in-order binary tree: even ranks are leaves, rank r's height is its number of trailing ones. `shift` rotates the ranks."""
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
    return _tree_from_parents(parent)


def all_reduce(num_ranks: int, pieces: int = 1) -> Program:
    """Return the all-reduce of at least 2·log2 n steps of M; pipelined in `pieces`, log2 n + pieces steps of M/pieces each way.

    >>> from shardwise.plan.ir.check import check
    >>> check(all_reduce(6)), check(all_reduce(7, pieces=3))
    (None, None)
    """
    steps = CollectiveBuilder(num_ranks)
    _add_reduce_and_broadcast(steps, [(binomial_tree(num_ranks), range(pieces))])
    return spec.all_reduce_program(steps, "tree", pieces)


def double_tree(num_ranks: int, pieces: int = 8) -> Program:
    """Return the all-reduce over two concurrent binary trees of `pieces` chunks each.

    >>> from shardwise.plan.ir.check import check
    >>> check(double_tree(9, pieces=4))
    """
    steps = CollectiveBuilder(num_ranks)
    _add_reduce_and_broadcast(steps, [(binary_tree(num_ranks), range(pieces)), (binary_tree(num_ranks, 1), range(pieces, 2 * pieces))])
    return spec.all_reduce_program(steps, "double_tree", 2 * pieces)


def broadcast(num_ranks: int, pieces: int = 1) -> Program:
    """Return the broadcast from rank 0 down the binomial tree: log2 n steps of M."""
    steps = CollectiveBuilder(num_ranks)
    tree = binomial_tree(num_ranks)
    depth = _step_received(tree)
    for _, _, move in sorted(
        _broadcast_transfers(tree, range(pieces), lambda rank, number: depth[rank] + number), key=lambda item: item[:2]
    ):
        steps.add_step([move])
    return spec.broadcast_program(steps, "tree", pieces, 0)


def _add_reduce_and_broadcast(steps: CollectiveBuilder, trees: Sequence[tuple[Tree, range]]) -> None:
    """Add the transfers that reduce chunks to the roots and broadcast the sums, in the order of the earliest step of each."""
    moves: list[tuple[int, int, ChunkTransfer]] = []
    for tree, pieces in trees:
        ready = _step_reduced(tree)
        down = _step_received(tree)
        top = ready[tree.root]
        for number, piece in enumerate(pieces):
            for rank, parent in enumerate(tree.parent):
                if parent is not None:
                    moves.append((ready[rank] + number, piece, ChunkTransfer(rank, parent, chunk_values([piece]), add=True)))
        # In one step, transfers down follow transfers up: the sum must be complete.
        moves += _broadcast_transfers(tree, pieces, lambda rank, number, top=top, down=down: top + down[rank] + number)  # type: ignore[misc]
    for _, _, move in sorted(moves, key=lambda item: item[:2]):
        steps.add_step([move])


def _broadcast_transfers(tree: Tree, pieces: range, when: Callable[[int, int], int]) -> list[tuple[int, int, ChunkTransfer]]:
    return [
        (when(rank, number), piece, ChunkTransfer(parent, rank, chunk_values([piece])))
        for number, piece in enumerate(pieces)
        for rank, parent in enumerate(tree.parent)
        if parent is not None
    ]


def _step_reduced(tree: Tree) -> list[int]:
    """Return [rank] -> the step after which it has its subtree's sum, if a rank receives one message a step, the earliest first."""
    steps_of, depth = [0] * len(tree.parent), tree.depth()
    for rank in sorted(range(len(depth)), key=depth.__getitem__, reverse=True):
        at = 0
        for child in sorted(tree.children[rank], key=steps_of.__getitem__):
            at = max(at, steps_of[child]) + 1
        steps_of[rank] = at
    return steps_of


def _step_received(tree: Tree) -> list[int]:
    """Return [rank] -> the step in which the root's data reach it, if a rank sends one message a step, to the highest child first."""
    steps_of, height, depth = [0] * len(tree.parent), tree.height(), tree.depth()
    for rank in sorted(range(len(depth)), key=depth.__getitem__):
        for order, child in enumerate(sorted(tree.children[rank], key=height.__getitem__, reverse=True)):
            steps_of[child] = steps_of[rank] + order + 1
    return steps_of
