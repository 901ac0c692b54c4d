"""Device mesh: ranks arranged along named axes, with their coordinates and process groups."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from shardwise.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes with sizes, outermost (farthest apart) first; ranks count along the last axis fastest.

    `begins`: where pipeline stages (then the outermost axis) have unequal numbers of ranks, the first rank of each, and after the
    last one the total. The other axes are those of one of these stages; ranks of stages that differ have no coordinates.

    >>> mesh = Mesh((("pipeline", 2), ("data", 2), ("tensor", 2)))
    >>> mesh.coordinates(5)
    {'pipeline': 1, 'data': 0, 'tensor': 1}
    >>> mesh.group(5, "tensor")
    (4, 5)
    """

    axes: tuple[tuple[str, int], ...]
    begins: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names):
            raise LayoutError(f"a mesh names an axis twice: {', '.join(names)}")
        for name, size in self.axes:
            if size < 1:
                raise LayoutError(f"mesh axis {name}={size}; every axis needs at least 1 rank")

    @property
    def num_ranks(self) -> int:
        return self.begins[-1] if self.begins else prod(size for _, size in self.axes)

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """Return the axes within one pipeline stage."""
        return tuple(name for name, _ in self.axes if name != "pipeline")

    def size(self, axis: str) -> int:
        """Number of ranks along `axis`; 1 for an axis that the mesh does not have."""
        return dict(self.axes).get(axis, 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of `rank_at` along every axis."""
        if not 0 <= rank < self.num_ranks:
            raise LayoutError(f"rank {rank} is not one of the mesh's {self.num_ranks} ranks")
        at: dict[str, int] = {}
        remaining = rank
        if self.begins:
            at["pipeline"] = bisect_right(self.begins, rank) - 1
            remaining -= self.begins[at["pipeline"]]
        for name, size in reversed(self.axes[bool(self.begins) :]):
            remaining, at[name] = divmod(remaining, size)
        if self.begins and remaining:
            raise LayoutError(f"rank {rank} is of stage {at['pipeline']}, which has more ranks than {self}")
        return {name: at[name] for name, _ in self.axes}

    def rank_at(self, at: Mapping[str, int]) -> int:
        """Return the rank at these coordinates; a missing axis means 0."""
        result = 0
        for name, size in self.axes[bool(self.begins) :]:
            result = result * size + at.get(name, 0)
        return result + self.begins[at.get("pipeline", 0)] if self.begins else result

    def index_along(self, rank: int, axes: Sequence[str]) -> int:
        """Return the index of `rank_at` among those along `axes`, counted along the last of them fastest.

        >>> Mesh((("branch", 2), ("data", 3))).index_along(4, ("data", "branch"))
        3
        """
        at, index = self.coordinates(rank), 0
        for axis in axes:
            index = index * self.size(axis) + at.get(axis, 0)
        return index

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks that differ from `rank_at` only along `axes`, in order; (rank,) where none has a size."""
        at = self.coordinates(rank)
        varying = [(name, size) for name, size in self.axes if name in axes]
        return tuple(
            self.rank_at({**at, **dict(zip((n for n, _ in varying), indices, strict=True))})
            for indices in product(*(range(size) for _, size in varying))
        )

    def stage_ranks(self, number: int) -> tuple[int, ...]:
        """Return the ranks of a stage of the pipeline.

        >>> Mesh((("pipeline", 2), ("data", 2)), (0, 2, 3)).stage_ranks(1)
        (2,)
        """
        if self.begins:
            return tuple(range(*self.begins[number : number + 2]))
        return self.group(self.rank_at({"pipeline": number}), *self.stage_axes)

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups along `axes`: a partition of the ranks."""
        return tuple(sorted({self.group(rank, *axes) for rank in range(self.num_ranks)}))
