"""Starting ranks, and what happens when they fail: the first cause is named, nobody hangs, nobody is left."""

from __future__ import annotations

import ctypes
import importlib
import io
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import ConfigError, Infeasible, RankError, RunError, UsageError
from shardwise.world.comm import encoding
from shardwise.world.launch.launch import ENGINE, Launcher, engine_modules, import_reference, launch
from shardwise.world.launch.watch import LaunchOptions
from shardwise.world.recorder import RecordReader
from shardwise.world.world import World
from tests.support.processes import children_of, gone

IMPORT = f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]\nimport test_launch as t"


def echo(world: World, *args: Any) -> Any:
    return {"rank": world.rank, "of": world.num_ranks, "threads": torch.get_num_threads(), "args": args}


def test_results_come_in_the_order_of_ranks_with_what_was_sent(ranks: Any) -> None:
    sent = ({"a": [1, 2.5, None, True, "x"], 3: (torch.arange(3), b"bytes")}, float("inf"))
    for rank, got in enumerate(ranks(echo, 3, *sent)):
        assert (got["rank"], got["of"], got["threads"]) == (rank, 3, 1)
        (first, infinite) = got["args"]
        assert infinite == float("inf")
        assert first["a"] == [1, 2.5, None, True, "x"]
        assert torch.equal(first[3][0], torch.arange(3))
        assert first[3][1] == b"bytes"


def test_a_closure_is_forked_from_here(ranks: Any) -> None:
    outside = torch.full((2,), 3.0)

    def closure(world: World, x: Any) -> Any:
        world.world_group.all_reduce(outside)
        return float(outside[0]), x(4), torch.get_num_threads()

    assert import_reference(closure) is None
    # The argument cannot be sent, only inherited.
    assert launch(closure, 2, lambda n: n + 1) == [(6.0, 5, 1)] * 2


def test_values_that_cannot_be_sent_are_named(ranks: Any) -> None:
    with pytest.raises(UsageError, match=r"args\[1\]\['here'\] is a Linear"):
        ranks(echo, 2, 1, {"here": torch.nn.Linear(1, 1)})
    with pytest.raises(RankError, match=r"the result\[0\] is a World"):
        ranks(returns_world, 1)


def returns_world(world: World) -> Any:
    return [world]


def test_messages_keep_types_and_shapes() -> None:
    value = [(), [], {}, {"t": torch.ones(2, 3, dtype=torch.bfloat16).t(), "s": torch.tensor(2.0)}, b"", "tensor", ["list", 1], -0.0]
    got = encoding.load(encoding.dump(value))
    assert str(got) == str(value)
    with pytest.raises(UsageError, match="set"):
        encoding.dump({1, 2})
    for pair in (torch.tensor([1 + 2j, 3j], dtype=torch.complex128), torch.tensor([[1 + 2j]], dtype=torch.complex128).conj()):
        assert torch.equal(encoding.load(encoding.dump(pair)), pair)
    for kind, tensor in (("sparse", torch.eye(2).to_sparse()), ("on meta", torch.ones(2, device="meta"))):
        with pytest.raises(UsageError, match=rf"value\[0\] is a .*{kind}"):
            encoding.dump([tensor])


@pytest.mark.parametrize(("num_ranks", "options"), [(0, {}), (2, {"threads": -1})])
def test_wrong_numbers_are_refused(num_ranks: int, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="launch at least 1 rank"):
        launch(echo, num_ranks, **options)


def fails(world: World, how: str, rank: int) -> None:
    """Rank `rank` fails while the others wait for it."""
    world.world_group.barrier()
    if world.rank == rank:
        print("the last words of a rank", flush=True)
        match how:
            case "exception":
                raise ValueError("seven is not even")
            case "shardwise":
                raise Infeasible("3 layers for 4 stages; use pipeline <= 3")
            case "chain":
                try:
                    raise KeyError("inner")
                except KeyError as error:
                    raise ConfigError("no such key") from error
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "term":
                os.kill(os.getpid(), signal.SIGTERM)
            case "segfault":
                ctypes.string_at(0)
            case "exit":
                os._exit(3)
            case "sys.exit":
                sys.exit(0)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hold":
                # usleep through PyDLL keeps the interpreter's lock.
                ctypes.PyDLL(None).sleep(60)
            case "skip":
                time.sleep(60)
            case "return":
                return
    world.world_group.all_reduce(torch.zeros(2, 3))


