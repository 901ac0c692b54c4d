"""Adapters of peft, TRL's SFTTrainer, data sets of `datasets`: as the serial run, and only adapters are trained and saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.world.world import World
from tests.support import trainer_scripts as scripts

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")


def with_adapters() -> Any:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn", "c_fc"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    torch.manual_seed(3)
    model = peft.get_peft_model(scripts.gpt().double(), config).double()
    for name, p in model.named_parameters():  # as if trained for a while
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    return model


def data(streaming: bool) -> Any:
    items = scripts.Texts(19, 1).items
    made = datasets.Dataset.from_list([{key: x.tolist() for key, x in item.items()} for item in items])
    return made.to_iterable_dataset() if streaming else made


def adapted(trainer_class: Any, folder: str, streaming: bool, **options: Any) -> Any:
    args = scripts.arguments(folder, eval_strategy="no", max_steps=4, save_steps=4)
    model = with_adapters()
    if trainer_class is transformers.Trainer:
        scripts.exactly(model.get_base_model())
    trainer = trainer_class(model=model, args=args, train_dataset=data(streaming), **options)
    trainer.train()
    trainer.save_model()
    return trainer


def adapted_on_ranks(world: World, folder: str, layout: str, streaming: bool) -> Any:
    from shardwise.adapters.transformers import Trainer

    trainer = adapted(Trainer, folder, streaming, plan=f"{layout} precision=float64")
    frozen = [p for p in trainer.model.parameters() if not p.requires_grad]
    assert frozen
    assert all(p.grad is None and p not in trainer.optimizer.optimizer.state for p in frozen)
    trainer.model.eval()
    tokens = trainer.model.generate(input_ids=torch.arange(3, 9)[None], max_new_tokens=4, do_sample=False, pad_token_id=1)
    return scripts.history(trainer), tokens


@pytest.mark.long
@pytest.mark.parametrize(("layout", "streaming"), [("data=2", True), ("tensor=2", False)])
def test_adapters_alone_are_trained(ranks: Callable[..., list[Any]], tmp_path: Path, layout: str, streaming: bool) -> None:
    serial = adapted(transformers.Trainer, str(tmp_path / "serial"), streaming)
    wanted = serial.model.eval().generate(input_ids=torch.arange(3, 9)[None], max_new_tokens=4, do_sample=False, pad_token_id=1)
    for history, tokens in ranks(adapted_on_ranks, 2, str(tmp_path / "ours"), layout, streaming, timeout_s=200.0):
        for row, theirs in zip(history, scripts.history(serial), strict=True):
            assert row == pytest.approx(theirs, rel=1e-9)
        assert torch.equal(tokens, wanted)
    files = sorted(path.name for path in (tmp_path / "ours").glob("*.safetensors"))
    assert files == ["adapter_model.safetensors"]
    again = peft.PeftModel.from_pretrained(scripts.gpt().double(), tmp_path / "ours").state_dict()
    for name, x in serial.model.state_dict().items():
        torch.testing.assert_close(again[name], x, rtol=1e-6, atol=1e-7)


def tuned(trainer_class: Any, folder: str, **options: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    words = datasets.Dataset.from_list([{"text": " ".join(f"w{int(i)}" for i in item["input_ids"])} for item in scripts.Texts(19, 1).items])
    args = trl.SFTConfig(
        folder, per_device_train_batch_size=4, max_steps=3, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, max_length=8,
        packing=False, bf16=False, save_strategy="no",
    )  # fmt: skip
    texts = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), pad_token="[PAD]", eos_token="[EOS]")
    trainer = trainer_class(model=scripts.gpt().double(), args=args, train_dataset=words, processing_class=texts, **options)
    if trainer_class is trl.SFTTrainer:  # the head that TRL puts into the model casts to float32, forward and backward
        scripts.exactly(trainer.model)
        backward = trainer.accelerator.backward

        def exact(*args: Any, **kwargs: Any) -> None:
            with scripts.compute_in_float64(True):
                backward(*args, **kwargs)

        trainer.accelerator.backward = exact
    trainer.train()
    return scripts.history(trainer)


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {"[PAD]": 0, "[EOS]": 1, "[UNK]": 2, **{f"w{i}": i for i in range(3, scripts.VOCABULARY)}}
    made = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    return made


def tuned_on_ranks(world: World, folder: str, layout: str) -> Any:
    from shardwise.adapters.trl import SFTTrainer

    return tuned(SFTTrainer, folder, plan=f"{layout} precision=float64")


@pytest.mark.long
@pytest.mark.parametrize("layout", ["data=2", "tensor=2"])
def test_supervised_tuning_is_the_serial_run(ranks: Callable[..., list[Any]], tmp_path: Path, layout: str) -> None:
    wanted = tuned(trl.SFTTrainer, str(tmp_path / "serial"))
    for history in ranks(tuned_on_ranks, 2, str(tmp_path / "ours"), layout, timeout_s=200.0):
        for row, theirs in zip(history, wanted, strict=True):
            assert row == pytest.approx(theirs, rel=1e-9)
