"""Mixed precision on a rank: dtypes of weights and of matrix products, and dynamic loss scaling for float16 (Micikevicius et al. 2018,
section 3.2), as in torch's `GradScaler`.

In: reduced gradients of a loss that was multiplied by `factor`. Out: unscaled gradients, and whether any is not finite: then all ranks skip
the step, and the factor is reduced. There is one factor for all ranks, stages and microbatches; since overflow is voted on, it stays equal
everywhere without communication.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.errors import Infeasible
from shardwise.plan.ir.precision import PRECISIONS
from shardwise.run.checkpoint.state_shard import StateShard, full_shard
from shardwise.world.private import unscale

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, one.weight_dtype) for name, one in PRECISIONS.items()}  # of weights, by precision
TENSOR_CORES, FLOAT8_CORES = (8, 0), (9, 0)  # compute capability for tf32 (Ampere), and for row-scaled float8 products (Hopper)
INITIAL_SCALE, GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000  # GradScaler's defaults


def autocast_dtype_of(precision: str) -> torch.dtype | None:
    """Return the autocast dtype of matrix products; None without autocast."""
    name = PRECISIONS[precision].product_dtype
    return getattr(torch, name) if name else None


def set_matmul_precision(precision: str, device: torch.device) -> None:
    """Enable tf32 matrix products if `precision` asks for it, by torch's process-wide switch; CPUs stay in float32.

    Raises:
        Infeasible: a GPU without tf32 or float8 tensor cores.
    """
    settings = PRECISIONS[precision]
    if not (settings.fraction_bits or settings.linear_dtype) or device.type != "cuda":
        return
    if torch.cuda.get_device_capability(device) < (FLOAT8_CORES if settings.linear_dtype else TENSOR_CORES):
        name, alternatives = torch.cuda.get_device_name(device), "bfloat16" if settings.linear_dtype else "float32 or precision=float16"
        raise Infeasible(f"precision={precision}: {name} has no such products; use precision={alternatives}")
    if settings.linear_dtype:
        return
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True


class LossScale:
    """Dynamic loss scale; 1 if the precision is not scaled, unless `scales_always`."""

    def __init__(self, device: torch.device, precision: str, initial: float = INITIAL_SCALE, scales_always: bool = False) -> None:
        self.is_scaled = PRECISIONS[precision].scales_loss or scales_always
        self._found_inf = torch.zeros((), device=device)
        self._initial, self._factor = initial, torch.tensor(initial)
        self._steps, self._skipped, self._saved_step = (torch.zeros((), dtype=torch.int64) for _ in range(3))

    @property
    def factor(self) -> float:
        """Loss scale of the current step."""
        return float(self._factor) if self.is_scaled else 1.0

    @property
    def num_skipped(self) -> int:
        """Number of skipped steps, which an optimizer must not count."""
        return int(self._skipped)

    @property
    def overflowed(self) -> Tensor:
        """1 if any of this rank's gradients is not finite, else 0; to be all-reduced."""
        return self._found_inf

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that a step changes."""
        return [self._factor, self._steps, self._skipped] if self.is_scaled else []

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide reduced gradients by the factor, and check that all are finite."""
        self._found_inf.zero_()
        if gradients:
            unscale(list(gradients), self._found_inf, torch.full_like(self._found_inf, 1 / self.factor))

    def update(self, overflowed: bool) -> None:
        """Update the factor after a step: reduce it after a skipped one, grow it after `GROWTH_INTERVAL` successful ones."""
        self._steps += 1
        if overflowed:
            self._skipped += 1
            self._factor *= BACKOFF
        elif int(self._steps) == GROWTH_INTERVAL:
            self._factor *= GROWTH
        else:
            return
        self._steps.zero_()

    def state_shards(self, step: int, is_owner: bool) -> list[StateShard]:
        """Return the state after `step` steps as shards to save; -1: to load into."""
        if step >= 0 and not self.is_scaled and not self.num_skipped:
            return []
        self._saved_step.fill_(step)
        state = {"factor": self._factor, "steps": self._steps, "skipped": self._skipped, "at": self._saved_step}
        return [full_shard("loss_scale", "scaling", x, slot, is_owner) for slot, x in state.items()]

    def after_load(self, step: int) -> None:
        """Finish loading `state_shards(-1)` from a checkpoint of `step` steps: reset the state if the checkpoint had none."""
        if int(self._saved_step) != step:
            self._factor.fill_(self._initial)
            self._steps.zero_()
            self._skipped.zero_()
