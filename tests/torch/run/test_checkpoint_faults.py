"""A checkpoint is written while the process dies, the power goes or the disk fails, at every call to the operating system."""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from threading import Barrier

import pytest
import torch
from test_checkpoint import blank, equal, state

from shardwise.errors import CheckpointError
from shardwise.run import checkpoint
from shardwise.run.checkpoint import disk

CALLS = ("fsync", "rename", "replace", "open", "mkdir", "unlink", "rmdir", "close")


class Faults:
    """Counts the calls that touch the disk and does `fault` before call number `at`.

    It also keeps which files have bytes that no fsync has covered: what a power loss takes.
    """

    def __init__(self, at: int, fault: Callable[[Faults, str], None]) -> None:
        self.at, self.fault, self.count = at, fault, 0
        self.calls: list[str] = []
        self.unsynced: dict[int, int] = {}  # inode -> an own descriptor, since names change

    def hit(self, name: str) -> None:
        self.calls.append(name)
        self.count += 1
        if self.count - 1 == self.at:
            self.fault(self, name)

    def install(self, put: Callable[[object, str, object], None]) -> None:
        for name in CALLS:
            put(os, name, self._wrap(name, getattr(os, name)))
        put(builtins, "open", self._wrap_open(builtins.open))
        put(io, "open", self._wrap_open(io.open))

    def _wrap(self, name: str, real: Callable) -> Callable:
        def call(*args: object, **kwargs: object) -> object:
            self.hit(name)
            result = real(*args, **kwargs)
            if name == "fsync":
                self.unsynced.pop(os.fstat(args[0]).st_ino, None)  # type: ignore[arg-type]
            return result

        return call

    def _wrap_open(self, real: Callable) -> Callable:
        faults = self

        class Writer(io.BufferedWriter):
            def write(self, data: object) -> int:  # type: ignore[override]
                faults.hit("write")
                faults.unsynced.setdefault(os.fstat(self.fileno()).st_ino, os.dup(self.fileno()))
                return super().write(data)  # type: ignore[arg-type]

        def call(path: object, mode: str = "r", *args: object, **kwargs: object) -> object:
            if "b" in mode and ("x" in mode or "w" in mode):
                faults.hit("open")
                return Writer(io.FileIO(path, mode.replace("b", "")))  # type: ignore[arg-type]
            return real(path, mode, *args, **kwargs)

        return call


def in_child(work: Callable[[], None]) -> int:
    """Exit status of a forked child that does `work`: 0 done, 7 killed by a fault, 1 raised."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        work()
        os._exit(0)
    except BaseException as error:  # whatever it is, the child must not return into the test
        print(repr(error), file=sys.stderr)
        os._exit(1)


def set_attribute(target: object, name: str, value: object) -> None:
    setattr(target, name, value)


def kill(faults: Faults, name: str) -> None:
    os._exit(7)


def lose_power(faults: Faults, name: str) -> None:
    """Every byte that was not fsynced is gone."""
    for handle in faults.unsynced.values():
        os.ftruncate(handle, 0)
    os._exit(7)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # a forked child has no thread pool


@pytest.mark.parametrize("fault", [kill, lose_power])
@pytest.mark.parametrize("keep", [0, 1, 2])
def test_whenever_it_dies_the_newest_good_checkpoint_is_whole(tmp_path: Path, fault: Callable, keep: int) -> None:
    """Steps 1 and 2 are there, 3 is being written: afterwards 2 or 3 loads, bit for bit, and the next save works."""
    number, outcomes = 0, []
    while True:
        folder = tmp_path / str(number)
        token = checkpoint.claim_folder(folder)
        for step in (1, 2):
            checkpoint.save(folder, step, state(step, step), {"s": step}, token=token, keep=keep)

        def work(folder: Path = folder, number: int = number, token: int = token) -> None:
            Faults(number, fault).install(set_attribute)
            checkpoint.save(folder, 3, state(3, 3), {"s": 3}, token=token, keep=keep)

        status = in_child(work)
        assert status in (0, 7), f"fault {number}"
        wanted, said = blank(state(1)), []
        found = checkpoint.load(folder, wanted, warn=said.append)["s"]
        assert found in ((3,) if status == 0 else (2, 3)), f"fault {number}"
        assert equal(wanted, state(found, found)), f"fault {number}"
        assert said == [], "what has a committed name is never damaged"
        outcomes.append(found)
        checkpoint.save(folder, 4, state(4, 4), {"s": 4}, token=checkpoint.claim_folder(folder), keep=keep)
        assert checkpoint.load(folder, blank(state(4)))["s"] == 4
        assert not list(folder.glob(".*")), "what dead writers left is swept"
        if status == 0:
            break
        number += 1
    assert number > 12, "the faults were not injected"
    assert outcomes == sorted(outcomes), "commits once, at one call"


def test_without_fsync_power_loss_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: a writer that forgets fsync before the rename leaves damage, so the test above can fail."""
    damaged = []
    for number in range(40):
        folder = tmp_path / str(number)

        def work(folder: Path = folder, number: int = number) -> None:
            faults = Faults(number, lose_power)
            faults.install(set_attribute)
            os.fsync = lambda handle: faults.hit("fsync")  # type: ignore[assignment]
            checkpoint.save(folder, 1, state(1))

        if in_child(work) == 7 and checkpoint.committed_checkpoints(folder):
            damaged.append(checkpoint.latest_good(folder, warn=lambda _: None) is None)
    assert any(damaged)


