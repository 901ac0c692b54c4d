"""Asynchronous collectives, and helpers for their tensors and errors. In: a transport's operation. Out: `CollectiveWork` to wait for.

A transport reads memory: a tensor's elements must lie there in order, without lazy conjugation or negation.
"""

from __future__ import annotations

import linecache
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import RunError, UsageError
from shardwise.plan.ir.placement import even_shard_range
from shardwise.world import recorder

if TYPE_CHECKING:
    from shardwise.world.comm.group import Group

# Folders of code that is not the user's program: shardwise, the standard library, whatever is installed.
_OWN_CODE = (str(Path(__file__).parents[2]), sysconfig.get_path("stdlib"), sys.prefix)
DTYPES = {getattr(torch, name): code for code, name in enumerate(recorder.DTYPES) if code}
Lengths = int | Sequence[int] | None  # full length of a dimension, lengths of its shards, or None for equal shards
NARROW = (torch.bfloat16, torch.float16)
# Types in which summands are added if a transport cannot add theirs, or would round more than once.
ACCUMULATION_DTYPES = {**dict.fromkeys(NARROW, torch.float32), torch.int16: torch.int32}
# Parts of the transports' errors after a peer's failure, in all versions observed: a symptom, not the cause.
PEER_LOSS_MESSAGES = (
    "onnection closed", "onnection reset", "roken pipe", "ocket closed", "onnection refused", "Timed out", "timed out", "Timeout",
    "remote process exited", "NCCL communicator was aborted", "Application timeout",
)  # fmt: skip


class LostPeer(RunError):
    """A collective ended because another rank has failed, or did not join in time. Never the first cause of a failure."""


