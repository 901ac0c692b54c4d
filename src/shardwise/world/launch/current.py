"""The current world and data-parallel coordinate of this context, for calls without explicit ones.

Set once by the launcher of the ranks; read by `shardwise.parallelize`, `shardwise.auto_parallelize` and `shardwise.shard`. Context
variables, so that
nothing else in the process sees them.
"""

from __future__ import annotations

import importlib
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TextIO

from shardwise.errors import UsageError
from shardwise.world.guard import NO_TOKEN, TOKEN_VARIABLE
from shardwise.world.launch.join import join
from shardwise.world.world import World

# Ray's switch for systems whose firewalls ask about every listener: its nodes then have loopback's address.
_LISTENS_BEYOND_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"

# Set by torchrun, wrappers of srun and mpirun, MPICH, Open MPI, MVAPICH.
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_WORLD: ContextVar[World | None] = ContextVar("shardwise_world", default=None)


@dataclass(slots=True)
class CalledBatch:
    """Record of the batch with which the loop's models were called last.

    `digest`: of the first of a series that did not come through `shardwise.shard`; empty while batches do. `has_all_rows`: it came through
    `shardwise.shard`, with fewer samples than there are replicas, so that each has all. `was_reported`: the user was warned of
    whole batches.
    """

    digest: str = ""
    has_all_rows: bool = False
    was_reported: bool = False


@dataclass(frozen=True, slots=True)
class DataParallelCoordinate:
    """The index, among `data_size` equal shards of every batch, of the shard of this rank of `world`.

    `ranks`: by index, this rank's peers with the other shards; ranks outside have the rows of one of them.
    """

    data_index: int = 0
    data_size: int = 1
    world: World | None = None
    ranks: tuple[int, ...] = (0,)
    called_batch: CalledBatch = field(default_factory=CalledBatch, compare=False)


_DATA_COORDINATE: ContextVar[DataParallelCoordinate | None] = ContextVar("shardwise_place", default=None)


def set_world(world: World) -> None:
    """Set this rank's world; called once in every rank by its launcher."""
    _WORLD.set(world)


def current_world(device: str = "auto") -> World:
    """Return this rank's world: as launched, or as torchrun or srun started it, or a world of one rank."""
    world = _WORLD.get()
    if world is None:
        world = join(os.environ, device)
        _WORLD.set(world)
    return world


@contextmanager
def without_launcher_variables() -> Iterator[None]:
    """Context in which other libraries see no launcher's variables, and so make no process groups of their own."""
    removed = {name: os.environ.pop(name) for name in _LAUNCHER_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(removed)


@contextmanager
def loopback_of_one_host(world: World) -> Iterator[None]:
    """Context in which torch's gloo connects ranks that `shardwise.launch` started over this host's loopback interface."""
    name = "GLOO_SOCKET_IFNAME"
    is_set = world.rendezvous is None and name not in os.environ and os.path.exists("/sys/class/net/lo")
    if is_set:
        os.environ[name] = "lo"
    try:
        yield
    finally:
        if is_set:
            del os.environ[name]


class _IsMain:
    """`shardwise.is_main`: true on rank 0, which prints and writes. Works with and without a call: `if shardwise.is_main:`.

    >>> import shardwise
    >>> bool(shardwise.is_main), shardwise.is_main()
    (True, True)
    """

    def __bool__(self) -> bool:
        return current_world().rank == 0

    def __call__(self) -> bool:
        return bool(self)


is_main = _IsMain()


def print_once(*values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = True) -> None:
    """Print on rank 0 only (`shardwise.print`)."""
    if is_main:
        print(*values, sep=sep, end=end, file=file, flush=flush)


def current_rank() -> int:
    """Return the number of this rank, from 0 (`shardwise.rank`); 0 in a single process."""
    return current_world().rank


def current_num_ranks() -> int:
    """Return the number of ranks of the run (`shardwise.num_ranks`); 1 in a single process."""
    return current_world().num_ranks


def set_data_coordinate(coordinate: DataParallelCoordinate) -> None:
    """Set the data coordinate; called when a model is parallelized."""
    _DATA_COORDINATE.set(coordinate)


def current_data_coordinate() -> DataParallelCoordinate | None:
    """Return the data coordinate of the model that was parallelized last; None before."""
    return _DATA_COORDINATE.get()


def run_token() -> str:
    """Return the secret that ranks and servers share, see `shardwise.world.guard`; empty if there is none."""
    token = os.environ.get(TOKEN_VARIABLE, NO_TOKEN)
    return "" if token == NO_TOKEN else token


def configure_local_ray() -> None:
    """Have a Ray that starts here listen on loopback and ask for a token. A token of the user's stays.

    Ray reads the variables when it is imported and when it starts; its other processes inherit them. One of its ports (calls between
    replicas of Ray Serve) listens on all interfaces whatever one sets, so that the token is needed as well.

    Raises:
        UsageError: Ray has been imported already, and this version of it does not read the variables again.
    """
    before = dict(os.environ)
    os.environ |= {_LISTENS_BEYOND_LOOPBACK: "0", "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    if "ray._raylet" in sys.modules and before != os.environ:
        try:
            _reread_ray_variables(sys.modules["ray._raylet"], importlib.import_module("ray._private.ray_constants"))
        except (ImportError, AttributeError) as error:
            raise UsageError(
                f"ray was imported before shardwise could set {_LISTENS_BEYOND_LOOPBACK}=0 and RAY_AUTH_MODE=token, and this version of it "
                f"does not read them again ({error}); import it later, or set them, and RAY_AUTH_TOKEN, before Python starts"
            ) from error


def _reread_ray_variables(native: Any, constants: Any) -> None:
    """Have an imported Ray read its variables again, in the order of its own tests: without it this process would send no token."""
    native.Config.initialize("")
    native.AuthenticationTokenLoader.instance().reset_cache()
    constants.ENABLE_RAY_CLUSTER &= False  # an AttributeError where this version has no such name
