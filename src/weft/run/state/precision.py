"""What a precision is on a rank: dtypes of weights and of products, and for float16 the scale of the loss (Micikevicius et al. 2018,
section 3.2), dynamic as torch's `GradScaler` has it.

In: summed gradients of a loss that was multiplied by `factor`. Out: those of the loss itself, and whether any is not finite: then the
step is skipped on all ranks, and the next one's loss is multiplied by less. One factor for all ranks, stages and microbatches, which all
see the same steps overflow, so it stays the same everywhere without being sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.errors import Infeasible
from weft.plan.precision import PRECISIONS
from weft.run.state.checkpoint.piece import Piece, full_piece
from weft.world.private import unscale

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, one.weights) for name, one in PRECISIONS.items()}  # of weights
TENSOR_CORES, EIGHT_BITS = (8, 0), (9, 0)  # the first GPUs with products of tf32, and of 8 bits with scales of rows: Ampere, Hopper
FIRST, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000  # GradScaler's defaults


def products_of(precision: str) -> torch.dtype | None:
    """What autocast makes of products' operands; None where nothing is cast."""
    name = PRECISIONS[precision].products
    return getattr(torch, name) if name else None


def set_products(precision: str, device: torch.device) -> None:
    """Let products of float32 be made by the units that round their operands, where a run asks for that; torch's public switch, which is
    of the whole process. On processors they stay float32.

    Raises:
        Infeasible: a GPU without such units.
    """
    one = PRECISIONS[precision]
    if not (one.bits or one.linears) or device.type != "cuda":
        return
    if torch.cuda.get_device_capability(device) < (EIGHT_BITS if one.linears else TENSOR_CORES):
        name, others = torch.cuda.get_device_name(device), "bfloat16" if one.linears else "float32 or precision=float16"
        raise Infeasible(f"precision={precision}: {name} has no such products; use precision={others}")
    if one.linears:
        return
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True


class LossScale:
    """What the loss is multiplied by; 1 where the precision is not `scaled`."""

    def __init__(self, device: torch.device, precision: str, first: float = FIRST) -> None:
        self.scaled = PRECISIONS[precision].scaled
        self._found_inf = torch.zeros((), device=device)
        self._first, self._factor = first, torch.tensor(first)
        self._steps, self._skipped, self._at = (torch.zeros((), dtype=torch.int64) for _ in range(3))

    @property
    def factor(self) -> float:
        """What the loss of the step under way is multiplied by."""
        return float(self._factor) if self.scaled else 1.0

    @property
    def skipped(self) -> int:
        """Steps that were not made, which an optimizer must not count."""
        return int(self._skipped)

    @property
    def overflowed(self) -> Tensor:
        """1 where this rank's gradients of the step are not all finite, else 0; to be voted on."""
        return self._found_inf

    @property
    def tensors(self) -> list[Tensor]:
        """What a step changes of it."""
        return [self._factor, self._steps, self._skipped] if self.scaled else []

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide summed gradients by the factor, and see whether all are finite."""
        self._found_inf.zero_()
        if gradients:
            unscale(list(gradients), self._found_inf, torch.full_like(self._found_inf, 1 / self.factor))

    def update(self, overflowed: bool) -> None:
        """End a step: a smaller factor after one that was skipped, a larger one after `INTERVAL` that were not."""
        self._steps += 1
        if overflowed:
            self._skipped += 1
            self._factor *= BACKOFF
        elif int(self._steps) == INTERVAL:
            self._factor *= GROWTH
        else:
            return
        self._steps.zero_()

    def pieces(self, step: int, owner: bool) -> list[Piece]:
        """The state after `step` steps, to be saved; -1 to load into."""
        if step >= 0 and not self.scaled and not self.skipped:
            return []
        self._at.fill_(step)
        state = {"factor": self._factor, "steps": self._steps, "skipped": self._skipped, "at": self._at}
        return [full_piece("loss_scale", "scaling", x, slot, owner) for slot, x in state.items()]

    def loaded(self, step: int) -> None:
        """After `pieces(-1)` were loaded from a checkpoint of `step` steps: begin anew where it had none."""
        if int(self._at) != step:
            self._factor.fill_(self._first)
            self._steps.zero_()
            self._skipped.zero_()
