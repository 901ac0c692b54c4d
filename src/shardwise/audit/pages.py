"""Pages that the recorder wrote, read back. Values of tensors stay in their file until they are asked for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Pages = dict[int, list["RecordedPage"]]  # by rank


@dataclass(frozen=True)
class RecordedShard:
    """What one rank holds of a tensor. `shape`, `ranges`, `flat`: its place in the full tensor, where that is known."""

    file: Any  # an open .npz
    key: str
    dtype: str
    shape: tuple[int, ...] | None
    ranges: list[list[list[int]]] | None
    flat: tuple[int, int] | None
    partial: bool

    @property
    def tensor(self) -> Tensor:
        """The values, in float64."""
        return torch.from_numpy(np.asarray(self.file[self.key])).double()

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the full tensor; of a shard without a place its own."""
        return self.shape if self.shape is not None else tuple(self.tensor.shape)

    @property
    def is_low_precision(self) -> bool:
        """Return whether its dtype has fewer bits than float32."""
        return self.dtype.rpartition(".")[2] in ("bfloat16", "float16")


Shards = dict[str, RecordedShard | None]


@dataclass(frozen=True)
class RecordedPage:
    """One page of one rank; the fields are those of the recorder's `Page`."""

    weights: Shards
    gradients: Shards
    buffers: Shards
    aliases: dict[str, list[str]]
    inputs: list[list[dict[str, Any]]]
    outputs: dict[str, list[Any]]
    kinds: dict[str, str]
    losses: list[float]
    targets: list[dict[str, Any]]
    masks: list[dict[str, Any]]
    norms: list[float]
    optimizers: list[dict[str, Any]]
    coarsest: str

    def shards_of(self, what: str) -> Shards:
        """Return its weights, gradients or buffers."""
        return {"weights": self.weights, "gradients": self.gradients, "buffers": self.buffers}[what]


def read_pages(folder: Path) -> Pages:
    """Read what all ranks of one run recorded."""
    pages: Pages = {}
    for place in sorted(folder.glob("rank*")):
        files = sorted(place.glob("*.json"), key=lambda p: int(p.stem))
        pages[int(place.name[4:])] = [_read_page(file) for file in files]
    return pages


def _read_page(file: Path) -> RecordedPage:
    record = json.loads(file.read_text())
    values = np.load(file.with_suffix(".npz"), allow_pickle=False)
    for what in ("weights", "gradients", "buffers"):
        record[what] = {name: None if place is None else _read_shard(values, place) for name, place in record[what].items()}
    return RecordedPage(**{name: record[name] for name in RecordedPage.__dataclass_fields__})


def _read_shard(values: Any, place: dict[str, Any]) -> RecordedShard:
    shape, flat = place["shape"], place["flat"]
    return RecordedShard(
        values, place["key"], place["dtype"], None if shape is None else tuple(shape), place["ranges"],
        None if flat is None else (flat[0], flat[1]), place["partial"],
    )  # fmt: skip
