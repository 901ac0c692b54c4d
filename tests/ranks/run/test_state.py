"""Models that write their own parameters and buffers (`state_models.py`): what they hold, and are evaluated with, is plain PyTorch's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "ranks")]

from test_awkward import TWO, check  # noqa: E402

import shardwise  # noqa: E402
from shardwise.errors import Infeasible  # noqa: E402
from shardwise.world.world import World  # noqa: E402
from tests.support.state_models import MODELS  # noqa: E402
from tests.support.verified_models import Subject  # noqa: E402

MORE = (
    "data=2 zero=3 microbatches=2",
    "data=2 zero=1 offload=optimizer",
    "pipeline=2 microbatches=2 recompute=full",
    "pipeline=2 microbatches=2 schedule=zb-h1",
)


@pytest.mark.parametrize("name", MODELS)
def test_models_that_write_their_own_state_are_what_they_are_in_one_process(name: str) -> None:
    assert not check(Subject(str(ROOT / f"tests/support/state_models.py:{name}")), TWO + MORE)


def test_what_is_written_in_another_order_is_refused_by_name() -> None:
    subject = Subject(str(ROOT / "tests/support/state_models.py:bounded"))
    with pytest.raises(Infeasible, match=r"reads or writes .*weight while the model runs, and gems-master"):
        check(subject, ("pipeline=2 microbatches=2 schedule=gems-master",))


def evaluated(world: World, name: str) -> tuple[float, float]:
    """(the loss of an evaluation, the loss of the next), after a step."""
    torch.manual_seed(0)
    made, batch = MODELS[name]()
    engine = shardwise.parallelize(made, batch=batch, optimizer="sgd", plan="data=2", world=world)
    engine.step(batch)
    return engine.evaluate(batch), engine.evaluate(batch)


@pytest.mark.parametrize("name", ["contrast", "bounded"])
def test_what_is_written_without_asking_whether_it_trains_is_written_in_evaluation_too(name: str) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    given = batch if isinstance(batch, dict) else dict(zip("ab", batch, strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(**given).backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        wanted = [float(model(**given)) for _ in range(2)]
    assert shardwise.launch(evaluated, 2, name)[0] == pytest.approx(wanted, rel=1e-5)
