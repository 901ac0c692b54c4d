"""Checkpoints that are written while the state changes: byte for byte those that waited, or none, whatever dies or fails meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from test_checkpoint import Ranks, blank, equal, on_ranks, state
from test_checkpoint_faults import Faults, in_child, kill, lose_power, set_attribute

from shardwise.errors import CheckpointError
from shardwise.run import checkpoint
from shardwise.run.checkpoint import BackgroundSaver, RankAgreement, StateShard, background, disk, full_shard


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # a forked child has no thread pool


def pieces_of(rank: int, seed: int = 0) -> list[StateShard]:
    """Of two ranks: what each owns, a block of rows that is not contiguous, and a copy that rank 1 does not write."""
    torch.manual_seed(seed)
    whole, half = torch.randn(6, 5), torch.randn(4, 3).half()
    block = whole.t().contiguous().t()[3 * rank : 3 * rank + 3]
    shared = full_shard("h", "buffer", half, is_owner=rank == 0)
    return [StateShard("w", "parameter", (6, 5), (3 * rank, 0), block), shared, full_shard(f"n{rank}", "scalar", torch.tensor(seed))]


def update(pieces: list[StateShard]) -> None:
    """What a step does to the state."""
    for piece in pieces:
        piece.tensor.add_(1)


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def settle(one: BackgroundSaver, together: RankAgreement) -> checkpoint.SaveTiming:
    """Agree again and again, as a loop does between its steps."""
    while True:
        failed, goes_on = together.all_reduce_max(one.vote())
        if (written := one.apply_vote(failed, goes_on)) is not None:
            return written
        time.sleep(0.002)


@pytest.mark.parametrize("waits", [False, True])
def test_it_is_byte_for_byte_the_checkpoint_that_was_waited_for(tmp_path: Path, waits: bool) -> None:
    def save(ranks: Ranks) -> checkpoint.SaveTiming | None:
        one = BackgroundSaver(tmp_path / "beside", ranks)
        for step in (3, 4):
            pieces = pieces_of(ranks.rank, step)
            checkpoint.save(tmp_path / "waited", step, pieces, {"s": step}, ranks)
            one.begin(step, pieces, {"s": step})
            update(pieces)
            written = one.finish() if waits else settle(one, ranks)
            assert written is not None
            assert written.step == step
            assert one.step is None
        return written

    first, second = on_ranks(2, save)
    assert isinstance(first, checkpoint.SaveTiming), first
    assert isinstance(second, checkpoint.SaveTiming), second
    for name in ("step-00000003", "step-00000004"):
        assert files_of(tmp_path / "beside" / name) == files_of(tmp_path / "waited" / name)
    assert first.size_bytes == checkpoint.size_of(tmp_path / "beside" / "step-00000004")
    assert not list((tmp_path / "beside").glob(".*"))


class Held:
    """Ranks' files wait for `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, real = Event(), disk.write_file

        def write_file(path: Path, parts: Any) -> tuple[int, str]:
            if path.suffix == ".safetensors":
                self.go.wait(20)
            return real(path, parts)

        monkeypatch.setattr(disk, "write_file", write_file)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    one = Held(monkeypatch)
    yield one
    one.go.set()


@pytest.mark.parametrize("copies", [True, False])
def test_without_the_copy_it_would_be_of_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: Held, copies: bool) -> None:
    """The broken twin reads the pieces while the update changes them."""
    if not copies:
        monkeypatch.setattr(background._HostCopy, "copy_tensors", lambda self, pieces: [piece.tensor for piece in pieces])
    one, pieces = BackgroundSaver(tmp_path, checkpoint.SingleRank()), state(1, 1)
    one.begin(1, pieces)
    update(pieces)
    held.go.set()
    one.finish()
    wanted = blank(state(1))
    checkpoint.load(tmp_path, wanted)
    assert equal(wanted, state(1, 1)) == copies


@pytest.mark.parametrize("fault", [kill, lose_power])
def test_whenever_it_dies_while_training_goes_on_no_checkpoint_is_torn(tmp_path: Path, fault: Callable[[Faults, str], None]) -> None:
    """Steps 1 and 2 are there, 3 is being written, and only one may stay: afterwards 2 or 3 loads, bit for bit."""
    number, outcomes = 0, []
    while True:
        folder = tmp_path / str(number)
        token = checkpoint.claim_folder(folder)
        for step in (1, 2):
            checkpoint.save(folder, step, state(step, step), token=token, keep=1)

        def work(folder: Path = folder, number: int = number, token: int = token) -> None:
            Faults(number, fault).install(set_attribute)
            one, pieces = BackgroundSaver(folder, checkpoint.SingleRank(), keep=1, token=token), state(3, 3)
            one.begin(3, pieces)
            update(pieces)
            one.finish()

        status = in_child(work)
        assert status in (0, 7), f"fault {number}"
        wanted, said = blank(state(1)), list[str]()
        found = checkpoint.load(folder, wanted, warn=said.append)["step"]
        assert found in ((3,) if status == 0 else (2, 3)), f"fault {number}"
        assert equal(wanted, state(found, found)), f"fault {number}"
        assert said == []
        outcomes.append(found)
        checkpoint.save(folder, 4, state(4, 4), token=checkpoint.claim_folder(folder), keep=1)
        assert not list(folder.glob(".*")), "what dead writers left is swept"
        if status == 0:
            break
        number += 1
    assert number > 12, "the faults were not injected"
    assert outcomes == sorted(outcomes)


