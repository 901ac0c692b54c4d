"""Grids of tensor ranks for 2-D and 3-D tensor parallelism: `tensor=2x4` or `tensor=2x2x2` as rows, columns and depth, each a mesh axis.

Every axis shards weights by the same factor rules. Rows shard first, then columns, which shard other dimensions than rows do, then depth,
which shards what these leave or one of their shards once more (3-D parallel matrix multiplication: Singh et al. SC'24). The last axis is
the innermost one: its ranks are neighbours. Not modelled: grids of more than three axes.
"""

from __future__ import annotations

from math import prod

from shardwise.errors import LayoutError

GRID_AXES = ("rows", "columns", "depth")  # outermost first
MAX_AXES = len(GRID_AXES)  # axes of a grid, and of an image
NESTED = GRID_AXES[-1]  # which may shard the shards of another axis once more
TENSOR = "tensor"  # the axis of tensor ranks in a line
GRID_USAGE = "use a count (tensor=4), rows x columns (tensor=2x2) or rows x columns x depth (tensor=2x2x2)"


def parse_counts(key: str, text: str, subject: str, usage: str) -> list[int]:
    """Parse `4` or `2x2x2` as ranks along each axis of `subject`, three at most. `usage`: how the layout's `key` is written.

    Raises:
        LayoutError: an axis without ranks, more than three axes.
    """
    words = text.split("x")
    for word in words:
        if not word.isdecimal() or len(word) > 6 or not int(word):
            raise LayoutError(f"{key}={text}: {word!r} is not the number of ranks along an axis of {subject}, 1 or more; {usage}")
    if len(words) > MAX_AXES:
        raise LayoutError(f"{key}={text} has {len(words)} axes, and {subject} has at most {MAX_AXES}; {usage}")
    return [int(word) for word in words]


def parse_grid(text: str) -> tuple[int, ...]:
    """Return ranks along rows, columns and depth; trailing sizes of 1 are left out, and () is a line.

    >>> parse_grid("2x4"), parse_grid("2x1x2"), parse_grid("2x2x1"), parse_grid("1x4")
    ((2, 4), (2, 1, 2), (2, 2), ())

    Raises:
        LayoutError: another form, an axis without ranks, more than three axes.
    """
    sizes = parse_counts(TENSOR, text, "a grid", GRID_USAGE)
    while sizes and sizes[-1] == 1:
        sizes.pop()
    return tuple(sizes) if sum(n > 1 for n in sizes) > 1 else ()


def format_grid(sizes: tuple[int, ...]) -> str:
    """Format a grid as `parse_grid` reads it.

    >>> format_grid((2, 4)), format_grid(())
    ('2x4', '')
    """
    return "x".join(map(str, sizes))


def normalize_grid(text: str, tensor: int) -> tuple[int, str]:
    """Return (tensor ranks, the grid in its canonical form) of `text`; a `tensor` of 1 is a default.

    >>> normalize_grid("2x2x1", 1), normalize_grid("4x1", 4)
    ((4, '2x2'), (4, ''))

    Raises:
        LayoutError: no such grid, or one of another number of ranks.
    """
    sizes = parse_grid(text)
    ranks = prod(int(word) for word in text.split("x"))
    if tensor not in (1, ranks):
        raise LayoutError(f"a grid of {text} has {ranks} tensor ranks, and tensor={tensor}; give one of them, or a grid of {tensor}")
    return ranks, format_grid(sizes)


def axes_of(tensor: int, grid: str) -> tuple[tuple[str, int], ...]:
    """Return the mesh axes of the tensor ranks with their sizes, outermost first; of a grid those that have more than one rank.

    >>> axes_of(4, ""), axes_of(4, "2x1x2")
    ((('tensor', 4),), (('rows', 2), ('depth', 2)))
    """
    if not grid:
        return ((TENSOR, tensor),)
    return tuple((name, n) for name, n in zip(GRID_AXES, parse_grid(grid), strict=False) if n > 1)


def grids_of(tensor: int) -> list[str]:
    """Return every grid of so many ranks, once: of rows and columns, and of all three axes.

    >>> grids_of(8), grids_of(3)
    (['2x4', '4x2', '2x2x2'], [])
    """
    sides = [n for n in range(2, tensor) if tensor % n == 0]
    flat = [(r, tensor // r) for r in sides]
    deep = [(r, c, tensor // r // c) for r in sides for c in sides if tensor % (r * c) == 0 and tensor // r // c > 1]
    return [format_grid(sizes) for sizes in (*flat, *deep)]
