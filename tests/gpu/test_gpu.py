"""On a machine with a GPU: one and several ranks on one card equal the serial run. Elsewhere every test is skipped with the reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu import reason_to_skip
from bench.parity import verified

# Counting devices, unlike asking for CUDA, leaves this process free to fork.
pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason=reason_to_skip() or "no GPU")


@pytest.mark.parametrize("layout", ["data=1", "data=2", "data=2 zero=1", "tensor=2", "pipeline=2 microbatches=2"])
def test_ranks_on_one_card_equal_the_serial_run(layout: str) -> None:
    found = verified("gpt-tiny", layout, 4, "cuda")
    assert found["ok"], found["text"]
