"""All-reduce algorithms by message size: rows of sizes and names, or their text, as `AllReduceChoices` that are looked up by bytes.

`native` is the transport's own collective: shared memory, gloo or NCCL. The other names are those of `shardwise.collectives`. Not
modelled here:
what an algorithm costs (`shardwise.cost`), and between which ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise

from shardwise.errors import LayoutError, did_you_mean

NATIVE = "native"
AUTO = "auto"
ALGORITHMS = (
    "parameter_server", "naive", "ring", "tree", "double_tree", "recursive_doubling", "halving_doubling", "hierarchical",
)  # fmt: skip
NAMES = (NATIVE, *ALGORITHMS)
SYNONYMS = {"butterfly": "recursive_doubling"}  # names of the literature: in a butterfly, ranks exchange whole tensors, bit by bit
# Algorithms that are a reduce-scatter and an all-gather, with the names of these halves, which ZeRO runs separately.
SCATTER_GATHER_HALVES = {"naive": ("naive", "naive"), "ring": ("ring", "ring"), "halving_doubling": ("halving", "doubling")}

_ROW = re.compile(r"(\w+) to (\d{1,18}) B")


@dataclass(frozen=True, slots=True)
class AllReduceChoices:
    """Rows of (up to how many bytes, name of the algorithm), sizes ascending; larger messages use `default`.

    >>> choices = AllReduceChoices(((4096, "recursive_doubling"), (1 << 20, "ring")))
    >>> choices.algorithm_for(4096), choices.algorithm_for(4097), choices.algorithm_for(1 << 30)
    ('recursive_doubling', 'ring', 'native')
    >>> str(choices)
    'recursive_doubling to 4096 B, ring to 1048576 B, native'
    >>> AllReduceChoices.parse(str(choices)) == choices
    True

    Raises:
        LayoutError: an unknown name (names the nearest), sizes that do not ascend.
    """

    rows: tuple[tuple[int, str], ...] = ()
    default: str = NATIVE
    text: str = field(default="", repr=False)  # of the program of `default`, where that is a file (`plan/ir/custom_collective`)

    def __post_init__(self) -> None:
        if self.text:
            return
        for name in (*(name for _, name in self.rows), self.default):
            if name not in NAMES:
                raise LayoutError(f"all_reduce={name} is unknown{did_you_mean(name, NAMES)}; use one of {', '.join(NAMES)}")
        sizes = [size for size, _ in self.rows]
        if any(a >= b for a, b in pairwise((-1, *sizes))):
            raise LayoutError(f"sizes {sizes} of all-reduce choices; give bytes that ascend")

    def algorithm_for(self, size_bytes: int) -> str:
        """Return the name of the algorithm for an all-reduce of so many bytes."""
        for up_to, name in self.rows:
            if size_bytes <= up_to:
                return name
        return self.default

    @property
    def names(self) -> tuple[str, ...]:
        """Return every name that some size has, once."""
        return tuple(dict.fromkeys((*(name for _, name in self.rows), self.default)))

    def __str__(self) -> str:
        """Return one line; `AllReduceChoices.parse` reads it back."""
        return ", ".join([*(f"{name} to {size} B" for size, name in self.rows), self.default])

    @classmethod
    def parse(cls, text: str) -> AllReduceChoices:
        """Parse the line that `str` wrote.

        Raises:
            LayoutError: another form, an unknown name, sizes that do not ascend.
        """
        *rows, above = [part.strip() for part in text.split(",")]
        matches = [_ROW.fullmatch(row) for row in rows]
        if not all(matches):
            raise LayoutError(f"all-reduce choices {text!r} are not of the form 'ring to 4096 B, native'")
        return cls(tuple((int(row[2]), row[1]) for row in matches if row), above)


def refuse_all_reduce(all_reduce: str, zero: int, ranks: int) -> str:
    """Return why gradients of so many ranks cannot be reduced by an algorithm, as ZeRO needs it; empty where they can.

    >>> refuse_all_reduce("ring", 1, 4), refuse_all_reduce("tree", 0, 4)
    ('', '')
    """
    if zero and all_reduce not in (AUTO, NATIVE, "hierarchical", *SCATTER_GATHER_HALVES):
        return (
            f"all_reduce={all_reduce} zero={zero}: ZeRO scatters sums and gathers weights, and {all_reduce} has no such halves; "
            "use auto, native, hierarchical, naive or ring"
        )
    if zero and all_reduce == "halving_doubling" and ranks & (ranks - 1):
        return f"all_reduce={all_reduce} zero={zero}: its halves need a power of two of ranks, not data x tensor = {ranks}; use ring"
    return ""
