"""Layouts of a model share its serial run where they compare with equal ones, and only there; no two ranks of a proof are equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise
from shardwise.api import plan_to_verify, subject_of
from shardwise.run.prove import prove as prove_file
from shardwise.run.prove import rank_threads, serial_points
from shardwise.run.prove.degrees import CERTAINTY, LINEAR
from shardwise.run.prove.locate import Values
from shardwise.run.prove.prove import prove_plan
from shardwise.run.prove.serial_points import ProofModel, ProofOptions
from shardwise.run.rank_model.model_source import CachedModelSource
from shardwise.run.verify.serial import SerialRun


class Layers(nn.Module):
    """Two products around a norm of the batch, or of features."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), norm(8), nn.GELU(), nn.Linear(8, 2))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(self.layers(x), target)


class Normed(Layers):
    """With statistics over the batch, so that microbatches train something else."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d)


BATCH = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.randn(8, 2, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def serial_runs(monkeypatch: pytest.MonkeyPatch) -> list[SerialRun]:
    """Return a list of all serial runs that are built."""
    built: list[SerialRun] = []

    class NotedRun(SerialRun):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            built.append(self)

    monkeypatch.setattr(serial_points, "SerialRun", NotedRun)
    return built


def prove_layouts(make: type[nn.Module], layouts: Sequence[str], **options: Any) -> Any:
    """Prove layouts in one call."""
    return shardwise.prove(make, layouts, BATCH, max_error_probability=0.1, **options)


def test_layouts_share_a_serial_run(serial_runs: list[SerialRun]) -> None:
    layouts = ["data=2", "tensor=2", "data=2 zero=3 microbatches=2", "pipeline=2 microbatches=2"]
    shared = prove_layouts(Layers, layouts)
    assert len(serial_runs) == 1
    for proof, layout in zip(shared, layouts, strict=True):
        (alone,) = prove_layouts(Layers, [layout])
        assert proof.ok
        assert (proof.points, proof.error_probability) == (alone.points, alone.error_probability)
    assert len(serial_runs) == 1 + len(layouts)


def test_what_a_layout_changes_of_the_serial_run_is_not_shared(serial_runs: list[SerialRun]) -> None:
    with pytest.warns(RuntimeWarning, match="microbatches change what is trained"):
        proofs = prove_layouts(Normed, ["data=2", "microbatches=2", "data=2 zero=1", "data=2 batch_norm=local"])
    assert all(proof.ok for proof in proofs), proofs
    assert len(serial_runs) == 3


def test_further_points_go_on_with_the_shared_run(serial_runs: list[SerialRun]) -> None:
    proofs = shardwise.prove(Layers, ["data=2", "tensor=2"], BATCH, max_error_probability=1e-24)
    assert [(proof.ok, proof.points) for proof in proofs] == [(True, 2), (True, 2)]
    assert len(serial_runs) == 1


def test_a_fault_in_one_layout_is_found_beside_layouts_that_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    add_up = rank_threads.add_up

    def add_up_three(parts: Sequence[Tensor]) -> Tensor:
        return add_up(parts) * (1 + 1e-15) if len(parts) == 3 and parts[0].is_floating_point() else add_up(parts)

    monkeypatch.setattr(rank_threads, "add_up", add_up_three)
    assert [proof.ok for proof in prove_layouts(Layers, ["data=2", "data=3", "tensor=2"])] == [True, False, True]


def test_what_is_counted_apart_is_added_to_any_point() -> None:
    CERTAINTY.reset()
    with CERTAINTY.count_apart() as counted:
        reciprocal = CERTAINTY.add_divisors(LINEAR, 5, zeros=1)
        CERTAINTY.num_functions += 2
    assert (CERTAINTY.num_functions, CERTAINTY.zero_divisors) == (0, 0)
    without = CERTAINTY.wrong_point_probability(reciprocal)
    for times in (1, 2):
        CERTAINTY.add_counted(counted)
        assert (CERTAINTY.num_functions, CERTAINTY.zero_divisors) == (2 * times, times)
        assert CERTAINTY.wrong_point_probability(reciprocal) / without == pytest.approx(1 + 5 * times + 2 * times)
    CERTAINTY.reset()


@pytest.mark.parametrize("layout", ["data=2 zero=3", "tensor=2", "data=2 tensor=2", "pipeline=2 microbatches=2", "data=2 microbatches=2"])
def test_no_two_ranks_compute_the_same(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that to prove ranks with equal places once would leave out none."""
    recorded = _record_ranks(layout, monkeypatch)
    assert not [(i, j) for i in range(len(recorded)) for j in range(i) if _have_equal_values(recorded[i], recorded[j])]


def test_equal_ranks_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = _record_ranks("tensor=2", monkeypatch)
    assert _have_equal_values(recorded[0], dict(recorded[0]))


def _record_ranks(layout: str, monkeypatch: pytest.MonkeyPatch) -> Sequence[Values]:
    """Return all values of forward of each rank."""
    found: list[Sequence[Values]] = []
    monkeypatch.setattr(prove_file, "first_wrong_value", lambda order, serial, places, recorded: found.append(recorded))
    monkeypatch.setattr(prove_file, "have_equal_values", lambda x, y: False)  # so that the values are recorded
    monkeypatch.setattr(prove_file, "_is_part", lambda value, full, shard: False)
    subject = subject_of(Layers, BATCH, None)
    source = CachedModelSource.from_model(subject[1])
    model = ProofModel(*subject[1:], source)
    prove_plan(plan_to_verify(layout, subject, source, None, None), model, ProofOptions(0.5), cut_everything=True)
    return found[0]


def _have_equal_values(x: Mapping[Any, Any], y: Mapping[Any, Any]) -> bool:
    return x.keys() == y.keys() and all(torch.equal(value.a, y[key].a) for key, value in x.items())
