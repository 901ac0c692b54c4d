"""On one process Megatron's parallel layers are linear layers that return their bias beside the output. Initial weights are torch's own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class ColumnParallelLinear(nn.Linear):
    """`Y = X A + b`, A cut along its columns."""

    def __init__(self, input_size: int, output_size: int, *, gather_output: bool, **more: Any) -> None:
        assert set(more) == {"config", "init_method", "bias", "skip_bias_add"}
        super().__init__(input_size, output_size, more["bias"])

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


class RowParallelLinear(nn.Linear):
    """`Y = X A + b`, A cut along its rows."""

    def __init__(self, input_size: int, output_size: int, *, input_is_parallel: bool, **more: Any) -> None:
        assert set(more) == {"config", "init_method", "bias", "skip_bias_add"}
        super().__init__(input_size, output_size, more["bias"])

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None
