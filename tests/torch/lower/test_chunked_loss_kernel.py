"""The kernel of a loss in chunks against torch's own linear layer and cross-entropy; what it allocates; how it sums in 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.errors import LayoutError, UsageError
from shardwise.lower.chunked_loss import chunk_losses
from shardwise.lower.kernels.chunked_loss import ChunkedLossCall, _add_product, compute_chunked_loss
from shardwise.model.chunked_loss import find_chunkable_losses
from shardwise.model.graph import Graph, Operator, Ref, Variable
from shardwise.model.graph import Tensor as Spec

ROWS, FEATURES, CLASSES = 10, 6, 8


def call_in(num_chunks: int, mean: bool = True, smoothing: float = 0.0) -> ChunkedLossCall:
    return ChunkedLossCall(num_chunks, (), 1, (), -100, (), None, smoothing, mean)


def make_operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((ROWS, FEATURES), (CLASSES, FEATURES), (CLASSES,))
    )
    target = torch.randint(0, CLASSES, (ROWS,), generator=draw)
    target[::4] = -100
    return x, weight, bias, target


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 7, 10, 99])
@pytest.mark.parametrize(("mean", "smoothing"), [(True, 0.0), (False, 0.0), (True, 0.2)])
def test_loss_and_gradients_are_torchs_own(num_chunks: int, mean: bool, smoothing: float) -> None:
    x, weight, bias, target = make_operands()
    found = compute_chunked_loss(call_in(num_chunks, mean, smoothing), x, weight, bias, target, None)
    gradients = torch.autograd.grad(3.0 * found, (x, weight, bias))
    wanted = F.cross_entropy(F.linear(x, weight, bias), target, reduction="mean" if mean else "sum", label_smoothing=smoothing)
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=0)
    for gradient, own in zip(gradients, torch.autograd.grad(3.0 * wanted, (x, weight, bias)), strict=True):
        torch.testing.assert_close(gradient, own, rtol=1e-12, atol=1e-14)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            self.size = max(self.size, one.numel() if isinstance(one, Tensor) else 0)
        return result


@pytest.mark.parametrize(("num_chunks", "rows"), [(1, 10), (2, 5), (3, 4), (10, 1)])
def test_no_more_logits_than_a_chunk_exist(num_chunks: int, rows: int) -> None:
    classes = 1000
    x, weight = torch.randn(ROWS, 2, requires_grad=True), torch.randn(classes, 2, requires_grad=True)
    with LargestTensor() as largest:
        compute_chunked_loss(call_in(num_chunks), x, weight, None, torch.arange(ROWS), None).backward()
    assert largest.size == max(rows * classes, 2 * classes)  # the weight's gradient


def test_weight_gradients_of_sixteen_bits_are_summed_in_float32() -> None:
    draw = torch.Generator().manual_seed(1)
    parts = [(torch.randn(8, 4, generator=draw).bfloat16(), torch.randn(4, 8, generator=draw).bfloat16()) for _ in range(64)]
    total: Tensor | None = None
    narrow = torch.zeros(8, 8, dtype=torch.bfloat16)
    for a, b in parts:
        total = _add_product(total, a, b)
        narrow += a @ b
    wanted = sum(a.double() @ b.double() for a, b in parts)
    assert total is not None
    assert total.dtype is torch.float32
    assert 4 * (total - wanted).abs().max() < (narrow - wanted).abs().max()  # the twin


def test_second_derivatives_are_refused() -> None:
    x, weight, bias, target = make_operands()
    loss = compute_chunked_loss(call_in(2), x, weight, bias, target, None)
    with pytest.raises(UsageError, match="loss_chunks"):
        torch.autograd.grad(loss, x, create_graph=True)


def make_graph() -> Graph:
    tensors = {
        "x": Spec((4, 6), "float32"), "w": Spec((8, 6), "float32"), "y": Spec((4,), "int64"), "logits": Spec((4, 8), "float32"),
        "rows": Spec((4, 8), "float32"), "loss": Spec((), "float32"),
    }  # fmt: skip
    operators = (
        Operator("linear", "aten.linear.default", (Ref("x"), Ref("w")), (), ("logits",), "head/linear"),
        Operator("view", "aten.reshape.default", (Ref("logits"), (4, 8)), (), ("rows",), "/view"),
        Operator("loss", "aten.cross_entropy_loss.default", (Ref("rows"), Ref("y")), (), ("loss",), "/cross_entropy_loss"),
    )
    inputs = tuple(Variable(v, v, tensors[v], batched=True) for v in ("x", "y"))
    return Graph((Variable("w", "w", tensors["w"], trainable=True),), (), inputs, (), operators, tensors, "loss", 4)


def test_a_stage_that_begins_within_is_refused() -> None:
    graph = make_graph()
    losses = find_chunkable_losses(graph)
    assert [op.name for op in losses[0].operators] == ["linear", "view", "loss"]
    with pytest.raises(LayoutError, match=r"a pipeline stage begins between head/linear and /cross_entropy_loss.*before head/linear"):
        chunk_losses(torch.fx.Graph(), losses, graph.operators[1:], 2)
