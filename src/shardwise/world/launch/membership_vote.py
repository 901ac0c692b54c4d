"""Membership vote of the surviving ranks, in a folder that all hosts share. In: this rank, and its address. Out: one decision for all.

Every rank that has left the failed step signs. The lowest rank that has signed decides, once all have or no rank came for a while; the
decision is a file that can be created only once. A rank that comes later, or cannot reach the deciding one, is excluded: two partitions of
the network never both continue. No messages are needed, so any host may have failed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwise.errors import RunError

QUIET_S = 2.0  # time without a new signature after which absent ranks have failed
LOOK_S = 0.02
FAILED = "failed-"


@dataclass(frozen=True, slots=True)
class Decision:
    """The ranks that continue, by their old numbers in the order of their new ones, and the address of their store."""

    ranks: tuple[int, ...]
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class MembershipVote:
    """The vote after one failure. `ranks_by_host`: the ranks of each host."""

    folder: Path
    rank: int
    ranks_by_host: Sequence[Sequence[int]]

    def record_failure(self, why: str) -> None:
        """Record that this rank fails by its own error `why`: the other ranks then raise it as their cause."""
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            _create_once(self.folder / f"{FAILED}{self.rank}", why)

    def vote(self, address: str, port: int, quiet_s: float = QUIET_S) -> tuple[Decision, bool]:
        """Sign, and return (decision, made by this rank), which listens at the given address.

        Raises RunError if a rank has failed by its own error, or the others have continued without this one.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / str(self.rank)).touch()
        all_ranks = {rank for box in self.ranks_by_host for rank in box}
        present, changed_s = set[int](), time.monotonic()
        while True:
            if (self.folder / "decision").exists():
                return self._read_decision(), False
            now_present, now = {int(path.name) for path in self.folder.iterdir() if path.name.isdigit()}, time.monotonic()
            if now_present != present:
                present, changed_s = now_present, now
            order = sorted(present).index(self.rank)
            if (order == 0 and present == all_ranks) or now - changed_s > quiet_s * (1 + order):
                self._raise_failed()
                decision = Decision(order_survivors(present, self.ranks_by_host), address, port)
                if _create_once(self.folder / "decision", json.dumps(asdict(decision))):
                    return decision, True
            time.sleep(LOOK_S)

    def _read_decision(self) -> Decision:
        self._raise_failed()
        data = json.loads((self.folder / "decision").read_text())
        decision = Decision(tuple(data["ranks"]), data["address"], data["port"])
        if self.rank not in decision.ranks:
            raise RunError(
                f"rank {self.rank} left the failed step after the others had continued without it; start it again once the run has ended"
            )
        return decision

    def _raise_failed(self) -> None:
        for path in sorted(self.folder.glob(f"{FAILED}*")):
            error = RunError(f"rank {path.name.removeprefix(FAILED)}: {path.read_text()}")
            error.second_hand = True
            raise error


def order_survivors(present: set[int], ranks_by_host: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the surviving ranks, those of complete hosts first, so that the ranks of a smaller plan share hosts.

    >>> order_survivors({1, 2, 3}, [(0, 1), (2, 3)])
    (2, 3, 1)
    """
    hosts = sorted(ranks_by_host, key=lambda box: (sum(rank not in present for rank in box), tuple(box)))
    return tuple(rank for box in hosts for rank in box if rank in present)


def _create_once(path: Path, text: str) -> bool:
    """Create a file atomically; return False if it exists already."""
    part = path.with_name(f".{path.name}-{os.getpid()}-{time.monotonic_ns()}")
    part.write_text(text, encoding="utf-8")
    try:
        os.link(part, path)
    except FileExistsError:
        return False
    finally:
        part.unlink()
    return True
