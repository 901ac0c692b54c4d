"""What goes wrong while ranks run, as the user sees it: one message, an exit code, nothing lost, nobody left behind."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.cli import run

CONFIG = """[model]
name = "gpt-tiny"
[data]
source = "synthetic"
[train]
steps = 2
batch = 4
[plan]
layout = "data=2"
cluster = "cpu-2"
"""
SHARDWISE = [sys.executable, "-c", "from shardwise.cli import main; main()"]
TIMEOUT_S = 120


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps that ended well."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "config.toml").write_text(CONFIG)
    done = shardwise("train", folder / "config.toml", f"run.folder={folder}/run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def finished(trained: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    return Path(shutil.copytree(trained, tmp_path / "finished"))


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def shardwise(*words: object, cwd: Path, env: dict[str, str] | None = None, file_bytes: int = 0) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        if file_bytes:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

    return subprocess.run(
        [*SHARDWISE, *map(str, words), "--json"], capture_output=True, text=True, cwd=cwd, env=env or environment(), timeout=TIMEOUT_S,
        preexec_fn=limit, check=False,
    )  # fmt: skip


def require(done: subprocess.CompletedProcess[str], exit_code: int, *fragments: str) -> None:
    assert done.returncode == exit_code, done.stderr
    assert "fault in shardwise" not in done.stderr
    record = json.loads(done.stdout)
    assert record["exit_code"] == exit_code
    for fragment in fragments:
        assert fragment in record["error"]


def ranks_of(pid: int) -> dict[int, int]:
    """[rank] -> process, of a launcher: the processes below it whose environment says a rank."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            below.setdefault(parent, []).append(int(entry.name))
    found, pending = [], list(below.get(pid, []))
    while pending:
        at = pending.pop()
        found.append(at)
        pending += below.get(at, [])
    leaves = sorted(p for p in found if p not in below)
    return dict(enumerate(leaves))


def wait_for(path: Path, lines: int) -> None:
    until = time.monotonic() + TIMEOUT_S
    while not path.exists() or path.read_text().count("\n") < lines:
        assert time.monotonic() < until, f"{path} never got {lines} lines"
        time.sleep(0.02)


def test_a_rank_that_dies_is_named_and_the_run_goes_on_from_its_checkpoint(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "config"
    words = [*SHARDWISE, "train", str(config), "steps=400", "checkpoint_every=2", "run.protect=none", "--json"]
    launcher = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment())
    try:
        wait_for(folder / "metrics.jsonl", 5)
        ranks = ranks_of(launcher.pid)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        out, err = launcher.communicate(timeout=TIMEOUT_S)
    finally:
        launcher.kill()
    assert launcher.returncode == 4, err
    assert "killed" in (error := json.loads(out)["error"]).lower()
    assert "rank" in error
    assert not [pid for pid in ranks.values() if Path(f"/proc/{pid}").exists()]
    reached = max(json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines())
    done = shardwise("train", config, f"steps={reached + 2}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "resuming after step" in done.stderr
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, reached + 3))


def test_a_port_that_is_in_use(config: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = str(taken.getsockname()[1])
        env = environment(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        require(shardwise("train", config, cwd=tmp_path, env=env), 4, port)


def refused(capfd: pytest.CaptureFixture[str], exit_code: int, *words: object) -> str:
    """The message of a command line that ends before it starts a rank, so that it needs no process of its own."""
    code = run([*map(str, words), "--json"])
    captured = capfd.readouterr()
    assert code == exit_code, captured.err
    assert "fault in shardwise" not in captured.err
    return str(json.loads(captured.out)["error"])


def test_a_run_folder_that_cannot_be_made(config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    error = refused(capfd, 2, "train", config, f"run.folder={tmp_path}/file/run")
    assert "choose another run.folder" in error


def test_a_run_folder_that_is_read_only(config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = Path("/sys/shardwise-run") if os.getuid() == 0 else tmp_path / "closed" / "run"
    if os.getuid():
        folder.parent.mkdir(mode=0o500)
    error = refused(capfd, 2, "train", config, f"run.folder={folder}")
    assert str(folder) in error
    assert "choose another run.folder" in error


def test_a_run_folder_that_another_launcher_uses(config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "in use" in refused(capfd, 4, "train", config, f"run.folder={folder}")


def test_a_checkpoint_of_another_model(config: Path, finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = "model.name=gpt:layers=1,hidden=32,heads=2,sequence=32,vocabulary=64"
    error = refused(capfd, 2, "train", config, f"run.folder={finished}", other)
    assert "another run" in error
    assert "gpt-tiny" in error


def test_a_damaged_checkpoint_is_found(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "verify", str(finished)]) == 0
    file = max(finished.glob("checkpoints/step-*/*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    capfd.readouterr()
    error = refused(capfd, 4, "checkpoint", "verify", finished)
    assert file.name in error
    assert "SHA-256" in error


def test_a_disk_that_is_full_loses_no_earlier_checkpoint(config: Path, finished: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: the checkpoint of this run does not fit, the one before stays."""

    def whole() -> list[str]:
        return sorted(path.name for path in (finished / "checkpoints").iterdir() if path.is_dir() and not path.name.startswith("."))

    before = whole()
    require(shardwise("train", config, "steps=4", f"run.folder={finished}", cwd=tmp_path, file_bytes=40_000), 4, "checkpoint")
    assert whole() == before
    assert run(["checkpoint", "verify", str(finished)]) == 0


@pytest.mark.parametrize("name", ["config.toml", "plan.toml", "metrics.jsonl", ".digests.json"])
def test_a_pipe_in_the_place_of_a_file_of_the_run_ends_at_once(
    config: Path, finished: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (finished / name).unlink()
    os.mkfifo(finished / name)
    assert run(["train", str(config), f"run.folder={finished}"]) == 2
    assert f"{finished / name} is no file" in capfd.readouterr().err


def test_an_interrupt_saves_and_leaves_nobody(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "config"
    launcher = subprocess.Popen(
        [*SHARDWISE, "train", str(config), "steps=4000"], stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment()
    )
    try:
        wait_for(folder / "metrics.jsonl", 3)
        ranks = ranks_of(launcher.pid)
        launcher.send_signal(signal.SIGINT)
        _, err = launcher.communicate(timeout=TIMEOUT_S)
    finally:
        launcher.kill()
    assert launcher.returncode == 75, err
    assert "Traceback" not in err
    until = time.monotonic() + 5
    while (left := [pid for pid in ranks.values() if Path(f"/proc/{pid}").exists()]) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left


@pytest.mark.parametrize("whole_group", [False, True])
def test_told_to_stop_it_saves_and_says_that_it_can_go_on(config: Path, tmp_path: Path, whole_group: bool) -> None:
    words = [*SHARDWISE, "train", str(config), "steps=100000", "--json"]
    launcher = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment(), start_new_session=True
    )
    try:
        wait_for(tmp_path / "runs" / "config" / "metrics.jsonl", 2)
        if whole_group:
            os.killpg(launcher.pid, signal.SIGTERM)
        else:
            launcher.send_signal(signal.SIGTERM)
        out, err = launcher.communicate(timeout=TIMEOUT_S)
    finally:
        launcher.kill()
    assert launcher.returncode == 75, err
    assert "told to stop: saving after step" in err
    step = json.loads(out)["step"]
    assert (tmp_path / "runs" / "config" / "checkpoints" / f"step-{step:08d}").is_dir()
