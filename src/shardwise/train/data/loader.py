"""Data loading: the rows of a global batch that each data rank takes, and batches prefetched by threads."""

from __future__ import annotations

import json
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from shardwise.capture.nesting import map_tensors, with_sample_count
from shardwise.errors import UsageError
from shardwise.plan.ir.placement import even_shard_range
from shardwise.plan.layout import Layout
from shardwise.plan.microbatches import check_equal_shares, microbatch_sizes
from shardwise.run.loop.replica_values import expose_replicas
from shardwise.run.rank_agreement import check_batch_agrees, digest_tensors, other_batch_error
from shardwise.train.data.position import position_of
from shardwise.train.data.row_loader import RowRequest, row_loader
from shardwise.train.data.sources import Batch, batch_size, take_rows
from shardwise.world.launch.current import DataParallelCoordinate
from shardwise.world.world import World

_NUM_PREFETCHED = 2


class DataCoordinate(Protocol):
    """A position along the data axis, such as an Engine."""

    @property
    def data_index(self) -> int: ...

    @property
    def data_size(self) -> int: ...


def rows_of(num_samples: int, index: int, count: int, microbatches: int = 1) -> list[int]:
    """Rows of a global batch for data coordinate `index` of `count`: its shard of every microbatch.

    So a microbatch has the same samples in any layout, which matters for models that couple samples (batch norm).

    >>> rows_of(8, 1, 2), rows_of(8, 1, 2, microbatches=2), rows_of(6, 1, 2, microbatches=2)
    ([4, 5, 6, 7], [2, 3, 6, 7], [2, 3, 5])

    Raises:
        Infeasible: the batch does not divide over `count`, or has too few samples.
    """
    check_equal_shares(num_samples, Layout(data=count), "the ranks of a plain loop have equal parts, whose gradients are averaged")
    return _rows_by_microbatch(microbatch_sizes(num_samples, count, microbatches), lambda size: even_shard_range(size, count, index))


def _rows_by_microbatch(sizes: Sequence[int], shard_range: Callable[[int], tuple[int, int]]) -> list[int]:
    """Concatenate a rank's rows of all microbatches. `shard_range`: (first row, number of rows) by the size of a microbatch."""
    rows: list[int] = []
    start = 0
    for size in sizes:
        first, count = shard_range(size)
        rows += range(start + first, start + first + count)
        start += size
    return rows


def shard(batches: Iterable[Batch], where: DataCoordinate) -> Iterator[Batch]:
    """Yield this data coordinate's rows of every batch of any loader: tensors, tuples, lists and dicts of them. The last may be smaller.

    Every rank must be given the same batches; ranks that differ only in another axis get the same rows.

    In a plain loop all ranks get a whole batch if it has fewer samples than there are data ranks, since each must have some.

    Raises:
        UsageError: the first batch differs from rank 0's.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> list(shard([torch.arange(4)], SimpleNamespace(data_index=1, data_size=2)))
    [tensor([2, 3])]
    """
    world: World | None = getattr(where, "world", None)
    for number, batch in enumerate(batches):
        if number == 0 and world is not None and world.num_ranks > 1:
            check_batch_agrees(batch, world)
        samples = batch_size(batch)
        in_loop = not hasattr(where, "sizes_of")
        rows = batch if in_loop and samples < where.data_size else take_rows(batch, rows_of_partial_batch(samples, where))
        # An engine's stages may have different data sizes: the number of samples marks rows that are not the whole batch.
        yield rows if in_loop and where.data_size == 1 else with_sample_count(rows, samples)


