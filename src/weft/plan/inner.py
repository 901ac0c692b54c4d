"""How the ranks of each pipeline stage are arranged, where stages differ: `inner=4x1/2x2`. In: text. Out: (data, tensor) of each stage.

All stages have as many ranks. Not modelled: stages of different size.
"""

from __future__ import annotations

from math import prod

from weft.errors import LayoutError

Inner = tuple[tuple[int, int], ...]


def parse_inner(text: str) -> Inner:
    """(data, tensor) of every stage.

    >>> parse_inner("4x1/2x2")
    ((4, 1), (2, 2))

    Raises:
        LayoutError: no such text, or stages with unequal numbers of ranks.
    """
    axes = []
    for word in text.split("/"):
        numbers = word.split("x")
        if len(numbers) != 2 or not all(n.isdecimal() and 0 < len(n) < 7 and int(n) for n in numbers):
            raise LayoutError(f"inner={text}: {word!r} is not data x tensor of a stage; for example inner=4x1/2x2")
        axes.append((int(numbers[0]), int(numbers[1])))
    ranks = {prod(sizes) for sizes in axes}
    if len(ranks) > 1:
        each = ", ".join(f"{d}x{t} = {d * t}" for d, t in axes)
        raise LayoutError(
            f"inner={text} has stages of unequal numbers of ranks ({each}); give every stage as many, and where devices differ slower ones "
            "fewer layers, as the planner does on a mixed cluster, or replicas unequal parts of the batch, shares=2/1"
        )
    return tuple(axes)
