"""What a new user tries first: what cannot work is refused before ranks start, with the numbers and a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.cli import run
from shardwise.errors import Infeasible, UsageError
from shardwise.train import flow

CONFIG = """model.name = "gpt-tiny"
data.text = "text.txt"
data.sequence = 16
train.steps = 1
train.batch = 2
run.folder = "run"
run.sample = 0
plan.layout = "data=1"
"""


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """`trained(*words)`: exit status and what `shardwise train` said; it fails the test where ranks are started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.toml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text("what is learnt by heart " * 200)
    monkeypatch.setattr(flow, "launch", lambda *_, **__: pytest.fail("ranks were started"))

    def call(*words: str) -> tuple[int, str]:
        status = run(["train", "config.toml", *words])
        return status, " ".join(capfd.readouterr().err.split())

    return call


def test_a_text_of_more_tokens_than_the_model_knows(trained: Any) -> None:
    status, said = trained()
    assert status == 2
    assert "gpt-tiny looks its tokens up in tokens.weight, which has 96 rows" in said
    assert "tokens from 0 to 255: use a vocabulary of at least 256" in said


@pytest.mark.parametrize("cluster", ["8xdgx-h100", "2xcpu-2"])
def test_machines_that_are_not_here(trained: Any, cluster: str) -> None:
    status, said = trained("model.name=gpt-tiny:vocabulary=256", f"plan.cluster={cluster}")
    assert status == 2
    count, kind = ("64", "H100") if "h100" in cluster else ("4", "")
    assert f"plan.cluster = {cluster} is {count} {kind}" in said
    assert f"shardwise plan gpt-tiny:vocabulary=256 --cluster {cluster} --batch 2" in said
    assert "plan.cluster=here" in said


class Drawing(nn.Module):
    """Holds a generator of its own, and draws from it where it is told to."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(3)
        self.up = nn.Linear(4, 4)
        nn.init.normal_(self.up.weight, generator=self.own)
        self.draws = draws

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self.own) if self.draws else torch.zeros(())
        return self.up(x + noise).square().mean()


X = (torch.ones(8, 4),)


@pytest.mark.parametrize("built", [True, False])
def test_a_module_may_hold_a_generator(built: bool) -> None:
    made = Drawing(False) if built else lambda: Drawing(False)
    serial = Drawing(False)
    torch.manual_seed(0)
    if not built:
        serial = Drawing(False)
    else:
        serial.load_state_dict(made.state_dict())  # type: ignore[union-attr]
    assert shardwise.parallelize(made, X, plan="data=1", seed=0).step(X).loss == pytest.approx(float(serial(*X).detach()), rel=1e-6)


def test_who_draws_from_a_generator_of_its_own_is_named_and_runs_whole() -> None:
    engine = shardwise.parallelize(lambda: Drawing(True), X, plan="data=1", seed=0)
    assert "its torch.Generator own in forward" in engine.plan.uncaptured
    torch.manual_seed(0)
    assert engine.step(X).loss == pytest.approx(float(Drawing(True)(*X).detach()), rel=1e-6)
    with pytest.raises(Infeasible, match=r"draws from its torch\.Generator own"):
        shardwise.parallelize(lambda: Drawing(True), X, plan="tensor=2")


def test_a_built_model_is_divided_in_place() -> None:
    net = nn.Linear(4, 2)
    before = net.weight.detach().clone()
    assert shardwise.auto_parallelize(net, X, plan="data=1") is net
    assert torch.equal(net.weight, before)
    net(*X).sum().backward()
    assert torch.equal(net.weight.grad, torch.full((2, 4), 8.0))
    with pytest.raises(UsageError, match="a batch is needed"):
        shardwise.auto_parallelize(nn.Linear(4, 2))  # type: ignore[call-overload]
