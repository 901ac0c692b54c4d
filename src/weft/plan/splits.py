"""Which data x context the ranks of a plan form for a microbatch, by its length (`split=lengths`). In: a layout; prices of each way to
split its ranks; lengths of rows. Out: the splits there are, and which rows run together under which of them.

Ranks that share a long sequence finish it sooner; ranks that have a short one each talk to nobody. As ByteScale (Ge et al. 2025) and FlexSP
(Wang et al. 2025) do, rows of like lengths run together, each set of them under the split that takes least time. Every rank chooses alike,
from the plan. Lengths are rounded up, and numbers of rows are powers of two, so that there are few forms to capture.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from weft.errors import Infeasible, LayoutError, UsageError
from weft.plan.beside import LENGTHS
from weft.plan.layout import Layout

GRANULES = 8  # lengths are multiples of so many parts of the longest
Split = tuple[int, int]  # data, context


def splits_of(layout: Layout) -> tuple[Layout, ...]:
    """The ways to split a layout's data x context ranks, the layout itself where it is for no other; most replicas first.

    >>> [(one.data, one.context) for one in splits_of(Layout.parse("context=4 split=lengths"))]
    [(4, 1), (2, 2), (1, 4)]
    """
    if layout.split != LENGTHS:
        return (layout,)
    ranks = layout.data * layout.context
    return tuple(in_split(layout, (ranks // n, n)) for n in range(1, ranks + 1) if ranks % n == 0)


def in_split(layout: Layout, split: Split) -> Layout:
    """A layout whose ranks are split otherwise; how they attend is what the layout says, where they share a sequence."""
    return replace(layout, data=split[0], context=split[1])


@dataclass(frozen=True, slots=True)
class SplitPrice:
    """Seconds of a microbatch under a split, by length as `Splits.lengths` has them: `fixed_s`, and `row_s` for each row of a replica."""

    data: int
    context: int
    fixed_s: tuple[float, ...]
    row_s: tuple[float, ...]


@dataclass(frozen=True)
class Splits:
    """What a plan knows of its splits. `positions`: of the batch's tensors by path, a dim that is the positions of its rows. `lengths`:
    of the prices, shortest first, the plan's own last. `most`: positions that a rank has at most, for which its memory was predicted."""

    positions: tuple[tuple[str, int], ...] = ()
    lengths: tuple[int, ...] = ()
    prices: tuple[SplitPrice, ...] = ()
    most: int = 0

    def __post_init__(self) -> None:
        if any(len(one.fixed_s) != len(self.lengths) or len(one.row_s) != len(self.lengths) for one in self.prices):
            raise UsageError(f"prices of splits are of {len(self.lengths)} lengths each: {', '.join(map(str, self.lengths))}")

    @property
    def longest(self) -> int:
        """Positions of the plan's own rows."""
        return self.lengths[-1]

    @property
    def granule(self) -> int:
        """What lengths are rounded up to a multiple of."""
        return max(1, -(-self.longest // GRANULES))

    def seconds(self, price: SplitPrice, rows: int, length: int) -> float:
        """Of a microbatch of so many rows of a length under a split, between lengths that were priced in proportion."""
        lengths, count = self.lengths, -(-rows // price.data)
        seconds = [fixed + count * each for fixed, each in zip(price.fixed_s, price.row_s, strict=True)]
        if len(lengths) == 1:
            return seconds[0]
        at = min(max(bisect_left(lengths, length), 1), len(lengths) - 1)
        part = (length - lengths[at - 1]) / (lengths[at] - lengths[at - 1])
        return max(0.0, seconds[at - 1] + part * (seconds[at] - seconds[at - 1]))

    def fits(self, price: SplitPrice, rows: int, length: int) -> bool:
        """Whether every replica has rows, and no rank more positions than its memory was predicted for."""
        return price.data <= rows and price.context <= length and -(-rows // price.data) * -(-length // price.context) <= self.most

    def least(self, rows: int, length: int) -> tuple[float, Split] | None:
        """(seconds, split) of least time for a microbatch; None where it fits under none."""
        return _least(self, rows, length)

    def chosen(self, rows: int, length: int) -> Split:
        """The split of least time for a microbatch.

        Raises:
            Infeasible: it fits under none.
        """
        cheapest = self.least(rows, length)
        if cheapest is None:
            raise Infeasible(
                f"{rows} rows of {length} positions do not fit: the plan's memory is predicted for {self.most} positions on a rank; "
                f"use fewer rows in a microbatch, or a plan for a batch of {length} positions"
            )
        return cheapest[1]

    def grouped(self, lengths: Sequence[int], multiple: int = 0) -> tuple[tuple[tuple[int, ...], int, Split], ...]:
        """(numbers of rows, their length, split) of every microbatch, such that all together take least time.

        Rows run together that lie side by side when they are sorted by length, which is rounded up to a `multiple`, by default `granule`;
        but no row is longer than the longest there is.

        Raises:
            Infeasible: a row that fits under no split.
        """
        multiple, longest = multiple or self.granule, max(lengths)
        order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
        padded = [min(longest, -(-max(1, lengths[row]) // multiple) * multiple) for row in order]
        best: list[tuple[float, int, Split]] = [(0.0, 0, (1, 1))]  # of the first rows: seconds, where the last microbatch begins, its split
        for end in range(1, len(order) + 1):
            tried = [
                (best[end - count][0] + cheapest[0], end - count, cheapest[1])
                for count in (1 << i for i in range(end.bit_length()))
                if (cheapest := self.least(count, padded[end - count])) is not None
            ]
            if not tried:
                self.chosen(1, padded[end - 1])  # which raises
            best.append(min(tried))
        groups: list[tuple[tuple[int, ...], int, Split]] = []
        end = len(order)
        while end:
            _, begin, split = best[end]
            groups.append((tuple(sorted(order[begin:end])), padded[begin], split))
            end = begin
        return tuple(reversed(groups))


@lru_cache(1 << 14)
def _least(splits: Splits, rows: int, length: int) -> tuple[float, Split] | None:
    tried = [(splits.seconds(one, rows, length), (one.data, one.context)) for one in splits.prices if splits.fits(one, rows, length)]
    return min(tried, default=None)


def check_split(layout: Layout, split: Split) -> None:
    """Raise LayoutError where a layout's ranks cannot be split so."""
    if all((one.data, one.context) != split for one in splits_of(layout)):
        have = ", ".join(f"data={one.data} context={one.context}" for one in splits_of(layout))
        raise LayoutError(f"data={split[0]} context={split[1]} is no split of {layout}; use one of {have}")
