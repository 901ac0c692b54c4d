"""What pools read: outputs x (entries of a window + what a window takes to begin), a maximum four times an average's additions."""

from __future__ import annotations

import pytest

from shardwise.model.work import WINDOW_START_TAPS, window_taps
from shardwise.ops.operator import Operator, Ref, Tensor


@pytest.mark.parametrize(
    ("target", "args", "shape", "entries", "each"),
    [
        ("aten.avg_pool2d.default", ((8, 8), (1, 1)), (2, 3, 9, 9), 64, (1.0, 1.0)),
        ("aten.max_pool2d.default", ((9, 9), (1, 1), (4, 4)), (2, 3, 16, 16), 81, (4.0, 0.0)),
        ("aten.max_pool1d.default", ((2,), (2,)), (2, 3, 8), 2, (4.0, 0.0)),
        ("aten.relu.default", (), (2, 3, 16, 16), 0, (0.0, 0.0)),
    ],
)
def test_pools_read_every_entry_of_every_window(
    target: str, args: tuple[object, ...], shape: tuple[int, ...], entries: int, each: tuple[float, float]
) -> None:
    tensors = {"x": Tensor((2, 3, 16, 16)[: len(shape)], "float32"), "y": Tensor(shape, "float32")}
    op = Operator("pool", target, (Ref("x"), *args), (), ("y",), "pool/pool")
    assert window_taps(op, tensors) == tuple(tensors["y"].size * (entries + WINDOW_START_TAPS) * one for one in each)
