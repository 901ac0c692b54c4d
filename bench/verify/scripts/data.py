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


def names(folder: Path) -> None:
    """Words of syllables, one a line."""
    draw = random.Random(0)
    words = ["".join(draw.choices(("an", "be", "el", "ma", "ri", "o"), k=draw.randint(2, 4))) for _ in range(400)]
    (folder / "names.txt").write_text("\n".join(words))


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


def drawn_digits(folder: Path) -> None:
    """Images of ten classes and their classes, in the files that Lightning's MNISTDataModule looks for."""
    import torch

    draw = torch.Generator().manual_seed(0)
    (folder / "MNIST" / "complete").mkdir(parents=True)
    for name, count in (("training", 96), ("test", 32)):
        classes = torch.randint(10, (count,), generator=draw)
        images = (torch.rand(count, 28, 28, generator=draw) * 20 * (1 + classes[:, None, None])).byte()
        torch.save((images, classes), folder / "MNIST" / "complete" / f"{name}.pt")


def masks(folder: Path) -> None:
    """Images, and beside them which of their pixels lie in a disc."""
    import numpy as np
    from PIL import Image

    draw, (y, x) = np.random.default_rng(0), np.mgrid[0:32, 0:32]
    for kind in ("imgs", "masks"):
        (folder / kind).mkdir(parents=True)
    for i in range(20):
        inside = (x - draw.integers(8, 24)) ** 2 + (y - draw.integers(8, 24)) ** 2 < draw.integers(20, 90)
        pixels = (90 * inside[..., None] + draw.normal(80, 20, (32, 32, 3))).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "imgs" / f"{i}.png")
        Image.fromarray(inside.astype(np.uint8) * 255).save(folder / "masks" / f"{i}.png")


def citations(folder: Path) -> None:
    """Papers with words, classes and citations, in the two files of Cora, and the archive that they are downloaded as."""
    import tarfile

    draw, count = random.Random(0), 120
    inside = folder / "cora"
    inside.mkdir(parents=True)
    rows = []
    for i in range(count):
        words = [int(draw.random() < (0.4 if k % 3 == i % 3 else 0.1)) for k in range(24)] + [1]
        rows.append("\t".join([str(1000 + i), *map(str, words), ("ash", "birch", "cedar")[i % 3]]) + "\n")
    (inside / "cora.content").write_text("".join(rows))
    # Each once: of an edge that is there twice the scripts' sparse matrix would have the sum.
    edges = {(i, j) for i in range(count) for j in draw.sample(range(i % 3, count, 3), 3) if i != j}
    (inside / "cora.cites").write_text("".join(f"{1000 + i}\t{1000 + j}\n" for i, j in sorted(edges)))
    with tarfile.open(folder / "cora.tgz", "w:gz") as archive:
        archive.add(inside, "cora")


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


def preferences(folder: Path) -> None:
    """Prompts with an answer that is chosen and one that is rejected; a data set of `datasets` with the parts train and test."""

    def row(draw: random.Random, i: int) -> dict[str, Any]:
        return {"prompt": sentence(draw, 4) + " ", "chosen": sentence(draw, 4), "rejected": sentence(draw, 4)}

    _both(folder, row, 16, 8)
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: train.json\n"
        "  - split: test\n    path: validation.json\n---\n"
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
