"""The record of collectives, written and read by different objects, through the file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.world import recorder
from shardwise.world.recorder import ALL_REDUCE, DONE, RUNNING, SEND, CollectiveRecorder, RecordReader, create_record_file, group_name


@pytest.fixture
def record(tmp_path: Path) -> Path:
    create_record_file(tmp_path / "record", 2, generation=3, capacity=4)
    return tmp_path / "record"


def test_what_one_rank_writes_the_launcher_reads(record: Path) -> None:
    writer, reader = CollectiveRecorder(record, 1, 3), RecordReader(record)
    assert reader.status(0).phase == "absent"
    assert reader.status(1).last is None
    writer.set_phase(RUNNING)
    pair, all_ranks = writer.slot((1, 0)), writer.slot((0, 1))
    done = writer.start(ALL_REDUCE, all_ranks, recorder.DTYPES.index("int64"), (2, 3), 48)
    writer.finish(done)
    writer.start(SEND, pair, recorder.DTYPES.index("bfloat16"), (1, 2, 3, 4, 5), 240, peer=0, tag=1 << 20)
    status = reader.status(1)
    assert (status.phase, status.pid, status.num_started) == ("running", os.getpid(), 2)
    last = status.last
    assert last is not None
    assert (last.generation, last.sequence, last.group, last.is_running, last.size_bytes) == (3, 1, "1,0", True, 240)
    assert str(last) == "send #1 bfloat16 [1, 2, 3, 4] to rank 0, tag 1048576 (ranks 1,0)"


def test_the_oldest_that_runs_is_shown_and_the_ring_turns(record: Path) -> None:
    writer, reader = CollectiveRecorder(record, 0), RecordReader(record)
    slot = writer.slot((0, 1))
    places = [writer.start(ALL_REDUCE, slot, 1, (n,), 4 * n) for n in range(6)]
    for place in (places[5], places[3], places[2]):
        writer.finish(place)
    last = reader.status(0).last
    assert last is not None
    assert (last.sequence, last.is_running) == (4, True)
    writer.finish(places[4])
    last = reader.status(0).last
    assert last is not None
    assert (last.sequence, last.is_running, last.shape) == (5, False, (5,))
    assert last.end_s >= last.start_s > 0


def test_a_record_that_is_being_written_over_is_not_one_that_runs(record: Path) -> None:
    """A rank that loses its core between the zeros of a record and what follows them would else seem to wait since the machine started."""
    writer, reader = CollectiveRecorder(record, 0), RecordReader(record)
    slot = writer.slot((0, 1))
    for number in range(7):
        place = writer.start(ALL_REDUCE, slot, 1, (4,), 16)
        writer.finish(place)
        if number >= 3:  # the oldest is next
            oldest = writer._ring + (number + 1) % 4 * recorder.RECORD_BYTES
            before = bytes(writer._map[oldest : oldest + recorder.RECORD.size])
            writer._map[oldest : oldest + recorder.RECORD.size] = bytes(recorder.RECORD.size)
            last = reader.status(0).last
            assert last is not None
            assert (last.sequence, last.is_running) == (number, False)
            writer._map[oldest : oldest + recorder.RECORD.size] = before
    reader.close()


def test_the_record_survives_the_process(record: Path) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom shardwise.world.recorder import *\n"
        "w = CollectiveRecorder(Path(sys.argv[1]), 0)\n"
        "w.start(ALL_GATHER, w.slot((0, 1)), 1, (7,), 28)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(record)], check=False).returncode == -9
    last = RecordReader(record).status(0).last
    assert last is not None
    assert (last.op, last.shape, last.is_running) == ("all_gather", (7,), True)


def test_stopping_reaches_every_rank_and_settled_waits_for_all(record: Path) -> None:
    one, two, reader = CollectiveRecorder(record, 0), CollectiveRecorder(record, 1), RecordReader(record)
    assert not one.stopping
    reader.request_stop()
    assert one.stopping
    assert two.stopping
    one.set_phase(DONE)
    assert not one.all_ended()
    two.set_phase(recorder.FAILED)
    assert one.all_ended()


def test_a_record_holds_no_more_than_its_size(record: Path) -> None:
    size = record.stat().st_size
    writer = CollectiveRecorder(record, 0)
    for n in range(100):
        writer.start(ALL_REDUCE, writer.slot(tuple(range(n + 1))), 1, (n,), n)
    assert record.stat().st_size == size
    assert RecordReader(record).status(1).phase == "absent"


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_text(json.dumps({"a": "b" * 100}))
    with pytest.raises(ValueError, match="not a record of collectives"):
        RecordReader(tmp_path / "other")


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        ((0, 1), "0,1"),
        ((0, 1, 2, 3), "0-3"),
        ((1, 3, 5, 7), "1-7 by 2"),
        ((3, 0, 1, 2), "3,0,1,2"),
        ((5, 4, 3, 2), "5-2 by -1"),
        (tuple(x * x for x in range(40)), f"{','.join(str(x * x) for x in range(40))[:40]}... (40)"),
    ],
)
def test_group_names(ranks: tuple[int, ...], name: str) -> None:
    assert group_name(ranks) == name
    assert len(group_name(ranks)) < recorder.SLOT_BYTES
