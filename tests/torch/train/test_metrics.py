"""`metrics.jsonl` with each byte flipped, each truncation, and lines gone: told, mended, and the run goes on; a whole file stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.plan.ir import metric_lines
from shardwise.plan.ir.metric_lines import Row
from shardwise.train.metrics import DAMAGED_FILE, MetricsFile, last_step, read_metrics

ROWS: list[Row] = [{"step": step, "loss": 5.0 / step, "lr": 1e-3, "grad_norm": None} for step in range(1, 6)]
WHOLE: list[Row] = [{key: value for key, value in row.items() if value is not None} for row in ROWS]


def written(path: Path, rows: list[Row] = ROWS) -> bytes:
    path.unlink(missing_ok=True)
    with MetricsFile(path, 0, lambda words: None) as file:
        for row in rows:
            file.write(row)
    return path.read_bytes()


def opened(path: Path, step: int = 5) -> str:
    """What a start of the run after `step` says."""
    said: list[str] = []
    with MetricsFile(path, step, said.append, checks_all=True):
        pass
    return " ".join(said)


def test_a_whole_file_is_read_as_written_and_nothing_is_said(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    content = written(path)
    assert read_metrics(path) == WHOLE
    assert opened(path) == ""
    assert path.read_bytes() == content
    assert opened(path, 3) == ""
    assert read_metrics(path) == WHOLE[:3]
    path.write_text("".join(json.dumps(row) + "\n" for row in WHOLE))  # of a version without digests
    assert (opened(path), read_metrics(path), last_step(path)) == ("", WHOLE, 5)


def test_any_flipped_bit_is_told_and_the_other_rows_stay(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    content = written(path)
    starts = [0, *(i + 1 for i, byte in enumerate(content) if byte == 10)]
    for at in range(len(content)):
        for bit in (1, 16):
            path.write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
            (tmp_path / DAMAGED_FILE).unlink(missing_ok=True)
            hit = sum(start <= at for start in starts) - 1
            said = opened(path)
            rest = read_metrics(path)
            assert "is damaged" in said or "is gone" in said, at
            assert rest in ([row for number, row in enumerate(WHOLE) if number not in gone] for gone in ({hit}, {hit, hit + 1})), at
            assert "is damaged" not in opened(path)  # it was mended
            assert read_metrics(path) == rest


def test_a_row_that_only_parses_would_pass_for_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: without digests another loss is taken for the one that was written."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(written(path).replace(b'"loss": 2.5', b'"loss": 2.7'))
    assert len(read_metrics(path)) == 4
    monkeypatch.setattr(metric_lines.zlib, "crc32", lambda data: 0)
    path.write_bytes(written(path).replace(b'"loss": 2.5', b'"loss": 2.7'))
    assert len(read_metrics(path)) == 5


def test_torn_ends_and_lost_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    content = written(path)
    for size in range(len(content)):
        path.write_bytes(content[:size])
        said, rest = opened(path), read_metrics(path)
        assert rest == WHOLE[: content[: size + 1].count(b"\n")]  # but for the line's end a row is whole
        assert ("is gone" in said) == (len(rest) < 5)
    lines = content.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:1] + lines[3:] + lines[4:]))
    assert "line 4 is damaged and the row of step 2 to 3 is gone" in opened(path)
    path.unlink()
    assert "the row of step 1 to 5 is gone" in opened(path)
    with MetricsFile(path, 5, lambda words: None) as file:
        file.write({"step": 6, "loss": 1.0})
    assert read_metrics(path) == [{"step": 6, "loss": 1.0}]


def test_damaged_lines_are_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = written(path).splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"\xff\x00{\n", b"[" * 5000 + b"\n", *lines[2:]]))
    assert "line 3 to 4 is damaged" in opened(path)
    assert (tmp_path / DAMAGED_FILE).read_bytes() == b"\xff\x00{\n" + b"[" * 5000 + b"\n"
    assert read_metrics(path) == WHOLE
    assert opened(path) == ""
