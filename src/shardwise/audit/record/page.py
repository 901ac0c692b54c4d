"""One page of a record, and its two files: `N.json` says everything but the values of tensors, which lie in `N.npz`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .placement import LocalShard

_BIGGEST_BUFFER = 1 << 22  # elements; larger ones are tables and masks


@dataclass
class Page:
    """All that a process does between two optimizer steps. Tensors by name: at its start, but `gradients` at the step."""

    weights: dict[str, LocalShard | None] = field(default_factory=dict)
    gradients: dict[str, LocalShard | None] = field(default_factory=dict)
    buffers: dict[str, LocalShard | None] = field(default_factory=dict)
    aliases: dict[str, list[str]] = field(default_factory=dict)  # of each name all names of the same parameter
    inputs: list[list[dict[str, Any]]] = field(default_factory=list)  # of each call of a root module
    outputs: dict[str, list[Any]] = field(default_factory=dict)  # elements, sum, sum of squares, is partial; in forward order
    kinds: dict[str, str] = field(default_factory=dict)  # a module's class
    losses: list[float] = field(default_factory=list)
    targets: list[dict[str, Any]] = field(default_factory=list)
    masks: list[dict[str, Any]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # that clipping measured
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    coarsest: str = "float64"  # the dtype with the largest unit of rounding that a module put out

    def add_buffer(self, name: str, shard: LocalShard | None) -> None:
        """Add a buffer that is small enough to be statistics."""
        if shard is not None and shard.value.numel() <= _BIGGEST_BUFFER:
            self.buffers[name] = shard

    def write(self, folder: str, number: int, rank: int, num_ranks: int) -> None:
        """Write both files; the second one by a rename, so that a page that can be read is whole."""
        os.makedirs(folder, exist_ok=True)
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        record: dict[str, Any] = {"rank": rank, "ranks": num_ranks, "page": number}
        for name, value in vars(self).items():
            if name not in ("weights", "gradients", "buffers"):
                record[name] = value
                continue
            record[name] = {}
            for tensor, shard in value.items():
                record[name][tensor] = None
                if shard is not None:
                    key = f"a{len(arrays)}"
                    arrays[key] = shard.value.contiguous().numpy()
                    record[name][tensor] = {"key": key, **shard.describe()}
        np.savez(os.path.join(folder, f"{number}.npz"), **arrays)  # type: ignore[arg-type]
        with open(os.path.join(folder, f"{number}.new"), "w") as file:
            json.dump(record, file)
        os.replace(os.path.join(folder, f"{number}.new"), os.path.join(folder, f"{number}.json"))