def test_a_rank_that_cannot_write_is_told_by_all_and_the_next_save_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, full = disk.write_file, [True]

    def write_file(path: Path, parts: Any) -> tuple[int, str]:
        if full[0] and path.name.startswith("rank-00001"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, parts)

    monkeypatch.setattr(disk, "write_file", write_file)

    def save(ranks: Ranks) -> str:
        one, said = BackgroundSaver(tmp_path, ranks), ""
        for how in (settle, lambda one, ranks: one.finish()):
            one.begin(1, pieces_of(ranks.rank))
            try:
                how(one, ranks)
            except CheckpointError as error:
                said += f"{error.second_hand} {error};"
            assert one.step is None
        ranks.all_reduce_max([0])
        full[0] = False
        one.begin(2, pieces_of(ranks.rank))
        one.finish()
        return said

    first, second = on_ranks(2, save)
    assert isinstance(second, str), second
    assert second.startswith("False checkpoint of step 1 not saved: No space left on device: this rank writes")
    assert first == second.replace("False ", "True rank 1: ")
    assert second.count("free space") == 2
    assert [one.step for one in checkpoint.committed_checkpoints(tmp_path)] == [2]
    assert not list(tmp_path.glob(".*"))


def test_what_is_left_is_given_up_and_whoever_takes_over_writes_beside_its_threads(tmp_path: Path, held: Held) -> None:
    """A rank is lost: nobody agrees any more, and the thread of the one that is left wakes up while the next one saves."""
    token = checkpoint.claim_folder(tmp_path)
    held.go.set()
    checkpoint.save(tmp_path, 1, state(1, 1), token=token)
    held.go.clear()

    class Two(checkpoint.SingleRank):
        num_ranks = 2
        generation = 0

        def all_reduce_max(self, values: Any) -> list[int]:
            return list(values)

    one = BackgroundSaver(tmp_path, Two(), token=token)
    one.begin(2, state(2, 2))
    assert one.vote() == (0, 1)
    one.abandon(wait=False)
    assert one.step is None
    other, pieces = BackgroundSaver(tmp_path, checkpoint.SingleRank(), token=token), state(3, 2)
    other.begin(2, pieces)
    held.go.set()
    other.finish()
    wanted = blank(state(1))
    assert checkpoint.load(tmp_path, wanted)["step"] == 2
    assert equal(wanted, state(3, 2))
    until = time.monotonic() + 10
    while list(tmp_path.glob(".saving-*")) and time.monotonic() < until:
        time.sleep(0.005)
    assert [one.step for one in checkpoint.committed_checkpoints(tmp_path)] == [1, 2]
    assert not list(tmp_path.glob(".saving-*"))


def test_an_error_gives_it_time_and_a_commit_that_has_begun_is_waited_for(tmp_path: Path, held: Held) -> None:
    one = BackgroundSaver(tmp_path, checkpoint.SingleRank())
    one.begin(1, state(1, 1))
    under_way = one._in_progress
    assert under_way is not None
    held.go.set()
    one.abandon(wait=True)
    assert under_way.decided.is_set()
    assert [one.step for one in checkpoint.committed_checkpoints(tmp_path)] == [1]


def test_a_writer_that_was_replaced_meanwhile_commits_nothing(tmp_path: Path, held: Held) -> None:
    one = BackgroundSaver(tmp_path, checkpoint.SingleRank(), token=checkpoint.claim_folder(tmp_path))
    one.begin(1, state(1, 1))
    checkpoint.claim_folder(tmp_path)
    shutil.rmtree(next(tmp_path.glob(".saving-*")))  # as the other sweeps
    held.go.set()
    with pytest.raises(checkpoint.WriterReplaced, match="another run took over"):
        one.finish()
    assert not checkpoint.committed_checkpoints(tmp_path)


def test_old_checkpoints_stay_until_the_new_one_is_committed(tmp_path: Path, held: Held) -> None:
    held.go.set()
    for step in (1, 2):
        checkpoint.save(tmp_path, step, state(step, step))
    held.go.clear()
    one = BackgroundSaver(tmp_path, checkpoint.SingleRank(), keep=1)
    one.begin(3, state(3, 3))
    time.sleep(3 * background.POLL_S)
    assert [saved.step for saved in checkpoint.committed_checkpoints(tmp_path)] == [1, 2]
    held.go.set()
    assert one.finish() is not None
    assert [saved.step for saved in checkpoint.committed_checkpoints(tmp_path)] == [3]


def test_a_folder_that_is_removed_meanwhile_is_told_and_made_anew(tmp_path: Path, held: Held) -> None:
    folder, said = tmp_path / "run" / "checkpoints", list[str]()
    folder.parent.mkdir()
    one = BackgroundSaver(folder, checkpoint.SingleRank(), token=checkpoint.claim_folder(folder), warn=said.append)
    one.begin(1, state(1, 1))
    shutil.rmtree(folder)
    held.go.set()
    with pytest.raises(CheckpointError, match="was removed while it was written to"):
        one.finish()
    one.begin(2, state(2, 2))
    one.finish()
    assert [saved.step for saved in checkpoint.committed_checkpoints(folder)] == [2]
    assert "it is made anew" in said[0]


def test_there_is_no_memory_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = BackgroundSaver(tmp_path, checkpoint.SingleRank())
    monkeypatch.setattr(background, "host_copy_bytes", lambda pieces: 1 << 60)
    with pytest.raises(CheckpointError, match="no memory for a copy of the state"):
        one.begin(1, state(1, 1))
    assert os.listdir(tmp_path) == []
