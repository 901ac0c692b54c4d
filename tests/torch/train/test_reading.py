"""Data files against what was written into them: every format, its broken twins with file, line and remedy, packing against enumeration."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.train.config import DataSection
from shardwise.train.corpus import Corpus, is_unchanged, open_data
from shardwise.train.data.packed_text import PackedText, pack_best_fit, packed_text, pieces_of
from shardwise.train.data.reading import files
from shardwise.train.data.reading.documents import Columns, documents_of
from shardwise.train.data.reading.records import DataRecord, read_huggingface, records_in
from shardwise.train.data.reading.tokenizers import ByteTokenizer, tokenizer_of

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran"]
TEXTS = ["the cat sat", "a dog ran and ran", "the mat"]
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }} </s> {% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer of words, made here."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    names = ["<unk>", "<s>", "</s>", "[user]", "[assistant]", *WORDS]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(folder)
    return folder


def as_jsonl(folder: Path, rows: list[dict[str, Any]]) -> Path:
    file = folder / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def as_gzip(folder: Path, rows: list[dict[str, Any]]) -> Path:
    file = folder / "a.jsonl.gz"
    file.write_bytes(gzip.compress("\n\n".join(json.dumps(row) for row in rows).encode()))
    return file


def as_csv(folder: Path, rows: list[dict[str, Any]]) -> Path:
    file = folder / "a.csv"
    file.write_text("text\n" + "".join(f'"{row["text"]}"\n' for row in rows))
    return file


def as_parquet(folder: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    file = folder / "a.parquet"
    pq.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def tar(file: Path, entries: dict[str, bytes]) -> Path:
    with tarfile.open(file, "w") as archive:
        for name, content in entries.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file


def as_shard(folder: Path, rows: list[dict[str, Any]]) -> Path:
    return tar(folder / "a.tar", {f"{i:04}.txt": row["text"].encode() for i, row in enumerate(rows)})


SOURCES: dict[str, Callable[[Path, list[dict[str, Any]]], Path]] = {
    "jsonl": as_jsonl, "csv": as_csv, "parquet": as_parquet, "webdataset": as_shard,
}  # fmt: skip


def prepared(tmp_path: Path, path: Path, **data: Any) -> Corpus:
    return open_data(DataSection(path=str(path), **data), "gpt-tiny", tmp_path / "run")


def tokens_of(corpus: Corpus) -> list[list[int]]:
    """Documents as they were written."""
    store = corpus.store()
    return [x.tolist() for x in np.split(store.tokens[:], store.ends[:-1])]


@pytest.mark.parametrize("source", SOURCES)
def test_every_format_has_the_documents_that_were_written(source: str, tmp_path: Path) -> None:
    path = SOURCES[source](tmp_path, [{"text": text} for text in TEXTS])
    corpus = prepared(tmp_path, path, source=source)
    assert tokens_of(corpus) == [list(text.encode() + b"\n") for text in TEXTS]
    assert corpus.store().loss_mask is None
    assert prepared(tmp_path, tmp_path, source=source).digest == corpus.digest  # of the folder that the file is in
    assert is_unchanged(corpus)


def test_packed_lines_are_read(tmp_path: Path) -> None:
    file = as_gzip(tmp_path, [{"text": text} for text in TEXTS])
    assert [record.values["text"] for record in records_in("jsonl", [file])] == TEXTS


def test_a_tokenizer_of_transformers_makes_its_own_tokens(tmp_path: Path, tokenizer: Path) -> None:
    corpus = prepared(tmp_path, as_jsonl(tmp_path, [{"text": text} for text in TEXTS]), source="jsonl", tokenizer=str(tokenizer))
    known = tokenizer_of(str(tokenizer), "")
    assert tokens_of(corpus) == [[5 + WORDS.index(word) for word in text.split()] + [2] for text in TEXTS]
    assert (corpus.vocabulary, known.size) == (14, 14)
    assert known.decode(tokens_of(corpus)[0]).startswith("the cat sat")


def learned_words(tmp_path: Path, tokenizer: Path, rows: list[dict[str, Any]], **data: Any) -> list[str]:
    """What of each document is learned, in words."""
    corpus = prepared(tmp_path, as_jsonl(tmp_path, rows), source="jsonl", tokenizer=str(tokenizer), **data)
    store, known = corpus.store(), tokenizer_of(str(tokenizer), "")
    assert store.loss_mask is not None
    starts = [0, *store.ends[:-1].tolist()]
    parts = [slice(a, b) for a, b in zip(starts, store.ends.tolist(), strict=True)]
    return [known.decode(store.tokens[part][store.loss_mask[part] == 1].tolist()) for part in parts]


def test_of_instructions_the_answers_are_learned(tmp_path: Path, tokenizer: Path) -> None:
    rows = [{"prompt": "the cat", "completion": "sat on"}, {"prompt": "a dog", "completion": "ran"}]
    assert learned_words(tmp_path, tokenizer, rows) == ["sat on </s>", "ran </s>"]
    columns = {"prompt_column": "[user] {question} [assistant]", "completion_column": "{answer}"}
    asked = [{"question": "the cat", "answer": "sat on"}]
    assert learned_words(tmp_path, tokenizer, asked, **columns) == ["sat on </s>"]


def test_of_messages_what_the_assistant_says_is_learned(tmp_path: Path, tokenizer: Path) -> None:
    said = [("user", "the cat"), ("assistant", "sat"), ("user", "a dog"), ("assistant", "ran")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in said]}]
    assert learned_words(tmp_path, tokenizer, rows) == ["sat </s> ran </s>"]


def test_a_data_set_of_the_library_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list([{"text": text} for text in TEXTS])
    made.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": made, "test": made.select([1])}).save_to_disk(tmp_path / "two")
    assert [r.values["text"] for r in read_huggingface(str(tmp_path / "one"), "", "train", False)] == TEXTS
    assert [r.values["text"] for r in read_huggingface(str(tmp_path / "two"), "", "test", False)] == [TEXTS[1]]
    with pytest.raises(ConfigError, match=r'data.split = "valid": .* has train, test'):
        list(read_huggingface(str(tmp_path / "two"), "", "valid", False))
    as_jsonl(tmp_path, [{"text": text} for text in TEXTS])
    lines = tmp_path / "lines"
    lines.mkdir()
    (tmp_path / "a.jsonl").rename(lines / "train.jsonl")
    assert [r.values["text"] for r in read_huggingface(str(lines), "", "train", True)] == TEXTS


BROKEN = [
    ("jsonl", b'{"text": "a"}\n\n{"text": \n', r"a.jsonl, line 3: no JSON: .*; mend the line or take it out"),
    ("jsonl", b'["a"]\n', r"a.jsonl, line 1: list in place of an object"),
    ("jsonl", b'{"text": "a"}\n{"tekst": "b"}\n', r'a.jsonl, line 2 has no column "text", which data.text_column names; it has tekst'),
    ("jsonl", b'{"text": 3}\n', r'a.jsonl, line 1: "text" is int, no text'),
    ("jsonl", b"", r"data.path: .*a.jsonl is empty"),
    ("jsonl", b'{"text": "\xff"}\n', r"a.jsonl.*(UTF-8|utf-8)"),
    ("csv", b"text,more\na,b\nc\n", r"a.csv, line 3: not as many fields as the first row has columns \(2\)"),
    ("csv", b"text\n" + b"a" * 200_000 + b"\n", r"a.csv, line 2 is no csv: .*; mend the row, or write long texts as jsonl"),
    ("webdataset", b"no tar", r"a.webdataset is no tar file that can be read"),
    ("parquet", b"no table", r"a.parquet is no parquet file that can be read"),
]


@pytest.mark.parametrize(("source", "content", "says"), BROKEN)
def test_broken_files_are_named_with_line_and_remedy(source: str, content: bytes, says: str, tmp_path: Path) -> None:
    if source == "parquet":
        pytest.importorskip("pyarrow")
    file = tmp_path / f"a.{source}"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        prepared(tmp_path, file, source=source)
    assert not list((tmp_path / "run").rglob(".*.new"))


@pytest.mark.parametrize(
    ("source", "name", "belongs"), [("text", "a.jsonl.gz", "jsonl"), ("text", "a.csv", "csv"), ("csv", "a.txt", "text")]
)
def test_a_file_of_another_source_is_refused_by_its_ending(source: str, name: str, belongs: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("text\nthe cat\n")
    data = DataSection.model_validate({"source": source, "path": str(tmp_path / name)})
    with pytest.raises(ConfigError, match=f'use data.source = "{belongs}"'):
        open_data(data, "gpt-tiny", tmp_path / "run")


def test_the_bytes_of_any_file_are_learned_where_it_is_named_as_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\nthe cat\n")
    corpus = open_data(DataSection.model_validate({"text": str(tmp_path / "a.csv")}), "gpt-tiny", tmp_path / "run")
    assert corpus.size == len("text\nthe cat\n")


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.path: .*none does not exist; name a file, a folder or a pattern of jsonl files"):
        prepared(tmp_path, tmp_path / "none", source="jsonl")
    with pytest.raises(ConfigError, match=r"data.path: .*none does not exist; name a file, a folder or a pattern of text"):
        prepared(tmp_path, tmp_path / "none", source="text")
    with pytest.raises(ConfigError, match=r"data.path: no jsonl files \(\*.jsonl"):
        prepared(tmp_path, tmp_path, source="jsonl")
    with pytest.raises(ConfigError, match=r'data.path is missing: data.source = "jsonl" needs files'):
        open_data(DataSection(source="jsonl"), "gpt-tiny", tmp_path)
    with pytest.raises(ConfigError, match="transformers finds no tokenizer in"):
        prepared(tmp_path, as_jsonl(tmp_path, [{"text": "a"}]), source="jsonl", tokenizer=str(tmp_path))
    with pytest.raises(ConfigError, match=r'"messages" is no list of messages'):
        prepared(tmp_path, as_jsonl(tmp_path, [{"messages": "a"}]), source="jsonl")
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(ConfigError, match="messages need a tokenizer that says how they are written"):
        prepared(tmp_path, as_jsonl(tmp_path, [{"messages": said}]), source="jsonl")


def test_prepared_tokens_that_changed_are_noticed(tmp_path: Path) -> None:
    corpus = prepared(tmp_path, as_jsonl(tmp_path, [{"text": text} for text in TEXTS]), source="jsonl")
    data = bytearray(corpus.file.read_bytes())
    data[3] ^= 1
    corpus.file.write_bytes(data)
    assert not is_unchanged(corpus)


def test_of_many_files_each_name_size_and_content_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [tmp_path / name for name in "abc"]
    for file in made:
        file.write_bytes(b"x" * 10)
    known = files.digest_of_all(made, list("abc"))
    assert files.digest_of_all(made, list("abd")) != known
    made[1].write_bytes(b"x" * 9 + b"y")
    assert files.digest_of_all(made, list("abc")) != known
    monkeypatch.setattr(files, "MAX_DIGESTED_BYTES", 15)  # every second, and the last
    known = files.digest_of_all(made, list("abc"))
    made[1].write_bytes(b"z" * 10)
    assert files.digest_of_all(made, list("abc")) == known
    made[2].write_bytes(b"z" * 10)
    assert files.digest_of_all(made, list("abc")) != known


# Packing


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 16))
def test_packing_has_every_token_once_and_no_sample_too_long(lengths: list[int], sequence: int) -> None:
    start, length = pieces_of(np.cumsum(np.asarray(lengths, np.int64)), sequence, truncates=False)
    packing = pack_best_fit(start, length, sequence)
    seen: list[int] = []
    for sample in range(packing.num_samples):
        pieces = packing.pieces(sample)
        assert 0 < sum(n for _, n in pieces) <= sequence
        seen += [i for first, n in pieces for i in range(first, first + n)]
    assert sorted(seen) == list(range(sum(lengths)))
    least = -(-sum(lengths) // sequence)
    assert least <= packing.num_samples <= 11 / 9 * optimum_at_most(length.tolist(), sequence) + 1


def optimum_at_most(lengths: list[int], sequence: int) -> int:
    """Samples that first fit, longest first, needs: at least the least number."""
    rooms: list[int] = []
    for n in sorted(lengths, reverse=True):
        place = next((i for i, room in enumerate(rooms) if room >= n), None)
        if place is None:
            rooms.append(sequence - n)
        else:
            rooms[place] -= n
    return len(rooms)


def packed_from(tmp_path: Path, rows: list[dict[str, Any]], sequence: int, together: bool) -> PackedText:
    corpus = prepared(tmp_path, as_jsonl(tmp_path, rows), source="jsonl")
    return packed_text(corpus.store(), sequence, 2, 0.3, 0, shares_samples=together)


def test_a_sample_of_documents_has_positions_and_labels_of_each(tmp_path: Path) -> None:
    source = packed_from(tmp_path, [{"text": text} for text in ("abcdef", "gh", "ijk", "lmn")], 12, together=True)
    rows = [source.train(0, [0]), source.validation(0, [0])]
    words = sorted(bytes(row.inputs[0].tolist()).rstrip(b"\0") for row in rows)
    assert words == [b"abcdef\nijk\n", b"lmn\ngh\n"]
    for row in rows:
        assert row.positions is not None
        begins = row.positions[0] == 0
        text = bytes(row.inputs[0].tolist())
        assert [i for i in range(12) if begins[i]] == [0, *(i + 1 for i, c in enumerate(text) if c == 10 and i < 11)]
        assert torch.equal(row.labels[0] == -100, begins | (row.inputs[0] == 0))
        assert torch.equal(row.targets[0, :-1], row.labels[0, 1:])


def test_an_instruction_is_cut_and_text_is_not(tmp_path: Path) -> None:
    asked = [{"prompt": "ab", "completion": "cdefgh"}] * 4
    source = packed_from(tmp_path, asked, 4, together=False)
    row = source.train(0, [0])
    assert (bytes(row.inputs[0].tolist()), row.positions) == (b"abcd", None)
    assert row.labels[0].tolist() == [-100, -100, ord("c"), ord("d")]
    assert (source.num_samples, source.num_validation) == (3, 1)
    text = packed_from(tmp_path, [{"text": "abcdefg"}], 4, together=False)
    assert (text.num_samples, text.num_validation) == (1, 1)
    with pytest.raises(ConfigError, match="the data makes 1 samples of 9 tokens"):
        packed_from(tmp_path, [{"text": "abcdefg"}], 9, together=False)


def test_documents_without_text_are_left_out() -> None:
    records = [DataRecord("a", {"text": ""}), DataRecord("b", {"text": "x"})]
    assert [document.ids for document in documents_of(records, Columns(), ByteTokenizer())] == [[ord("x"), 10]]
