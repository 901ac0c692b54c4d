"""Branch parallelism on whole networks: equal to the serial model in every composition, bytes by count, broken twins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from shardwise.errors import Infeasible, LayoutError
from shardwise.lower import regions
from shardwise.model.sharding.fold import propagate_with_folding
from shardwise.model.sharding.propagate import propagate
from shardwise.model.stages.branches import BranchRegion
from shardwise.plan.plan_file import read_plan, write_plan
from shardwise.run.rank_model.model_source import ModelSource
from shardwise.run.verify.verify import Verification
from shardwise.zoo.resolve import resolve

MODELS = Path(__file__).parents[2].joinpath("support", "branch_models.py")


def verified(name: str, layout: str, **options: Any) -> Verification:
    model = resolve(f"{MODELS}:{name}")
    return shardwise.verify(model.make, layout, model.batch(model.default_batch), loss=model.loss, **options)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("branched", "data=2 branch=4 zero=1"),
        ("branched", "branch=4 microbatches=2 recompute=full"),
        ("branched", "branch=2 pipeline=2 microbatches=4 schedule=gems-master"),
        ("branched_drawing", "data=2 branch=2 neighbours=data microbatches=2"),
        ("branched_drawing", "branch=2 pipeline=2 microbatches=2 schedule=zb-h1"),
        ("inception", "data=2 branch=2 zero=3"),
        ("inception", "branch=2 spatial=2"),
        ("inception", "branch=4 pipeline=2 microbatches=2"),
        ("inception_of_three", "branch=2 microbatches=2 offload=activations"),
        ("towers", "data=2 branch=2 recompute=full"),
        ("towers_that_share", "branch=2 zero=1"),
        ("paths", "data=2 branch=4"),
        ("twins", "branch=2 zero=1"),
        ("branched_drawing", "branch=3"),
    ],
)
def test_a_layout_whose_ranks_own_branches_equals_serial(name: str, layout: str) -> None:
    found = verified(name, layout)
    assert found.ok, found.first_difference
    assert found.divided["branch"]["flops"] > 0.2


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_what_enters_and_leaves_is_as_narrow_as_autocast_makes_it(precision: str) -> None:
    found = verified("branched", f"branch=2 precision={precision}", dtype=precision)
    assert found.ok, found.first_difference


def test_a_plan_file_says_the_owners(tmp_path: Path) -> None:
    model = resolve(f"{MODELS}:inception")
    plan = shardwise.plan(model.make, batch=model.batch(8), loss=model.loss, layout="branch=2")
    write_plan(plan, tmp_path / "plan.toml")
    again = read_plan(tmp_path / "plan.toml")
    assert dict(again.shards)["branch"] == dict(plan.shards)["branch"]
    turned = replace(again, shards=tuple((axis, tuple((name, 1 - rank) for name, rank in cuts)) for axis, cuts in again.shards))
    found = shardwise.verify(model.make, turned, model.batch(8), loss=model.loss)
    assert found.ok, found.first_difference


def test_tensor_ranks_share_a_branch() -> None:
    found = verified("branched", "branch=2 tensor=2", cut_everything=True)
    assert found.ok, found.first_difference
    assert found.divided["tensor"]["parameters"] > 0.5
    assert found.divided["branch"]["parameters"] > 0.5


def test_weights_that_branches_share_are_whole_everywhere_and_refused_where_they_would_come_in_pieces() -> None:
    with pytest.raises(LayoutError, match=r"zero=2 with .* which branches of several ranks of branch share, is not supported; use zero=1"):
        verified("twins", "branch=2 zero=2")


def test_unequal_pieces_of_the_samples_are_refused_where_data_has_cut_them_already() -> None:
    with pytest.raises(Infeasible, match="8 samples does not divide into data=2 x branch=3 equal shares; use a multiple of 6"):
        verified("branched_drawing", "data=2 branch=3")


def test_a_stage_does_not_begin_between_branches() -> None:
    model = resolve(f"{MODELS}:inception")
    plan = shardwise.plan(model.make, batch=model.batch(8), loss=model.loss, cluster="here", layout="branch=2 pipeline=2 microbatches=2")
    plan = replace(plan, stages=("layers.0.five.1.0/conv2d",))
    with pytest.raises(LayoutError, match="a pipeline stage begins between parallel branches that branch=2 gives to ranks, among layers"):
        shardwise.verify(model.make, plan, model.batch(8), loss=model.loss)


def test_broken_twin_a_piece_that_goes_to_the_wrong_place_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = regions._exchange_flat

    def turned(pieces: Any, *rest: Any) -> Any:
        return sent([[x.roll(1, -1) for x in those] for those in pieces], *rest)

    monkeypatch.setattr(regions, "_exchange_flat", turned)
    assert not verified("branched", "branch=2", steps=1).ok


def test_broken_twin_a_gradient_that_owners_do_not_send_back_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    back = regions._from_owners

    def lost(xs: Any, ways: Any, *rest: Any) -> Any:
        found = back(xs, ways, *rest)
        return {i: x * 0 for i, x in found.items()} if len(ways) == 2 else found  # two ways in, and four out

    monkeypatch.setattr(regions, "_from_owners", lost)
    found = verified("branched", "branch=2", steps=1)
    assert "gradients" in str(found.first_difference)


def test_gradients_of_branches_are_summed_over_data_alone() -> None:
    model = resolve(f"{MODELS}:branched")
    graph = ModelSource.from_model(model.make).capture(model.batch(8), model.loss, 8).graph
    found = propagate_with_folding(graph, {"data": 2, "branch": 4})
    axes = {v.name: found.gradient_axes[v.value] for v in graph.parameters}
    assert {axes[name] for name in axes if name.startswith("layers.")} == {("data",)}
    assert {axes[name] for name in axes if not name.startswith("layers.")} == {("data", "branch")}


def _whole_state(world: Any, which: str) -> dict[str, Tensor]:
    """Buffers after two steps; `which`: the layout, and with "apart" branches that share statistics stay branches (a broken twin)."""
    layout, apart, _ = which.partition(" apart")
    if apart:
        BranchRegion.join_branches = lambda self, values, graph: self  # type: ignore[method-assign, assignment]
    model = resolve(f"{MODELS}:twins_with_statistics")
    batch = model.batch(model.default_batch)
    engine = shardwise.parallelize(model.make, batch, loss=model.loss, plan=f"{layout} precision=float64", world=world, seed=0)
    for _ in range(2):
        engine.step(batch)
    return {name: x for name, x in (engine.full_state_dict() or {}).items() if "running" in name}


def test_statistics_that_branches_share_are_those_of_both() -> None:
    serial = _whole_state(None, "data=1")
    assert len(serial) == 2
    found, apart = (shardwise.launch(_whole_state, 2, which)[0] for which in ("branch=2", "branch=2 apart"))
    for name, expected in serial.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-10)
    assert any((apart[name] - expected).abs().max() > 1e-3 for name, expected in serial.items())


def test_statistics_that_all_branches_share_are_refused() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return F.cross_entropy(self.f(a) @ self.f(b).t(), torch.arange(a.shape[0]))

    graph = ModelSource.from_model(Views).capture((torch.randn(16, 8), torch.randn(16, 8)), None, None).graph
    with pytest.raises(LayoutError, match="write the same running statistics"):
        propagate(graph, {"branch": 2})
