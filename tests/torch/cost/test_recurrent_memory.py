"""What oneDNN's LSTM keeps is what torch reports of its workspace, in widths and lengths that rows do and do not fill."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.capture.capture import capture
from shardwise.cost.devices.recurrent import num_single_steps, workspace_bytes
from shardwise.model.work import kind_of

PAGES = 8 * 4096  # parts begin at pages


class Last(nn.Module):
    """A loss of what a recurrence leaves."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0].square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("steps", "samples", "inputs", "hidden"),
    [(64, 8, 128, 128), (64, 8, 256, 128), (128, 4, 16, 128), (64, 8, 128, 256), (64, 8, 100, 100), (2, 16, 320, 160), (40, 3, 7, 33)],
)
def test_a_workspace_is_as_large_as_torch_says(steps: int, samples: int, inputs: int, hidden: int, dtype: torch.dtype) -> None:
    if not torch.backends.mkldnn.is_available() or (dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        pytest.skip("no oneDNN for this type on this processor")
    weights = [p.detach().to(dtype) for p in nn.LSTM(inputs, hidden).parameters()]
    x, state = torch.zeros(steps, samples, inputs, dtype=dtype), torch.zeros(samples, hidden, dtype=dtype)
    made = torch.mkldnn_rnn_layer(x, *weights, state, state, False, [], 2, hidden, 1, True, False, False, True)
    told = workspace_bytes(steps, samples, inputs, hidden, dtype.itemsize)
    assert told <= made[3].numel() + 4096
    assert made[3].numel() <= told + PAGES


@pytest.mark.parametrize(
    ("layer", "steps"),
    [
        (nn.GRU(8, 16, num_layers=2, batch_first=True), 2 * 5.0),
        (nn.GRU(8, 16, bidirectional=True, batch_first=True), 2 * 5.0),
        (nn.RNN(8, 16, num_layers=3, batch_first=True), 3 * 5 / 3),
        (nn.LSTM(8, 16, num_layers=2, batch_first=True), 0.0),
    ],
)
def test_what_is_no_lstm_takes_its_steps_one_by_one(layer: nn.Module, steps: float) -> None:
    """Layers times directions times steps; a plain cell has a third of a GRU's operators."""
    graph = capture(Last(layer), (torch.randn(3, 5, 8),)).graph
    (told,) = (num_single_steps(op, graph.tensors) for op in graph.operators if kind_of(op) == "recurrent")
    assert told == pytest.approx(steps)
