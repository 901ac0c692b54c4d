"""A fine-tuning loop as Hugging Face's users write it: from_pretrained, train(), eval(), a validation loss; losses are the serial run's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import shardwise
from shardwise.world.launch.current import current_world
from shardwise.world.world import World

transformers = pytest.importorskip("transformers")
NONE = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}  # GPT-2's own are 0.1


def batches() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 64, (4, 4, 12), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": x, "labels": x} for x in ids]


def tuned(model: Any, training: Callable[[], Iterable[Any]], validation: Callable[[], Iterable[Any]]) -> list[tuple[list[float], float]]:
    """By epoch: losses of training, and of validation, which is computed twice alike."""
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for _ in range(2):
        model.train()
        losses = []
        for batch in training():
            loss = model(**batch).loss
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(float(loss.detach()))
        model.eval()
        with torch.no_grad():
            once, again = (float(model(**batch).loss) for batch in validation() for _ in range(2))
        assert once == again
        found.append((losses, once))
    return found


def divided(world: World, folder: str, layout: str, *settings: dict[str, float]) -> list[Any]:
    """For each setting of the configuration: what `tuned` tells, and the last state's validation loss in plain PyTorch."""
    data, found = batches(), []
    for changes in settings:
        torch.manual_seed(0)
        with shardwise.auto_parallelize(batch=data[0], plan=layout, world=world):
            model = transformers.GPT2LMHeadModel.from_pretrained(folder, **changes)
        losses = tuned(model, lambda: shardwise.shard(data[:3]), lambda: shardwise.shard(data[3:]))
        state, plain = shardwise.full_state_dict(model), 0.0
        if state is not None:
            whole = transformers.GPT2LMHeadModel.from_pretrained(folder, **changes)
            whole.load_state_dict(state)
            with torch.no_grad():
                plain = float(whole.eval()(**data[3]).loss)
        found.append((losses, plain))
    return found


def flat(losses: list[tuple[list[float], float]]) -> list[float]:
    return [x for training, validation in losses for x in (*training, validation)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint as `save_pretrained` writes it, of random weights."""
    made = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=4, n_positions=16, vocab_size=64, bos_token_id=1, eos_token_id=1)
    transformers.GPT2LMHeadModel(config).save_pretrained(made)
    return str(made)


@pytest.fixture(scope="module")
def wanted(folder: str) -> tuple[list[float], list[float]]:
    """Losses of plain PyTorch without dropout, and of shardwise on one process with it."""
    data = batches()
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, **NONE)
    assert not model.training
    plain = flat(tuned(model, lambda: data[:3], lambda: data[3:]))
    dropping = flat(divided(current_world("cpu"), folder, "data=1", {})[0][0])
    assert dropping[0] != pytest.approx(plain[0], rel=1e-4)  # something was dropped
    return plain, dropping


@pytest.mark.parametrize("layout", ["data=2", pytest.param("tensor=2", marks=pytest.mark.long)])
def test_one_script_on_one_and_two_ranks(
    ranks: Callable[..., list[Any]], folder: str, wanted: tuple[list[float], ...], layout: str
) -> None:
    for (losses, plain), theirs in zip(ranks(divided, 2, folder, layout, NONE, {})[0], wanted, strict=True):
        assert flat(losses) == pytest.approx(theirs, rel=2e-6)
        assert losses[-1][1] == pytest.approx(plain, rel=2e-6)
