"""1x1 convolutions as matrix products: decide where one product is faster.

On CPUs torch multiplies such a convolution sample by sample, which reads the weights once per sample, or has oneDNN do it, which first
converts to its own memory format. For maps with few positions, one product over all samples and positions is faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from shardwise.model.graph import Operator, Tensor
from shardwise.model.sharding.sharding import Sharding
from shardwise.ops import record_of
from shardwise.ops.vocabulary import CostKind

# Measured, forward and backward of 64 to 1,024 channels on one and two threads: up to 16 positions one product took 0.1 to 1.0 of torch's
# time where weights are large (2 to 15 samples on one thread) and 0.3 to 1.0 where samples are many; at 36 positions 0.7 to 1.3.
MAX_POSITIONS = 16
MIN_ROWS, MIN_WEIGHTS = 8, 1 << 16
ONEDNN_SAMPLES = 16  # from which on oneDNN runs them in one thread, too (`use_mkldnn` in aten/src/ATen/native/Convolution.cpp)


def is_run_as_product(op: Operator, tensors: Mapping[str, Tensor], sharding: Sharding | None) -> bool:
    """Return whether a rank runs this operator as one product, by the sizes of its local map and weights."""
    record = record_of(op)
    if record.kind != CostKind.CONVOLUTION or record.product.bias is None or not op.target.endswith(".default") or op.kwargs:
        return False
    x, weight = local_operand_shapes(op, tensors, sharding)
    options: tuple[object, ...] = op.args[3:]
    stride, padding, _, groups = options + (1, 0, 1, 1)[len(options) :]
    once = all(n == 1 for n in _as_tuple(stride)) and not any(_as_tuple(padding)) and groups == 1
    return once and len(x) == len(weight) <= 4 and prod(weight[2:]) == 1 and is_product_faster(x[0], prod(x[2:]), prod(weight))


def local_operand_shapes(
    op: Operator, tensors: Mapping[str, Tensor], sharding: Sharding | None, at: Mapping[str, int] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shapes of a rank's maps and weights; `at`: its coordinate along each axis, by default a rank with the largest shard."""
    x, weight = (tensors[value].shape for value in op.inputs[:2])
    if sharding is None:
        return x, weight
    local = []
    for value, row in zip(op.inputs[:2], sharding.input_placements[op.name], strict=False):
        placements = {axis: row.get(axis) or form for axis, form in sharding.placements[value].items()}
        local.append(sharding.local_shape(value, tensors[value].shape, placements, at))
    return local[0], local[1]


def is_product_faster(num_samples: int, num_positions: int, num_weights: int) -> bool:
    """Return whether one product is faster for maps with so many positions and so many weights.

    >>> is_product_faster(8, 4, 512 * 1024), is_product_faster(8, 1024, 64 * 64), is_product_faster(1, 16, 512 * 1024)
    (True, False, False)
    """
    return (
        num_samples > 1
        and num_positions <= MAX_POSITIONS
        and num_samples * num_positions >= MIN_ROWS
        and (num_weights >= MIN_WEIGHTS or num_samples >= ONEDNN_SAMPLES)
    )


def _as_tuple(value: object) -> tuple[object, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)
