"""Who is left after a loss, found out in a folder that all hosts share. In: this rank, and where it listens. Out: one decision for all.

Every rank that has left the lost step signs. The first of those that have signed decides, once all have or nobody came for a while; the
decision is a file that can be made once. Who comes later, or is cut off from the one that decided, takes part in nothing more: so two parts
of a network that cannot reach each other never both go on. Nobody's messages are needed, so it does not matter which host is lost.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from weft.errors import RunError

QUIET_S = 2.0  # without a new rank: who has not come is lost
LOOK_S = 0.02
FAILED = "failed-"


@dataclass(frozen=True, slots=True)
class Decision:
    """The ranks that go on, under their numbers until now, in the order of those to come; where they meet."""

    ranks: tuple[int, ...]
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class RollCall:
    """One loss. `boxes`: the ranks of each host."""

    folder: Path
    rank: int
    boxes: Sequence[Sequence[int]]

    def fail(self, why: str) -> None:
        """This rank ends of itself, and so do the others: its `why` is their cause."""
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(self.folder / f"{FAILED}{self.rank}", why)

    def answer(self, address: str, port: int, quiet_s: float = QUIET_S) -> tuple[Decision, bool]:
        """(what was decided, whether by this rank), which listens there.

        Raises RunError where a rank has failed by itself, or the others have gone on without this one.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / str(self.rank)).touch()
        all_ranks = {rank for box in self.boxes for rank in box}
        present, since = set[int](), time.monotonic()
        while True:
            if (self.folder / "decision").exists():
                return self._decided(), False
            now_present, now = {int(path.name) for path in self.folder.iterdir() if path.name.isdigit()}, time.monotonic()
            if now_present != present:
                present, since = now_present, now
            place = sorted(present).index(self.rank)
            if (place == 0 and present == all_ranks) or now - since > quiet_s * (1 + place):
                self._raise_failed()
                decision = Decision(ordered(present, self.boxes), address, port)
                if _write(self.folder / "decision", json.dumps(asdict(decision))):
                    return decision, True
            time.sleep(LOOK_S)

    def _decided(self) -> Decision:
        self._raise_failed()
        data = json.loads((self.folder / "decision").read_text())
        decision = Decision(tuple(data["ranks"]), data["address"], data["port"])
        if self.rank not in decision.ranks:
            raise RunError(
                f"rank {self.rank} left the lost step after the others had gone on without it; start it again once the run has ended"
            )
        return decision

    def _raise_failed(self) -> None:
        for path in sorted(self.folder.glob(f"{FAILED}*")):
            error = RunError(f"rank {path.name.removeprefix(FAILED)}: {path.read_text()}")
            error.second_hand = True
            raise error


def ordered(present: set[int], boxes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The ranks that are left, those of whole hosts first: who is needed for a smaller plan then shares hosts.

    >>> ordered({1, 2, 3}, [(0, 1), (2, 3)])
    (2, 3, 1)
    """
    hosts = sorted(boxes, key=lambda box: (sum(rank not in present for rank in box), tuple(box)))
    return tuple(rank for box in hosts for rank in box if rank in present)


def _write(path: Path, text: str) -> bool:
    """Make a file that is whole once it is there; False where another has made it."""
    part = path.with_name(f".{path.name}-{os.getpid()}-{time.monotonic_ns()}")
    part.write_text(text, encoding="utf-8")
    try:
        os.link(part, path)
    except FileExistsError:
        return False
    finally:
        part.unlink()
    return True
