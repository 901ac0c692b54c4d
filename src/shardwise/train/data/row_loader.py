"""Load a replica's own samples only. In: a user's `DataLoader`. Out: the same loader over requests for some rows of each batch.

Every rank runs the samplers, which draw as in the serial run; the data set is asked for this replica's samples alone. Where loading draws
random numbers, or the loader's `collate_fn` makes something else of some samples than of all, whole batches are loaded and cut, as the
serial run has them. Not modelled: a data set that counts its calls, and one that draws for some samples only in a worker.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from shardwise.capture.nesting import named_leaves
from shardwise.run.rank_agreement import digest_tensors
from shardwise.train.data.random_states import find_generators, read_states, write_states
from shardwise.train.data.sources import batch_size, take_rows


@dataclass(frozen=True, slots=True)
class RowRequest:
    """The `rows` of a batch of samples `indices` that a replica loads."""

    indices: Sequence[Any]
    rows: Sequence[int]


@dataclass(slots=True)
class RowBatchSampler:
    """A loader's batch sampler, whose batches become requests. `num_skipped`: batches to leave out in the next epoch, without loading them;
    then the global generators get `states_after`."""

    batches: Iterable[Sequence[Any]]
    rows_of: Callable[[int], Sequence[int]]
    num_skipped: int = 0
    states_after: Any = None

    def __iter__(self) -> Iterator[RowRequest]:
        num_skipped, states, self.num_skipped, self.states_after = self.num_skipped, self.states_after, 0, None
        batches = iter(self.batches)
        for _ in range(num_skipped):
            next(batches, None)
        if states is not None:
            write_states(states, [])
        for indices in batches:
            listed = list(indices)
            yield RowRequest(listed, self.rows_of(len(listed)))

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]  # as the loader's sampler says


class RowDataset(Dataset[Any]):
    """A data set that loads and collates the requested rows of a batch; other attributes are the user's data set's."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], loads_whole: bool) -> None:
        self.dataset, self._collate, self.loads_whole = dataset, collate, loads_whole
        self._generators = [] if loads_whole else find_generators((dataset, collate))
        self._form: list[Any] | None = None  # of the first batch of a collate function of the user's

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["dataset"], name)

    def __getitems__(self, request: RowRequest) -> tuple[Any, RowRequest, int, bool]:
        """Return the rows, the request, the number of samples in the whole batch, and whether whole batches are loaded."""
        if not self.loads_whole:
            before = read_states(self._generators)
            rows = self._load_rows(request)
            if rows is not None and read_states(self._generators) == before:
                return rows, request, len(request.indices), False
            write_states(before, self._generators)
            self.loads_whole = True
        whole = self._collate(self._load(request.indices))
        return whole, request, batch_size(whole), True

    def _load(self, indices: Sequence[Any]) -> list[Any]:
        load_all = getattr(self.dataset, "__getitems__", None)
        return list(load_all(indices)) if load_all is not None else [self.dataset[index] for index in indices]

    def _load_rows(self, request: RowRequest) -> Any:
        """Return this replica's rows; None where the collate function makes something else of them than of the whole batch."""
        if self._collate is default_collate:
            return self._collate(self._load([request.indices[row] for row in request.rows]))
        if self._form is not None:
            samples = self._load([request.indices[row] for row in request.rows])
            rows = self._collate(samples)
            if _form_of(rows) == self._form and batch_size(rows) == len(request.rows):
                return rows
        # The first batch, or one of another form (of longer samples): the whole of it tells whether samples are collated one by one.
        samples = self._load(request.indices)
        whole = self._collate(samples)
        if batch_size(whole) != len(samples):
            return None
        for number, sample in enumerate(samples):
            if digest_tensors(self._collate([sample])) != digest_tensors(take_rows(whole, [number])):
                return None
        self._form = _form_of(whole)
        return take_rows(whole, request.rows)


def _form_of(batch: Any) -> list[Any]:
    return [(path, x.dtype, tuple(x.shape[1:])) for path, x in named_leaves(batch) if isinstance(x, torch.Tensor)]


def pass_collated(loaded: Any) -> Any:
    """Return what `RowDataset` has collated already."""
    return loaded


def row_loader(loader: Any, rows_of: Callable[[int], Sequence[int]], loads_whole: bool) -> DataLoader[Any] | None:
    """Return a copy of a `DataLoader` that loads the rows `rows_of(batch size)` of each batch; None for loaders whose samples cannot be
    asked for: of an `IterableDataset`, without batches, or with an iteration of their own."""
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return None
    if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
        return None
    rows = copy.copy(loader)
    dataset = RowDataset(loader.dataset, loader.collate_fn, loads_whole)
    # Set in the table: a loader refuses to change these attributes.
    rows.__dict__.update(
        dataset=dataset, collate_fn=pass_collated, batch_sampler=RowBatchSampler(loader.batch_sampler, rows_of), _iterator=None
    )
    return rows
