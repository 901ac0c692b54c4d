"""Small data for the scripts, made here: `make(name, folder)` writes what `name` stands for into a folder, alike every time."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = "the a one red green old small river house bird walks sees finds near under over and then slowly again".split()


def sentence(draw: random.Random, *lengths: int) -> str:
    """Of few lengths: each that a batch is padded to is captured anew."""
    return " ".join(draw.choices(WORDS, k=draw.choice(lengths or (6, 10))))


def text(folder: Path) -> None:
    """Lines of words: train.txt, valid.txt, test.txt."""
    for seed, (name, lines) in enumerate((("train", 120), ("valid", 30), ("test", 30))):
        draw = random.Random(seed)
        (folder / f"{name}.txt").write_text("".join(sentence(draw) + "\n" for _ in range(lines)))


def characters(folder: Path) -> None:
    """Tokens of nanoGPT's data folders: two files of uint16."""
    import numpy as np

    draw = np.random.default_rng(0)
    for name, count in (("train", 4000), ("val", 1000)):
        (np.cumsum(draw.integers(0, 3, count)) % 48).astype(np.uint16).tofile(folder / f"{name}.bin")
    import pickle

    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 48}))


def photographs(folder: Path) -> None:
    """Images of three classes in folders: train, val."""
    _pictures(folder / "train", 24)
    _pictures(folder / "val", 9)


def pets(folder: Path) -> None:
    """Images of three classes in one folder, which their names tell."""
    _pictures(folder, 30, "{name}_{i}.jpg")


def scenes(folder: Path) -> None:
    """Where super_resolution looks for its data set."""
    _pictures(folder / "BSDS300" / "images" / "train", 12, "{i}.jpg", 300)
    _pictures(folder / "BSDS300" / "images" / "test", 4, "{i}.jpg", 300)


def _pictures(folder: Path, count: int, name: str = "{name}/{i}.png", side: int = 64) -> None:
    import numpy as np
    from PIL import Image

    draw, (y, x) = np.random.default_rng(count), np.mgrid[0:side, 0:side] / side
    for i in range(count):
        kind = i % 3
        wave = np.sin(20 * (x if kind == 0 else y if kind == 1 else x + y) + draw.uniform(0, 6))[..., None]
        pixels = (128 + 70 * wave + draw.normal(0, 20, (side, side, 3))).clip(0, 255).astype(np.uint8)
        path = folder / name.format(name=("ash", "birch", "cedar")[kind], i=i)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)


def waves(folder: Path) -> None:
    """Sine waves, as generate_sine_wave.py makes them, fewer and shorter."""
    import numpy as np
    import torch

    starts = np.random.RandomState(2).randint(-80, 80, 11).reshape(-1, 1)
    torch.save(np.sin((np.arange(30) + starts) / 20.0).astype("float64"), folder / "traindata.pt")


def _rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _both(folder: Path, row: Callable[[random.Random, int], dict[str, Any]], train: int = 32, valid: int = 8) -> None:
    for seed, (name, count) in enumerate((("train", train), ("validation", valid))):
        draw = random.Random(seed)
        _rows(folder / f"{name}.json", [row(draw, i) for i in range(count)])


def pairs(folder: Path) -> None:
    """Two sentences and whether they are the same, as GLUE has them; the folder is a data set of `datasets`, too, with the name mrpc."""

    def row(draw: random.Random, i: int) -> dict[str, Any]:
        one = sentence(draw)
        return {"sentence1": one, "sentence2": one if i % 2 else sentence(draw), "label": i % 2, "idx": i}

    _both(folder, row)
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: mrpc\n  data_files:\n  - split: train\n    path: train.json\n"
        "  - split: validation\n    path: validation.json\n---\n"
    )


def translations(folder: Path) -> None:
    """Sentences and their words in the other order."""
    _both(folder, lambda draw, i: {"translation": (lambda s: {"en": s, "de": " ".join(reversed(s.split()))})(sentence(draw))})


def summaries(folder: Path) -> None:
    _both(folder, lambda draw, i: (lambda s: {"text": s, "summary": " ".join(s.split()[:3])})(sentence(draw, 10, 14)))


def questions(folder: Path) -> None:
    """Contexts, questions, answers in them; as SQuAD has them."""

    def row(draw: random.Random, i: int) -> dict[str, Any]:
        context = sentence(draw, 8, 14, 20)
        answer = draw.choice(context.split())
        spans = {"text": [answer], "answer_start": [context.index(answer)]}
        return {"id": str(i), "title": "t", "context": context, "question": f"the {answer} near", "answers": spans}

    for seed, (name, count) in enumerate((("train", 40), ("validation", 12))):
        draw = random.Random(seed)
        (folder / f"{name}.json").write_text(json.dumps({"data": [row(draw, i) for i in range(count)]}))


def tags(folder: Path) -> None:
    """Words with a tag each."""

    def row(draw: random.Random, i: int) -> dict[str, Any]:
        tokens = sentence(draw).split()
        return {"tokens": tokens, "ner_tags": ["B-X" if w in ("red", "river") else "B-Y" if w == "bird" else "O" for w in tokens]}

    _both(folder, row)


def endings(folder: Path) -> None:
    """A sentence and four that may follow, as SWAG has them."""

    def row(draw: random.Random, i: int) -> dict[str, Any]:
        return {"sent1": sentence(draw), "sent2": "then", **{f"ending{k}": sentence(draw, 3) for k in range(4)}, "label": i % 4}

    _both(folder, row, 24, 8)


def bert(folder: Path) -> None:
    """A small model of BERT with its tokenizer of words: what `from_pretrained` loads."""
    _model(folder, "BertConfig", "BertForPreTraining", SIZES | {"max_position_embeddings": 64}, {"initializer_range": 0.2})


def gpt(folder: Path) -> None:
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 1, "initializer_range": 0.2}
    _model(folder, "GPT2Config", "GPT2LMHeadModel", sizes, {})


def t5(folder: Path) -> None:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0}
    _model(folder, "T5Config", "T5ForConditionalGeneration", sizes, {"eos_token_id": 1})


def vit(folder: Path) -> None:
    """A small vision transformer and what prepares its images."""
    import transformers

    _model(folder, "ViTConfig", "ViTForImageClassification", SIZES | {"image_size": 32, "patch_size": 8}, {"initializer_range": 0.2}, False)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)


SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}


def _model(folder: Path, config: str, kind: str, sizes: dict[str, Any], more: dict[str, Any], words: bool = True) -> None:
    import torch
    import transformers

    vocabulary = ["[PAD]", "</s>", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *(f"w{i}" for i in range(10))]
    if words:
        from tokenizers import Tokenizer, models, pre_tokenizers, processors

        tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, "[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        if "T5" in config:
            tokenizer.post_processor = processors.TemplateProcessing("$A </s>", "$A $B </s>", [("</s>", 1)])
        elif "Bert" in config:
            tokenizer.post_processor = processors.TemplateProcessing(
                "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 3), ("[SEP]", 4)]
            )
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="</s>", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
            mask_token="[MASK]", model_max_length=64,
        ).save_pretrained(folder)  # fmt: skip
        sizes = sizes | {"vocab_size": len(vocabulary)}
    torch.manual_seed(0)
    made = getattr(transformers, config)(**sizes, **more)
    getattr(transformers, kind)(made).double().save_pretrained(folder)


def make(name: str, folder: Path) -> None:
    """Write it, if it is not there."""
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.part")
        part.mkdir(parents=True, exist_ok=True)
        globals()[name](part)
        part.rename(folder)
