"""The planner shares images among ranks by itself where they are large: because samples are few, or because one does not fit."""

from __future__ import annotations

import pytest

import shardwise
from shardwise.errors import Infeasible, UsageError
from shardwise.plan.plan import Plan
from shardwise.zoo.resolve import resolve


def planned(name: str, cluster: str, batch: int, constraints: str = "", layout: str | None = None) -> Plan:
    model = resolve(name)
    return shardwise.plan(model.make, model.batch(batch), loss=model.loss, cluster=cluster, constraints=constraints, layout=layout)


def test_one_sample_is_shared_by_all_devices() -> None:
    plan = planned("resnet-18:image=2048", "1xdgx-a100-40", 1)
    assert plan.layout.num_ranks == 8
    assert plan.layout.spatial != "1"
    said = dict(plan.reasons)
    assert said["spatial"].startswith(f"spatial={plan.layout.spatial}: the best priced plan with spatial=")
    alone = planned("resnet-18:image=2048", "1xdgx-a100-40", 1, "spatial=1")
    assert plan.prediction is not None
    assert alone.prediction is not None
    assert plan.prediction.step_time_s < alone.prediction.step_time_s


def test_samples_that_do_not_fit_are_shared_though_replicas_have_some() -> None:
    """A sample for each of eight V100, none of which holds one of a U-Net's without computing its activations again."""
    plan = planned("unet:image=4096", "1xp3.16xlarge", 8)
    assert plan.layout.spatial != "1"
    assert plan.layout.recompute == "none"
    with pytest.raises(Infeasible, match="the fullest rank needs"):
        planned("unet:image=4096", "1xp3.16xlarge", 8, layout="data=8 zero=3 precision=float16")


def test_what_would_do_shares_images_among_more() -> None:
    """Where nothing fits, the leanest that was tried and what would do count pieces of images too."""
    with pytest.raises(Infeasible, match=r"none of|no layout") as caught:
        planned("unet:image=12288", "1xp3.16xlarge", 1)
    said = str(caught.value)
    assert "such devices (" in said, said
    assert "spatial=" in said.partition("What would do")[2], said


def test_small_images_are_not_shared() -> None:
    """Where halos are as large as pieces nothing is searched; what is asked for is."""
    assert planned("resnet-18:image=224", "1xdgx-a100-40", 2).layout.spatial == "1"
    assert planned("resnet-18:image=224", "1xdgx-a100-40", 2, "spatial=2 ranks=4").layout.spatial == "2"
    with pytest.raises(UsageError, match="spatial is a word"):
        planned("resnet-18:image=224", "1xdgx-a100-40", 2, "spatial<=2")
