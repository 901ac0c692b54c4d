"""MPI as a transport, through mpi4py. In: ranks that mpirun or srun started. Out: their rendezvous address, and channels of groups.

A channel has the calls of `process_group.ProcessGroup`. Messages and collectives are non-blocking, so that both ends may send; a wait
polls MPI and sleeps in between, since MPI's own wait takes a whole core. Not modelled: tensors on a GPU, which are staged through the
host; progress outside waits, which is up to the MPI library; replacing a failed rank: MPI ends the job.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable, Sequence
from importlib import import_module
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import UsageError

MPI = "mpi"
SPIN_S, SLEEP_S = 100e-6, 50e-6
_NAMES = {
    torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.int64: "INT64_T", torch.int32: "INT32_T", torch.int16: "INT16_T",
    torch.int8: "INT8_T", torch.uint8: "UINT8_T",
}  # fmt: skip
_OPS = {"sum": "SUM", "max": "MAX", "min": "MIN"}
_ADDRESS_BYTES = 256
_LEAST_TAGS = 32767  # that every MPI has


def load_mpi() -> Any:
    """Return mpi4py's MPI module, initialised with threads.

    Raises:
        UsageError: there is no mpi4py, or no MPI library for it.
    """
    try:
        mpi: Any = import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"transport mpi needs mpi4py and an MPI library ({str(error).splitlines()[0]}); pip install 'shardwise[mpi]' beside the MPI "
            f"that "
            "starts the ranks, or leave SHARDWISE_TRANSPORT out: ranks that mpirun starts then use shared memory, gloo and NCCL"
        ) from error
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise UsageError("this MPI library was built without MPI_THREAD_MULTIPLE, which sums beside backward need; use another, or gloo")
    return mpi


def check_started(rank: int, num_ranks: int) -> None:
    """Raise UsageError unless MPI has the same rank and number of ranks."""
    world = load_mpi().COMM_WORLD
    if (world.rank, world.size) != (rank, num_ranks):
        raise UsageError(
            f"transport mpi: this is rank {rank} of {num_ranks}, and for MPI {world.rank} of {world.size}; start the ranks with mpirun or "
            "srun, not with shardwise.launch or torchrun"
        )


def broadcast_address(find: Callable[[], tuple[str, int]]) -> tuple[str, int]:
    """Return, on all ranks, the address and port that `find` returns on rank 0."""
    world = load_mpi().COMM_WORLD
    buffer = bytearray(_ADDRESS_BYTES)
    if world.rank == 0:
        address, port = find()
        text = f"{port} {address}".encode()
        buffer[: len(text)] = text
    world.Bcast(buffer, 0)
    port_text, _, address = buffer.rstrip(b"\0").decode().partition(" ")
    return address, int(port_text)


def local_ranks() -> tuple[int, int]:
    """Return (this rank's index on its host, number of ranks there)."""
    mpi = load_mpi()
    host_comm = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED)
    return int(host_comm.rank), int(host_comm.size)


def abort_all_on_exception() -> None:
    """End all ranks on an uncaught exception from now on: by default MPI waits at a rank's end for the others."""
    mpi, previous_hook = load_mpi(), sys.excepthook

    def abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous_hook(kind, error, trace)
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(1)

    sys.excepthook = abort


class Request:
    """A non-blocking operation."""

    __slots__ = ("_keep", "_request", "_timeout_s")

    def __init__(self, request: Any, keep: object, timeout_s: float) -> None:
        self._request, self._keep, self._timeout_s = request, keep, timeout_s

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        if self._keep is not None and self._request.Test():
            self._keep = None
        return self._keep is None

    def wait(self) -> None:
        """Return when it has ended. Raises RuntimeError after the timeout."""
        begun = time.monotonic()
        while not self.is_completed():
            passed = time.monotonic() - begun
            if passed > self._timeout_s:
                raise RuntimeError(f"Timed out after {self._timeout_s:g} s in MPI")
            if passed > SPIN_S:
                time.sleep(SLEEP_S)


class MpiChannel:
    """One group's collectives and messages. Exactly the members `ranks` create it, with the same `name`."""

    def __init__(self, ranks: Sequence[int], name: str, timeout_s: float) -> None:
        self._mpi, self._timeout_s = load_mpi(), timeout_s
        world = self._mpi.COMM_WORLD
        most = world.Get_attr(self._mpi.TAG_UB) or _LEAST_TAGS
        self._tags = int(most) + 1
        # Another thread may open another connection between the same ranks at the same time.
        self._comm = world.Create_group(world.group.Incl(list(ranks)), zlib.crc32(name.encode()) % self._tags)

    def widens(self, dtype: torch.dtype) -> bool:
        """Return whether tensors of this type can be reduced."""
        return dtype in _NAMES

    def all_reduce(self, x: Tensor, op: str, wait: bool) -> Request:
        return self._request(self._comm.Iallreduce(self._mpi.IN_PLACE, self._typed(x), getattr(self._mpi, _OPS[op])), x)

    def broadcast(self, x: Tensor, source: int, wait: bool) -> Request:
        return self._request(self._comm.Ibcast(self._bytes(x), source), x)

    def all_gather(self, out: Tensor, x: Tensor, sizes: Sequence[int], wait: bool) -> Request:
        return self._request(self._comm.Iallgather(self._bytes(x), self._bytes(out)), out, x)

    def exchange(self, out: Tensor, x: Tensor, arriving: Sequence[int], sizes: Sequence[int], wait: bool) -> Request:
        unit = x.element_size()
        sent, received = ((self._memory(t), [n * unit for n in counts], self._mpi.BYTE) for t, counts in ((x, sizes), (out, arriving)))
        return self._request(self._comm.Ialltoallv(list(sent), list(received)), out, x)

    def send(self, x: Tensor, to: int, tag: int) -> Request:
        return self._request(self._comm.Isend(self._bytes(x), to, tag % self._tags), x)

    def receive(self, x: Tensor, source: int, tag: int) -> Request:
        return self._request(self._comm.Irecv(self._bytes(x), source, tag % self._tags), x)

    def _request(self, request: Any, *keep: Tensor) -> Request:
        return Request(request, keep, self._timeout_s)

    def _memory(self, x: Tensor) -> Any:
        return self._mpi.memory.fromaddress(x.data_ptr(), x.nbytes)

    def _bytes(self, x: Tensor) -> list[Any]:
        return [self._memory(x), self._mpi.BYTE]

    def _typed(self, x: Tensor) -> list[Any]:
        return [self._memory(x), getattr(self._mpi, _NAMES[x.dtype])]