def is_peer_loss(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, is a peer loss."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    lost = (LostPeer, dist.DistNetworkError)
    return any(isinstance(e, lost) or (type(e) is RuntimeError and any(part in str(e) for part in PEER_LOSS_MESSAGES)) for e in chain)


def explain_transport_error(rank: int, last: object, error: BaseException) -> RunError:
    """Return a RunError (or LostPeer) for a transport's `error` in the `last` collective of `rank`."""
    text = str(error).split("\n")[0]
    call = _describe_users_call(sys._getframe())
    if any(part in text for part in PEER_LOSS_MESSAGES):
        return LostPeer(f"rank {rank} lost another rank in {last}: {text}{call}")
    remedy = "all ranks of a group must call the same collectives with matching shapes and dtypes"
    return RunError(f"rank {rank} failed in {last}: {text}; {remedy}{call}")


def _describe_users_call(frame: FrameType | None) -> str:
    """Describe the line of the user's program that led to a frame, which every rank must run; empty in threads of the library's own."""
    while frame is not None and (frame.f_code.co_filename.startswith(_OWN_CODE) or not Path(frame.f_code.co_filename).is_file()):
        frame = frame.f_back
    if frame is None:
        return ""
    file, line = frame.f_code.co_filename, frame.f_lineno
    words = " ".join(linecache.getline(file, line).split())
    return f"; every rank must run {Path(file).name}:{line}, `{words}`: leave it out of what one rank does alone, as under `if rank == 0`"


class CollectiveWork:
    """An asynchronous collective. `wait()` returns when its result may be used; a second wait does nothing."""

    __slots__ = ("_at", "_finish", "_group", "_keep", "_work")

    def __init__(self, group: Group | None, work: Any, at: int, finish: Callable[[], object] | None, keep: object) -> None:
        self._group = group
        self._work = work
        self._at = at
        self._finish = finish
        self._keep = keep

    def wait(self) -> None:
        """Block this thread (gloo) or this CUDA stream (NCCL). Raises LostPeer or RunError with the group and the collective."""
        work = self._work
        if work is None:
            return
        group = self._group
        assert group is not None
        began = time.monotonic()
        try:
            work.wait()
        except RuntimeError as error:
            raise group.explain_error(error) from error
        self._work = None
        if self._at >= 0:
            group.recorder.finish(self._at, began)
        if self._finish is not None:
            self._finish()
        self._keep = self._finish = None

    def call_after(self, finish: Callable[[], object]) -> None:
        """Call `finish` once when this has been waited for, after what its collective does then; at once if it has been."""
        earlier = self._finish
        if self._work is None:
            finish()
        else:
            self._finish = finish if earlier is None else lambda: (earlier(), finish())

    def without_timing(self) -> CollectiveWork:
        """Return itself, recorded as ended already, so that a rank that waits late, or never, does not seem to hang."""
        if self._group is not None and self._work is not None and self._at >= 0:
            self._group.recorder.finish(self._at, time.monotonic())
            self._at = -1
        return self

    @property
    def is_done(self) -> bool:
        """True if `wait` would return at once."""
        return self._work is None or bool(self._work.is_completed())


DONE = CollectiveWork(None, None, 0, None, None)


def synchronize_device(device: torch.device) -> None:
    """Return when the device has finished this process's work; at once on CPUs."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_lazy_view(x: Tensor) -> bool:
    """Return whether the memory of `x` holds conjugated or negated elements: transports read the memory."""
    return x.is_conj() or x.is_neg()


def concatenate_flat(pieces: Sequence[Tensor]) -> Tensor:
    """Return the concatenated elements of all pieces, without intermediate copies."""
    flat = pieces[0].new_empty(sum(x.numel() for x in pieces))
    for target, x in zip(torch.split(flat, [x.numel() for x in pieces]), pieces, strict=True):
        target.view(x.shape).copy_(x)
    return flat


def is_dense_in_order(x: Tensor) -> bool:
    """Return whether the memory of `x` is its elements in order."""
    return x.is_contiguous() and not is_lazy_view(x)


def check_fits(full: Tensor, part: Tensor, members: int) -> None:
    """Raise UsageError unless both are contiguous, of one dtype, and `full` is `members` times as large as `part`."""
    if full.numel() != members * part.numel() or full.dtype != part.dtype or not (is_dense_in_order(full) and is_dense_in_order(part)):
        raise UsageError(
            f"{full.numel()} elements of {full.dtype} for {members} pieces of {part.numel()} of {part.dtype}; "
            f"give contiguous tensors of one dtype, the whole {members} times the piece"
        )


def gathered_lengths(group: Group, local_length: int, length: Lengths) -> list[int]:
    """Return the lengths of the members' shards of a dimension, given those or the full length; None: all as long as `local_length`."""
    if length is None:
        return [local_length] * group.size
    lengths = shard_lengths(group, length)
    if local_length != lengths[group.index]:
        raise UsageError(
            f"member {group.index} of {group.size} has {local_length} of a dimension of {sum(lengths)}; its piece is {lengths[group.index]}"
        )
    return lengths


def shard_lengths(group: Group, length: int | Sequence[int]) -> list[int]:
    """Return the lengths of the members' shards of a dimension of `length`, or the given ones.

    Raises:
        UsageError: there are more or fewer lengths than members.
    """
    if isinstance(length, int):
        return [even_shard_range(length, group.size, i)[1] for i in range(group.size)]
    if len(length) != group.size:
        raise UsageError(f"{len(length)} lengths of pieces for a group of {group.size}; give one for each member")
    return list(length)


def all_to_all_shards(
    group: Group, x: Tensor, dims: tuple[int, int], concat_length: Lengths, split_lengths: Sequence[int]
) -> tuple[Sequence[Tensor], list[tuple[int, ...]]]:
    """Return the shard of `x` for each member, and the shapes that they send here; arguments as of `Group.all_to_all`."""
    split_dim, concat_dim = dims
    cuts = shard_lengths(group, split_lengths or x.shape[split_dim])
    shapes = []
    for n in gathered_lengths(group, x.shape[concat_dim], concat_length):
        shape = list(x.shape)
        shape[split_dim], shape[concat_dim] = cuts[group.index], n
        shapes.append(tuple(shape))
    return torch.split(x, cuts, split_dim), shapes
