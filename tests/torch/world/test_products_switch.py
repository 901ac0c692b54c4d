"""The switch of products that round their operands: set where it is asked for, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shardwise.errors import Infeasible
from shardwise.run.state.precision import set_matmul_precision


def test_it_is_set_on_gpus_that_have_such_units_and_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", said.append)
    monkeypatch.setattr(torch.backends, "cudnn", SimpleNamespace(allow_tf32=False))  # torch's own may be frozen by now
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for name in ("float32", "bfloat16", "float64"):
        set_matmul_precision(name, torch.device("cuda"))
    set_matmul_precision("tf32", torch.device("cpu"))
    assert said == []
    set_matmul_precision("tf32", torch.device("cuda"))
    assert said == ["high"]
    assert torch.backends.cudnn.allow_tf32


def test_a_gpu_without_them_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    with pytest.raises(Infeasible, match="precision=float8: Tesla V100 has no such products; use precision=bfloat16"):
        set_matmul_precision("float8", torch.device("cuda"))
    with pytest.raises(Infeasible, match="precision=tf32: Tesla V100 has no such products; use precision=float32 or precision=float16"):
        set_matmul_precision("tf32", torch.device("cuda"))
