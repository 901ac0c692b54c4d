"""What a model's tables and attention must have for a configuration's tokens, told before ranks start; libraries' packing and shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwise import api
from shardwise.errors import ConfigError
from shardwise.lower.float64_mode import compute_in_float64
from shardwise.run.rank_model.model_source import CachedModelSource
from shardwise.train.check_tokens import attention_without_mask, check_tokens
from shardwise.train.config import TrainingConfig
from shardwise.train.corpus import DESCRIPTION, open_data, save_description
from shardwise.train.data.packed_text import packed_text
from shardwise.train.data.reading.records import records_in
from shardwise.train.training_task import sequence_length_of, text_form, with_positions
from shardwise.zoo.resolve import resolve
from shardwise.zoo.resolved import ResolvedModel

ROWS = [{"text": "abcdefg"[: i % 6 + 2]} for i in range(24)]
TINY = {
    "llama": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "qwen2": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
}


def configure(folder: Path, model: str, *changes: str) -> TrainingConfig:
    """A configuration whose data is prepared in its run folder."""
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = ["data.source=jsonl", f"data.path={folder / 'a.jsonl'}", "data.sequence=16", f"run.folder={folder / 'run'}"]
    config = TrainingConfig.parse(f'[model]\nname = "{model}"', changes=[*words, *changes])
    (folder / "run").mkdir(exist_ok=True)
    save_description(open_data(config.data, model, folder / "run"), folder / "run" / DESCRIPTION)
    return config


def check(config: TrainingConfig, subject: ResolvedModel) -> None:
    """As `shardwise train` asks before it plans."""
    source = CachedModelSource.from_model(subject.make)
    check_tokens(config, source, api.batch_shapes(subject, config.train.batch, source), subject.loss)


def named(config: TrainingConfig) -> ResolvedModel:
    return with_positions(resolve(config.model.name, config.train.batch, sequence_length_of(config)), config)


def test_a_token_without_a_row_is_refused_before_the_first_step(tmp_path: Path) -> None:
    config = configure(tmp_path, "gpt:vocabulary=64,sequence=16,hidden=16,layers=1,heads=2")
    with pytest.raises(ConfigError, match=r"tokens.weight, which has 64 rows, .* from 0 to 103: use a vocabulary of at least 104"):
        check(config, named(config))
    check(config, resolve("gpt:vocabulary=104,sequence=16,hidden=16,layers=1,heads=2", 8))


class Blind(nn.Module):
    """Takes positions, and attends to everything before."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(128, 8), nn.Embedding(16, 8), nn.Linear(8, 128)

    def forward(self, input_ids: torch.Tensor, labels: Any = None, position_ids: Any = None) -> torch.Tensor:
        x = self.tokens(input_ids)
        x = x if position_ids is None else x + self.places(position_ids)
        mixed: torch.Tensor = self.head(F.scaled_dot_product_attention(x, x, x, is_causal=True))
        return mixed


def test_attention_that_does_not_see_where_documents_begin_is_refused(tmp_path: Path) -> None:
    config = configure(tmp_path, "gpt:vocabulary=128,sequence=16,hidden=16,layers=1,heads=2", "data.packing=documents")
    good = named(config)
    check(config, good)
    bad = ResolvedModel("blind", Blind, good.batch, good.loss, 8)
    with pytest.raises(ConfigError, match=r"its attention \(.*\) has no mask that follows from them, so documents in one sample would see"):
        check(config, bad)
    with pytest.raises(ConfigError, match=r"takes no position_ids, .*; use data.packing = \"none\""):
        text_form(resolve("moe-tiny", 8), resets_positions=True)


@pytest.mark.parametrize("kind", TINY)
def test_models_of_transformers_keep_packed_documents_apart(kind: str, tmp_path: Path) -> None:
    """Their losses are those of the documents one by one, in float64; and the captured graph shows it."""
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": kind, "vocab_size": 128, "bos_token_id": 1, "eos_token_id": 1, **TINY[kind]}))
    config = configure(tmp_path, f"hf:{file}", "data.packing=documents")
    corpus = open_data(config.data, config.model.name, tmp_path / "run")
    together, alone = (packed_text(corpus.store(), 16, 4, 0.2, 0, shares_samples=both) for both in (True, False))
    torch.manual_seed(0)
    model = named(config).make().double().eval()

    def call(batch: Any) -> torch.Tensor:
        with compute_in_float64(True):  # these compute some of it in float32 whatever they are given
            return model(**batch).loss.detach()

    form = text_form(resolve(config.model.name, 4, 16), resets_positions=True)

    def total(samples: Any, keep: bool = True) -> float:
        batch = form(samples._read(torch.arange(samples.packing.num_samples).numpy()))
        if not keep:
            batch.pop("position_ids", None)
        return float(call(batch)) * int((batch["labels"][:, 1:] != -100).sum())

    assert total(together) == pytest.approx(total(alone), rel=1e-12)
    assert abs(total(together, keep=False) - total(alone)) > 1e-4
    source = CachedModelSource.from_model(named(config).make)
    rows = form(together.train(0, range(4)))
    assert attention_without_mask(source.capture(rows, None, 4).graph) == ""


def test_shards_of_the_webdataset_library_are_read(tmp_path: Path) -> None:
    library = pytest.importorskip("webdataset")
    with library.TarWriter(str(tmp_path / "a.tar")) as out:
        for i, row in enumerate(ROWS):
            out.write({"__key__": f"{i:06}", "txt": row["text"], "json": {"number": i}, "cls": i})
    found = [record.values for record in records_in("webdataset", [tmp_path / "a.tar"])]
    assert [values["text"] for values in found] == [row["text"] for row in ROWS]
    assert [values["number"] for values in found] == [values["cls"] for values in found] == list(range(24))
