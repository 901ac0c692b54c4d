"""Splits by length (`split=lengths`): which data x context the ranks of a plan form for a microbatch, by its length.

Ranks that share a long sequence finish it sooner; ranks with short ones of their own need no communication. As in ByteScale (Ge et al.
2025) and FlexSP (Wang et al. 2025), rows of similar lengths run together, each group under the split that takes least time. Every rank
chooses the same, from the plan. Lengths are rounded up, and numbers of rows are powers of two, so that there are few shapes to capture.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from shardwise.errors import Infeasible, LayoutError, UsageError
from shardwise.plan.compatibility import SPLIT_BY_LENGTH
from shardwise.plan.layout import Layout

GRANULES = 8  # lengths are multiples of the longest over so many
Split = tuple[int, int]  # data, context


def splits_of(layout: Layout) -> tuple[Layout, ...]:
    """Return the ways to split a layout's data x context ranks, the layout alone where it has one for all; most replicas first.

    >>> [(one.data, one.context) for one in splits_of(Layout.parse("context=4 split=lengths"))]
    [(4, 1), (2, 2), (1, 4)]
    """
    if layout.split != SPLIT_BY_LENGTH:
        return (layout,)
    ranks = layout.data * layout.context
    return tuple(with_split(layout, (ranks // n, n)) for n in range(1, ranks + 1) if ranks % n == 0)


def with_split(layout: Layout, split: Split) -> Layout:
    """Return the layout with its ranks split otherwise; `attention` stays, where ranks share a sequence."""
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
    """Prices of a plan's splits. `positions`: of the batch's tensors by path, a dim that is the positions of its rows. `lengths`: of the
    prices, ascending, the plan's own last. `max_positions`: positions on a rank at most, for which memory was predicted."""

    positions: tuple[tuple[str, int], ...] = ()
    lengths: tuple[int, ...] = ()
    prices: tuple[SplitPrice, ...] = ()
    max_positions: int = 0

    def __post_init__(self) -> None:
        if any(len(price.fixed_s) != len(self.lengths) or len(price.row_s) != len(self.lengths) for price in self.prices):
            raise UsageError(f"prices of splits are of {len(self.lengths)} lengths each: {', '.join(map(str, self.lengths))}")

    @property
    def longest(self) -> int:
        """Number of positions of the plan's own rows."""
        return self.lengths[-1]

    @property
    def granule(self) -> int:
        """Number to whose multiples lengths are rounded up."""
        return max(1, -(-self.longest // GRANULES))

    def seconds(self, price: SplitPrice, rows: int, length: int) -> float:
        """Seconds of a microbatch of so many rows of a length under a split, interpolated between lengths that were priced."""
        lengths, count = self.lengths, -(-rows // price.data)
        seconds = [fixed + count * each for fixed, each in zip(price.fixed_s, price.row_s, strict=True)]
        if len(lengths) == 1:
            return seconds[0]
        at = min(max(bisect_left(lengths, length), 1), len(lengths) - 1)
        part = (length - lengths[at - 1]) / (lengths[at] - lengths[at - 1])
        return max(0.0, seconds[at - 1] + part * (seconds[at] - seconds[at - 1]))

    def fits(self, price: SplitPrice, rows: int, length: int) -> bool:
        """Return whether every replica has rows, and no rank more positions than its memory was predicted for."""
        return price.data <= rows and price.context <= length and -(-rows // price.data) * -(-length // price.context) <= self.max_positions

    def cheapest_split(self, rows: int, length: int) -> tuple[float, Split] | None:
        """Return (seconds, split) of least time for a microbatch; None where it fits under none."""
        return _cheapest_split(self, rows, length)

    def choose_split(self, rows: int, length: int) -> Split:
        """Return the split of least time for a microbatch.

        Raises:
            Infeasible: it fits under none.
        """
        cheapest = self.cheapest_split(rows, length)
        if cheapest is None:
            raise Infeasible(
                f"{rows} rows of {length} positions do not fit: the plan's memory is predicted for {self.max_positions} positions on a "
                f"rank; "
                f"use fewer rows in a microbatch, or a plan for a batch of {length} positions"
            )
        return cheapest[1]

    def group_rows(self, lengths: Sequence[int], multiple: int = 0) -> tuple[tuple[tuple[int, ...], int, Split], ...]:
        """Group rows into microbatches of least total time: (numbers of rows, their length, split) of each.

        Rows run together that are adjacent when sorted by length, which is rounded up to a `multiple`, by default `granule`, but at most to
        the longest.

        Raises:
            Infeasible: a row that fits under no split.
        """
        multiple, longest = multiple or self.granule, max(lengths)
        order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
        padded = [min(longest, -(-max(1, lengths[row]) // multiple) * multiple) for row in order]
        best: list[tuple[float, int, Split]] = [(0.0, 0, (1, 1))]  # of the first rows: seconds, where the last microbatch begins, its split
        for end in range(1, len(order) + 1):
            candidates = [
                (best[end - count][0] + cheapest[0], end - count, cheapest[1])
                for count in (1 << i for i in range(end.bit_length()))
                if (cheapest := self.cheapest_split(count, padded[end - count])) is not None
            ]
            if not candidates:
                self.choose_split(1, padded[end - 1])  # which raises
            best.append(min(candidates))
        groups: list[tuple[tuple[int, ...], int, Split]] = []
        end = len(order)
        while end:
            _, begin, split = best[end]
            groups.append((tuple(sorted(order[begin:end])), padded[begin], split))
            end = begin
        return tuple(reversed(groups))


@lru_cache(1 << 14)
def _cheapest_split(splits: Splits, rows: int, length: int) -> tuple[float, Split] | None:
    tried = [(splits.seconds(p, rows, length), (p.data, p.context)) for p in splits.prices if splits.fits(p, rows, length)]
    return min(tried, default=None)


def check_split(layout: Layout, split: Split) -> None:
    """Raise LayoutError where a layout's ranks cannot be split so."""
    if all((option.data, option.context) != split for option in splits_of(layout)):
        have = ", ".join(f"data={option.data} context={option.context}" for option in splits_of(layout))
        raise LayoutError(f"data={split[0]} context={split[1]} is no split of {layout}; use one of {have}")
