"""Steps that are interrupted at many points: the weights are those before or after the update, or the model refuses to go on by name.

Interruptions are KeyboardInterrupt at the k-th line that a step runs in the package or in torch's optimizers, and real signals.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.errors import RunError, ShardwiseError
from shardwise.run.step import interruption


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.square().mean()


BATCH = (torch.arange(12.0).view(4, 3) / 10,)


class Interrupter:
    """Raises KeyboardInterrupt at the k-th line of the files that are concerned; counts lines with k = 0."""

    def __init__(self, k: int) -> None:
        self.k, self.count = k, 0

    def __enter__(self) -> Interrupter:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        if "/shardwise/run/" not in name and "/torch/optim/" not in name:
            return None
        if event == "line":
            self.count += 1
            if self.count == self.k:
                raise KeyboardInterrupt
        return self._trace


def weights(tensors: Any) -> torch.Tensor:
    return torch.cat([x.detach().double().reshape(-1) for x in tensors])


def tried(make: Callable[[], tuple[Callable[[], object], Callable[[], torch.Tensor]]], points: int) -> tuple[int, int, int]:
    """How often the weights were those before, those after, or refused; a step after an interruption equals one that nothing touched."""
    step, now = make()
    before = now()
    step()
    after = now()
    step()
    twice = now()
    step, now = make()
    with Interrupter(0) as counter:
        step()
    outcomes = [0, 0, 0]
    for k in sorted({1 + i * (counter.count - 1) // (points - 1) for i in range(points)}):
        step, now = make()
        try:
            with Interrupter(k):
                step()
        except KeyboardInterrupt:
            pass
        try:
            left = now()
            step()
        except ShardwiseError:
            outcomes[2] += 1
            continue
        which = [torch.equal(left, before), torch.equal(left, after)]
        assert any(which), k
        assert torch.equal(now(), after if which[0] else twice), k
        outcomes[which.index(True)] += 1
    return outcomes[0], outcomes[1], outcomes[2]


def engine() -> tuple[Callable[[], object], Callable[[], torch.Tensor]]:
    made = shardwise.parallelize(model, BATCH, loss=loss, plan="data=1 microbatches=2", optimizer="adamw", seed=0)

    def now() -> torch.Tensor:
        state = made.full_state_dict()
        assert state is not None
        return weights(state.values())

    return lambda: made.step(BATCH, lr=0.1), now


def test_a_step_of_the_engine() -> None:
    before, after, refused = tried(engine, 14)
    assert before > 0
    assert refused > 0
    assert before + after + refused == 14


def test_without_the_marks_half_an_update_would_be_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interruption between two parameters: refused by name, and by its broken twin not."""
    step, _ = engine()
    made = step.__closure__[0].cell_contents  # type: ignore[attr-defined]

    def half(lr: float | None) -> None:
        next(iter(made.rank_model.parameters.values())).data.add_(1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(made._optimizer, "step", half)
    with pytest.raises(KeyboardInterrupt):
        step()
    monkeypatch.undo()
    for use in (step, made.full_state_dict, lambda: made.save("nowhere"), lambda: made.evaluate(BATCH)):
        with pytest.raises(RunError, match="an update was interrupted, so that the state may be that of half a step"):
            use()
    monkeypatch.setattr(interruption.WholeSteps, "check", lambda self: None)
    step()


def loop() -> tuple[Callable[[], object], Callable[[], torch.Tensor]]:
    net = model()
    shardwise.auto_parallelize(net, BATCH, plan="data=1")
    optimizer = torch.optim.Adam(net.parameters(), 0.1, foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        loss(net(*BATCH), BATCH).backward()
        optimizer.step()

    return step, lambda: weights(net.parameters())


def test_a_step_of_a_plain_loop() -> None:
    """The loop cannot refuse to be looked at; it refuses the next step."""
    step, now = loop()
    before = now()
    step()
    after = now()
    step, _ = loop()
    with Interrupter(0) as counter:
        step()
    refused = 0
    for k in range(1, counter.count, max(1, counter.count // 14)):
        step, now = loop()
        try:
            with Interrupter(k):
                step()
        except KeyboardInterrupt:
            pass
        is_whole = any(torch.equal(now(), whole) for whole in (before, after))
        try:
            step()
        except ShardwiseError:
            refused += 1
        else:
            assert is_whole, k
    assert refused > 0


def test_an_optimizer_that_calls_the_module_in_its_step_is_not_refused() -> None:
    net = model()
    shardwise.auto_parallelize(net, BATCH, plan="data=1")
    optimizer = torch.optim.LBFGS(net.parameters(), 0.1, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(net(*BATCH), BATCH)
        value.backward()
        return value

    first = float(optimizer.step(closure).detach())
    assert float(optimizer.step(closure).detach()) < first


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Take SIGINT as Python does: a shell's background job ignores it."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("interruptible")
def test_a_signal_within_an_update_comes_behind_it() -> None:
    step, now = engine()
    step()
    after, (step, now) = now(), engine()
    made = step.__closure__[0].cell_contents  # type: ignore[attr-defined]
    update = made._optimizer.step

    def signalled(lr: float | None) -> float | None:
        os.kill(os.getpid(), signal.SIGINT)
        norm: float | None = update(lr)
        return norm

    made._optimizer.step = signalled
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        step()
    assert torch.equal(now(), after)
    assert signal.getsignal(signal.SIGINT) is handler
    assert made.step_index == 1


def test_a_signal_while_handlers_are_replaced_leaves_the_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM comes when SIGINT's handler is replaced already and its own is not: both are the user's again."""
    handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    mine = {number: signal.getsignal(number) for number in handlers}
    replace = interruption._signals.signal

    def replaced(number: int, handler: Any) -> Any:
        if number == signal.SIGTERM and handler is not mine[signal.SIGTERM]:
            raise KeyboardInterrupt
        return replace(number, handler)

    monkeypatch.setattr(interruption._signals, "signal", replaced)
    try:
        with pytest.raises(KeyboardInterrupt), interruption.WholeSteps(False).guard_update():
            pass
        assert {number: signal.getsignal(number) for number in handlers} == mine
    finally:
        monkeypatch.undo()
        for number, handler in handlers.items():
            signal.signal(number, handler)
