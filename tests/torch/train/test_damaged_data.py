"""Damaged, truncated and absurd data files: every reader refuses them by file and position, or reads what is whole; no other error.

Truncations are tried at every byte, and random bytes are changed. A format that says how much it has (parquet, tar, gzip) is never read
short.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
import struct
import tarfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from shardwise.errors import ConfigError, ShardwiseError
from shardwise.train.config import DataSection
from shardwise.train.corpus import open_data
from shardwise.train.data.reading import records
from shardwise.train.data.reading.documents import Columns, Document, documents_of
from shardwise.train.data.reading.images import ENDINGS, write_index
from shardwise.train.data.reading.pixels import Crop, PixelForm, prepare_with_pillow
from shardwise.train.data.reading.records import records_in
from shardwise.train.data.reading.tables import pandas_table_reader, stack_columns
from shardwise.train.data.reading.token_files import write_documents
from shardwise.train.data.reading.tokenizers import ByteTokenizer

TEXTS = ["the cat sat", "a dog ran", 'ä mat, "quoted"']


def of_jsonl() -> bytes:
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS).encode()


def of_csv() -> bytes:
    return ("text,more\n" + "".join('"{}",1\n'.format(text.replace('"', '""')) for text in TEXTS)).encode()


def of_tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for number, text in enumerate(TEXTS):
            info = tarfile.TarInfo(f"{number}.txt")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


def of_parquet() -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(pyarrow.Table.from_pylist([{"text": text} for text in TEXTS]), out)
    return out.getvalue()


FORMATS: dict[str, tuple[str, str, Callable[[], bytes]]] = {
    "jsonl": ("jsonl", "a.jsonl", of_jsonl),
    "gzip": ("jsonl", "a.jsonl.gz", lambda: gzip.compress(of_jsonl())),
    "csv": ("csv", "a.csv", of_csv),
    "tar": ("webdataset", "a.tar", of_tar),
    "parquet": ("parquet", "a.parquet", of_parquet),
    "text": ("text", "a.txt", lambda: "\n".join(TEXTS).encode()),
}


def documents_in(source: str, file: Path) -> list[list[int]] | str:
    """The documents of a file, or what it is refused with, which names the file."""
    try:
        return [d.ids for d in documents_of(records_in(source, [file]), Columns(), ByteTokenizer())]
    except ConfigError as error:
        text = str(error)
    assert str(file) in text
    return text


@pytest.mark.parametrize("form", FORMATS)
def test_every_truncation_is_refused_or_has_whole_records(form: str, tmp_path: Path) -> None:
    source, name, make = FORMATS[form]
    content, file = make(), tmp_path / name
    file.write_bytes(content)
    whole = documents_in(source, file)
    assert isinstance(whole, list)
    assert b"".join(map(bytes, whole)).decode().split("\n")[:-1] == [*TEXTS]
    needed = content.rindex(TEXTS[-1].encode()) + 1024 if form == "tar" else len(content)  # of a tar file two blocks of zeros, of ten
    for size in range(0, needed, 97 if form == "tar" else 1):
        file.write_bytes(content[:size])
        read = documents_in(source, file)
        if form in ("gzip", "tar", "parquet"):
            assert isinstance(read, str) or not size, size
        elif form in ("jsonl", "csv") and isinstance(read, list):
            cut = content[:size].rstrip(b"\n")
            assert read == whole[: len(read)], size
            assert cut.count(b"\n") + (form == "jsonl") >= len(read), size


@pytest.mark.parametrize("form", FORMATS)
def test_changed_bytes_are_refused_or_read(form: str, tmp_path: Path) -> None:
    source, name, make = FORMATS[form]
    content, file, draw = make(), tmp_path / name, random.Random(form)
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(draw.choice((1, 1, 4))):
            damaged[draw.randrange(len(damaged))] = draw.choice((0, 255, 0x80, draw.randrange(256)))
        file.write_bytes(damaged)
        documents_in(source, file)


ABSURD = [
    ("a.jsonl", b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "line 1: no JSON: brackets"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\\ud800"}\n', r"line 2: character 0 of its text is \\ud800"),
    ("a.jsonl", b'{"text": "a", "n": ' + b"1" * 5000 + b"}\n", "line 1: no JSON"),
    ("a.jsonl", b'{"text": NaN}\n', 'line 1: "text" is float'),
    ("a.jsonl", b'{"text": "a"}\n\x00\n', "line 2: no JSON"),
    ("a.jsonl", b'{"prompt": "a", "completion": null}\n', 'line 1: "completion" is NoneType'),
    ("a.jsonl", b'{"messages": [{"role": "user", "content": 3}]}\n', 'line 1: no message of "messages" has the role'),
    ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n')[:-9], "line 2 cannot be read"),
    ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n') + b"more", r"line 2 cannot be read"),
    ("a.csv", b'text\na\n"b\n', "line 3 is no csv: unexpected end of data"),
    ("a.csv", b"text,text\na,b\n", "line 1: two columns are called 'text'"),
    ("a.csv", b"text\na\n\xff\n", "is not UTF-8"),
    ("a.tar", of_tar() + of_tar(), r"byte \d+: the shard ends here, and more than zeros follow"),
    ("a.tar", of_tar()[:1024] + b"\1" * 512 + of_tar()[1024:], "byte 1024: the shard is damaged or cut off here"),
    ("a.txt", b"ab\xffcd", "byte 2 is not UTF-8"),
]


@pytest.mark.parametrize(("name", "content", "says"), ABSURD, ids=range(len(ABSURD)))
def test_absurd_files_are_refused_with_the_position(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    source = next(source for source, form in records.FORMATS.items() if form.accepts(file))
    read = documents_in(source, file)
    assert isinstance(read, str)
    assert re.search(says, read), read


def test_a_reader_that_loses_rows_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts are those of the file's own description: here the broken twin reads one row less."""
    pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    file = tmp_path / "a.parquet"
    file.write_bytes(of_parquet())
    assert isinstance(documents_in("parquet", file), list)
    iterate = pq.ParquetFile.iter_batches
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda self, *a, **k: (b.slice(1) for b in iterate(self, *a, **k)))
    assert "2 rows were read, and it says that it has 3" in str(documents_in("parquet", file))


