"""Identify one of several connections between the same ranks. In: its purpose. Out: `Connection`, and its key in the store."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.errors import UsageError
from shardwise.world.recorder import group_name

INTRA_HOST = "box"  # name of side connections inside one host


@dataclass(frozen=True, slots=True)
class SideConnection:
    """An additional connection of a group: the `number`-th of this `name`, made by a group of `ranks`."""

    name: str
    number: int
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.name.isalpha():
            raise UsageError(f"the name of a side connection is a word, not {self.name!r}")

    def __str__(self) -> str:
        return f"/{self.name}{self.number} of {group_name(self.ranks)}"


@dataclass(frozen=True, slots=True)
class Connection:
    """A group's primary connection, a side connection (the path in `side_path`, outermost first), or one for messages in one `direction`:
    (sender, receiver), members by their indices.

    >>> str(Connection()), str(Connection(direction=(0, 1)).within(SideConnection("box", 1, (2, 3))))
    ('', '/box1 of 2,3/0to1')
    """

    side_path: tuple[SideConnection, ...] = ()
    direction: tuple[int, int] | None = None

    @property
    def is_primary(self) -> bool:
        """True for the group's own connection."""
        return not self.side_path and self.direction is None

    @property
    def is_intra_host(self) -> bool:
        """True if its ranks are on one host."""
        return bool(self.side_path) and self.side_path[0].name == INTRA_HOST

    def within(self, outer: SideConnection) -> Connection:
        """Return this connection nested inside the side connection `outer`."""
        return replace(self, side_path=(outer, *self.side_path))

    def __str__(self) -> str:
        suffix = "" if self.direction is None else f"/{self.direction[0]}to{self.direction[1]}"
        return "".join(map(str, self.side_path)) + suffix
