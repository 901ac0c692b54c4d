"""`StateShard`: one rank's shard of one tensor of the training state, with its position in the global tensor.

In: a local tensor and its position. Out: what `save` writes and `load` fills.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from shardwise.errors import CheckpointError
from shardwise.run.checkpoint.region import BlockRegion

StateKind = Literal["parameter", "buffer", "optimizer", "scalar", "random", "rest", "scaling", "skips"]
STATE_KINDS: tuple[str, ...] = get_args(StateKind)
OPTIONAL = ("random", "rest", "scaling", "skips")

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class StateShard:
    """Shard of the global tensor `name`: `tensor` holds the block at `offsets`.

    `slot`: name of an optimizer's state tensor of that parameter, "exp_avg". `is_owner`: this rank writes it; replicas do not.
    `block`: shape of the block, by default the tensor's. `flat`: the tensor is one-dimensional and holds elements
    `flat[0] <= i < flat[1]` of the block in row-major order (a ZeRO shard of a tensor-parallel block).
    Kinds "random" (generator state), "rest" (residuals of gradient compression), "scaling" (float16 loss scale) and "skips" (updates that
    left a parameter alone) are optional: restored if a shard of that name exists.

    Raises:
        CheckpointError: an unknown kind or dtype, or a tensor of another size than its block or range.

    >>> StateShard("w", "parameter", (4, 4), (2, 0), torch.zeros(2, 4)).region.size
    8
    >>> StateShard("w", "optimizer", (4, 4), (2, 0), torch.zeros(3), "exp_avg", block=(2, 4), flat=(5, 8)).region.size
    3
    """

    name: str
    kind: StateKind
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor
    slot: str = ""
    is_owner: bool = True
    block: tuple[int, ...] | None = None
    flat: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.kind not in STATE_KINDS:
            raise CheckpointError(f"{self.name}: kind {self.kind!r} is unknown; use one of {', '.join(STATE_KINDS)}")
        if self.tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{self.name}: {self.tensor.dtype} cannot be stored; use one of {', '.join(DTYPES)}")
        if self.region.size != self.tensor.numel() or (self.flat is None and self.region.shape != tuple(self.tensor.shape)):
            raise CheckpointError(
                f"{self.label}: a tensor of {list(self.tensor.shape)} for a block of {list(self.region.shape)}, flat range {self.flat}"
            )

    @property
    def region(self) -> BlockRegion:
        block = tuple(self.tensor.shape) if self.block is None else self.block
        return BlockRegion(tuple(self.global_shape), tuple(self.offsets), block, self.flat)

    @property
    def key(self) -> tuple[str, str, str]:
        """Key of the global tensor: kind, slot, name."""
        return (self.kind, self.slot, self.name)

    @property
    def label(self) -> str:
        """Readable name."""
        return key_label(self.key)


def key_label(key: tuple[str, str, str]) -> str:
    kind, slot, name = key
    return f"{name}:{slot}" if slot else name if kind in ("parameter", "buffer") else f"{kind} {name}"


def full_shard(name: str, kind: StateKind, tensor: Tensor, slot: str = "", is_owner: bool = True) -> StateShard:
    """Return the shard that is the full tensor.

    >>> full_shard("step", "scalar", torch.tensor(3)).global_shape
    ()
    """
    shape = tuple(tensor.shape)
    return StateShard(name, kind, shape, (0,) * len(shape), tensor, slot, is_owner)