class ShardedLoader:
    """A loader sharded as by `shard`, which can be iterated once an epoch like the loader itself.

    Of a `DataLoader` each replica loads its own samples only (`train/data/row_loader`), unless `load_whole`. Its position in the epoch is
    in the checkpoints of `shardwise.save`.

    >>> from types import SimpleNamespace
    >>> import torch
    >>> mine = ShardedLoader([torch.arange(4), torch.arange(3)], SimpleNamespace(data_index=1, data_size=2))
    >>> len(mine), [x.tolist() for x in mine], [x.tolist() for x in mine]
    (2, [[2, 3], [2]], [[2, 3], [2]])
    """

    def __init__(self, loader: Iterable[Batch], where: DataCoordinate, load_whole: bool = False) -> None:
        self.loader, self._where = loader, where
        self._position = position_of(loader, getattr(where, "world", None) if isinstance(where, DataParallelCoordinate) else None)
        self._row_loader = row_loader(loader, self._rows_to_load, load_whole or where.data_size == 1)
        self._is_first_epoch, self._loads_whole = True, True

    def __iter__(self) -> Iterator[Batch]:
        if isinstance(self._where, DataParallelCoordinate):
            expose_replicas(self._where)
        if self._row_loader is None:
            return shard(self._position.run_epoch(self.loader), self._where)
        return self._load_rows(self._row_loader)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # as the loader says

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)

    def _rows_to_load(self, num_samples: int) -> list[int]:
        has_each_some = hasattr(self._where, "sizes_of") or num_samples >= self._where.data_size
        return rows_of_partial_batch(num_samples, self._where) if has_each_some else list(range(num_samples))

    def _load_rows(self, loader: DataLoader[Any]) -> Iterator[Batch]:
        for number, (loaded, request, samples, is_whole) in enumerate(self._position.run_epoch(loader)):
            if number == 0:
                loaded, samples, is_whole = self._agree_on_first(loader, (loaded, request, samples, is_whole))
            elif is_whole and not self._loads_whole:
                raise UsageError(
                    "loading draws random numbers, or collate_fn pads, for some batches only, which other ranks do not see: "
                    "shardwise.shard(loader, load_whole=True) loads whole batches on every rank"
                )
            rows = take_rows(loaded, self._rows_to_load(samples)) if is_whole else loaded
            is_alone = not hasattr(self._where, "sizes_of") and self._where.data_size == 1
            yield rows if is_alone else with_sample_count(rows, samples)

    def _agree_on_first(self, loader: DataLoader[Any], first: tuple[Any, RowRequest, int, bool]) -> tuple[Any, int, bool]:
        """Compare the first batch of an epoch with the other ranks'; all load whole batches if one has to. Return it, its number of
        samples, and whether it is whole."""
        loaded, request, samples, is_whole = first
        world: World | None = getattr(self._where, "world", None)
        dataset: Any = loader.dataset
        if world is not None and world.num_ranks > 1:
            content = loaded if is_whole else _stored_tensors(dataset.dataset)
            digests = (zlib.crc32(repr([str(index) for index in request.indices]).encode()), digest_tensors(content), is_whole)
            ranks = [json.loads(text) for text in world.all_gather_text(json.dumps(digests))]
            if ranks[0][0] != digests[0] or (ranks[0][2] == is_whole and ranks[0][1] != digests[1]):
                raise other_batch_error(world)
            if any(whole for *_, whole in ranks) and not is_whole:
                dataset.loads_whole = True
                if loader.num_workers == 0:
                    loaded, request, samples, is_whole = dataset.__getitems__(request)
                elif self._is_first_epoch:
                    raise UsageError(
                        "loading draws random numbers on some ranks only: shardwise.shard(loader, load_whole=True) loads whole batches"
                    )
        self._loads_whole, self._is_first_epoch = is_whole or loader.num_workers > 0, False
        return loaded, samples, is_whole


def _stored_tensors(dataset: Any) -> Any:
    """Return the tensors that a data set holds in memory; those of a part of one are of the whole."""
    while hasattr(dataset, "dataset") and not isinstance(dataset, torch.Tensor):
        dataset = dataset.dataset
    if isinstance(dataset, list | tuple):
        return dataset[:1]
    return [value for value in getattr(dataset, "__dict__", {}).values() if isinstance(value, torch.Tensor | list | tuple)][:8]


def rows_of_partial_batch(num_samples: int, where: DataCoordinate) -> list[int]:
    """Rows as of `rows_of`, for a batch that may be smaller than the plan's, in fewer microbatches if necessary."""
    sizes_of = getattr(where, "sizes_of", None)  # an Engine has microbatches, a coordinate of a plain loop has none
    if sizes_of is None:
        first, count = even_shard_range(num_samples, where.data_size, where.data_index)
        return list(range(first, first + count))
    return _rows_by_microbatch(
        sizes_of(num_samples), getattr(where, "rows_of", lambda size: even_shard_range(size, where.data_size, where.data_index))
    )


class Loader:
    """Batches `make(step)` of steps `start <= step < stop`, in order, prefetched by `workers` threads.

    `pin`: CPU tensors in page-locked memory, from which copies to a GPU overlap. The threads use the GPU that is current when the loader
    is made. `waited_s`: seconds that the consumer has waited for batches.
    An exception in `make` is raised when the batch is consumed. Use it in a `with`, or exhaust it: that ends the threads.

    >>> with Loader(lambda step: step * 10, 2, 5) as loader:
    ...     list(loader)
    [20, 30, 40]
    """

    def __init__(self, make: Callable[[int], Batch], start: int, stop: int, pin: bool = False, workers: int = 1) -> None:
        self._make, self._pin, self._steps = make, pin, iter(range(start, stop))
        here = partial(torch.cuda.set_device, torch.cuda.current_device()) if pin else None  # a new thread starts with the first GPU
        self._pool = ThreadPoolExecutor(workers, "shardwise-loader", initializer=here)
        self._pending: deque[Future[Batch]] = deque()
        self.waited_s = 0.0
        for _ in range(workers + _NUM_PREFETCHED - 1):
            self._prepare_next()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._pending:
            self.close()
            raise StopIteration
        began = time.perf_counter()
        try:
            batch = self._pending.popleft().result()
        except BaseException:
            self.close()
            raise
        self.waited_s += time.perf_counter() - began
        self._prepare_next()
        return batch

    def close(self) -> None:
        """End the threads."""
        self._steps = iter(())
        for future in self._pending:
            future.cancel()
        self._pending.clear()
        self._pool.shutdown()

    def _prepare_next(self) -> None:
        for step in self._steps:
            self._pending.append(self._pool.submit(self._prepare, step))
            return

    def _prepare(self, step: int) -> Batch:
        batch = self._make(step)
        return map_tensors(batch, lambda x: x.pin_memory() if x.device.type == "cpu" else x) if self._pin else batch
