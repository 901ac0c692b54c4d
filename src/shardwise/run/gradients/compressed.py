"""Compressed all-reduce of gradients with error feedback: a bucket is replaced by the (lossy) sum over ranks.

A message is bytes: bfloat16: the numbers; int8: a scale for every `BLOCK` elements, then a byte for each; top-k: the selected values, then
their indices. The residual that a rank does not send is added to its next gradients (Seide et al. 2014; Karimireddy et al. 2019; Stich et
al. 2018). Sums are in the gradients' dtype and in the members' order, so every run is bitwise equal.

A bucket is exchanged in two phases, so that bytes do not grow with the ranks: every member receives all messages of its shard and reduces
them; the sums are compressed again, with residuals of their own, and all-gathered (as in 1-bit Adam: Tang et al. 2021). ZeRO-1 needs the
first phase only. Top-k of a full bucket is one phase: an all-gather of every rank's pairs (Aji and Heafield 2017).

Non-finite values stay non-finite in their own step: a block of int8 that contains one becomes NaN, never a plausible number. They leave no
residual, so that skipping the update of such a step has the same effect as without compression. Not modelled: sparse sums that merge
indices on the way; dtypes other than float32 and float64, which are reduced uncompressed.

In the field's terms: gradient compression.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.plan.ir.compression import BLOCK, Compression
from shardwise.world.comm.group import RanksByHost
from shardwise.world.world import CollectiveWork, Group

DTYPES = (torch.float32, torch.float64)
_INT8_MAX = 127


def encode(compression: Compression, x: Tensor) -> Tensor:
    """Return the message of flat `x`, in bytes; the residual is left in `x` if the compression keeps one."""
    if compression.kind == "bfloat16":
        return x.to(torch.bfloat16).view(torch.uint8)
    if compression.kind == "int8":
        blocks = _as_blocks(x)
        scales = torch.maximum(blocks.amax(1), blocks.amin(1).neg_()).div_(_INT8_MAX).float()
        divisors = torch.where(scales > 0, scales, 1.0).to(x.dtype)
        sent = blocks.div(divisors[:, None]).round_().clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8)
        flat = sent.view(-1)[: x.numel()]
        x.sub_(_dequantize_values(flat, scales, x.dtype))
        if not scales.isfinite().all():
            _drop_nonfinite(x)
        return torch.cat([scales.view(torch.uint8), flat.view(torch.uint8)])
    indices = _largest_indices(x.abs(), compression.num_sent(x.numel()))
    values = x[indices]
    x[indices] = 0
    if not values.isfinite().all():
        _drop_nonfinite(x)
    return torch.cat([values.view(torch.uint8), indices.to(torch.int32).view(torch.uint8)])


def _drop_nonfinite(residual: Tensor) -> None:
    """Zero non-finite residuals: they were sent in their own step, and would spoil every later one."""
    residual.nan_to_num_(0.0, 0.0, 0.0)


def add_message(compression: Compression, message: Tensor, out: Tensor) -> None:
    """Decode a message and add it to flat `out`, which has as many elements as the encoded tensor."""
    if compression.kind == "bfloat16":
        out.add_(message.view(torch.bfloat16))
    elif compression.kind == "int8":
        split = message.numel() - out.numel()
        # Cloned, since a message may not be aligned for float32.
        out.add_(_dequantize_values(message[split:].view(torch.int8), message[:split].clone().view(torch.float32), out.dtype))
    else:
        split = compression.num_sent(out.numel()) * out.element_size()
        out.index_add_(0, message[split:].clone().view(torch.int32), message[:split].clone().view(out.dtype))


def _largest_indices(x: Tensor, count: int) -> Tensor:
    """Return indices of the `count` largest elements, of equal ones the first. kthvalue takes a quarter of the time of torch.topk."""
    threshold = torch.kthvalue(x, x.numel() - count + 1).values
    if threshold.isnan():
        return torch.nonzero(x.isnan()).view(-1)[:count]
    above = torch.nonzero(~(x <= threshold)).view(-1)  # NaN counts as largest
    return torch.cat([above, torch.nonzero(x == threshold).view(-1)])[:count]


def _as_blocks(x: Tensor) -> Tensor:
    """Return `x` as [block, element], padded with zeros."""
    num_padding = -x.numel() % BLOCK
    return (torch.nn.functional.pad(x, (0, num_padding)) if num_padding else x).view(-1, BLOCK)


def _dequantize_values(x: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return _as_blocks(x.to(dtype)).mul(scales.to(dtype)[:, None]).view(-1)[: x.numel()]


class CompressedBucket:
    """A bucket of `size` flat gradients, named after its first parameter. In every step call `start`, `reduce_received` and `finish`, in
    the same order on all ranks of the group.

    `start` does not wait; `reduce_received` waits for the other ranks' `start`. `sharded`: this rank needs its own shard of the sum only.
    `overlaps_backward`: the other ranks run the same program, so that the second phase may start during backward.
    """

    def __init__(
        self,
        compression: Compression,
        name: str,
        size: int,
        get_gradients: Callable[[], Tensor],
        group: Group,
        sharded: bool,
        overlaps_backward: bool,
    ) -> None:
        self._compression, self.name, self._get_gradients, self.group, self.sharded, self.overlaps_backward = (
            compression,
            name,
            get_gradients,
            group,
            sharded,
            overlaps_backward,
        )
        self._is_one_phase = compression.kind == "topk" and not sharded
        self._shard_length = size if self._is_one_phase else -(-size // group.size)  # elements of one message
        like = get_gradients()
        self._residual = (
            like.new_zeros(self._shard_length * (1 if self._is_one_phase else group.size)) if compression.has_error_feedback else None
        )
        self._residual_of_sum = (
            like.new_zeros(self._shard_length) if compression.has_error_feedback and not sharded and not self._is_one_phase else None
        )
        self._work: CollectiveWork | None = None
        self._arrived = torch.empty(0, dtype=torch.uint8)

    @property
    def ranks_by_host(self) -> RanksByHost:
        """The members, each as its own host: no gradients are reduced before compression."""
        return tuple((rank,) for rank in self.group.ranks)

    @property
    def residuals(self) -> dict[str, Tensor]:
        """The residuals: of this rank's gradients, and of the sums of its shard."""
        tensors = {"rest": self._residual, "rest_of_sum": self._residual_of_sum}
        return {name: x for name, x in tensors.items() if x is not None}

    @property
    def flat_gradients(self) -> Tensor:
        """The bucket's flat gradients."""
        return self._get_gradients()

    def start(self) -> None:
        """Compress and send the bucket."""
        x, size = self.flat_gradients, self.group.size
        if self._residual is not None:
            self._residual[: x.numel()].add_(x)
            x = self._residual
        if self._is_one_phase:
            self._gather(encode(self._compression, x))
            return
        if x.numel() < size * self._shard_length:
            x = torch.nn.functional.pad(x, (0, size * self._shard_length - x.numel()))
        sent = torch.cat([encode(self._compression, piece) for piece in x.view(size, -1)])
        self._arrived = torch.empty_like(sent)
        self._work = self.group.exchange_into(self._arrived, sent, wait=False)

    def _gather(self, message: Tensor) -> None:
        self._arrived = message.new_empty(self.group.size * message.numel())
        self._work = self.group.all_gather_into(self._arrived, message, wait=False)

    def _wait(self) -> Tensor:
        """Wait for the received messages [member, byte]."""
        if self._work is not None:
            self._work.wait()
        arrived, self._arrived, self._work = self._arrived, self._arrived[:0], None
        return arrived.view(self.group.size, -1)

    def reduce_received(self) -> None:
        """Reduce the received messages of this rank's shard, and send the sum."""
        if self._is_one_phase:
            return
        total = self.flat_gradients.new_zeros(self._shard_length)
        for message in self._wait():
            add_message(self._compression, message, total)
        if self.sharded:
            self.flat_gradients.view(self.group.size, -1)[self.group.index].copy_(total)
            return
        if self._residual_of_sum is not None:
            total = self._residual_of_sum.add_(total)
        self._gather(encode(self._compression, total))

    def finish(self) -> None:
        """Write the received sums into the bucket."""
        if self.sharded:
            return
        arrived, full = self._wait(), self.flat_gradients
        full.zero_()
        if self._is_one_phase:
            for message in arrived:
                add_message(self._compression, message, full)
            return
        for member, message in enumerate(arrived):
            piece = full[member * self._shard_length : (member + 1) * self._shard_length]
            if piece.numel() == self._shard_length:
                add_message(self._compression, message, piece)
            elif piece.numel():
                padded = piece.new_zeros(self._shard_length)
                add_message(self._compression, message, padded)
                piece.copy_(padded[: piece.numel()])
