"""A step on a batch of a known form walks it once and slices it by a kept recipe, with the same results as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.capture import nesting
from shardwise.capture.nesting import BatchLeaves, BatchSignature, batch_size_of, named_leaves, tensors_of
from shardwise.run.engine import Engine


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: dict[str, Tensor], y: Tensor, scale: float = 1.0) -> Tensor:
        return ((self.layers(x["a"]).squeeze(-1) - y) ** 2 * scale).mean()


def _batch(rows: int, scale: float | None = None) -> dict[str, Any]:
    torch.manual_seed(rows)
    batch: dict[str, Any] = {"x": {"a": torch.randn(rows, 3)}, "y": torch.randn(rows)}
    return batch if scale is None else batch | {"scale": scale}


def _engine(plan: str) -> Engine:
    torch.manual_seed(0)
    return shardwise.parallelize(Regression(), _batch(8), plan=plan)


class Walks:
    """Counts walks of batches, and reads of a step's counter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, walk = 0, nesting.named_leaves

        def counted(batch: Any, path: str = "") -> list[tuple[str, Any]]:
            self.count += 1
            return walk(batch, path)

        monkeypatch.setattr(nesting, "named_leaves", counted)


@pytest.mark.parametrize("plan", ["data=1", "data=1,schedule=1f1b,microbatches=4"])
def test_a_step_walks_its_batch_once(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, walks = _engine(plan), Walks(monkeypatch)
    engine.step(_batch(8))
    assert walks.count > 1  # of a form that is not known yet
    for number in range(1, 4):
        walks.count = 0
        engine.step(_batch(8) if number < 3 else _batch(4))
        assert (walks.count == 1) == (number < 3)


FORMS = [(8, None), (4, None), (8, 2.0), (8, None), (8, 3.0), (4, None), (8, 2.0), (7, None), (7, None)]


@pytest.mark.parametrize("plan", ["data=1", "data=1,schedule=1f1b,microbatches=2"])
def test_kept_plans_compute_what_new_ones_do(plan: str) -> None:
    engines = [_engine(plan) for _ in range(2)]
    for rows, scale in FORMS:
        engines[1]._batch_plans._kept.entries.clear()
        losses = [engine.step(_batch(rows, scale)).loss for engine in engines]
        assert losses[0] == losses[1], (rows, scale)
    first, second = (engine.parameters for engine in engines)
    assert all(torch.equal(p, second[name]) for name, p in first.items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_dtype_is_computed_as_by_the_serial_model(dtype: torch.dtype) -> None:
    """Targets promote what they meet; what a linear layer does not take, it does not take."""
    engine, model = _engine("data=1"), Regression()
    model.load_state_dict(engine.full_state_dict())
    batch = _batch(8)
    engine.forward_backward(batch)
    wide = batch | {"y": batch["y"].to(dtype)}
    (loss,), expected = engine.forward_backward(wide).losses, model(**wide)
    assert loss.dtype == expected.dtype
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0.0)
    with pytest.raises(RuntimeError, match="same dtype"):
        engine.forward_backward(batch | {"x": {"a": batch["x"]["a"].to(dtype)}})


def test_an_object_in_a_batch_is_no_key() -> None:
    assert BatchLeaves((torch.ones(2), object())).key is None
    assert BatchLeaves((torch.ones(2), 1)).key != BatchLeaves((torch.ones(2), 2)).key
    assert BatchLeaves((torch.ones(2),)).key != BatchLeaves((torch.ones(3),)).key


def test_leaves_are_those_of_the_batch() -> None:
    batch = {"a": (torch.ones(2), [torch.zeros(2, 3), None]), "b": 3}
    leaves = BatchLeaves(batch)
    assert [path for path, _ in named_leaves(batch)] == list(leaves.by_path) == ["a.0", "a.1.0", "a.1.1", "b"]
    assert leaves.tensors.keys() == tensors_of(batch).keys()
    assert leaves.num_rows == batch_size_of(batch) == 2
    assert BatchSignature.of_leaves(leaves).key == BatchSignature.of(batch).key


def test_microbatches_with_shares_of_the_samples_have_a_recipe() -> None:
    engine = _engine("data=1,schedule=1f1b,microbatches=2")
    for rows in (8, 7):
        engine.step(_batch(rows))
    recipes = [recipe for _, _, recipe in engine._batch_plans._kept.entries.values()]
    shares = [[float(x) for constants in recipe.constants for x in constants.values()] for recipe in recipes if recipe is not None]
    assert shares == [[0.5, 0.5], pytest.approx([4 / 7, 3 / 7])]
