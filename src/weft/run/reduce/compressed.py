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
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft.plan.compression import BLOCK, Compression
from weft.world.group import Boxes
from weft.world.world import Group, Work

DTYPES = (torch.float32, torch.float64)
_LARGEST = 127


def encode(how: Compression, x: Tensor) -> Tensor:
    """Return the message of flat `x`, in bytes; the residual is left in `x` if the compression keeps one."""
    if how.kind == "bfloat16":
        return x.to(torch.bfloat16).view(torch.uint8)
    if how.kind == "int8":
        blocks = _in_blocks(x)
        scales = torch.maximum(blocks.amax(1), blocks.amin(1).neg_()).div_(_LARGEST).float()
        divisors = torch.where(scales > 0, scales, 1.0).to(x.dtype)
        sent = blocks.div(divisors[:, None]).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
        flat = sent.view(-1)[: x.numel()]
        x.sub_(_scaled(flat, scales, x.dtype))
        if not scales.isfinite().all():
            _forget(x)
        return torch.cat([scales.view(torch.uint8), flat.view(torch.uint8)])
    indices = _largest(x.abs(), how.sent(x.numel()))
    values = x[indices]
    x[indices] = 0
    if not values.isfinite().all():
        _forget(x)
    return torch.cat([values.view(torch.uint8), indices.to(torch.int32).view(torch.uint8)])


def _forget(rest: Tensor) -> None:
    """Zero non-finite residuals: they were sent in their own step, and would spoil every later one."""
    rest.nan_to_num_(0.0, 0.0, 0.0)


def add(how: Compression, message: Tensor, out: Tensor) -> None:
    """Decode a message and add it to flat `out`, which has as many elements as the encoded tensor."""
    if how.kind == "bfloat16":
        out.add_(message.view(torch.bfloat16))
    elif how.kind == "int8":
        split = message.numel() - out.numel()
        # Cloned, since a message may not be aligned for float32.
        out.add_(_scaled(message[split:].view(torch.int8), message[:split].clone().view(torch.float32), out.dtype))
    else:
        split = how.sent(out.numel()) * out.element_size()
        out.index_add_(0, message[split:].clone().view(torch.int32), message[:split].clone().view(out.dtype))


def _largest(x: Tensor, count: int) -> Tensor:
    """Return indices of the `count` largest elements, of equal ones the first. kthvalue takes a quarter of the time of torch.topk."""
    threshold = torch.kthvalue(x, x.numel() - count + 1).values
    if threshold.isnan():
        return torch.nonzero(x.isnan()).view(-1)[:count]
    above = torch.nonzero(~(x <= threshold)).view(-1)  # NaN counts as largest
    return torch.cat([above, torch.nonzero(x == threshold).view(-1)])[:count]


def _in_blocks(x: Tensor) -> Tensor:
    """Return `x` as [block, element], padded with zeros."""
    num_padding = -x.numel() % BLOCK
    return (torch.nn.functional.pad(x, (0, num_padding)) if num_padding else x).view(-1, BLOCK)


def _scaled(x: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return _in_blocks(x.to(dtype)).mul(scales.to(dtype)[:, None]).view(-1)[: x.numel()]


class Compressed:
    """A bucket of `size` flat gradients, named after its first parameter. In every step call `start`, `reduce_received` and `finish`, in
    the same order on all ranks of the group.

    `start` does not wait; `reduce_received` waits for the other ranks' `start`. `sharded`: this rank needs its own shard of the sum only.
    `overlaps_backward`: the other ranks run the same program, so that the second phase may start during backward.
    """

    def __init__(
        self, how: Compression, name: str, size: int, place: Callable[[], Tensor], over: Group, sharded: bool, early: bool
    ) -> None:
        self._how, self.name, self._place, self.over, self.sharded, self.early = how, name, place, over, sharded, early
        self._gathers = how.kind == "topk" and not sharded
        self._length = size if self._gathers else -(-size // over.size)  # elements of one message
        like = place()
        self._rest = like.new_zeros(self._length * (1 if self._gathers else over.size)) if how.keeps else None
        self._rest_of_sum = like.new_zeros(self._length) if how.keeps and not sharded and not self._gathers else None
        self._work: Work | None = None
        self._arrived = torch.empty(0, dtype=torch.uint8)

    @property
    def boxes(self) -> Boxes:
        """The members, each as its own host: no gradients are reduced before compression."""
        return tuple((rank,) for rank in self.over.ranks)

    @property
    def residuals(self) -> dict[str, Tensor]:
        """The residuals: of this rank's gradients, and of the sums of its shard."""
        tensors = {"rest": self._rest, "rest_of_sum": self._rest_of_sum}
        return {name: x for name, x in tensors.items() if x is not None}

    @property
    def flat(self) -> Tensor:
        """The bucket's flat gradients."""
        return self._place()

    def start(self) -> None:
        """Compress and send the bucket."""
        x, size = self.flat, self.over.size
        if self._rest is not None:
            self._rest[: x.numel()].add_(x)
            x = self._rest
        if self._gathers:
            self._gather(encode(self._how, x))
            return
        if x.numel() < size * self._length:
            x = torch.nn.functional.pad(x, (0, size * self._length - x.numel()))
        sent = torch.cat([encode(self._how, piece) for piece in x.view(size, -1)])
        self._arrived = torch.empty_like(sent)
        self._work = self.over.exchange_into(self._arrived, sent, wait=False)

    def _gather(self, message: Tensor) -> None:
        self._arrived = message.new_empty(self.over.size * message.numel())
        self._work = self.over.all_gather_into(self._arrived, message, wait=False)

    def _wait(self) -> Tensor:
        """Wait for the received messages [member, byte]."""
        if self._work is not None:
            self._work.wait()
        arrived, self._arrived, self._work = self._arrived, self._arrived[:0], None
        return arrived.view(self.over.size, -1)

    def meet(self) -> None:
        """Reduce the received messages of this rank's shard, and send the sum."""
        if self._gathers:
            return
        total = self.flat.new_zeros(self._length)
        for message in self._wait():
            add(self._how, message, total)
        if self.sharded:
            self.flat.view(self.over.size, -1)[self.over.index].copy_(total)
            return
        if self._rest_of_sum is not None:
            total = self._rest_of_sum.add_(total)
        self._gather(encode(self._how, total))

    def finish(self) -> None:
        """Write the received sums into the bucket."""
        if self.sharded:
            return
        arrived, full = self._wait(), self.flat
        full.zero_()
        if self._gathers:
            for message in arrived:
                add(self._how, message, full)
            return
        for member, message in enumerate(arrived):
            piece = full[member * self._length : (member + 1) * self._length]
            if piece.numel() == self._length:
                add(self._how, message, piece)
            elif piece.numel():
                padded = piece.new_zeros(self._length)
                add(self._how, message, padded)
                piece.copy_(padded[: piece.numel()])
