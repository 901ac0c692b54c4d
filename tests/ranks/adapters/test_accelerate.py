"""Accelerate's loops with one changed import, on 1 and 2 ranks; without it a divided model is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.world.world import World
from tests.support import trainer_scripts as scripts

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")


def nlp_example(accelerator: Any, folder: str, resume: bool = False) -> list[float]:
    """Accelerate's first example: everything is made before `prepare`, gradients accumulate, an evaluation gathers."""
    transformers.set_seed(42)
    model = scripts.gpt().double()
    model = scripts.exactly(model) if type(accelerator) is accelerate.Accelerator else model
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-2)
    train = torch.utils.data.DataLoader(scripts.Texts(19, 1), shuffle=True, batch_size=4)
    valid = torch.utils.data.DataLoader(scripts.Texts(6, 2), shuffle=False, batch_size=4)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 1, 8)
    model, optimizer, train, valid, scheduler = accelerator.prepare(model, optimizer, train, valid, scheduler)
    if resume:
        accelerator.load_state(folder)
    found = []
    for epoch in range(2):
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                output = model(**batch)
                accelerator.backward(output.loss)
                if accelerator.sync_gradients:
                    found.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            found += [float(output.loss), *scheduler.get_last_lr()]
        model.eval()
        for batch in valid:
            with torch.no_grad():
                output = model(**batch)
            predictions, labels = accelerator.gather_for_metrics((output.logits.argmax(-1), batch["labels"]))
            found.append(float((predictions[:, :-1] == labels[:, 1:]).double().mean()))
        if epoch == 0 and not resume:
            accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        f"{folder}/model", is_main_process=accelerator.is_main_process, save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )  # fmt: skip
    return found


def ranked(world: World, folder: str, layout: str, serial: str) -> list[Any]:
    from shardwise.adapters.accelerate import Accelerator

    losses = nlp_example(Accelerator(plan=f"{layout} precision=float64", gradient_accumulation_steps=2, cpu=True), folder)
    again = nlp_example(Accelerator(plan=f"{layout} precision=float64", gradient_accumulation_steps=2, cpu=True), serial, True)
    return [losses, again]


@pytest.mark.parametrize("layout", [pytest.param("data=2", marks=pytest.mark.long), "tensor=2"])
def test_the_first_example_is_the_serial_run(ranks: Callable[..., list[Any]], tmp_path: Path, layout: str) -> None:
    plain = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    wanted = nlp_example(plain, str(tmp_path / "serial"))
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "serial" / "model").state_dict()  # before others write there
    resumed = nlp_example(accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True), str(tmp_path / "serial"), True)
    for losses, again in ranks(ranked, 2, str(tmp_path / "ours"), layout, str(tmp_path / "serial"), timeout_s=200.0):
        assert losses == pytest.approx(wanted, rel=1e-9)
        assert again == pytest.approx(resumed, rel=1e-9)
    ours = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours" / "model").state_dict()
    for name, x in theirs.items():
        torch.testing.assert_close(ours[name], x, rtol=1e-7, atol=1e-9)
    assert json.loads((tmp_path / "ours" / "model" / "config.json").read_text())["n_embd"] == 32
