"""Which connection among several between the same ranks. In: what it is for. Out: `Connection`, and the name by which its ranks meet."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.errors import UsageError
from weft.world.recorder import group_name

BOX = "box"  # what connections apart are called where their ranks are one host's


@dataclass(frozen=True, slots=True)
class Apart:
    """What a group made apart from its own connection: the `number`-th of this `name`, of a group of `ranks`."""

    name: str
    number: int
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.name.isalpha():
            raise UsageError(f"a connection apart is called by a word, not {self.name!r}")

    def __str__(self) -> str:
        return f"/{self.name}{self.number} of {group_name(self.ranks)}"


@dataclass(frozen=True, slots=True)
class Connection:
    """A group's own connection, one `apart` from it (and from that one, the outermost first), or one of messages in one `direction`:
    (sender, receiver), members by their indices.

    >>> str(Connection()), str(Connection(direction=(0, 1)).within(Apart("box", 1, (2, 3))))
    ('', '/box1 of 2,3/0to1')
    """

    apart: tuple[Apart, ...] = ()
    direction: tuple[int, int] | None = None

    @property
    def is_primary(self) -> bool:
        """Whether it is the group's own connection."""
        return not self.apart and self.direction is None

    @property
    def of_box(self) -> bool:
        """Whether its ranks are one host's."""
        return bool(self.apart) and self.apart[0].name == BOX

    def within(self, outer: Apart) -> Connection:
        """The same of what was made apart by `outer`."""
        return replace(self, apart=(outer, *self.apart))

    def __str__(self) -> str:
        way = "" if self.direction is None else f"/{self.direction[0]}to{self.direction[1]}"
        return "".join(map(str, self.apart)) + way