@pytest.mark.parametrize(
    ("code", "says"), [(errno.ENOSPC, "free space"), (errno.EIO, "disk under"), (errno.EROFS, "cannot be written"), (errno.EDQUOT, "free")]
)
def test_a_disk_that_fails_at_any_call_is_an_error_with_a_remedy_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, says: str
) -> None:
    def fail(faults: Faults, name: str) -> None:
        raise OSError(code, os.strerror(code))

    number, errors = 0, 0
    while True:
        folder = tmp_path / str(number)
        checkpoint.save(folder, 1, state(1))
        faults, raised = Faults(number, fail), ""
        with monkeypatch.context() as patch:
            faults.install(patch.setattr)
            try:
                checkpoint.save(folder, 2, state(2))
            except CheckpointError as error:
                raised = str(error)
        assert not raised or (says in raised and str(folder) in raised), f"fault {number}: {raised}"
        names = [saved.step for saved in checkpoint.committed_checkpoints(folder)]
        assert names in ([1], [1, 2]), f"fault {number}"
        assert raised or names == [1, 2]
        wanted = blank(state(1))
        step = checkpoint.load(folder, wanted)["step"]
        assert equal(wanted, state(step)), f"fault {number}"
        assert [p for p in folder.iterdir() if p.name.startswith(".")] == [] or raised
        checkpoint.save(folder, 3, state(3))
        assert not list(folder.glob(".*"))
        errors += bool(raised)
        if faults.count <= number:
            break
        number += 1
    assert errors > 10


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError):
        checkpoint.save(tmp_path / "file", 1, state(1))
    with pytest.raises(CheckpointError):
        checkpoint.claim_folder(tmp_path / "file")


def claims(folder: str, start: float) -> list[int]:
    while time.monotonic() < start:
        pass
    return [checkpoint.claim_folder(Path(folder)) for _ in range(20)]


def test_no_two_writers_that_begin_at_once_have_one_token(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        start = time.monotonic() + 0.2
        taken = [token for one in [pool.submit(claims, str(tmp_path), start) for _ in range(2)] for token in one.result()]
    assert len(set(taken)) == 40


@pytest.mark.parametrize("token", ["-5", "1e20", "true", str(2**70)])
def test_a_fence_that_nobody_wrote_is_refused(tmp_path: Path, token: str) -> None:
    (tmp_path / "fence.json").write_text(f'{{"token": {token}}}')
    with pytest.raises(CheckpointError, match="if no other run writes here, remove it"):
        checkpoint.claim_folder(tmp_path)


def test_a_pipe_in_the_place_of_a_manifest_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    os.mkfifo(tmp_path / "step-00000001" / "manifest.json")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        checkpoint.verify(tmp_path / "step-00000001")


def test_a_folder_that_was_removed_is_made_anew_by_its_writer_alone(tmp_path: Path) -> None:
    folder, said = tmp_path / "run" / "checkpoints", list[str]()
    folder.parent.mkdir()
    token = checkpoint.claim_folder(folder)
    checkpoint.save(folder, 1, state(1), token=token)
    shutil.rmtree(folder)
    checkpoint.save(folder, 2, state(2), token=token, warn=said.append)
    assert [one.step for one in checkpoint.committed_checkpoints(folder)] == [2]
    assert "was removed while the run went on" in said[0]
    shutil.rmtree(folder)
    other = checkpoint.claim_folder(folder), checkpoint.claim_folder(folder)
    assert other[1] != token
    with pytest.raises(checkpoint.WriterReplaced):
        checkpoint.save(folder, 3, state(3), token=token)


def test_a_run_folder_that_was_removed_ends_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.parent.mkdir()
    token = checkpoint.claim_folder(folder)
    shutil.rmtree(folder.parent)
    with pytest.raises(checkpoint.FolderRemoved, match="run was removed while the run went on"):
        checkpoint.save(folder, 1, state(1), token=token)


@dataclass
class Thread:
    """One of two ranks, in threads that share `given`."""

    rank: int
    given: list[list[int]]
    meet: Barrier
    num_ranks: int = 2
    generation: int = 0

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        self.given[self.rank] = list(values)
        self.meet.wait()
        most = [max(pair) for pair in zip(*self.given, strict=True)]
        self.meet.wait()
        return most


def test_every_rank_says_why_one_could_not_save(tmp_path: Path) -> None:
    given, meet = [[], []], Barrier(2, timeout=20)

    def save(rank: int) -> str:
        try:
            checkpoint.save(tmp_path / "file", 1, state(1), None, Thread(rank, given, meet))
        except CheckpointError as error:
            return f"{error.second_hand} {error}"
        return ""

    (tmp_path / "file").write_text("in the way")
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(save, range(2))
    assert first.startswith("False checkpoint of step 1 not saved: File exists")
    assert second == first.replace("False ", "True rank 0: ")


def test_a_disk_without_inodes_is_told_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    assert "free space" in disk.explain_os_error(full, tmp_path, 0)
    there = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((*there[:5], 200, 0, 0, *there[8:])))
    assert "no inodes are left" in disk.explain_os_error(full, tmp_path, 0)
