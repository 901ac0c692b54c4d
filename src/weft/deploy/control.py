"""When a running workflow is planned anew. In: what was planned, what is seen. Out: another demand or fewer machines, or nothing.

A machine whose replica died counts as gone: that it starts again elsewhere is Ray's matter, that it is paid for the plan's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from weft.serve.assign import Ask
from weft.serve.workflow import Machines

MOST, LEAST = 1.15, 0.6  # of the planned rate, beyond which a plan no longer fits
ROOM = 1.05  # of the measured rate, that is planned for
WINDOW_S, LONG_S = 20.0, 120.0  # that more is looked at, and less
ENOUGH = 400  # requests that a rate is measured from: of random ones 400 are so many to 5 %


@dataclass(frozen=True)
class Rates:
    """Requests that came in, by time. `seen`: (seconds, how many by then)."""

    seen: tuple[tuple[float, int], ...] = ()

    def with_count(self, at_s: float, arrived: int) -> Rates:
        """One more look; those older than the window are left out, but for one, and those before the first request."""
        seen = (*(one for one in self.seen if one[1]), (at_s, arrived))
        while len(seen) > 2 and seen[1][0] <= at_s - LONG_S:
            seen = seen[1:]
        return Rates(seen)

    def over(self, window_s: float) -> float | None:
        """Requests/s over so many seconds; None until they are over, or where too few came."""
        if not self.seen:
            return None
        end, last = self.seen[-1]
        begin, first = next((one for one in reversed(self.seen) if one[0] <= end - window_s), (end, last))
        return (last - first) / (end - begin) if last - first >= ENOUGH else None


def without(machines: Machines, lost: Mapping[str, str]) -> Machines:
    """The machines that are left. `lost`: workers' names by what died."""
    gone = Counter(lost.values())
    left = tuple(replace(w, count=w.count - gone[w.name]) for w in machines.workers if w.count > gone[w.name])
    names = {w.name for w in machines.workers} - {w.name for w in left}
    return Machines(left, tuple(link for link in machines.links if not {link.start, link.end} & names))


def wanted(ask: Ask, lately: float | None, long: float | None) -> Ask:
    """What is to be planned for: what was, unless the measured rate has lately risen over it, or long been below."""
    if lately is not None and lately > MOST * ask.rate:
        return replace(ask, rate=ROOM * lately)
    if long is not None and long < LEAST * ask.rate:
        return replace(ask, rate=ROOM * long)
    return ask
