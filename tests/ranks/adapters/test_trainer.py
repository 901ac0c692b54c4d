"""transformers' Trainer with one changed import, on 1 and 2 ranks: everything that it logs, and what it saves, is the serial run's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.errors import UsageError
from shardwise.world.world import World
from tests.support import trainer_scripts as scripts

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
LONG = pytest.mark.long  # each imports transformers on two ranks


def told(world: World, folder: str, layout: str, *runs: dict[str, Any]) -> list[Any]:
    """By run: what was logged, the next random numbers, and the weights as `from_pretrained` finds them."""
    from shardwise.adapters.transformers import Trainer

    found = []
    for number, run in enumerate(runs):
        place = f"{folder}/{number}"
        trainer = scripts.script(Trainer, place, plan=f"{layout} precision=float64", **run)
        saved = transformers.GPT2LMHeadModel.from_pretrained(place).state_dict() if world.rank == 0 else None
        found.append((scripts.history(trainer), scripts.seeds(), saved))
    return found


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    folder = str(tmp_path_factory.mktemp("serial"))
    trainer = scripts.script(transformers.Trainer, folder, {})
    seeds = scripts.seeds()
    return (scripts.history(trainer), seeds, transformers.GPT2LMHeadModel.from_pretrained(folder).state_dict()), folder


def same(mine: Any, wanted: Any, rel: float = 1e-9) -> None:
    assert len(mine[0]) == len(wanted[0])
    for row, theirs in zip(mine[0], wanted[0], strict=True):
        assert row == pytest.approx(theirs, rel=rel)
    assert mine[1] == wanted[1]
    if mine[2] is not None:
        for name, x in wanted[2].items():
            torch.testing.assert_close(mine[2][name], x, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("layout", ["tensor=2", pytest.param("data=2", marks=LONG), pytest.param("data=2 zero=3", marks=LONG)])
def test_what_it_logs_and_saves_is_the_serial_runs(
    ranks: Callable[..., list[Any]], serial: tuple[Any, str], tmp_path: Path, layout: str
) -> None:
    wanted, folder = serial
    again = {"changes": {}, "resume": f"{folder}/checkpoint-2"}  # which plain transformers wrote
    for from_start, resumed in ranks(told, 2, str(tmp_path), layout, {"changes": {}}, again, timeout_s=200.0):
        same(from_start, wanted)
        same(resumed, wanted)
    # Plain transformers goes on from what was written here.
    trainer = scripts.script(transformers.Trainer, str(tmp_path / "plain"), {}, f"{tmp_path}/0/checkpoint-2")
    for row, theirs in zip(scripts.history(trainer), wanted[0], strict=True):
        assert row == pytest.approx(theirs, rel=1e-9)


@LONG
def test_dropout_and_half_precision_are_those_of_one_rank(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """The model's own random numbers, after a checkpoint too; sums of bfloat16 are rounded otherwise on two ranks."""
    dropping = {"changes": {}, "dropout": 0.2}
    again = {**dropping, "resume": f"{tmp_path}/one/0/checkpoint-2"}
    half = {"changes": {"bf16": True, "num_train_epochs": 1, "save_strategy": "no"}}
    wanted = told(World(), str(tmp_path / "one"), "data=1", dropping, half)
    assert wanted[0][0][0]["loss"] != pytest.approx(wanted[1][0][0]["loss"], rel=1e-3)  # something was dropped
    for first, resumed, rounded in ranks(told, 2, str(tmp_path / "two"), "data=2", dropping, again, half, timeout_s=200.0):
        same(first, wanted[0])
        same(resumed, wanted[0])
        assert [row["loss"] for row in rounded[0] if "loss" in row] == pytest.approx(
            [row["loss"] for row in wanted[1][0] if "loss" in row], rel=1e-2
        )


def others(world: World, folder: str) -> list[Any]:
    """Whole batches that differ between ranks; a plain Trainer around a divided model; a model that is made by a function; generation in
    evaluation by another trainer's class."""
    import shardwise
    from shardwise.adapters import transformers as adapted

    args = scripts.arguments(folder, max_steps=2, save_strategy="no", eval_strategy="no", num_train_epochs=1)
    trainer = adapted.Trainer(scripts.gpt(), args, train_dataset=scripts.Texts(8, world.rank), plan="data=2")
    with pytest.raises(UsageError, match="different batches"):
        trainer.train()
    samples = scripts.Texts(4, 1)
    batch = {key: torch.stack([item[key] for item in samples.items]) for key in samples[0]}
    divided = shardwise.auto_parallelize(scripts.gpt(), batch, plan="data=2", world=world)
    with pytest.raises(UsageError, match=r"DistributedDataParallel is given GPT2LMHeadModel.*shardwise\.adapters"):
        nn.parallel.DistributedDataParallel(divided)
    made = adapted.Trainer(model_init=lambda: scripts.gpt(), args=args, train_dataset=scripts.Texts(19, 1), plan="tensor=2")
    made.train()
    assert adapted.trainer_of(transformers.Trainer) is adapted.Trainer
    adapted.save_pretrained(made.model, f"{folder}/files", 4000)
    adapted.load_pretrained(divided, f"{folder}/files")
    one, other = (shardwise.full_state_dict(model) or {} for model in (divided, made.model))
    assert one.keys() == other.keys()
    assert all(torch.equal(x, other[name]) for name, x in one.items())
    return scripts.history(made)


@LONG
def test_what_else_scripts_do(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    args = scripts.arguments(str(tmp_path / "serial"), max_steps=2, save_strategy="no", eval_strategy="no", num_train_epochs=1)
    serial = transformers.Trainer(model_init=lambda: scripts.gpt(), args=args, train_dataset=scripts.Texts(19, 1))
    serial.train()
    for history in ranks(others, 2, str(tmp_path / "ours"), timeout_s=200.0):
        for row, theirs in zip(history, scripts.history(serial), strict=True):
            assert row == pytest.approx(theirs, rel=1e-5)
    files = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours" / "files")
    assert len(list((tmp_path / "ours" / "files").glob("*.safetensors"))) > 2
    for name, x in serial.model.state_dict().items():
        torch.testing.assert_close(files.state_dict()[name], x, rtol=1e-4, atol=1e-5)
