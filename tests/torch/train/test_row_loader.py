"""Each replica of a loop loads its own samples of every batch, as the serial run's loader has them, whatever the samplers are."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, Subset, WeightedRandomSampler

from shardwise.plan.ir.placement import even_shard_range
from shardwise.train.data.loader import ShardedLoader
from shardwise.world.launch.current import DataParallelCoordinate
from shardwise.world.world import World

N, BATCH = 21, 8


class Squares(Dataset[Any]):
    """Counts what it loads. `draws`: whose random numbers it adds, if any."""

    def __init__(self, draws: str = "") -> None:
        self.loaded: list[int] = []
        self.draws, self.own = draws, np.random.default_rng(3)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        self.loaded.append(index)
        noise = (
            {"": 0.0, "python": random.random(), "numpy": np.random.rand(), "own": self.own.random()}.get(self.draws) if self.draws else 0.0
        )
        if self.draws == "torch":
            noise = float(torch.rand(()))
        return {"x": torch.tensor([float(index), float(noise or 0.0)]), "name": f"sample {index}"}


class Shuffled(Sampler[int]):
    """A sampler of the user's, with a generator of its own."""

    def __init__(self) -> None:
        self.generator = random.Random(5)

    def __iter__(self) -> Iterator[int]:
        order = list(range(N))
        self.generator.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return N


def padded(samples: list[Any]) -> Any:
    """A collate function whose result depends on all samples of the batch."""
    longest = max(int(s["x"][0]) for s in samples) + 1
    return {"x": torch.stack([torch.nn.functional.pad(s["x"][:1], (0, longest)) for s in samples])}


def stacked(samples: list[Any]) -> Any:
    return {"x": torch.stack([s["x"] for s in samples])}


LOADERS: dict[str, Callable[[Any], Any]] = {
    "in order": lambda d: DataLoader(d, BATCH),
    "shuffled": lambda d: DataLoader(d, BATCH, shuffle=True),
    "generator": lambda d: DataLoader(d, BATCH, shuffle=True, generator=torch.Generator().manual_seed(4)),
    "without the last": lambda d: DataLoader(d, BATCH, shuffle=True, drop_last=True),
    "one sample at the end": lambda d: DataLoader(Subset(d, range(17)), BATCH),
    "replacement": lambda d: DataLoader(d, BATCH, sampler=RandomSampler(d, replacement=True, num_samples=40)),
    "weighted": lambda d: DataLoader(d, BATCH, sampler=WeightedRandomSampler(torch.arange(1.0, N + 1), N)),
    "own sampler": lambda d: DataLoader(d, BATCH, sampler=Shuffled()),
    "batch sampler": lambda d: DataLoader(d, batch_sampler=BatchSampler(Shuffled(), BATCH, True)),
    "collate": lambda d: DataLoader(d, BATCH, shuffle=True, collate_fn=stacked),
    "padding": lambda d: DataLoader(d, BATCH, shuffle=True, collate_fn=padded),
}


def seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def epochs(loader: Any, count: int = 2) -> tuple[list[Tensor], float]:
    """All batches of some epochs, and what torch's generator draws then."""
    batches = [batch["x"] for _ in range(count) for batch in loader]
    return batches, float(torch.rand(()))


def rows(x: Tensor, index: int) -> Tensor:
    first, count = even_shard_range(len(x), 2, index)
    return x[first : first + count] if len(x) > 1 else x


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("index", [0, 1])
def test_a_replica_loads_its_rows_of_the_serial_batches(name: str, index: int) -> None:
    seed()
    wanted, drawn = epochs(LOADERS[name](Squares()))
    seed()
    data = Squares()
    found, drawn_here = epochs(ShardedLoader(LOADERS[name](data), SimpleNamespace(data_index=index, data_size=2)))
    assert len(found) == len(wanted)
    for ours, whole in zip(found, wanted, strict=True):
        assert torch.equal(ours, rows(whole, index))
    assert drawn_here == drawn
    own, all_of_them = sum(len(rows(x, index)) for x in wanted), sum(map(len, wanted))
    # One whole batch, in each form, tells how a function of the user's collates.
    extra = {"collate": BATCH, "padding": all_of_them - own + BATCH}.get(name, 0)
    assert own <= len(data.loaded) <= own + extra


