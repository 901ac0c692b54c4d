"""Where a training step reads values of tensors on the host: on a GPU each such read waits until the device has caught up.

On processors every read is counted by the operator that all of `item`, `tolist`, `float` and `bool` dispatch, with its source line.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise
from shardwise.run.gradients.loop_reducer import LoopGradientReducer
from shardwise.run.step.dispatch import StepResult

READS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero"}
# Reads that remain, by file and function, with the reason.
ALLOWED = {
    "run/engine.py:step_index": "a counter, always on the host, which a checkpoint saves",
    "run/state/precision.py:factor": "the loss scale, always on the host",
    "run/state/precision.py:update": "the number of steps at this loss scale, always on the host",
    "run/state/optimizer.py:_overflowed": "float16 skips an update, which the host decides, as torch's GradScaler does: once a step",
}


class ReadCounter(TorchDispatchMode):
    """Counts reads of values by the innermost function of the package; reads outside of the package by this test's name."""

    def __init__(self) -> None:
        super().__init__()
        self.by_function: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func.name().split(".")[0] in READS:
            frames = [x for x in traceback.extract_stack() if "/shardwise/" in x.filename and "/tests/" not in x.filename]
            self.by_function[f"{frames[-1].filename.split('/shardwise/')[-1]}:{frames[-1].name}" if frames else "user"] += 1
        return func(*args, **(kwargs or {}))


class Experts(nn.Module):
    """A linear layer whose rows go to the expert with the largest score, densely: every expert sees every row."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts, self.head = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 16) / 4), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        share = torch.where(scores == scores.amax(-1, keepdim=True), scores, 0.0)
        return nn.functional.cross_entropy(self.head(torch.einsum("be,bi,eio->bo", share, x, self.experts)), y)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(x), y)


def _batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(8, 16, generator=generator), "y": torch.randint(0, 4, (8,), generator=generator)}


def _engine(model: Any, plan: str, clip: float, clips_on_device: bool = True) -> Any:
    engine = shardwise.parallelize(model, _batch(), plan=plan, optimizer={"name": "adamw", "lr": 1e-2, "clip": clip}, seed=0)
    engine._optimizer.clips_on_device = clips_on_device  # as on a GPU
    return engine


def _reads_of_step(engine: Any) -> tuple[Counter[str], StepResult]:
    for _ in range(2):
        engine.step(_batch())
    with ReadCounter() as reads:
        result = engine.step(_batch())
    return reads.by_function, result


@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("plan", ["data=1", "data=1,precision=float16", "data=1,schedule=1f1b,microbatches=4", "data=1,zero=3"])
def test_an_engine_step_reads_only_what_is_listed(plan: str, clip: float) -> None:
    reads, result = _reads_of_step(_engine(Layers, plan, clip))
    assert set(reads) <= set(ALLOWED), reads
    assert reads["run/state/optimizer.py:_overflowed"] == ("float16" in plan)
    assert (result.grad_norm is None) == (not clip)


def test_a_step_with_experts_reads_only_what_is_listed() -> None:
    assert set(_reads_of_step(_engine(Experts, "data=1", 0.1))[0]) <= set(ALLOWED)


class _Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(2)) for _ in range(3))


def test_a_loop_finds_the_gradients_of_other_ranks_by_one_read() -> None:
    parameters = dict(_Unused().named_parameters())
    views = {"a": torch.tensor([0.0, 2.0]), "b": torch.zeros(2), "c": torch.tensor([3.0, 0.0])}
    reducer = object.__new__(LoopGradientReducer)
    reducer._fresh, reducer._reduced_names = set(), frozenset("abc")
    reducer._lent = SimpleNamespace(is_lent=lambda _: False, lends=lambda _: False)  # type: ignore[assignment]
    reducer._parameters, reducer._reduced_groups = parameters, [(SimpleNamespace(views=views), None)]  # type: ignore[list-item]
    for used, found, num_reads in (({}, ["a", "c"], 1), ({"c": None}, ["a", "c"], 1), (dict.fromkeys("abc"), ["a", "b", "c"], 0)):
        reducer._used = used
        with ReadCounter() as reads:
            assert reducer._write_gradients(None) == found
        assert len(reads.by_function) <= num_reads, reads.by_function


def test_clipping_by_a_number_of_the_host_is_counted() -> None:
    assert _reads_of_step(_engine(Layers, "data=1", 0.1, clips_on_device=False))[0]["run/state/optimizer.py:_clip"] == 1


@pytest.mark.parametrize("clip", [0.1, 1e6])
def test_clipping_on_the_device_gives_the_same_bits(clip: float) -> None:
    host, device = (_engine(Layers, "data=1", clip, on_device) for on_device in (False, True))
    for _ in range(4):
        norms = [engine.step(_batch()).grad_norm for engine in (host, device)]
        assert norms[0] == norms[1]
    assert all(torch.equal(p, device.parameters[name]) for name, p in host.parameters.items())


def test_a_plain_loop_reads_only_what_is_listed() -> None:
    torch.manual_seed(0)
    model = shardwise.auto_parallelize(Layers(), _batch(), plan="data=1")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for number in range(3):
        with ReadCounter() as reads:
            optimizer.zero_grad()
            model(**_batch()).backward()
            optimizer.step()
        assert number < 2 or set(reads.by_function) <= set(ALLOWED), reads.by_function
