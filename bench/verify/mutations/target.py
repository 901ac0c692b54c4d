"""Which mutation is active in this process, and what has fired. In: a change, or none to take note of what could be broken.

A mutation is (site, kind, how). Counters say how often each came by with numbers that it would change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

OFF, FAR = 1e-6, 1e-3
SCALED, ON_ONE_RANK, LEFT_OUT, WRONG_GROUP, WRONG_DUAL = "off by 1e-6", "off by 1e-6 on one rank", "left out", "wrong group", "wrong dual"
ONE_ELEMENT, SHIFTED = "one element off by 1e-6", "one element too far"


@dataclass(frozen=True, slots=True, order=True)
class Mutation:
    """`site`: module and function (and, of a weight or slice, its expression). `kind`: the collective, "weight", "slice" or "dual"."""

    site: str
    kind: str
    how: str


@dataclass(frozen=True, slots=True)
class Change:
    """What one run breaks; what is scaled is `off` by that."""

    mutation: Mutation
    off: float = OFF


@dataclass
class Active:
    """The state of one process. Without a change everything that comes by is counted and nothing broken."""

    change: Change | None = None
    fired: Counter[Mutation] = field(default_factory=Counter)
    paused: int = 0

    @property
    def off(self) -> float:
        return OFF if self.change is None else self.change.off

    def begin(self, change: Change | None) -> None:
        """Break this from here on, and count anew."""
        self.change = change
        self.fired.clear()

    def hit(self, mutation: Mutation) -> bool:
        """Count what comes by; whether it is to be broken."""
        if self.paused or (self.change is not None and mutation != self.change.mutation):
            return False
        self.fired[mutation] += 1
        return self.change is not None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """While the serial reference and the comparison run, which are no part of what is broken."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1