def test_paths_that_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo.jsonl")
    with pytest.raises(ConfigError, match="is no regular file"):
        open_data(DataSection(source="jsonl", path=str(tmp_path / "fifo.jsonl")), "gpt-tiny", tmp_path / "run")
    good, closed = tmp_path / "some", tmp_path / "some" / "closed"
    closed.mkdir(parents=True)
    (good / "a.jsonl").write_bytes(of_jsonl())
    scan = os.scandir

    def scandir(path: os.PathLike[str] | str) -> object:
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    for source in ("jsonl", "text"):
        with pytest.raises(ConfigError, match=r"some/closed cannot be read: Permission denied"):
            open_data(DataSection(source=source, path=str(good)), "gpt-tiny", tmp_path / "run")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="closed cannot be read: IsADirectoryError"):
        list(records_in("jsonl", [closed]))


def test_token_ids_that_the_tokenizer_does_not_have(tmp_path: Path) -> None:
    for ids, says in (([1, 300], "token 300"), ([-1, 2], "token -1")):
        with pytest.raises(ConfigError, match=f"document 1 has {says}, and the tokenizer says that it has 256"):
            write_documents([Document([1], [True]), Document(ids, [True, True])], tmp_path, 256)
    assert not list(tmp_path.glob("*.bin"))


def as_shard(folder: Path, label: bytes, image: bytes = b"x") -> Path:
    file = folder / "a.tar"
    with tarfile.open(file, "w") as archive:
        for name, content in (("0.png", image), ("0.cls", label)):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file


@pytest.mark.parametrize("label", [b"-1", b"99999999999999999999", b"20000000", b"x", b"", b"\xff", b"9" * 5000, b"1.5"])
def test_absurd_classes(label: bytes, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a.tar, 0(.cls|) "):
        write_index([str(as_shard(tmp_path, label))], [], tmp_path / "index")


def test_names_that_are_no_lines(tmp_path: Path) -> None:
    for number, name in enumerate((b"a\nb.png", b"a\xff.png", "a\u2028b.png".encode())):
        folder = tmp_path / str(number) / "cat"
        folder.mkdir(parents=True)
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_bytes(b"x")
        with pytest.raises(ConfigError, match="its name has a line break or bytes that are not UTF-8"):
            write_index([str(folder.parent)], [], tmp_path / "index")


@pytest.mark.filterwarnings("ignore")  # Pillow's, of damaged headers
def test_damaged_images_are_refused_by_name() -> None:
    pillow = pytest.importorskip("PIL.Image")
    form, draw = PixelForm(3, 4, 4, (0.0,) * 3, (1.0,) * 3), random.Random(0)
    for ending in ("png", "jpeg", "bmp", "webp", "tiff", "ppm"):
        assert f".{ending}" in ENDINGS
        out = io.BytesIO()
        pillow.fromarray(np.random.default_rng(0).integers(0, 255, (9, 7, 3), np.uint8)).save(out, ending)
        content = out.getvalue()
        damaged = [content[:size] for size in range(0, len(content), max(1, len(content) // 60))]
        for _ in range(60):
            changed = bytearray(content)
            for _ in range(3):
                changed[draw.randrange(min(len(changed), 120))] = draw.randrange(256)
            damaged.append(bytes(changed))
        for data in damaged:
            with suppress(ShardwiseError):
                prepare_with_pillow([data], ["photo"], [Crop()], form)
    header = struct.pack(">II5B", 1 << 20, 1 << 20, 8, 2, 0, 0, 0)  # of a picture of 3 TiB
    bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    with pytest.raises(ShardwiseError, match="photo is no image that Pillow can read"):
        prepare_with_pillow([bomb], ["photo"], [Crop()], form)


TABLES = [
    (b"a,label\n1,2\n3\n", "no number in row 2"),
    (b"a,label\n1,2\n3,4,5,6\n", "is no table that can be read"),
    (b"a,label\n1,x\n", "is no column of numbers"),
    (b"a,label\n1,inf\n", "no number in row 1"),
    (b"a,label\n1,1e300\n", "no number in row 1"),
    (b"a,label\n\xff,1\n", "is no table that can be read"),
    (b"", "is no table that can be read"),
    (b"b,label\n1,2\n", 'has no column "a"'),
    (b'a,label\n"1,2\n', "is no table that can be read|no number"),
]


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize(("content", "says"), TABLES, ids=range(len(TABLES)))
def test_damaged_tables(content: bytes, says: str, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("sklearn")
    file = tmp_path / "a.csv"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        stack_columns(pandas_table_reader().read(file), ["a", "label"], file)
    assert str(file) in str(caught.value)
