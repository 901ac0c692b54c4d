"""The life of one rank's process, from fork to end. In: a `LaunchSpec` and the rank. Out: a file in the run's folder: result or failure.

The process dies with its parent (parent-death signal) and with the launcher (the end of a pipe), whatever its own code does.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from shardwise import errors
from shardwise.errors import ShardwiseError, UsageError, first_error
from shardwise.world import matmul_backend, private, recorder
from shardwise.world.comm import encoding
from shardwise.world.comm.pending import is_peer_loss
from shardwise.world.launch.current import current_world, set_world
from shardwise.world.persistent_memory import PersistentMemory
from shardwise.world.recorder import CollectiveRecorder, process_state
from shardwise.world.terminal import STOP_SIGNALS, open_durable_stream
from shardwise.world.world import TRANSPORT, RecoveryContext, World, pick_device

BEAT_S = 0.2
BEATS_PER_LAUNCHER_CHECK = 5
LINGER_S = 3.0
UNREPORTED_FAILURE = 74  # the exit code of a rank that could not write its failure file
# Set while a rank imports the module of its function, so that a script that launches at its top level gets an error.
IMPORTING = "SHARDWISE_RANK_IMPORTING"
_PR_SET_PDEATHSIG = 1
# Parts of torch's errors in a fork of a process whose threads or GPU it would need.
_SPOILED_FORK = ("combination with fork-based multiprocessing", "re-initialize CUDA in forked subprocess")
NEEDS_FRESH_PROCESS = (
    "a fork of a process that has used a GPU (or, where there is one, has run backward) cannot train: verify from the command line "
    "(shardwise verify) or before anything else runs, or give shardwise.launch a function from the top level of a module, which runs in "
    "processes "
    "of their own"
)


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One launch, as it is sent to the prepared process. `function` is (module, qualified name, file); empty if it is inherited."""

    folder: str
    num_ranks: int
    threads: int
    device: str
    generation: int
    collective_timeout_s: float
    function: tuple[str, str, str]
    sys_path: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    launcher: int = 0  # its process id
    recovers: bool = False  # failed ranks are replaced: then a fork server forks them (`world/launch/fork_server`)
    prepare: tuple[str, str, str] = ("", "", "")  # as `function`: called in the fork server with the same arguments, once for all ranks
    may_add_threads: bool = True  # False if ranks are forked from a process with a thread pool, whose threads a fork does not copy

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> LaunchSpec:
        data = json.loads(text)
        return LaunchSpec(**{**data, **{name: tuple(data[name]) for name in ("function", "sys_path", "prepare")}})


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """The call that a rank inherits from the process that forked it: function, arguments, and the result of `prepare`."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    prepared: Any = None


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread that forked it ends; Linux only, elsewhere only the pipe does."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def ignore_stop_signals() -> None:
    """Ignore SIGTERM, Ctrl-C and terminal signals, which may reach every process of a group: only the launcher handles them.

    A process that only forks ranks would take them down with it; it ends when the launcher does.
    """
    for number in (signal.SIGTERM, signal.SIGINT, *STOP_SIGNALS):
        signal.signal(number, signal.SIG_IGN)


def log_file(folder: str, rank: int) -> Path:
    """Return the file for a rank's output that is not shown."""
    return Path(folder) / f"rank-{rank}.log"


def run_rank(
    task: LaunchSpec,
    rank: int,
    lifeline: int,
    parent: int,
    terminal: tuple[int, int, int] | None,
    prepared_call: PreparedCall | None = None,
    memory: PersistentMemory | None = None,
) -> NoReturn:
    """Run the task's function as `rank` and end the process. `terminal`: descriptors for rank 0's input, output and errors.

    `memory`: persistent memory, if failed ranks are replaced.
    """
    try:
        die_with_parent(parent)
        ignore_stop_signals()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until the first access to `World.stopping`
        _redirect_output(task, rank, terminal)
        _run_function(task, rank, lifeline, prepared_call, memory)
    finally:  # a forked rank must never continue its parent's work
        os._exit(70)


def _run_function(
    task: LaunchSpec, rank: int, lifeline: int, prepared_call: PreparedCall | None, memory: PersistentMemory | None
) -> NoReturn:
    folder = Path(task.folder)
    notes = CollectiveRecorder(folder / "record", rank, task.generation)
    worlds: list[World] = []  # the newest
    watch_args = (lifeline, notes, 0 if rank else task.launcher, worlds)
    threading.Thread(target=_run_heartbeat, args=watch_args, daemon=True, name="shardwise-heartbeat").start()
    code = 0
    try:
        apply_settings(task, task.threads)
        if prepared_call is None:
            prepared_call = PreparedCall(*load_call(task, folder))
        make = partial(_make_world, task, rank, worlds)
        world = make(task.generation, notes)
        if memory is not None:
            world.recovery = RecoveryContext(
                memory, prepared_call.prepared, lambda number: make(number, CollectiveRecorder(folder / "record", rank, number))
            )
        set_world(world)
        notes.set_phase(recorder.RUNNING)
        result = prepared_call.function(world, *prepared_call.arguments)
        current_world().synchronize()  # finish sends from a GPU that others wait for
        _write_atomically(folder / f"result-{rank}", encoding.dump(result, "the result"))
        notes.set_phase(recorder.DONE)
        _flush_output()
        # The end of this process would cut off ranks that still receive from it.
        deadline = time.monotonic() + LINGER_S
        while not notes.all_ended() and time.monotonic() < deadline:
            time.sleep(0.005)
    except BaseException as error:  # SystemExit included: it would end the rank without a report
        code = 1
        try:
            _write_atomically(folder / f"failure-{rank}", json.dumps(failure_record(error, rank)).encode())
        except OSError:  # a full disk
            code = UNREPORTED_FAILURE
            traceback.print_exception(error)
        notes.set_phase(recorder.FAILED)
    finally:
        _flush_output()
        os._exit(code)