CASES = {
    "exception": "rank 1 failed: ValueError: seven is not even",
    "shardwise": "rank 1 failed: 3 layers for 4 stages; use pipeline <= 3",
    "chain": "rank 1 failed: no such key",
    "kill": "rank 1 was killed by SIGKILL; if nobody killed it, the kernel did for want of memory",
    "term": "rank 1 was killed by SIGTERM",
    "segfault": "rank 1 was killed by SIGSEGV; a fault in native code",
    "exit": "rank 1 exited with code 3 before its function returned",
    "sys.exit": "rank 1 failed: SystemExit: the function called sys.exit(0) before it returned",
}


@pytest.mark.parametrize("how", CASES)
def test_the_first_failure_is_named(ranks: Any, how: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(fails, 3, how, 1)
    assert str(caught.value).startswith(CASES[how])
    assert caught.value.rank == 1
    if how in ("kill", "exit", "segfault"):
        assert "rank 0 (" in str(caught.value)
        assert "all_reduce #2 float32 [2, 3] (ranks 0,1,2)" in str(caught.value)
        assert "the last words of a rank" in str(caught.value)
    if how == "exception":
        assert "in fails: raise ValueError" in str(caught.value)
        assert "Traceback" in caught.value.__notes__[0]


@pytest.mark.parametrize(("how", "kind", "code"), [("shardwise", Infeasible, 3), ("chain", ConfigError, 2), ("exception", RankError, 4)])
def test_an_error_keeps_its_class_and_exit_code(ranks: Any, how: str, kind: type[Exception], code: int) -> None:
    with pytest.raises(kind) as caught:
        ranks(fails, 2, how, 0)
    assert isinstance(caught.value, RankError)
    assert caught.value.exit_code == code
    assert caught.value.rank == 0


def both_fail(world: World) -> None:
    """Rank 2 fails first; rank 0 by itself a moment later, before it is ended."""
    world.world_group.barrier()
    if world.rank == 2:
        raise ValueError("first")
    if world.rank == 0:
        time.sleep(0.02)
        raise ValueError("second")
    world.world_group.barrier()


def test_of_two_failures_the_earlier_is_named(ranks: Any) -> None:
    with pytest.raises(RankError, match="rank 2 failed: ValueError: first"):
        ranks(both_fail, 3)


def slow_death(world: World) -> None:
    """Rank 1 loses its connections first and only then fails: the others' complaints come earlier than the cause."""
    world.world_group.barrier()
    if world.rank == 1:
        for name in os.listdir("/proc/self/fd"):
            try:
                one = socket.socket(fileno=os.dup(int(name)))
                if one.family == socket.AF_INET and one.getpeername():
                    one.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        time.sleep(0.4)
        raise ValueError("the cause")
    world.world_group.barrier()


def test_a_lost_connection_is_never_the_first_cause(ranks: Any) -> None:
    with pytest.raises(RankError, match="rank 1 failed: ValueError: the cause"):
        ranks(slow_death, 3)


def tells_of_another(world: World) -> None:
    """Rank 0 ends a moment before rank 1, whose failure it tells of."""
    world.world_group.barrier()
    if world.rank == 0:
        error = ConfigError("rank 1: it failed")
        error.second_hand = True
        raise error
    time.sleep(0.4)
    raise ConfigError("the cause")


def test_what_a_rank_tells_of_another_is_never_the_first_cause(ranks: Any) -> None:
    with pytest.raises(RankError, match="rank 1 failed: the cause"):
        ranks(tells_of_another, 2)


def cleans_up_badly(world: World) -> None:
    try:
        raise Infeasible("the cause")
    finally:
        Path("/nowhere/at/all").rmdir()


def test_cleaning_up_masks_nothing(ranks: Any) -> None:
    with pytest.raises(Infeasible, match="the cause"):
        ranks(cleans_up_badly, 1)


@pytest.mark.parametrize(
    ("how", "said"),
    [("stop", "its process is stopped"), ("hold", "native code holds its interpreter"), ("skip", "rank 1 did not take part")],
)
def test_a_hang_names_the_rank_that_is_waited_for(ranks: Any, how: str, said: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(fails, 3, how, 1, timeout_s=1.5)
    assert caught.value.rank == 1
    assert said in str(caught.value)
    assert "rank 2 (running): in all_reduce #2 float32 [2, 3] (ranks 0,1,2) for" in str(caught.value)


def test_a_stopped_rank_is_named_long_before_any_time_is_up(ranks: Any) -> None:
    with pytest.raises(RankError, match=r"rank 1: its process is stopped \(SIGSTOP") as caught:
        ranks(fails, 3, "stop", 1, timeout_s=900.0)
    assert caught.value.rank == 1


def hangs_in_a_step(world: World) -> None:
    """Steps of a moment, in the ninth of which rank 1 sleeps."""
    timed_step = world.pace.time_steps()
    for step in range(10):
        with timed_step:
            if world.rank == 1 and step == 8:
                time.sleep(600)
            world.world_group.barrier()


def test_a_step_that_lasts_longer_than_those_before_it_is_a_hang(ranks: Any) -> None:
    with pytest.raises(RankError, match="lasts longer than 1 s: rank 1 did not take part") as caught:
        ranks(hangs_in_a_step, 3, timeout_s=900.0, hang_after_s=1.0)
    assert caught.value.rank == 1


def test_swapped_collectives_are_shown_rank_by_rank(ranks: Any) -> None:
    with pytest.raises(RankError, match="the ranks are in different collectives"):
        ranks(swapped, 2, timeout_s=1.5)


def swapped(world: World) -> None:
    """Rank 0 sends before it receives what rank 1 never sends."""
    world.world_group.barrier()
    if world.rank == 0:
        world.world_group.irecv(torch.zeros(3), 1, tag=5).wait()
    world.world_group.barrier()


def test_a_rank_that_returns_early_is_named(ranks: Any) -> None:
    with pytest.raises(RankError) as caught:
        ranks(fails, 2, "return", 1, timeout_s=3.0)
    assert "rank 1 did not take part" in str(caught.value)
    with pytest.raises(RankError) as caught:
        ranks(fails, 2, "return", 1, timeout_s=30.0)
    assert "rank 1 had returned" in str(caught.value)


def test_the_folder_of_a_killed_launcher_goes_at_the_next_launch(ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closure's ranks are forked from the launcher itself, so that nobody outlives it who could remove what it leaves."""
    code = "import os, time, shardwise; shardwise.launch(lambda world: time.sleep(60), 2)"
    dead = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 30
    while not list(tmp_path.glob("shardwise-*/rank-1.log")) and time.monotonic() < until:
        time.sleep(0.05)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (left,) = tmp_path.glob("shardwise-*")
    try:
        ranks(nothing, 1)
        assert left.exists()  # its launcher lives
    finally:
        dead.kill()
        dead.wait()
    until = time.monotonic() + 10  # its ranks hold the lock until they are gone, too
    while left.exists() and time.monotonic() < until:
        ranks(nothing, 1)
    assert not list(tmp_path.glob("shardwise-*"))


def nothing(world: World) -> None:
    pass


def told(world: World) -> str:
    """Rank 0 answers one question, and has returned when the second is asked."""
    first = world.broadcast_text(lambda: "chosen")
    return first if world.rank == 0 else world.broadcast_text(str)


def test_who_waits_for_a_choice_of_rank_0_hears_that_it_returned(ranks: Any) -> None:
    with pytest.raises(RankError) as caught:
        ranks(told, 2, timeout_s=None)
    assert "rank 1 waits for what rank 0 chooses, and rank 0 has ended; rank 0 had returned" in str(caught.value)


def test_long_work_without_collectives_is_no_hang(ranks: Any) -> None:
    assert ranks(sleeps, 2, 1.5, timeout_s=0.8) == [None, None]


def sleeps(world: World, seconds: float) -> None:
    time.sleep(seconds)


def leaves_unread(world: World, untimed: bool) -> float:
    """A sum that nobody waits for while the rank works for long, and which is read then."""
    total = torch.ones(())
    work = world.world_group.all_reduce(total, wait=False)
    if untimed:
        work = work.without_timing()
    time.sleep(3.5)
    work.wait()
    return float(total)


def test_what_need_not_be_waited_for_is_no_hang(ranks: Any) -> None:
    assert ranks(leaves_unread, 2, True, timeout_s=2.0) == [2.0, 2.0]
    with pytest.raises(RankError, match=r"all_reduce #1 .* lasts longer than 2 s"):
        ranks(leaves_unread, 2, False, timeout_s=2.0)


def faults(world: World) -> tuple[int, int]:
    """(threads of the process that forked this one, page faults of ten 48 MiB tensors made one after the other).

    The first few still grow the heap: what is allocated in between lies in the way.
    """
    for _ in range(20):
        torch.ones(12 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(12 << 20)
    return len(os.listdir(f"/proc/{os.getppid()}/task")), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_ranks_come_from_one_thread_and_keep_freed_memory(ranks: Any) -> None:
    (num_threads, num_faults) = ranks(faults, 1)[0]
    assert num_threads == 1
    with Launcher(allocator=False) as plain:
        (_, without) = plain.launch(faults, 1)[0]
    if without > 1000:  # a C library that has such settings
        assert num_faults < without / 2


def talks(world: World) -> None:
    print(f"rank {world.rank} speaks", flush=True)
    os.write(2, b"and in C\n")


def test_only_rank_0_is_shown_and_logs_are_kept_where_asked(ranks: Any, capfd: Any, tmp_path: Path) -> None:
    ranks(talks, 2, folder=tmp_path / "logs")
    out = capfd.readouterr()
    assert out.out == "rank 0 speaks\n"
    assert out.err == "and in C\n"
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "rank 1 speaks\nand in C\n"
    ranks(talks, 2, show=False)
    assert capfd.readouterr().out == ""


def is_terminal(world: World) -> bool:
    return sys.stdout.isatty()


def test_rank_0_writes_to_the_terminal_itself(tmp_path: Path) -> None:
    """A progress display needs a terminal, not a pipe."""
    import pty

    code = f"{IMPORT}\nprint('found', t.launch(t.is_terminal, 2))\n"
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = io.BytesIO()
    while True:
        try:
            if not (data := os.read(ours, 1000)):
                break
        except OSError:
            break
        said.write(data)
    process.wait()
    os.close(ours)
    assert b"found [True, False]" in said.getvalue()


def test_launches_at_the_same_time_do_not_meet(launcher: Launcher) -> None:
    def one(number: int) -> Any:
        return launcher.launch(sums, 2, number, options=LaunchOptions(threads=1))

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(one, range(3))) == [[2.0 * number + 1] * 2 for number in range(3)]


def sums(world: World, number: int) -> float:
    x = torch.tensor([float(world.rank + number)])
    world.world_group.all_reduce(x)
    return float(x)


def test_a_prepared_process_that_died_is_replaced(launcher: Launcher) -> None:
    with Launcher() as own:
        assert own.launch(sums, 2, 0, options=LaunchOptions(threads=1)) == [1.0, 1.0]
        before = own.pid
        assert before is not None
        thread = threading.Timer(0.5, os.kill, (before, signal.SIGKILL))
        thread.start()
        with pytest.raises(RunError, match="process that starts ranks has ended"):
            own.launch(sleeps, 2, 30.0)
        assert own.launch(sums, 2, 0, options=LaunchOptions(threads=1)) == [1.0, 1.0]
        assert own.pid != before


def test_a_prepared_process_that_does_not_answer_is_named_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with Launcher() as own:
        assert own.launch(sums, 2, 0, options=LaunchOptions(threads=1)) == [1.0, 1.0]
        before = own.pid
        assert before is not None
        os.kill(before, signal.SIGSTOP)
        monkeypatch.setattr("shardwise.world.launch.launch.START_S", 0.5)
        monkeypatch.setattr("shardwise.world.launch.launch.KILL_S", 0.5)
        with pytest.raises(RunError, match=rf"process {before}\) started none of 2 within 0.5 s.*launch again"):
            own.launch(sums, 2, 0, options=LaunchOptions(threads=1))
        monkeypatch.undo()
        assert own.launch(sums, 2, 0, options=LaunchOptions(threads=1)) == [1.0, 1.0]
        assert own.pid != before


def test_a_prepared_process_that_fails_to_start_ranks_says_why(tmp_path: Path) -> None:
    """Here its own code is told to fork no more, as a system out of processes does."""
    (tmp_path / "no_forks.py").write_text("import os\ndef fork(): raise OSError(11, 'no process is left')\nos.fork = fork\n")
    monkey = pytest.MonkeyPatch()
    monkey.syspath_prepend(str(tmp_path))
    try:
        with Launcher(preload=["no_forks"]) as own, pytest.raises(RunError, match=r"starts ranks has ended(.|\n)*no process is left"):
            own.launch(sums, 2, 0, options=LaunchOptions(threads=1))
    finally:
        monkey.undo()


def test_a_prepared_process_that_cannot_start_says_why() -> None:
    with pytest.raises(RunError, match="No module named 'no_such_module_here'"):
        launch(echo, 1, preload=["no_such_module_here"])


def loaded(world: World) -> list[bool]:
    return [name in sys.modules for name in ENGINE]


def test_ranks_find_imported_what_this_process_has_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin that has traced nothing imports nothing for its ranks, nor does one whose ranks may use a GPU."""
    for name in ENGINE:
        importlib.import_module(name)
    assert launch(loaded, 2) == [[True] * len(ENGINE)] * 2
    assert launch(loaded, 1, preload=()) == [[False] * len(ENGINE)]
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    assert launch(loaded, 1) == [[False] * len(ENGINE)]
    monkeypatch.setattr("torch.version.cuda", "12.8")
    assert (engine_modules("cpu"), engine_modules("cuda"), engine_modules("auto")) == (ENGINE, (), ())


def test_what_engines_need_starts_no_thread_and_asks_no_gpu() -> None:
    """A process with threads of its own, or one that has asked the driver, could not be forked into ranks that compute."""
    code = (
        "import importlib, os, torch; asked = []\n"
        "for name in ('is_available', 'device_count', '_lazy_init'): setattr(torch.cuda, name, lambda name=name: asked.append(name))\n"
        f"for name in {ENGINE}: importlib.import_module(name)\n"
        "print(len(os.listdir('/proc/self/task')), asked)"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert found.stdout.split("\n")[0] == "1 []", found.stderr


def long_launch(folder: str, grace_s: float, forked: bool) -> None:
    """What the launchers run that the tests below end: ranks write their pids, then look out for `stopping`."""
    found = launch((lambda world, folder: waits(world, folder)) if forked else waits, 2, folder, timeout_s=60.0, stop_grace_s=grace_s)
    Path(folder, "found").write_text(repr(found))


def waits(world: World, folder: str) -> str:
    Path(folder, f"pid-{world.rank}").write_text(str(os.getpid()))
    world.world_group.barrier()
    while not world.all_reduce_max([world.stopping])[0]:
        time.sleep(0.02)
    return "saved"


def start_launcher(folder: Path, grace_s: float = 0.0, forked: bool = True) -> tuple[subprocess.Popen[bytes], set[int]]:
    """A process that launches two waiting ranks, and the ranks with the prepared process."""
    heeds = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # which tests under nohup inherit ignored
    code = f"{heeds}\n{IMPORT}\nt.long_launch({str(folder)!r}, {grace_s}, {forked})\n"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    until = time.monotonic() + 60
    while not all((folder / f"pid-{rank}").exists() and (folder / f"pid-{rank}").read_text() for rank in (0, 1)):
        assert time.monotonic() < until
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    pids = {int((folder / f"pid-{rank}").read_text()) for rank in (0, 1)}
    time.sleep(0.2)
    return process, pids | children_of(process.pid)


def alive(pids: set[int]) -> set[int]:
    return {
        pid
        for pid in pids
        if Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    }


@pytest.mark.parametrize("forked", [False, True])
def test_ranks_die_with_their_launcher(tmp_path: Path, forked: bool) -> None:
    process, pids = start_launcher(tmp_path, forked=forked)
    assert len(pids) == 2 + (not forked)
    assert alive(pids) == pids
    process.kill()
    process.communicate()
    assert not gone(lambda: alive(pids), 1.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_lets_ranks_save_and_return(tmp_path: Path, number: signal.Signals) -> None:
    process, pids = start_launcher(tmp_path, grace_s=30.0)
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0, said.decode()
    assert (tmp_path / "found").read_text() == "['saved', 'saved']"
    assert not gone(lambda: alive(pids), 1.0)


def test_a_terminal_that_says_twice_that_it_is_gone_lets_ranks_save(tmp_path: Path) -> None:
    process, pids = start_launcher(tmp_path, grace_s=30.0)
    for pid in (process.pid, *pids, process.pid):  # the kernel tells all of them, and a shell its own child again
        os.kill(pid, signal.SIGHUP)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0, said.decode()
    assert (tmp_path / "found").read_text() == "['saved', 'saved']"


def test_a_signal_to_every_process_lets_ranks_save(tmp_path: Path) -> None:
    """As batch systems send it: the process that forks ranks does not end, which would end the ranks."""
    process, pids = start_launcher(tmp_path, grace_s=30.0, forked=False)
    for pid in (process.pid, *pids):
        os.kill(pid, signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0, said.decode()
    assert (tmp_path / "found").read_text() == "['saved', 'saved']"
    assert not gone(lambda: alive(pids), 1.0)


@pytest.mark.parametrize(("number", "said"), [(signal.SIGTERM, b"stopped by SIGTERM"), (signal.SIGINT, b"KeyboardInterrupt")])
def test_a_signal_without_grace_ends_ranks_at_once(tmp_path: Path, number: signal.Signals, said: bytes) -> None:
    process, pids = start_launcher(tmp_path)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode != 0
    assert said in err
    assert not gone(lambda: alive(pids), 1.0)
    assert not (tmp_path / "found").exists()


def test_a_script_that_launches_at_its_top_level_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from shardwise.world.launch.launch import launch\ndef f(world):\n    return world.rank\nprint(launch(f, 2))\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert 'put the call under `if __name__ == "__main__":`' in done.stderr
    script.write_text(script.read_text().replace("print(", "if __name__ == '__main__':\n    print("))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "[0, 1]\n", done.stderr


def test_the_record_outlives_the_ranks(ranks: Any, tmp_path: Path) -> None:
    with redirect_stdout(io.StringIO()), pytest.raises(RankError):
        ranks(fails, 2, "kill", 1, folder=tmp_path / "kept", generation=4)
    reader = RecordReader(tmp_path / "kept" / "record")
    last = reader.status(0).last
    assert last is not None
    assert (last.generation, last.op, last.shape, last.group) == (4, "all_reduce", (2, 3), "0,1")
    assert reader.status(1).phase == "running"
    reader.close()


def _stuck(*given: Any, **named: Any) -> None:
    time.sleep(60)


def test_a_rank_that_never_starts_is_named_with_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a lock does that was held when it was forked."""
    monkeypatch.setattr("shardwise.world.launch.prepared_rank.World", _stuck)
    monkeypatch.setattr("shardwise.world.launch.watch.STARTED_S", 0.5)
    with pytest.raises(RankError, match=r"rank 0 did not start within 0\.5 s \(it is starting\)") as caught:
        launch(lambda world: world.rank, 2, show=False)
    assert "in _stuck" in str(caught.value)


def test_a_process_that_has_used_a_gpu_does_not_fork_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for device in ("cpu", "cuda"):
        with pytest.raises(UsageError, match=r"this process has used CUDA; .*shardwise verify.* from the top level of a module"):
            launch(lambda world: world.rank, 1, device=device)


def test_what_torch_says_in_a_spoiled_fork_comes_with_the_remedy() -> None:
    def spoiled(world: World) -> None:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing. See https://...")

    with pytest.raises(RankError, match=r"fork-based multiprocessing\. See .*; a fork of a process that has used a GPU .* cannot train"):
        launch(spoiled, 2, show=False)
