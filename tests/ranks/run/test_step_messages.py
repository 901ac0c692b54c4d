"""What ranks send in a step besides gradients: one small message, which runs beside backward, and what it must still find.

Losses and gradients are those of a serial run; collectives are counted where a group starts them, and waits before backward by the group's
synchronous calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import shardwise
from shardwise.run.loop import model_outputs
from shardwise.run.loop.model_outputs import PendingOutput
from shardwise.run.recovery.fingerprints import StateDiverged
from shardwise.world import recorder
from shardwise.world.comm.group import Group
from shardwise.world.world import World


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layers(x).squeeze(-1) - y).square().mean()


def build_model() -> Perceptron:
    torch.manual_seed(3)
    return Perceptron().double()


def build_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(8, 4, generator=generator, dtype=torch.float64),
        "y": torch.randn(8, generator=generator, dtype=torch.float64),
    }


@contextmanager
def counted(world: World) -> Iterator[list[tuple[str, int, bool]]]:
    """Record (operation, bytes, whether the caller waits) of every collective of a rank."""
    calls: list[tuple[str, int, bool]] = []
    start, end = world.recorder.start, Group._end

    def recording_start(op: int, slot: int, dtype: int, shape: tuple[int, ...], size: int, *more: int) -> int:
        calls.append((recorder.OPS[op], size, True))
        return start(op, slot, dtype, shape, size, *more)

    def recording_end(self: Group, work: Any, at: int, finish: Any, keep: object, wait: bool) -> Any:
        calls[-1] = (*calls[-1][:2], wait)
        return end(self, work, at, finish, keep, wait)

    world.recorder.start, Group._end = recording_start, recording_end  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        world.recorder.start, Group._end = start, end  # type: ignore[method-assign]


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def run_engine(world: World) -> dict[str, Any]:
    engine: Any = shardwise.parallelize(
        build_model(), build_batch(), plan="data=2 precision=float64", world=world, optimizer={"name": "sgd"}
    )
    first = engine.step(build_batch()).loss
    with counted(world) as calls:
        loss = engine.step(build_batch()).loss
    found = ""
    if world.rank == 1:
        with torch.no_grad():
            engine.rank_model.groups[0].data[5] += 1e-9
    try:
        engine.step(build_batch())
    except StateDiverged as error:
        found = str(error)
    return {"losses": [first, loss], "calls": calls, "found": found}


def run_loop(world: World) -> dict[str, Any]:
    whole = build_batch()
    model = shardwise.auto_parallelize(build_model(), whole, plan="data=2 precision=float64", world=world)
    own = next(iter(shardwise.shard([whole])))
    found: dict[str, Any] = {}

    def train(use: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        loss = model(**own)
        use(loss).backward()  # type: ignore[no-untyped-call]
        return loss, gradients_of(model)

    for _ in range(2):  # the first backward compares replicas
        model.zero_grad()
        with counted(world) as calls:
            loss = model(**own)
            is_pending = isinstance(loss, PendingOutput)
            loss.backward()
        found["calls"] = calls
    found["types"] = is_pending or type(loss) is Tensor, type(loss) is Tensor
    found["plain"] = loss.item(), gradients_of(model)
    found["read before"] = [train(_read_and_return)[1], train(lambda x: x / 4)[1]]
    found["used differently"] = train(lambda x: x * (world.rank + 1))[1]
    found["seeded"] = _gradients(lambda: model(**own).backward(torch.tensor(1.0 + world.rank, dtype=torch.float64)), model)
    found["hooked"] = _gradients(lambda: _double_gradient(model(**own), world.rank + 1.0).backward(), model)
    with torch.no_grad():
        unread, found["without gradients"] = model(**own), float(model(**own))
        del unread
    is_root, model_outputs.is_backward_root = model_outputs.is_backward_root, lambda node: True
    try:
        found["twin"] = train(lambda x: x * (world.rank + 1))[1]
    finally:
        model_outputs.is_backward_root = is_root
    return found


def _gradients(run: Callable[[], Any], model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    run()
    return gradients_of(model)


def _read_and_return(loss: Tensor) -> Tensor:
    assert loss.item() > 0
    return loss


def _double_gradient(loss: Tensor, factor: float) -> Any:
    loss.register_hook(lambda grad: grad * factor)  # type: ignore[no-untyped-call]
    return loss


def run_both(world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    return run_engine(world), run_loop(world)


def test_one_message_beside_gradients(ranks: Callable[..., list[Any]]) -> None:
    model = build_model()
    expected = model(**build_batch())
    expected.backward()
    gradients = gradients_of(model)
    size = sum(x.nbytes for x in gradients)
    for engine, loop in ranks(run_both, 2):
        assert abs(engine["losses"][0] - expected.item()) < 1e-12
        assert engine["losses"][1] < engine["losses"][0]
        assert [op for op, _, _ in engine["calls"]] == ["all_reduce"] * 2
        assert not any(waits for _, _, waits in engine["calls"])  # neither is waited for where it starts
        assert engine["calls"][0][1] < 1024
        assert engine["calls"][1][1] >= size  # the message is under way first, the gradients after it
        assert "rank 0, 1 have other weights" in engine["found"]
        assert [(op, waits) for op, _, waits in loop["calls"]] == [("all_reduce", False)] * 2
        assert loop["calls"][0][1] == 8 < size <= loop["calls"][1][1]
        assert loop["types"] == (True, True)
        assert max(abs(loss - expected.item()) for loss in (loop["plain"][0], loop["without gradients"])) < 1e-12
        cases = [(loop["plain"][1], 1.0), (loop["read before"][0], 1.0), (loop["read before"][1], 0.25), (loop["used differently"], 1.5)]
        for found, factor in [*cases, (loop["seeded"], 1.5), (loop["hooked"], 1.5)]:
            for x, y in zip(found, gradients, strict=True):
                torch.testing.assert_close(x, y * factor, rtol=0, atol=1e-12)
        assert not all(torch.allclose(x, y * 1.5, rtol=0, atol=1e-12) for x, y in zip(loop["twin"], gradients, strict=True))
