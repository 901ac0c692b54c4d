"""Reads of values on the host between forward and update, on several ranks: on a GPU each waits until the device has caught up.

Both the methods that read (`item`, `tolist`, `float`, `bool`, `cpu`, `numpy`) and the operators below them are counted, with the function
of the package that reads. What is counted here and does not wait on a GPU is listed, with the reason.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise
from shardwise.world.world import World

METHODS = {
    getattr(Tensor, name)
    for name in ("item", "tolist", "__float__", "__int__", "__bool__", "__index__", "cpu", "numpy", "nonzero", "equal")
} | {torch.nonzero, torch.equal}
OPERATORS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero"}
ENGINE_LAYOUTS = (
    "data=2", "data=2 zero=1", "data=2 zero=2", "data=2 zero=3", "tensor=2", "pipeline=2 microbatches=2", "data=2 microbatches=2",
    "data=2 zero=2 microbatches=2", "data=2 precision=bfloat16-mixed",
)  # fmt: skip
EXPERT_LAYOUTS = {  # of two layers of experts: layout, reads of a step in each function
    "data=2 expert=2": {"lower/kernels/expert_dispatch.py:_read_once": 2},
    "data=2 expert=2 microbatches=2": {"lower/kernels/expert_dispatch.py:_read_once": 4},
    "data=2 expert=2 recompute=full": {"lower/kernels/expert_dispatch.py:_read_once": 4},  # forward, and again for backward
    "data=2": {"capture/experts.py:_rows_by_expert": 2},  # where no grouped product takes the operands
    "data=2 limited": {}, "data=2 expert=2 limited": {},
}  # fmt: skip
LOOP_LAYOUTS = ("data=2", "data=2 zero=1", "data=2 zero=3", "tensor=2")
ALLOWED = {
    "run/engine.py:step_index": "a counter, always on the host, which a checkpoint saves",
    "run/state/precision.py:factor": "the loss scale, always on the host",
    "run/recovery/fingerprints.py:_judge": "the message of the step before, which has come to the host",
    "run/gradients/replica_watch.py:observe_gradients": "on processors only; from a GPU the sums are read in a later step",
    "run/gradients/replica_watch.py:_compare_weights": "in one of 32 backwards",
    "run/rank_agreement.py:digest_tensors": "on processors only; of a GPU's inputs in one of 32 calls",
    "run/loop/batch_agreement.py:agree_on_batch": "the same",
}


class _Methods(TorchFunctionMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METHODS:
            _note(self.found)
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().split(".")[0] in OPERATORS:
            _note(self.found)
        return func(*args, **(kwargs or {}))


def _note(found: Counter[str]) -> None:
    frame = [x for x in traceback.extract_stack() if "/shardwise/" in x.filename and "/tests/" not in x.filename][-1]
    found[f"{frame.filename.split('/shardwise/')[-1]}:{frame.name}"] += 1


def reads_of(run: Callable[[], Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    with ExitStack() as stack:
        stack.enter_context(_Methods(found))
        stack.enter_context(_Operators(found))
        run()
    return found


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(x), y)


class ExpertLayer(nn.Module):
    """A layer of experts, each token by two of four. `limited`: each expert has a place for every token, and shapes follow no data."""

    def __init__(self, limited: bool) -> None:
        super().__init__()
        self.limited, self.gate = limited, nn.Linear(8, 4)
        self.up, self.down = (nn.Parameter(torch.randn(4, 8, 8) / 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weight, which = self.gate(x).softmax(-1).topk(2)
        if self.limited:
            share = torch.zeros_like(self.gate(x)).scatter(1, which, weight).t().unsqueeze(-1)
            return x + (torch.bmm(torch.bmm(x.expand(4, *x.shape), self.up).relu(), self.down) * share).sum(0)
        rows, ids, order = torch.ops.shardwise.to_experts(x, which, 4)
        rows = torch.ops.shardwise.of_experts(rows, ids, self.up, None, True).relu()
        rows = torch.ops.shardwise.of_experts(rows, ids, self.down, None, True)
        combined: Tensor = torch.ops.shardwise.from_experts(rows, order, weight, 4)
        return x + combined


class Experts(nn.Module):
    def __init__(self, limited: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(ExpertLayer(limited), ExpertLayer(limited))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(x)), y)


def build_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(8, 8, generator=generator), "y": torch.randint(0, 4, (8,), generator=generator)}


def engine_reads(world: World, layout: str, clip: float = 0.1) -> Counter[str]:
    engine: Any = shardwise.parallelize(
        Layers(), build_batch(), plan=layout, world=world, seed=0, optimizer={"name": "adamw", "lr": 1e-2, "clip": clip}
    )
    engine._optimizer.clips_on_device = engine._fingerprints.reads_later = True  # as on a GPU
    for _ in range(2):
        engine.step(build_batch())
    found = reads_of(lambda: engine.step(build_batch()))
    assert engine.step(build_batch()).loss > 0
    engine.drain()
    return found


def expert_reads(world: World, layout: str) -> dict[str, int]:
    """Reads of a step with experts. Modes do not see what operators of one's own and recomputation do, so the methods are replaced."""
    found: Counter[str] = Counter()
    engine: Any = shardwise.parallelize(
        Experts(layout.endswith("limited")), build_batch(), plan=layout.removesuffix(" limited"), world=world, seed=0, optimizer="sgd"
    )
    engine._fingerprints.reads_later = True  # as on a GPU
    engine.step(build_batch())
    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "tolist", "__bool__", "__int__", "__index__", "__float__", "nonzero", "unique"):
            patch.setattr(Tensor, name, _noting(getattr(Tensor, name), found))
        engine.step(build_batch())
    engine.drain()
    return {at: n for at, n in found.items() if at not in ALLOWED}


