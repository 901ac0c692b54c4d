"""Which parameter of the serial run a rank's parameter is, and which of its elements: by place, name and initial values.

Frameworks rename parameters (a pipeline stage counts its own layers), and shards made by hand say nothing of themselves. A parameter whose
values are all equal (zeros, ones) matches anything, so it follows its module's other parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from shardwise.audit.pages import Pages, RecordedShard

_COPY = re.compile(r"#\d+$")  # a further block of the same parameter on the same rank


@lru_cache(maxsize=256)
def _all_indices(numel: int) -> Tensor:
    """Return the indices of a flat tensor, which all tensors of this size share and nobody changes."""
    return torch.arange(numel)


@dataclass
class GatheredShard:
    """One rank's values of a serial parameter's elements `index`."""

    rank: int
    index: Tensor
    values: Tensor
    partial: bool


def is_constant(values: Tensor) -> bool:
    """Return whether all elements are equal."""
    return values.numel() == 0 or bool((values == values.flatten()[0]).all())


def canonical_name(aliases: dict[str, list[str]], name: str) -> str:
    """Return the first of the names of a tied parameter."""
    return aliases.get(name, [name])[0]


@dataclass
class ParameterMatch:
    """The match of all ranks' parameters with the serial run's. `renamed`: other names; `guessed`: placed by the rank alone."""

    serial: dict[str, RecordedShard]
    aliases: dict[str, list[str]]
    names: dict[tuple[int, str], str] = field(default_factory=dict)
    indices: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    unmatched: list[tuple[int, str]] = field(default_factory=list)
    guessed: list[str] = field(default_factory=list)
    _prefixes: dict[str, str] = field(default_factory=dict)  # of modules, on the rank that is being matched
    _rows: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)  # serial names matched on this rank

    def match_ranks(self, ranks: Pages) -> None:
        """Match the parameters of all ranks; those with telling values first."""
        for rank, pages in ranks.items():
            self._prefixes, self._rows, self._taken = {}, {}, set()
            held = {name: p for name, p in pages[0].weights.items() if p is not None}
            for name in sorted(held, key=lambda n: is_constant(held[n].tensor)):
                self._match_one(rank, name, held[name])

    def _match_one(self, rank: int, name: str, shard: RecordedShard) -> None:
        first: tuple[str, Tensor] | None = None
        values, plain = shard.tensor.flatten(), _COPY.sub("", name)
        for candidate in self._candidates(plain, values):
            index = self.find_place(rank, name, shard, candidate)
            if index is None:
                continue
            first = first or (candidate, index)
            expected = self.serial[candidate].tensor.flatten()[index]
            if torch.allclose(values, expected, rtol=1e-2 if shard.is_low_precision else 1e-6, atol=1e-12):
                return self._keep(rank, name, candidate, index)
            if shard.ranges is not None and candidate == plain:
                break
        if first and first[0].rpartition(".")[2] == plain.rpartition(".")[2]:
            return self._keep(rank, name, *first)
        self.unmatched.append((rank, name))

    def _candidates(self, name: str, values: Tensor) -> Iterator[str]:
        seen: set[str] = set()
        names = [name]
        stem = name.rpartition(".")[0]
        while stem:
            if stem in self._prefixes:
                names.insert(0, self._prefixes[stem] + name[len(stem) :])
                break
            stem = stem.rpartition(".")[0]
        names += [n for n in self.serial if n.endswith("." + name) or name.endswith("." + n)]
        if is_constant(values):  # the last resort: the first of its kind, in forward order, that no other name has
            leaf = name.rpartition(".")[2]
            names += [n for n in self.serial if n.rpartition(".")[2] == leaf and n not in self._taken]
        else:
            names += list(self.serial)
        for candidate in names:
            if candidate in self.serial and candidate not in seen:
                seen.add(candidate)
                yield candidate

    def _keep(self, rank: int, name: str, serial_name: str, index: Tensor) -> None:
        self.indices[rank, name], self.names[rank, name] = index, serial_name
        self._taken.add(serial_name)
        name = _COPY.sub("", name)
        if serial_name != name:
            self.renamed[name] = serial_name
        own, other = name.rpartition(".")[0], serial_name.rpartition(".")[0]
        while own and other and own not in self._prefixes:
            self._prefixes[own] = other
            if own.rpartition(".")[2] != other.rpartition(".")[2]:
                break
            own, other = own.rpartition(".")[0], other.rpartition(".")[0]

    def find_place(self, rank: int, name: str, shard: RecordedShard, serial_name: str) -> Tensor | None:
        """Return the flat indices of a shard's elements in a serial parameter; None if it cannot be a part of it."""
        shape, own = self.serial[serial_name].full_shape, tuple(shard.tensor.shape)
        full = _all_indices(prod(shape))
        if shard.shape is not None:
            if shard.shape != shape:
                return None
            if shard.ranges is not None:
                block = full.reshape(shape)
                for dim, runs in enumerate(shard.ranges):
                    block = torch.cat([block.narrow(dim, start, stop - start) for start, stop in runs] or [block.narrow(dim, 0, 0)], dim)
                full = block.flatten()
            index = full if shard.flat is None else full[shard.flat[0] : shard.flat[1]]
            return index if index.numel() == shard.tensor.numel() else None
        if own == shape:
            return full
        return self._find_rows(rank, name, shard.tensor, serial_name)

    def _find_rows(self, rank: int, name: str, values: Tensor, serial_name: str) -> Tensor | None:
        """Find the rows (of one dimension) of a serial parameter that a shard without a place consists of."""
        shape, own = self.serial[serial_name].full_shape, tuple(values.shape)
        other = [d for d in range(len(shape)) if d >= len(own) or own[d] != shape[d]]
        if len(own) != len(shape) or len(other) != 1 or own[other[0]] > shape[other[0]]:
            return None
        dim, key = other[0], (name.rpartition(".")[0], shape[other[0]])
        if not is_constant(values):
            rows = self.serial[serial_name].tensor.float().reshape(shape).movedim(dim, 0)
            positions = {row.contiguous().numpy().tobytes(): i for i, row in enumerate(rows)}
            found = [positions.get(row.contiguous().numpy().tobytes()) for row in values.float().movedim(dim, 0)]
            if None in found:
                return None
            self._rows[key] = [i for i in found if i is not None]
        places = self._rows.get(key)  # a constant bias lies where its weight's rows lie
        if places is None or len(places) != own[dim]:
            part = rank % max(1, shape[dim] // own[dim])
            places = list(range(part * own[dim], min(shape[dim], (part + 1) * own[dim])))
            self.guessed.append(name)
        full = _all_indices(prod(shape)).reshape(shape)
        return full.movedim(dim, 0)[places].movedim(0, dim).flatten()

    def gather(self, ranks: Pages, step: int, what: str) -> dict[str, list[GatheredShard]]:
        """Return all ranks' shards of a page, by the (first) serial name."""
        gathered: dict[str, list[GatheredShard]] = {}
        for rank, pages in ranks.items():
            if step >= len(pages):
                continue
            for name, shard in pages[step].shards_of(what).items():
                is_alias = canonical_name(pages[step].aliases, name) != name
                if shard is None or (rank, name) not in self.names or is_alias:
                    continue
                values, index = shard.tensor.flatten(), self.indices[rank, name]
                found = index if index.numel() == values.numel() else self.find_place(rank, name, shard, self.names[rank, name])
                if found is not None and found.numel() == values.numel():
                    key = canonical_name(self.aliases, self.names[rank, name])
                    gathered.setdefault(key, []).append(GatheredShard(rank, found, values, shard.partial))
        return gathered


def match_parameters(serial: Pages, ranks: Pages) -> ParameterMatch:
    """Match the parameters of a parallel run with those of the serial run."""
    first = serial[min(serial)][0]
    match = ParameterMatch({name: p for name, p in first.weights.items() if p is not None}, first.aliases)
    match.match_ranks(ranks)
    return match
