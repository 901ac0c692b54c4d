"""The world and the data coordinate that this context works in, for calls that are not given one.

Set once by whoever starts ranks; read by `weft.parallelize`, `weft.auto_parallelize` and `weft.shard`. A context variable, so that
nothing else in the process sees it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TextIO

from weft.world.guard import TOKEN
from weft.world.world import World

# Of torchrun, srun's and mpirun's wrappers, MPICH, Open MPI, MVAPICH.
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_WORLD: ContextVar[World | None] = ContextVar("weft_world", default=None)


@dataclass(frozen=True, slots=True)
class Place:
    """Which of `data_size` equal parts of every batch belongs to this rank of `world`."""

    data_index: int = 0
    data_size: int = 1
    world: World | None = None


_PLACE: ContextVar[Place | None] = ContextVar("weft_place", default=None)


def set_world(world: World) -> None:
    """Called once in every rank, by what started it."""
    _WORLD.set(world)


def current_world(device: str = "auto") -> World:
    """This rank's world: as it was launched, or as torchrun or srun started it, or a world of one rank."""
    world = _WORLD.get()
    if world is None:
        world = World.from_environment(os.environ, device)
        _WORLD.set(world)
    return world


@contextmanager
def launched_by_nobody() -> Iterator[None]:
    """A block in which other libraries find no launcher's variables, and so make no process groups of their own."""
    told = {name: os.environ.pop(name) for name in _LAUNCHED if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(told)


class _Main:
    """`weft.is_main`: whether this process is rank 0, which prints and writes. Works with and without a call: `if weft.is_main:`.

    >>> import weft
    >>> bool(weft.is_main), weft.is_main()
    (True, True)
    """

    def __bool__(self) -> bool:
        return current_world().rank == 0

    def __call__(self) -> bool:
        return bool(self)


is_main = _Main()


def print_once(*values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = True) -> None:
    """`weft.print`: as `print`, on rank 0 alone."""
    if is_main:
        print(*values, sep=sep, end=end, file=file, flush=flush)


def set_place(place: Place) -> None:
    """Called where a model is divided."""
    _PLACE.set(place)


def current_place() -> Place | None:
    """The data coordinate of the model that was divided last; None before."""
    return _PLACE.get()


def token() -> str:
    """The secret that ranks and servers share, see `weft.world.guard`; empty where there is none."""
    return os.environ.get(TOKEN, "")
