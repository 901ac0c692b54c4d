"""Gradients compressed on their way between ranks. In: a bucket of one rank's gradients. Out: in its place, what the ranks' sum became.

A message of a piece is bytes: of bfloat16 the numbers; of int8 a scale for every `BLOCK` elements, then a byte for each; of top-k the
chosen numbers, then where they are. What a rank does not send it keeps, and adds to its next gradients (Seide et al. 2014; Karimireddy
et al. 2019; Stich et al. 2018). Sums are made in the gradients' own type, in the members' order, so every run has the same bits.

A bucket is exchanged in two phases, so that bytes do not grow with the ranks: every member gets its piece of all the others and adds
them up; the sums are compressed again, with a rest of their own, and gathered (as 1-bit Adam does: Tang et al. 2021). With ZeRO-1 the
first phase is all. Top-k of a whole bucket is one phase: every rank's pairs go to everyone (Aji and Heafield 2017).

What is not finite stays so in its own step: a block of int8 that holds it becomes not a number, and never a plausible one. Nothing of it is
kept back, so that whoever leaves out the update of such a step goes on as without compression. Not modelled: sparse sums in
which indices meet on the way; other types than float32 and float64, which are summed as they are.
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
    """The message of flat `x`, in bytes; what it does not hold is left in `x` where `how.keeps`."""
    if how.kind == "bfloat16":
        return x.to(torch.bfloat16).view(torch.uint8)
    if how.kind == "int8":
        blocks = _in_blocks(x)
        scales = torch.maximum(blocks.amax(1), blocks.amin(1).neg_()).div_(_LARGEST).float()
        by = torch.where(scales > 0, scales, 1.0).to(x.dtype)
        sent = blocks.div(by[:, None]).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
        flat = sent.view(-1)[: x.numel()]
        x.sub_(_scaled(flat, scales, x.dtype))
        if not scales.isfinite().all():
            _forget(x)
        return torch.cat([scales.view(torch.uint8), flat.view(torch.uint8)])
    at = _largest(x.abs(), how.sent(x.numel()))
    values = x[at]
    x[at] = 0
    if not values.isfinite().all():
        _forget(x)
    return torch.cat([values.view(torch.uint8), at.to(torch.int32).view(torch.uint8)])


def _forget(rest: Tensor) -> None:
    """What is not finite has arrived as such in its own step; kept back, it would be in every step that follows."""
    rest.nan_to_num_(0.0, 0.0, 0.0)


def add(how: Compression, message: Tensor, out: Tensor) -> None:
    """Add what a message holds to flat `out`, which has as many elements as what was encoded."""
    if how.kind == "bfloat16":
        out.add_(message.view(torch.bfloat16))
    elif how.kind == "int8":
        split = message.numel() - out.numel()
        # Copied, since a message may begin where no float may.
        out.add_(_scaled(message[split:].view(torch.int8), message[:split].clone().view(torch.float32), out.dtype))
    else:
        split = how.sent(out.numel()) * out.element_size()
        out.index_add_(0, message[split:].clone().view(torch.int32), message[:split].clone().view(out.dtype))


def _largest(x: Tensor, count: int) -> Tensor:
    """Where the `count` largest elements are; of equal ones the first. The least of them is found in a quarter of what torch.topk takes."""
    level = torch.kthvalue(x, x.numel() - count + 1).values
    if level.isnan():
        return torch.nonzero(x.isnan()).view(-1)[:count]
    above = torch.nonzero(~(x <= level)).view(-1)  # what is no number is above all
    return torch.cat([above, torch.nonzero(x == level).view(-1)])[:count]


def _in_blocks(x: Tensor) -> Tensor:
    """[block, element], zeros at the end."""
    missing = -x.numel() % BLOCK
    return (torch.nn.functional.pad(x, (0, missing)) if missing else x).view(-1, BLOCK)


def _scaled(x: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return _in_blocks(x.to(dtype)).mul(scales.to(dtype)[:, None]).view(-1)[: x.numel()]


class Compressed:
    """A bucket, which the first parameter in it names: `size` flat gradients where `place` says. In every step `start`, `meet` and
    `finish`, in the same order on all ranks of the sum.

    `start` waits for nobody; `meet` for what the others have started. `sharded`: this rank wants its own piece of the sum only. `early`:
    others of the sum run the same program, so that it may be met while backward goes on.
    """

    def __init__(
        self, how: Compression, name: str, size: int, place: Callable[[], Tensor], over: Group, sharded: bool, early: bool
    ) -> None:
        self._how, self.name, self._place, self.over, self.sharded, self.early = how, name, place, over, sharded, early
        self._gathers = how.kind == "topk" and not sharded
        self._length = size if self._gathers else -(-size // over.size)  # of what one message is of
        like = place()
        self._rest = like.new_zeros(self._length * (1 if self._gathers else over.size)) if how.keeps else None
        self._rest_of_sum = like.new_zeros(self._length) if how.keeps and not sharded and not self._gathers else None
        self._work: Work | None = None
        self._arrived = torch.empty(0, dtype=torch.uint8)

    @property
    def boxes(self) -> Boxes:
        """The members, each alone, as nobody's gradients are summed before they are compressed."""
        return tuple((rank,) for rank in self.over.ranks)

    @property
    def residuals(self) -> dict[str, Tensor]:
        """What was not sent yet: of this rank's gradients, and of the sums that it makes for the others."""
        tensors = {"rest": self._rest, "rest_of_sum": self._rest_of_sum}
        return {name: x for name, x in tensors.items() if x is not None}

    @property
    def flat(self) -> Tensor:
        """Where its gradients lie."""
        return self._place()

    def start(self) -> None:
        """Send what the bucket holds."""
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
        """What arrived: [member, byte]."""
        if self._work is not None:
            self._work.wait()
        arrived, self._arrived, self._work = self._arrived, self._arrived[:0], None
        return arrived.view(self.over.size, -1)

    def meet(self) -> None:
        """Add up what arrived of this rank's piece, and send the sum."""
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
        """Put what arrived into the bucket."""
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
