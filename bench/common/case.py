"""What is measured: the model, its batch, and the settings that every contender is given alike. No torch here."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Case:
    """A model of the zoo and its work for a step: `batch` samples of `sequence` tokens, in `microbatches` where a pipeline needs them."""

    model: str = "gpt-10m"
    batch: int = 8
    sequence: int = 256
    microbatches: int = 4
    seed: int = 0
    lr: float = 1e-4
    together: int = 10  # contenders that fit into 20 GiB at a time

    def __post_init__(self) -> None:
        if self.batch % self.microbatches:
            raise ValueError(f"a batch of {self.batch} does not divide into {self.microbatches} microbatches")

    @property
    def label(self) -> str:
        return f"{self.model}, {self.batch} x {self.sequence}"


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to train the case: `module` has `build(case, rank, num_ranks, **options) -> step`.

    `settings`: "equal" gives every contender the same threads, allocator and matrix products; "own" leaves them as each sets them.
    `needs`: packages that only the peers' environment has. `launcher`: the contender starts its ranks itself.
    """

    name: str
    module: str
    num_ranks: int = 2
    threads: int = 1
    precision: str = "float32"
    settings: str = "equal"
    options: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    launcher: bool = False

    def with_settings(self, settings: str) -> Contender:
        return replace(self, settings=settings)

    def environment(self) -> dict[str, str]:
        """What the settings add to a rank's environment."""
        threads = {} if self.launcher else {"OMP_NUM_THREADS": str(self.threads)}
        if self.settings == "own":
            return threads
        from shardwise.world.launch.launch import ALLOCATOR  # takes torch with it
        from shardwise.world.matmul_backend import PRODUCTS, load_or_measure_timings

        return {**ALLOCATOR, PRODUCTS: load_or_measure_timings().chosen, **threads}


def to_text(case: Case, contender: Contender) -> str:
    """What a rank is told, as one argument."""
    return json.dumps({"case": asdict(case), "contender": asdict(contender)})


def from_text(text: str) -> tuple[Case, Contender]:
    """Read `to_text` back."""
    read = json.loads(text)
    contender = read["contender"] | {"needs": tuple(read["contender"]["needs"])}
    return Case(**read["case"]), Contender(**contender)


def corpus() -> bytes:
    """Text that every machine with Python has: a module of the standard library, the same bytes for all contenders of a run."""
    return Path(argparse.__file__).read_bytes()


def window_starts(case: Case, step: int, length: int) -> list[int]:
    """Where the samples of a step begin in a text of `length` bytes: a fixed walk with a stride prime to most lengths."""
    first = (case.seed + step) * case.batch
    return [((first + i) * 7919) % (length - case.sequence - 1) for i in range(case.batch)]
