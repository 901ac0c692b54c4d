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
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from weft import errors
from weft.errors import UsageError, WeftError, first_of
from weft.world import encoding, matmul_backend, private, recorder
from weft.world.current import current_world, set_world
from weft.world.kept import Kept
from weft.world.pending import is_lost
from weft.world.recorder import Recorder, process_state
from weft.world.terminal import ASKING, lasting
from weft.world.world import TRANSPORT, Survivor, World

BEAT_S = 0.2
BEATS_A_LOOK = 5
LINGER_S = 3.0
UNTOLD = 74  # the exit code of a rank that could not write its failure file
# Set while a rank imports the module of its function, so that a script that launches at its top level gets an error.
IMPORTING = "WEFT_RANK_IMPORTING"
_PR_SET_PDEATHSIG = 1
# Parts of torch's errors in a fork of a process whose threads or GPU it would need.
_SPOILED_FORK = ("combination with fork-based multiprocessing", "re-initialize CUDA in forked subprocess")
FRESH = (
    "a fork of a process that has used a GPU (or, where there is one, has run backward) cannot train: verify from the command line "
    "(weft verify) or before anything else runs, or give weft.launch a function from the top level of a module, which runs in processes "
    "of their own"
)


@dataclass(frozen=True, slots=True)
class Task:
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
    recovers: bool = False  # failed ranks are replaced: then a fork server forks them (`world/nest`)
    prepare: tuple[str, str, str] = ("", "", "")  # as `function`: called in the fork server with the same arguments, once for all ranks
    may_add_threads: bool = True  # False if ranks are forked from a process with a thread pool, whose threads a fork does not copy

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Task:
        data = json.loads(text)
        return Task(**{**data, **{name: tuple(data[name]) for name in ("function", "sys_path", "prepare")}})


@dataclass(frozen=True, slots=True)
class Made:
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


def answered_by_launcher() -> None:
    """Ignore Ctrl-C and terminal signals, which reach every process of a terminal: only the launcher handles them."""
    for number in (signal.SIGINT, *ASKING):
        signal.signal(number, signal.SIG_IGN)


def log_file(folder: str, rank: int) -> Path:
    """Return the file for a rank's output that is not shown."""
    return Path(folder) / f"rank-{rank}.log"


def run_rank(
    task: Task,
    rank: int,
    lifeline: int,
    parent: int,
    terminal: tuple[int, int, int] | None,
    inherited: Made | None = None,
    memory: Kept | None = None,
    generation: int | None = None,
) -> NoReturn:
    """Run the task's function as `rank` and end the process. `terminal`: descriptors for rank 0's input, output and errors.

    `memory`: persistent memory, if failed ranks are replaced. `generation`: None for the task's own.
    """
    try:
        task = replace(task, generation=task.generation if generation is None else generation)
        _run(task, rank, lifeline, parent, terminal, inherited, memory)
    finally:  # a forked rank must never continue its parent's work
        os._exit(70)


def _run(
    task: Task,
    rank: int,
    lifeline: int,
    parent: int,
    terminal: tuple[int, int, int] | None,
    inherited: Made | None,
    memory: Kept | None,
) -> NoReturn:
    die_with_parent(parent)
    answered_by_launcher()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _redirect(task, rank, terminal)
    folder = Path(task.folder)
    notes = Recorder(folder / "record", rank, task.generation)
    worlds: list[World] = []  # the newest
    watch_args = (lifeline, notes, 0 if rank else task.launcher, worlds)
    threading.Thread(target=_watch, args=watch_args, daemon=True, name="weft-heartbeat").start()
    code = 0
    try:
        enter(task, task.threads)
        if inherited is None:
            inherited = Made(*sent(task, folder))
        make = partial(_world, task, rank, worlds)
        world = make(task.generation, notes)
        if memory is not None:
            world.survivor = Survivor(memory, inherited.prepared, lambda number: make(number, Recorder(folder / "record", rank, number)))
        set_world(world)
        notes.phase(recorder.RUNNING)
        result = inherited.function(world, *inherited.arguments)
        current_world().synchronize()  # finish sends from a GPU that others wait for
        _write(folder / f"result-{rank}", encoding.dump(result, "the result"))
        notes.phase(recorder.DONE)
        _flush()
        # The end of this process would cut off ranks that still receive from it.
        deadline = time.monotonic() + LINGER_S
        while not notes.settled() and time.monotonic() < deadline:
            time.sleep(0.005)
    except BaseException as error:  # SystemExit included: it would end the rank without a report
        code = 1
        try:
            _write(folder / f"failure-{rank}", json.dumps(failure(error, rank)).encode())
        except OSError:  # a full disk
            code = UNTOLD
            traceback.print_exception(error)
        notes.phase(recorder.FAILED)
    finally:
        _flush()
        os._exit(code)