def apply_settings(task: LaunchSpec, threads: int) -> None:
    """Apply the task's environment and `threads` to this process."""
    os.environ.update(task.env)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    if matmul_backend.PRODUCTS in os.environ:
        matmul_backend.set_matmul_precision(os.environ[matmul_backend.PRODUCTS])


def _make_world(task: LaunchSpec, rank: int, worlds: list[World], generation: int, notes: CollectiveRecorder) -> World:
    """Return the world of a generation, and put it into `worlds`; each has its own store, so that no stale addresses are read."""
    path = Path(task.folder) / (f"store-{generation}" if generation else "store")
    worlds[:] = [_world_on_file_store(task, rank, path, generation, notes)]
    return worlds[0]


def _world_on_file_store(task: LaunchSpec, rank: int, path: Path, generation: int, notes: CollectiveRecorder) -> World:
    return World(
        rank,
        task.num_ranks,
        private.file_store(str(path), task.num_ranks) if task.num_ranks > 1 else None,
        device=pick_device(task.device, rank),
        generation=generation,
        threads=task.threads,
        may_add_threads=task.may_add_threads,
        recorder=notes,
        timeout_s=task.collective_timeout_s,
        catch_sigterm=True,
        transport=os.environ.get(TRANSPORT, ""),
    )


def load_call(task: LaunchSpec, folder: Path) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the task's function, imported as in its launcher, and the arguments, read from the task's folder."""
    os.chdir(task.cwd)
    sys.path[:] = task.sys_path
    os.environ[IMPORTING] = "1"
    function = import_function(task.function)
    del os.environ[IMPORTING]
    return function, encoding.load((folder / "arguments").read_bytes())


def failure_record(error: BaseException, rank: int) -> dict[str, Any]:
    """Return the failure record of an exception, or of the one that it masks, as plain data for the launcher."""
    error = first_error(error)
    error_class = (
        next((c.__name__ for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c), "")
        if isinstance(error, ShardwiseError)
        else ""
    )
    text = str(error)
    if any(part in text for part in _SPOILED_FORK):
        text = f"{text.splitlines()[0]}; {NEEDS_FRESH_PROCESS}"
    if isinstance(error, SystemExit):
        text = f"the function called sys.exit({error.code!r}) before it returned"
    stack = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    return {
        "rank": rank,
        "time": time.monotonic(),
        "type": type(error).__qualname__,
        "kept": error_class,
        "message": text,
        "lost": is_peer_loss(error),
        "second_hand": isinstance(error, ShardwiseError) and error.second_hand,
        "traceback": "".join(traceback.format_exception(error)),
        "frames": [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in stack[-4:]],
    }


def import_function(reference: tuple[str, str, str]) -> Callable[..., Any]:
    """Import the module-level function of a (module, qualified name, file), by the module's name or else from its file."""
    module, qualname, file = reference
    try:
        if module == "__main__":
            raise ModuleNotFoundError(module)
        value: Any = importlib.import_module(module)
        if not _is_same_file(getattr(value, "__file__", None), file):
            raise ModuleNotFoundError(f"{module} is another file here: {value.__file__}")
    except ModuleNotFoundError as error:
        if error.name not in (None, module, module.partition(".")[0]):
            raise
        name = "__shardwise_main__" if module == "__main__" else module
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise UsageError(f"{file} cannot be imported in a new process") from None
        value = importlib.util.module_from_spec(spec)
        sys.modules[name] = value
        spec.loader.exec_module(value)
    for name in qualname.split("."):
        value = getattr(value, name)
    return value  # type: ignore[no-any-return]


def _is_same_file(a: str | None, b: str) -> bool:
    return a is not None and os.path.realpath(a) == os.path.realpath(b)


def _redirect_output(task: LaunchSpec, rank: int, terminal: tuple[int, int, int] | None) -> None:
    if rank == 0 and terminal is not None:
        for target, source in enumerate(terminal):
            os.dup2(source, target)
    else:
        null = os.open(os.devnull, os.O_RDONLY)
        log = os.open(log_file(task.folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for target, source in ((0, null), (1, log), (2, log)):
            os.dup2(source, target)
        os.close(null)
        os.close(log)
    # The inherited streams may be a notebook's or a test's, and buffer text that their owner will write.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = open_durable_stream(1), open_durable_stream(2)
    faulthandler.enable(sys.stderr, all_threads=False)


def _run_heartbeat(lifeline: int, notes: CollectiveRecorder, launcher: int, worlds: list[World]) -> None:
    """Write heartbeats, end the process when the launcher's end of the pipe closes, and report a stopped launcher.

    Also abandon worlds with a failed rank: waits over gloo do not detect it themselves.
    """
    poll = select.poll()
    poll.register(lifeline, select.POLLIN | select.POLLHUP)
    num_beats, has_reported = 0, False
    while True:
        notes.write_heartbeat()
        if poll.poll(BEAT_S * 1000):
            os._exit(1)
        for world in tuple(worlds):
            world.abandon_if_failed()
        num_beats += 1
        if launcher and num_beats % BEATS_PER_LAUNCHER_CHECK == 0:
            is_stopped = process_state(launcher) == "T"
            if is_stopped and not has_reported:
                print(f"the launcher (process {launcher}) is stopped and watches no rank: `kill -CONT {launcher}`", file=sys.stderr)
            has_reported = is_stopped


def _write_atomically(path: Path, data: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.replace(path)


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
