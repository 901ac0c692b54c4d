"""The position of a loop in its loader's epoch: what a checkpoint holds of it, and how a resumed loop continues the epoch.

The samplers run again from the states that the random generators had when the epoch began; batches before the position are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from shardwise.train.data.random_states import find_generators, read_states, write_states
from shardwise.train.data.row_loader import RowBatchSampler
from shardwise.world.world import World


class LoaderPosition:
    """The position in `loader`: batches that the loop has had of the current epoch, and random states at its begin."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        batches = getattr(loader, "batch_sampler", None)
        self._owned = find_generators((getattr(loader, "generator", None), getattr(loader, "sampler", None), batches))
        self._count = 0
        self._start: list[Any] | None = None  # None: between epochs
        self._replays = False
        self._resumed: dict[str, Any] | None = None
        self.is_reporting = False

    def state(self) -> dict[str, Any]:
        """Return the position and the random states as JSON values."""
        if self._resumed is not None:  # loaded, and not iterated since
            return self._resumed
        return {"count": self._count, "start": self._start, "now": read_states(self._owned), "replays": self._replays}

    def load_state(self, state: Any) -> None:
        """Continue at the position of a `state`: at once for random generators, at the next epoch for batches."""
        write_states(state["now"], self._owned)
        self._resumed = state if state["start"] is not None else None
        self._start = None

    def run_epoch(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the epoch's batches of `loader`, which is this position's, or a copy over the same samplers; in a resumed loop those that
        are left of the epoch."""
        resumed, self._resumed = self._resumed, None
        self._count, dropped, now = 0, 0, None
        if resumed is not None:
            self._count, now = resumed["count"], read_states([])
            write_states(resumed["start"], self._owned)
            if self.is_reporting:
                print(f"shardwise: the loop continues its epoch after batch {self._count}", file=sys.stderr, flush=True)
        self._start = read_states(self._owned)
        sampler = loader.batch_sampler if isinstance(loader, DataLoader) else None
        if resumed is not None and isinstance(sampler, RowBatchSampler) and not resumed["replays"]:
            sampler.num_skipped, sampler.states_after = self._count, now
        elif resumed is not None:
            dropped = self._count
        batches = iter(loader)
        for _ in range(dropped):
            next(batches, None)
        if dropped and now is not None:
            write_states(now, [])
        for batch in batches:
            self._count += 1
            has_workers = getattr(loader, "num_workers", 0) > 0
            self._replays = has_workers and isinstance(sampler, RowBatchSampler) and bool(batch[3])
            yield batch
        self._count, self._start = 0, None


def position_of(loader: Any, world: World | None) -> LoaderPosition:
    """Return the position of a loader in a loop of `world`, the same however often the loader is sharded.

    Without a world, and for an iterator (which no loop can begin again), it is in no checkpoint.
    """
    if world is None or hasattr(loader, "__next__"):
        return LoaderPosition(loader)
    registered = world.loader_positions
    for position in registered.positions:
        if isinstance(position, LoaderPosition) and position.loader is loader:
            return position
    position = LoaderPosition(loader)
    position.is_reporting = world.rank == 0
    registered.register(position)
    return position