def _noting(method: Callable[..., Any], found: Counter[str]) -> Callable[..., Any]:
    def read(*args: Any, **kwargs: Any) -> Any:
        _note(found)
        return method(*args, **kwargs)

    return read


def loop_reads(world: World, layout: str, reads_loss: bool = False) -> Counter[str]:
    torch.manual_seed(0)
    model = shardwise.auto_parallelize(Layers(), build_batch(), plan=layout, world=world)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    own = next(iter(shardwise.shard([build_batch()])))

    def step() -> None:
        optimizer.zero_grad()
        loss = model(**own)
        if reads_loss:
            loss.item()
        loss.backward()
        optimizer.step()

    for _ in range(2):
        step()
    return reads_of(step)


def corrupted_step(world: World) -> tuple[int, str]:
    """Return after how many further steps a changed weight is found where messages are read later, and the error."""
    engine: Any = shardwise.parallelize(Layers(), build_batch(), plan="data=2", world=world, seed=0, optimizer={"name": "sgd"})
    engine._fingerprints.reads_later = True
    engine.step(build_batch())
    if world.rank == 1:
        with torch.no_grad():
            engine.rank_model.groups[0].data[3] += 1e-6
    for number in range(4):
        try:
            engine.step(build_batch())
        except shardwise.errors.RunError as error:
            return number, str(error)
    return -1, ""


def run_all(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {f"engine {layout}": engine_reads(world, layout) for layout in ENGINE_LAYOUTS}
    found |= {f"loop {layout}": loop_reads(world, layout) for layout in LOOP_LAYOUTS}
    experts = {layout: expert_reads(world, layout) for layout in EXPERT_LAYOUTS}
    return {"reads": found, "experts": experts, "twin": loop_reads(world, "data=2", reads_loss=True), "corrupted": corrupted_step(world)}


def test_a_step_reads_nothing_on_the_host(ranks: Callable[..., list[Any]]) -> None:
    for found in ranks(run_all, 2):
        for layout, reads in found["reads"].items():
            assert set(reads) <= set(ALLOWED), (layout, reads)
        assert found["experts"] == EXPERT_LAYOUTS
        assert not set(found["twin"]) <= set(ALLOWED)  # one `.item` of the loop is counted
        assert found["corrupted"][0] == 1  # one step later than where the message of the step itself is read
        assert "rank 0, 1 have other weights" in found["corrupted"][1]
