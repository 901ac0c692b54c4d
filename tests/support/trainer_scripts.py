"""Fine-tuning scripts around trainers of transformers, as their authors write them: a model, arguments, data sets, a trainer's class."""

from __future__ import annotations

import random
from functools import wraps
from typing import Any

import numpy as np
import torch

from shardwise.lower.float64_mode import compute_in_float64

VOCABULARY = 64


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Token ids with a mask and labels, of which some do not count."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(count):
            ids = torch.randint(3, VOCABULARY, (10,), generator=generator)
            mask = (torch.arange(10) < int(torch.randint(4, 11, (), generator=generator))).long()
            self.items.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return self.items[i]


def gpt(dropout: float = 0.0) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    drops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 4, "n_positions": 16, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=1, eos_token_id=1))


def exactly(model: Any) -> Any:
    """A serial model of float64 whose library computes losses in float32 otherwise."""
    forward = model.forward

    @wraps(forward)
    def exact(*args: Any, **kwargs: Any) -> Any:
        with compute_in_float64(True):
            return forward(*args, **kwargs)

    model.forward = exact
    return model


def arguments(folder: str, **changes: Any) -> Any:
    from transformers import TrainingArguments

    told: dict[str, Any] = {
        "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 2,
        "learning_rate": 1e-2, "lr_scheduler_type": "cosine", "warmup_steps": 1, "weight_decay": 0.1, "max_grad_norm": 0.5,
        "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "logging_steps": 1, "report_to": [], "use_cpu": True,
        "disable_tqdm": True,
    }  # fmt: skip
    return TrainingArguments(folder, **{**told, **changes})


def rates(prediction: Any) -> dict[str, float]:
    right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"accuracy": float(right[prediction.label_ids[:, 1:] >= 0].mean())}


def history(trainer: Any) -> list[dict[str, float]]:
    """What it logged, without times, and without the mean of this start's losses, which begin where it was resumed."""
    timed = ("runtime", "per_second", "flos", "train_loss")
    return [{k: v for k, v in row.items() if not k.endswith(timed)} for row in trainer.state.log_history]


def script(
    trainer_class: Any, folder: str, changes: dict[str, Any], resume: str | None = None, dropout: float = 0.0, **options: Any
) -> Any:
    """Train, evaluate, save, as a script does. Gives the trainer."""
    from transformers import Trainer

    args = arguments(folder, **changes)
    model = gpt(dropout)
    model = model if args.bf16 else model.double()
    model = exactly(model) if trainer_class is Trainer else model
    trainer = trainer_class(model=model, args=args, train_dataset=Texts(19, 1), eval_dataset=Texts(6, 2), compute_metrics=rates, **options)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    return trainer


def seeds() -> list[float]:
    """The next random numbers of each library."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]