@pytest.mark.parametrize("draws", ["torch", "python", "numpy", "own"])
def test_a_data_set_that_draws_is_loaded_whole(draws: str) -> None:
    seed()
    wanted, drawn = epochs(LOADERS["shuffled"](Squares(draws)))
    for index in range(2):
        seed()
        found, drawn_here = epochs(ShardedLoader(LOADERS["shuffled"](Squares(draws)), SimpleNamespace(data_index=index, data_size=2)))
        for ours, whole in zip(found, wanted, strict=True):
            assert torch.equal(ours, rows(whole, index))
        assert drawn_here == drawn


def test_workers_load_rows() -> None:
    seed()
    wanted, _ = epochs(DataLoader(Squares(), BATCH, shuffle=True, num_workers=2), 1)
    seed()
    loader = DataLoader(Squares(), BATCH, shuffle=True, num_workers=2)
    found, _ = epochs(ShardedLoader(loader, SimpleNamespace(data_index=1, data_size=2)), 1)
    assert all(torch.equal(ours, rows(whole, 1)) for ours, whole in zip(found, wanted, strict=True))


def test_an_iterable_data_set_is_read_whole() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([{"x": torch.tensor([float(i)])} for i in range(N)])

    wanted, _ = epochs(DataLoader(Stream(), BATCH))
    found, _ = epochs(ShardedLoader(DataLoader(Stream(), BATCH), SimpleNamespace(data_index=0, data_size=2)))
    assert all(torch.equal(ours, rows(whole, 0)) for ours, whole in zip(found, wanted, strict=True))


def walk(loader: Any, num_batches: int) -> list[Tensor]:
    """As many batches, over as many epochs as they are."""
    found: list[Tensor] = []
    while len(found) < num_batches:
        for batch in loader:
            found.append(batch["x"].clone())
            torch.rand(())  # the loop draws, too: dropout
            if len(found) == num_batches:
                return found
    return found


@pytest.mark.parametrize("name", ["in order", "shuffled", "generator", "replacement", "own sampler", "batch sampler", "collate"])
@pytest.mark.parametrize("stop", [2, 3, 4])
def test_a_resumed_loop_continues_the_epoch(name: str, stop: int) -> None:
    """After `stop` batches, on another number of replicas than before: the serial loop without interruption is the reference."""
    seed()
    wanted = walk(LOADERS[name](Squares()), 7)
    seed()
    before = World()
    loader = ShardedLoader(LOADERS[name](Squares()), DataParallelCoordinate(0, 2, before))
    batches = iter(loader)
    for _ in range(stop):
        try:
            next(batches)
        except StopIteration:
            batches = iter(loader)
            next(batches)
        torch.rand(())
    (saved,) = [position.state() for position in before.loader_positions.positions]
    torch.manual_seed(99)  # a new process
    random.seed(99)
    after, data = World(), Squares()
    resumed = ShardedLoader(LOADERS[name](data), DataParallelCoordinate(0, 1, after))
    after.loader_positions.load([saved])
    found = walk(resumed, 7 - stop)
    assert [x.tolist() for x in found] == [x.tolist() for x in wanted[stop:]]
    assert len(data.loaded) == sum(map(len, found))  # nothing before the position is loaded


def test_a_position_waits_for_its_loader() -> None:
    world, data = World(), Squares()
    saved_world = World()
    saved_loader = ShardedLoader(LOADERS["in order"](Squares()), DataParallelCoordinate(0, 1, saved_world))
    next(iter(saved_loader))
    world.loader_positions.load([position.state() for position in saved_world.loader_positions.positions])
    found = walk(ShardedLoader(LOADERS["in order"](data), DataParallelCoordinate(0, 1, world)), 1)
    assert found[0][:, 0].tolist() == list(map(float, range(BATCH, 2 * BATCH)))
