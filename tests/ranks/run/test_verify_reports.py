"""What a verification says beside whether it is equal: what was divided, of every rank, of several layouts, of a plan file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.cli import run
from shardwise.errors import Infeasible, UsageError
from shardwise.plan.plan import Plan
from shardwise.plan.plan_file import write_plan
from shardwise.run.engine import Engine
from shardwise.run.gradients.gradient_reducer import GradientReducer
from shardwise.run.rank_model.model_source import ModelSource


class Mlp(nn.Module):
    """4 -> 8 -> 6: 40 + 54 parameters, and 4 * 8 + 8 * 6 = 80 multiply-adds a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).tanh())
        return y


BATCH = (torch.randn(8, 4, generator=torch.Generator().manual_seed(0)),)


def square(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def verified(layout: Any, **options: Any) -> Any:
    return shardwise.verify(Mlp, layout, BATCH, loss=square, **{"steps": 1, **options})


def test_how_much_each_axis_divides() -> None:
    """Against counts by hand."""
    layouts = ["tensor=2", "data=2", "data=2 zero=1", "pipeline=2"]
    found = verified(layouts)
    assert found.ok, found
    shares = [one.divided for one in found.layouts]
    assert shares[0] == {"tensor": {"parameters": 0.0, "flops": 0.0}}
    assert shares[1] == {"data": {"parameters": 0.0, "flops": 1.0}}
    assert shares[2] == {"data": {"parameters": 1.0, "flops": 1.0}}
    # Stages of one layer each: the fullest rank has 54 of 94 parameters, 48 of 80 multiply-adds, where an even one had half.
    assert shares[3] == {"pipeline": {"parameters": pytest.approx(2 * (1 - 54 / 94)), "flops": pytest.approx(2 * (1 - 48 / 80))}}
    (warning,) = found.warnings
    assert "tensor=2 divides no parameter and no product of this model (0 %)" in warning
    assert "--cut-everything" in warning
    assert found.layouts[0].warnings == (warning,)


def test_cutting_everything_divides_what_the_rules_allow() -> None:
    """Rows of the first layer, columns of the second: of biases the second one's 6 stay whole."""
    found = verified(["tensor=2", "tensor=2x2"], cut_everything=True)
    assert found.ok, found
    line, grid = (one.divided for one in found.layouts)
    assert line["tensor"]["flops"] == 1.0
    assert line["tensor"]["parameters"] in (pytest.approx(88 / 94), 1.0)
    assert not found.warnings
    assert grid.keys() == {"tensor", "rows", "columns"}
    for share in grid.values():
        assert 0 < share["flops"] <= 1
    ways = {"rows": grid["rows"]["flops"], "columns": grid["columns"]["flops"]}
    # Cut over both axes an operator is a quarter, over one a half: (1 - h) / (1 - 1/4), and every axis divides its own share.
    assert grid["tensor"]["flops"] <= (ways["rows"] + ways["columns"]) * (1 / 2) / (3 / 4) + 1e-9


def test_a_rank_that_differs_after_the_last_update_is_found_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken twins: rank 1 has copies only, of which the whole tensors on rank 0 say nothing."""
    update, collect = Engine.update, GradientReducer.wait

    def drifting(self: Engine, *given: Any) -> Any:
        done = update(self, *given)
        if self.world.rank == 1:
            with torch.no_grad():
                self.rank_model.parameters["down.weight"][2, 3] *= 1 + 1e-6
        return done

    def scaled(self: GradientReducer) -> None:
        collect(self)
        if self.groups[0].is_counted is False:
            self.groups[0].views["up.weight"].mul_(1 + 1e-6)

    monkeypatch.setattr(Engine, "update", drifting)
    for layout in ("data=2", "data=2 zero=1", "tensor=2"):
        found = verified(layout)
        assert not found.ok
        assert "weights of down.weight on rank 1 in step 1" in (found.first_difference or "")
    monkeypatch.setattr(Engine, "update", update)
    monkeypatch.setattr(GradientReducer, "wait", scaled)
    found = verified("data=2")  # AdamW's first step is the same for any factor of its gradient
    assert "gradients of up.weight on rank 1 in step 1" in (found.first_difference or "")


def test_what_the_optimizer_keeps_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken twin: weights show a wrong state of the optimizer only a step later."""
    update = Engine.update

    def drifting(self: Engine, *given: Any) -> Any:
        done = update(self, *given)
        if self.world.rank == 1:
            for piece in self.state_shards(drain=False):
                if piece.slot == "exp_avg_sq":
                    with torch.no_grad():
                        piece.tensor.mul_(1 + 1e-6)
        return done

    monkeypatch.setattr(Engine, "update", drifting)
    for layout in ("data=2", "data=2 zero=1", "tensor=2"):
        assert "exp_avg_sq on rank 1 in step 1" in (verified(layout).first_difference or "")


def test_a_loss_is_compared_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken twin: off by what float32 does not show."""
    loss_of = Engine.loss_of
    monkeypatch.setattr(Engine, "loss_of", lambda self, result: loss_of(self, result) * (1 + 1e-8))
    assert "loss in step 1" in (verified("data=2").first_difference or "")


def test_several_layouts_trace_the_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[Any] = []
    capture = ModelSource.capture

    def counted(self: ModelSource, batch: Any, loss: Any, size: Any, *rest: Any) -> Any:
        captures.append(size)
        return capture(self, batch, loss, size, *rest)

    monkeypatch.setattr(ModelSource, "capture", counted)
    found = verified(["data=2", "tensor=2", "pipeline=2 microbatches=2"])
    assert sorted(captures) == [4, 8]  # once for each number of samples
    assert [one.layout for one in found.layouts] == [
        str(shardwise.Layout.parse(x)) for x in ("data=2", "tensor=2", "pipeline=2 microbatches=2")
    ]
    assert found.worst == {kind: max(one.worst[kind] for one in found.layouts) for kind in found.worst}
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["layout", "data=2", "tensor=2", "pipeline=2"]
    assert all("equal" in line for line in lines[1:4])
    assert "<td>data=2</td>" in found._repr_html_()
    with pytest.raises(Infeasible, match="data=9"):  # of 8 samples; before any rank starts
        verified(["data=2", "data=9"])


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """A plan that cuts what no planner would, and begins its second stage after tanh."""
    (tmp_path / "model.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def make():\n"
        "    torch.manual_seed(0)\n"
        "    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))\n"
        "    return net, (torch.randn(8, 4),), lambda output, batch: output.square().mean()\n"
    )
    model = f"{tmp_path}/model.py:make"
    planned = shardwise.plan(model, 8, cluster="1xcpu-2", layout="tensor=2 pipeline=2 microbatches=2")
    plan = Plan(planned.layout, model, "1xcpu-2", 8, stages=("2/linear",), shards=(("tensor", (("0.weight", 0),)),))
    write_plan(plan, tmp_path / "plan.toml")
    return tmp_path / "plan.toml"


def test_a_plan_file_is_verified_as_it_is(plan_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(plan_file), "--steps", "1", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["ok"]
    assert found["layout"] == str(shardwise.Layout.parse("tensor=2 pipeline=2 microbatches=2"))
    assert found["divided"]["tensor"]["parameters"] == pytest.approx(32 / 94)  # the plan's own cut and no other
    assert found["divided"]["pipeline"]["parameters"] == pytest.approx(2 * (1 - 54 / 94))
    assert shardwise.verify(str(plan_file), steps=1).divided == found["divided"]
    whole = shardwise.verify(plan_file, steps=1, cut_everything=True)
    assert whole.ok
    assert whole.divided["tensor"]["parameters"] > 0.9
    assert whole.divided["pipeline"] == found["divided"]["pipeline"]
    with pytest.raises(UsageError, match="is a plan, which has a layout of its own"):
        shardwise.verify(str(plan_file), "data=2")
    assert run(["verify", str(plan_file), "--layout", "data=2"]) == 2
    assert run(["verify", str(plan_file), "--batch", "16"]) == 2
    assert "for 8 samples" in capfd.readouterr().err


def test_the_command_line_tells_all(plan_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = f"{plan_file.parent}/model.py:make"
    words = ["verify", model, "--layout", "tensor=2", "--layout", "data=2", "--steps", "1"]
    assert run([*words, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["ok"]
    keys = {"ok", "worst", "first_difference", "replicated_operators", "divided", "warnings"}
    assert all(keys <= one.keys() for one in (found, *found["layouts"]))
    assert [one["divided"] for one in found["layouts"]] == [
        {"tensor": {"parameters": 0.0, "flops": 0.0}},
        {"data": {"parameters": 0.0, "flops": 1.0}},
    ]
    assert found["warnings"] == found["layouts"][0]["warnings"] != []
    assert run([*words, "--cut-everything"]) == 0
    shown = capfd.readouterr()
    assert "warning" not in shown.out + shown.err
    assert run(["verify", model, "--layout", "tensor=2", "--steps", "1"]) == 0
    shown = capfd.readouterr()
    assert "tensor divides 0 % of the parameters, 0 % of the FLOPs" in shown.out
    assert "--cut-everything" in shown.err


def test_without_a_layout_nothing_is_divided_and_that_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    for words, why in (([], "no layout was given"), (["--layout", "data=1"], "the layout has one rank")):
        assert run(["verify", "gpt-tiny", "--steps", "1", "--json", *words]) == 0
        shown = capfd.readouterr()
        warnings = [text for text in json.loads(shown.out)["warnings"] if "nothing was divided" in text]
        assert len(warnings) == 1
        assert warnings[0].startswith(why)
        assert f"warning: {warnings[0]}" in shown.err
    assert run(["verify", "gpt-tiny", "--layout", "data=2", "--steps", "1", "--json"]) == 0
    shown = capfd.readouterr()
    assert not [text for text in json.loads(shown.out)["warnings"] if "divided" in text]
    assert "nothing was divided" not in shown.err