def enter(task: Task, threads: int) -> None:
    """Apply the task's environment and `threads` to this process."""
    os.environ.update(task.env)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    if matmul_backend.PRODUCTS in os.environ:
        matmul_backend.apply(os.environ[matmul_backend.PRODUCTS])


def _world(task: Task, rank: int, worlds: list[World], generation: int, notes: Recorder) -> World:
    """Return the world of a generation, and put it into `worlds`; each has its own store, so that no stale addresses are read."""
    path = Path(task.folder) / (f"store-{generation}" if generation else "store")
    worlds[:] = [_of_store(task, rank, path, generation, notes)]
    return worlds[0]


def _of_store(task: Task, rank: int, path: Path, generation: int, notes: Recorder) -> World:
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


def sent(task: Task, folder: Path) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the task's function, imported as in its launcher, and the arguments, read from the task's folder."""
    os.chdir(task.cwd)
    sys.path[:] = task.sys_path
    os.environ[IMPORTING] = "1"
    function = found(task.function)
    del os.environ[IMPORTING]
    return function, encoding.load((folder / "arguments").read_bytes())


def pick_device(name: str, local_rank: int) -> torch.device:
    """Return the device of one rank for `cpu`, `cuda` or `auto`; ranks share GPUs round-robin. Raises UsageError without a GPU."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if name not in ("cuda", "auto"):
        raise UsageError(f"device {name!r} is not cpu, cuda or auto")
    if not torch.cuda.is_available():
        raise UsageError("device cuda, but torch sees no GPU here; use device=cpu, or check the driver with nvidia-smi")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def failure(error: BaseException, rank: int) -> dict[str, Any]:
    """Return the failure record of an exception, or of the one that it masks, as plain data for the launcher."""
    error = first_of(error)
    error_class = (
        next((c.__name__ for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c), "")
        if isinstance(error, WeftError)
        else ""
    )
    text = str(error)
    if any(part in text for part in _SPOILED_FORK):
        text = f"{text.splitlines()[0]}; {FRESH}"
    if isinstance(error, SystemExit):
        text = f"the function called sys.exit({error.code!r}) before it returned"
    stack = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    return {
        "rank": rank,
        "time": time.monotonic(),
        "type": type(error).__qualname__,
        "kept": error_class,
        "message": text,
        "lost": is_lost(error),
        "second_hand": isinstance(error, WeftError) and error.second_hand,
        "traceback": "".join(traceback.format_exception(error)),
        "frames": [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in stack[-4:]],
    }


def found(reference: tuple[str, str, str]) -> Callable[..., Any]:
    """Import the module-level function of a (module, qualified name, file), by the module's name or else from its file."""
    module, qualname, file = reference
    try:
        if module == "__main__":
            raise ModuleNotFoundError(module)
        value: Any = importlib.import_module(module)
        if not _is_file(getattr(value, "__file__", None), file):
            raise ModuleNotFoundError(f"{module} is another file here: {value.__file__}")
    except ModuleNotFoundError as error:
        if error.name not in (None, module, module.partition(".")[0]):
            raise
        name = "__weft_main__" if module == "__main__" else module
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise UsageError(f"{file} cannot be imported in a new process") from None
        value = importlib.util.module_from_spec(spec)
        sys.modules[name] = value
        spec.loader.exec_module(value)
    for name in qualname.split("."):
        value = getattr(value, name)
    return value  # type: ignore[no-any-return]


def _is_file(a: str | None, b: str) -> bool:
    return a is not None and os.path.realpath(a) == os.path.realpath(b)


def _redirect(task: Task, rank: int, terminal: tuple[int, int, int] | None) -> None:
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
    sys.stdout, sys.stderr = lasting(1), lasting(2)
    faulthandler.enable(sys.stderr, all_threads=False)


def _watch(lifeline: int, notes: Recorder, launcher: int, worlds: list[World]) -> None:
    """Write heartbeats, end the process when the launcher's end of the pipe closes, and report a stopped launcher.

    Also abandon worlds with a failed rank: waits over gloo do not detect it themselves.
    """
    poll = select.poll()
    poll.register(lifeline, select.POLLIN | select.POLLHUP)
    num_beats, has_reported = 0, False
    while True:
        notes.beat()
        if poll.poll(BEAT_S * 1000):
            os._exit(1)
        for world in tuple(worlds):
            world.abandon_lost()
        num_beats += 1
        if launcher and num_beats % BEATS_A_LOOK == 0:
            is_stopped = process_state(launcher) == "T"
            if is_stopped and not has_reported:
                print(f"the launcher (process {launcher}) is stopped and watches no rank: `kill -CONT {launcher}`", file=sys.stderr)
            has_reported = is_stopped


def _write(path: Path, data: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.replace(path)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
