"""A process group of ranks and its collectives on tensors. In: this rank's tensor. Out: the collective's result, or `CollectiveWork`.

Three transports: shared memory between processes of one host, gloo between hosts (and for tensors on a GPU, staged through host memory, so
that several ranks can share one GPU) and NCCL where every member has a GPU of its own. A group of one rank does nothing. Shards along a
dimension are those of `plan.placement.piece`.

Not modelled: matching. Mismatched collectives or shapes raise an error in shared memory; over gloo and NCCL they hang, fail or give wrong
numbers.

Messages between two ranks: equal tags are matched in the order in which they were sent; different tags never. A pipeline gives every
(direction, stage boundary) its own tag, since activations and gradients of several microbatches are in flight at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from shardwise.errors import RunError, UsageError
from shardwise.world import recorder
from shardwise.world.comm.connection import Connection, SideConnection
from shardwise.world.comm.mpi import MPI
from shardwise.world.comm.pending import (  # fmt: skip
    ACCUMULATION_DTYPES,
    DONE,
    DTYPES,
    CollectiveWork,
    Lengths,
    all_to_all_shards,
    check_fits,
    concatenate_flat,
    explain_transport_error,
    gathered_lengths,
    is_dense_in_order,
    is_lazy_view,
    shard_lengths,
    synchronize_device,
)
from shardwise.world.comm.process_group import ProcessGroup
from shardwise.world.recorder import CollectiveRecorder

if TYPE_CHECKING:
    from shardwise.world.comm.all_reduce import CollectiveDispatcher
    from shardwise.world.comm.levels import HierarchicalReducer

SHARED = "shared_memory"
RanksByHost = tuple[tuple[int, ...], ...]


class Group:
    """`ranks` of the world in a given order, this rank among them at `index`.

    Created by `World.group`; nothing is connected before the first collective (or `connect()`), which all members and no other rank
    call.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        recorder: CollectiveRecorder,
        device: torch.device,
        open_transport: Callable[[tuple[int, ...], Connection], tuple[Any, str]],
        ranks_by_host_of: Callable[[tuple[int, ...]], RanksByHost] = lambda ranks: (ranks,),
    ) -> None:
        self.ranks = ranks
        self.size = len(ranks)
        self.index = ranks.index(rank)
        self.recorder, self.device = recorder, device
        self._rank = rank
        self.slot = recorder.slot(ranks) if self.size > 1 else 0
        self._open, self._ranks_by_host_of = open_transport, ranks_by_host_of
        self._transport: Any = None
        self._closed = False
        self._staged = self._nccl = self.shares_memory = self.is_gloo = False
        self.collective_runner: Any = None  # set by `shardwise.world.comm.runner.runner_of`: a group and its runner end together
        self._dispatcher: CollectiveDispatcher | None = None
        self.hierarchical: HierarchicalReducer | None = None  # the two-level reducer, if it was chosen and the members' hosts allow it
        self._side_groups = defaultdict[str, list[Group]](list)
        self.fused_name = ""  # under which torch finds it for products fused with collectives, if all ranks agreed on them
        self._registration: object = None

    @property
    def transport_name(self) -> str:
        """Name of the transport between the members: shared memory, "gloo" or "nccl"; "" before they connect, and over MPI."""
        return SHARED if self.shares_memory else "gloo" if self.is_gloo else "nccl" if self._nccl else ""

    @property
    def total_time_s(self) -> float:
        """Sum of the durations of this group's collectives so far, also of those that overlap."""
        return self.recorder.time_by_slot_s[self.slot] if self.size > 1 else 0.0

    def __repr__(self) -> str:
        return f"Group(ranks={recorder.group_name(self.ranks)}, index={self.index})"

    def connect(self) -> None:
        """Connect the members now; otherwise the first collective does. All members must call it."""
        if self._transport is not None or self.size == 1:
            return
        if self._closed:
            raise RunError(f"{self} was closed and can run no more collectives")
        at = self.recorder.start(recorder.CONNECT, self.slot, 0, (), 0)
        try:
            self._transport, kind = self._open(self.ranks, Connection())
            self._nccl = kind == "nccl"
            self.shares_memory, self.is_gloo = kind == SHARED, kind == "gloo"
            if kind in ("gloo", "nccl"):
                directed = (lambda pair: self._open(self.ranks, Connection(direction=pair))[0]) if self._nccl else None
                self._transport = ProcessGroup(self._transport, self.size, self.index, directed)
            if self._nccl:  # it connects in the first collective
                self._transport.all_reduce(torch.zeros(1, device=self.device), "sum", True).wait()
        except RuntimeError as error:
            raise self.explain_error(error) from error
        self.recorder.finish(at)
        if self._dispatcher is not None:
            self._dispatcher.connect()
        self._staged = kind in ("gloo", MPI) and self.device.type != "cpu"

    def connect_pairs(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Connect the message channels of all `pairs` of (sender, receiver) by index. All members must call it with the same pairs.

        Only NCCL has a connection for each direction, whose first message blocks both ends: a rank that posted a receive ahead would
        deadlock with a sender that waits for it. Connections persist.
        """
        if self.size > 1:
            self.connect()
        if self._nccl:
            self._call("connect_pairs", pairs, self.device)

    def close(self) -> None:
        """Close the connections for good. Ranks that wait for this one, or will need it, get a LostPeer."""
        for side_group in chain(*self._side_groups.values()):
            side_group.close()
        if self.shares_memory and self._transport is not None:
            self._transport.close()
        self._transport, self._closed = None, True
        self.use_fused_products("", None)

    def abandon(self) -> None:
        """Abort this rank's waits over gloo in all of its threads, though no peer leaves: those threads get a LostPeer."""
        for side_group in chain(*map(tuple, tuple(self._side_groups.values()))):
            side_group.abandon()
        if isinstance(self._transport, ProcessGroup):
            self._transport.abandon()

    @property
    def ranks_by_host(self) -> RanksByHost:
        """The members' ranks by host: those of one host share memory, or a fast network inside a machine."""
        return self._ranks_by_host_of(self.ranks)

    def side_group(self, name: str, ranks: tuple[int, ...] = ()) -> Group:
        """Return a group of all members, or of `ranks`, with connections of its own, for collectives that must not mix with this group's.

        All of its members call this equally often with the same `name`. It is not recorded.
        """
        side = SideConnection(name, len(self._side_groups[name]) + 1, self.ranks)
        group = Group(
            ranks or self.ranks, self._rank, CollectiveRecorder(), self.device, lambda r, inner: self._open(r, inner.within(side))
        )
        self._side_groups[name].append(group)
        return group

    def use_fused_products(self, name: str, registration: object) -> None:
        """Run products fused with collectives under this `name` of torch's, which holds while `registration` lives."""
        self.fused_name, self._registration = name, registration

    def use_dispatcher(self, dispatcher: CollectiveDispatcher | None) -> None:
        """Use `dispatcher` for asynchronous all-reduces, reduce-scatters and all-gathers from now on; None: the transport's own."""
        self._dispatcher, self.hierarchical = dispatcher, dispatcher.levels if dispatcher is not None else None

    def explain_error(self, error: BaseException) -> RunError:
        """Return the transport's `error` with the collective in which it occurred."""
        return explain_transport_error(self._rank, self.recorder.last(), error)

    def _begin(self, op: int, x: Tensor, peer: int = -1, tag: int = 0) -> int:
        if self._transport is None:
            self.connect()
        return self.recorder.start(op, self.slot, DTYPES.get(x.dtype, 0), x.shape, x.nbytes, peer, tag)

    def _end(self, work: Any, at: int, finish: Callable[[], object] | None, keep: object, wait: bool) -> CollectiveWork:
        if work is None:  # shared memory has waited already
            self.recorder.finish(at)
            if finish is not None:
                finish()
            return DONE
        result = CollectiveWork(self, work, at, finish, keep)
        if wait:
            result.wait()
        return result

    def _call(self, call: str, *args: Any) -> Any:
        try:
            return getattr(self._transport, call)(*args)
        except RuntimeError as error:
            raise self.explain_error(error) from error

    def _to_transport(self, x: Tensor) -> Tensor:
        """Return `x` as the transport takes it: contiguous, on the host if staged, with bools as bytes."""
        x = x.detach().resolve_conj().resolve_neg()
        if self._staged:
            x = x.cpu()
        x = x.contiguous()
        return x.view(torch.uint8) if x.dtype is torch.bool else x

    def _receive_buffer(self, x: Tensor, size: int) -> Tensor:
        """Return a flat receive buffer of `size` elements of the type of `x` (which went through `_to_transport`)."""
        return torch.empty(size, dtype=x.dtype, device=x.device)

    def _from_transport(self, x: Tensor, like: Tensor) -> Tensor:
        x = x.view(torch.bool) if like.dtype is torch.bool else x
        return x.to(like.device)

    def all_reduce(self, x: Tensor, op: Literal["sum", "max", "min"] = "sum", wait: bool = True) -> CollectiveWork:
        """Replace `x` on every member by the sum (or maximum, minimum) over the members; a bool's sum is "any".

        More than two summands of bfloat16 or float16 are added in float32, so that the result is rounded once. NaN on one member stays
        NaN in the maximum or minimum through shared memory, and may be lost over gloo.

        Raises:
            UsageError: the maximum or minimum of complex numbers.
        """
        if self.size == 1:
            return DONE
        if is_lazy_view(x):
            resolved = x.detach().resolve_conj().resolve_neg()
            self.all_reduce(resolved, op)
            x.detach().copy_(resolved)
            return DONE
        if x.is_complex():  # no transport has complex numbers: reduce pairs of reals
            if op != "sum":
                raise UsageError(f"{op} of {x.dtype}: complex numbers have no order")
            return self.all_reduce(torch.view_as_real(x.detach()), op, wait)
        if self._dispatcher is not None and not wait and op == "sum" and (chosen := self._dispatcher.all_reduce(x)) is not None:
            return chosen
        at = self._begin(recorder.ALL_REDUCE, x)
        if self.shares_memory and wait and not x.requires_grad and x.is_contiguous() and x.dtype is torch.float32:
            # Fast path: the general one below costs more than the sum of a few numbers.
            try:
                self._transport.all_reduce(x, op, True)
            except RuntimeError as error:
                raise self.explain_error(error) from error
            self.recorder.finish(at)
            return DONE
        if x.dtype is torch.bool and op == "sum":
            op = "max"
        sent = x
        if self._staged or x.dtype is torch.bool or x.requires_grad or not x.is_contiguous():
            x = self._to_transport(x)
        if x.dtype in ACCUMULATION_DTYPES and not self._transport.widens(x.dtype):
            x = x.to(ACCUMULATION_DTYPES[x.dtype])
        back = None if x is sent else lambda: sent.detach().copy_(x.view(torch.bool) if sent.dtype is torch.bool else x)
        return self._end(self._call("all_reduce", x, op, wait), at, back, x, wait)

    def shared_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a zeroed flat tensor that collectives reduce, gather and scatter without a copy: they recognise it by its address.

        Every member gets its own; all must call, with the same size. Plain memory if the transport is not shared memory.
        Collectives on it need the same range on every member; the memory is freed when all have dropped the tensor.
        """
        if self.size > 1:
            self.connect()
        if self.hierarchical is not None:
            return self.hierarchical.shared_buffer(numel, dtype)
        if not self.shares_memory:
            return torch.zeros(numel, dtype=dtype, device=self.device)
        at = self.recorder.start(recorder.CONNECT, self.slot, DTYPES.get(dtype, 0), (numel,), numel * dtype.itemsize)
        try:
            buffer: Tensor = self._transport.shared_buffer(numel, dtype)
        except (RuntimeError, OSError) as error:
            raise self.explain_error(error) from error
        self.recorder.finish(at)
        return buffer

    def broadcast(self, x: Tensor, source_index: int = 0, wait: bool = True) -> CollectiveWork:
        """Replace `x` on every member by that of member `source_index`."""
        if self.size == 1:
            return DONE
        at = self._begin(recorder.BROADCAST, x)
        sent = self._to_transport(x)
        in_place = sent.data_ptr() == x.data_ptr()
        finish = None if in_place or self.index == source_index else lambda: x.detach().copy_(self._from_transport(sent, x))
        return self._end(self._call("broadcast", sent, source_index, wait), at, finish, sent, wait)

    def barrier(self) -> None:
        """Return when every member has called it."""
        if self.size > 1:
            self.all_reduce(torch.zeros(1, dtype=torch.uint8, device=self.device), op="max")
            if self._nccl:
                synchronize_device(self.device)

    def all_gather(self, x: Tensor, dim: int = 0, length: Lengths = None) -> Tensor:
        """Return the members' shards concatenated along `dim`; a new tensor. `length`: full length, or of each shard (default: equal).

        Raises:
            UsageError: a tensor without dimensions.
        """
        dim = self._normalise_dim(x, dim)
        if self.size == 1:
            return x.clone()
        lengths = gathered_lengths(self, x.shape[dim], length)
        at = self._begin(recorder.ALL_GATHER, x)
        widest = max(lengths)
        sent = self._to_transport(x)
        if self.shares_memory:
            row = torch.Size([*sent.shape[:dim], *sent.shape[dim + 1 :]]).numel()
            out = self._receive_buffer(sent, row * sum(lengths))
            self._end(self._call("all_gather", out, sent, [row * n for n in lengths], True), at, None, None, True)
            if dim == 0:
                return self._from_transport(out.view(sum(lengths), *sent.shape[1:]), x)
            shapes = [[*sent.shape[:dim], n, *sent.shape[dim + 1 :]] for n in lengths]
            arrived = torch.split(out, [row * n for n in lengths])
            return self._from_transport(torch.cat([part.view(shape) for part, shape in zip(arrived, shapes, strict=True)], dim), x)
        if sent.shape[dim] < widest:
            padded = sent.new_zeros([*sent.shape[:dim], widest, *sent.shape[dim + 1 :]])
            padded.narrow(dim, 0, sent.shape[dim]).copy_(sent)
            sent = padded
        out = self._receive_buffer(sent, self.size * sent.numel())
        self._end(self._call("all_gather", out, sent.view(-1), (), True), at, None, None, True)
        parts = out.view(self.size, *sent.shape)
        if dim == 0 and min(lengths) == widest:
            joined = parts.view(self.size * widest, *sent.shape[1:])
        else:
            joined = torch.cat([part.narrow(dim, 0, n) for part, n in zip(parts.unbind(0), lengths, strict=True)], dim)
        return self._from_transport(joined, x)

    def all_gather_into(self, out: Tensor, x: Tensor, wait: bool = True) -> CollectiveWork:
        """Gather flat `x_n` of every member into flat `out` (size * n elements), member after member; may be waited for later."""
        check_fits(out, x, self.size)
        if self.size == 1:
            out.copy_(x)
            return DONE
        if self._dispatcher is not None and not wait and (chosen := self._dispatcher.all_gather_into(out, x)) is not None:
            return chosen
        at = self._begin(recorder.ALL_GATHER, x)
        sent = self._to_transport(x)
        arrived, finish = self._receive_target(out, sent)
        return self._end(self._call("all_gather", arrived, sent, [sent.numel()] * self.size, wait), at, finish, (sent, arrived), wait)

    def reduce_scatter(self, x: Tensor, dim: int = 0, lengths: Sequence[int] = ()) -> Tensor:
        """Return this rank's shard along `dim` of the sum of `x` over the members; a new contiguous tensor. Shards may be uneven or empty.

        `lengths`: of the shards, if not those of `plan.placement.piece`.

        Summands are added in the members' order, bfloat16 and float16 in float32: the same bits in every run. NCCL adds other types in the
        order of its ring.

        Raises:
            UsageError: a tensor without dimensions.
        """
        dim = self._normalise_dim(x, dim)
        if self.size == 1:
            return x.clone(memory_format=torch.contiguous_format)
        cuts = shard_lengths(self, lengths or x.shape[dim])
        at = self._begin(recorder.REDUCE_SCATTER, x)
        if dim == 0:
            sent = self._to_transport(x).view(-1)
        else:
            sent = self._to_transport(concatenate_flat(torch.split(x.detach(), cuts, dim)))
        row = x.numel() // max(1, x.shape[dim])
        shape = [*x.shape[:dim], cuts[self.index], *x.shape[dim + 1 :]]
        local_size = cuts[self.index] * row
        if self._transport_reduces(x, cuts):
            out = self._receive_buffer(sent, local_size)
            self._end(self._call("reduce_scatter", out, sent, [n * row for n in cuts], True), at, None, None, True)
            return out.view(shape)
        out = self._receive_buffer(sent, self.size * local_size)
        work = self._call("exchange", out, sent, [local_size] * self.size, [n * row for n in cuts], True)
        self._end(work, at, None, None, True)
        parts = self._from_transport(out, x).view(self.size, *shape)
        return parts.any(0) if x.dtype is torch.bool else parts.sum(0, dtype=x.dtype)

    def reduce_scatter_into(self, out: Tensor, x: Tensor, wait: bool = True) -> CollectiveWork:
        """Reduce-scatter flat `x_size*n` into flat `out_n`, this member's shard of the sum over the members. May be waited for later.

        If `out` is this member's shard of `x` itself, no transport needs room for all shards; the rest of `x` may be overwritten.
        """
        check_fits(x, out, self.size)
        if self.size == 1:
            out.copy_(x)
            return DONE
        if self._dispatcher is not None and not wait and (chosen := self._dispatcher.reduce_scatter_into(out, x)) is not None:
            return chosen
        at = self._begin(recorder.REDUCE_SCATTER, x)
        sent = self._to_transport(x)
        sizes = [out.numel()] * self.size
        if self._transport_reduces(x, sizes):
            return self._end(self._call("reduce_scatter", out.detach(), sent, sizes, wait), at, None, (sent, out), wait)
        arrived = self._receive_buffer(sent, sent.numel())

        def finish() -> None:
            torch.sum(self._from_transport(arrived, out).view(self.size, -1), 0, dtype=out.dtype, out=out.detach())

        return self._end(self._call("exchange", arrived, sent, sizes, sizes, wait), at, finish, (sent, arrived), wait)

    def all_to_all(
        self, x: Tensor, split_dim: int, concat_dim: int, concat_length: Lengths = None, split_lengths: Sequence[int] = ()
    ) -> Tensor:
        """Return `x`, sharded along `concat_dim`, as a new tensor sharded along `split_dim` instead.

        `concat_length`: the full length of `concat_dim`, or of its shards (default: they are equal). `split_lengths`: of the shards of
        `split_dim`, if not those of `plan.placement.piece`.
        """
        if self.size == 1:
            return x.clone(memory_format=torch.contiguous_format)
        split_dim, concat_dim = split_dim % x.dim(), concat_dim % x.dim()
        if split_dim == concat_dim:
            raise UsageError(f"all_to_all of dimension {split_dim} with itself; split_dim and concat_dim must differ")
        parts, shapes = all_to_all_shards(self, x, (split_dim, concat_dim), concat_length, split_lengths)
        return torch.cat(self.exchange(parts, shapes), concat_dim)

    def exchange(self, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Send `sent[i]` to member i and return the tensors that members sent here, member i's of `shapes[i]`; all of one dtype."""
        if len(sent) != self.size or len(shapes) != self.size:
            raise UsageError(f"exchange of {len(sent)} tensors for {len(shapes)} shapes; a group of {self.size} needs one for each member")
        if self.size == 1:
            return [sent[0].clone(memory_format=torch.contiguous_format)]
        flat = concatenate_flat([x.detach() for x in sent])
        at = self._begin(recorder.ALL_TO_ALL, flat)
        staged = self._to_transport(flat)
        sizes = [torch.Size(shape).numel() for shape in shapes]
        out = self._receive_buffer(staged, sum(sizes))
        work = self._call("exchange", out, staged, sizes, [x.numel() for x in sent], True)
        self._end(work, at, None, None, True)
        return [part.view(tuple(shape)) for part, shape in zip(torch.split(self._from_transport(out, flat), sizes), shapes, strict=True)]

    def exchange_into(self, out: Tensor, x: Tensor, wait: bool = True) -> CollectiveWork:
        """Send piece i of flat `x` to member i, and receive into flat `out`, member after member; all pieces are equal.

        May be waited for later; until then neither tensor may change.
        """
        if (
            out.numel() != x.numel()
            or x.numel() % self.size
            or out.dtype != x.dtype
            or not (is_dense_in_order(x) and is_dense_in_order(out))
        ):
            raise UsageError(
                f"exchange of {x.numel()} elements of {x.dtype} into {out.numel()} of {out.dtype} between {self.size}; "
                "give contiguous tensors of one dtype and size, a multiple of the members"
            )
        if self.size == 1:
            out.copy_(x)
            return DONE
        at = self._begin(recorder.ALL_TO_ALL, x)
        sent = self._to_transport(x)
        arrived, finish = self._receive_target(out, sent)
        sizes = [x.numel() // self.size] * self.size
        return self._end(self._call("exchange", arrived, sent, sizes, sizes, wait), at, finish, (sent, arrived), wait)

    def _receive_target(self, out: Tensor, sent: Tensor) -> tuple[Tensor, Callable[[], Any] | None]:
        """Return the tensor to receive into for `out`, and a function that then copies it there, if needed."""
        if not self._staged and out.dtype is not torch.bool:
            return out.detach(), None
        arrived = self._receive_buffer(sent, out.numel())
        return arrived, lambda: out.copy_(self._from_transport(arrived, out))

    def isend(self, x: Tensor, to_index: int, tag: int = 0) -> CollectiveWork:
        """Start sending `x`, which must not change before `wait`. Never blocks, so that two ranks may send to one another."""
        at = self._begin(recorder.SEND, x, self._peer_rank(to_index), tag)
        sent = self._to_transport(x)
        return self._end(self._call("send", sent, to_index, tag), at, None, sent, False)

    def irecv(self, x: Tensor, from_index: int, tag: int = 0) -> CollectiveWork:
        """Start receiving into `x`, whose shape and dtype must be the sender's; `x` is ready after `wait`."""
        at = self._begin(recorder.RECEIVE, x, self._peer_rank(from_index), tag)
        direct = not self._staged and x.is_contiguous() and not is_lazy_view(x)
        buffer = x.detach() if direct else torch.empty(x.shape, dtype=x.dtype, device="cpu" if self._staged else x.device)
        finish = None if direct else lambda: x.detach().copy_(buffer)
        return self._end(self._call("receive", buffer, from_index, tag), at, finish, buffer, False)

    def _transport_reduces(self, x: Tensor, sizes: Sequence[int]) -> bool:
        """Return whether the transport itself can reduce-scatter this type into shards of `sizes`."""
        if self._nccl:
            return bool(self._transport.scatters(x.dtype, sizes))
        return self.shares_memory and x.dtype is not torch.bool and bool(self._transport.widens(x.dtype))

    def _peer_rank(self, index: int) -> int:
        if not 0 <= index < self.size or index == self.index:
            raise UsageError(f"member {self.index} of {self} cannot exchange messages with member {index}")
        return self.ranks[index]

    def _normalise_dim(self, x: Tensor, dim: int) -> int:
        if not x.dim():
            raise UsageError(f"{self} cannot shard or gather a tensor without dimensions; give one of one element, x.view(1)")
        return dim % x.dim()
