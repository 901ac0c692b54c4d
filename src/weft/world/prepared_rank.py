"""What one rank's process does from its fork to its end. In: a `Task` and the rank. Out: a file in the run's folder, a result or a failure.

The process dies with whoever forked it (parent-death signal) and with the launcher (the end of a pipe), whatever its own code does.
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
from pathlib import Path
from typing import Any, NoReturn

import torch

from weft import errors
from weft.errors import UsageError, WeftError
from weft.world import encoding, matmul_backend, private, recorder
from weft.world.current import set_world
from weft.world.pending import LOST, LostPeer
from weft.world.recorder import Recorder, process_state
from weft.world.world import TRANSPORT, World

BEAT_S = 0.2
BEATS_A_LOOK = 5
LINGER_S = 3.0
# Set while a rank imports the module of its function, so that a script that launches at its top level is told so.
IMPORTING = "WEFT_RANK_IMPORTING"
_PR_SET_PDEATHSIG = 1
# What torch says in a fork of a process whose own threads or GPU it would need.
_SPOILED_FORK = ("combination with fork-based multiprocessing", "re-initialize CUDA in forked subprocess")
FRESH = (
    "a fork of a process that has used a GPU (or, where there is one, has run backward) cannot train: verify from the command line "
    "(weft verify) or before anything else runs, or give weft.launch a function from the top level of a module, which runs in processes "
    "of their own"
)


@dataclass(frozen=True, slots=True)
class Task:
    """One launch, as it is sent to the prepared process. `function` is (module, qualified name, file); empty where it is inherited."""

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
    launcher: int = 0  # its process
    may_add_threads: bool = True  # False where ranks are forked from a process with a pool of threads, none of which a fork takes along

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Task:
        data = json.loads(text)
        return Task(**{**data, "function": tuple(data["function"]), "sys_path": tuple(data["sys_path"])})


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process when the thread that forked it ends; Linux only, elsewhere the pipe alone must do."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def log_file(folder: str, rank: int) -> Path:
    """Where the output of a rank goes that is not shown."""
    return Path(folder) / f"rank-{rank}.log"


def run_rank(
    task: Task,
    rank: int,
    lifeline: int,
    parent: int,
    terminal: tuple[int, int, int] | None,
    inherited: tuple[Callable[..., Any], tuple[Any, ...]] | None = None,
) -> NoReturn:
    """Runs the task's function as `rank` and ends the process. `terminal`: descriptors for rank 0's input, output and errors."""
    try:
        _run(task, rank, lifeline, parent, terminal, inherited)
    finally:  # whatever happens, a forked rank never goes on with its parent's work
        os._exit(70)


def _run(
    task: Task,
    rank: int,
    lifeline: int,
    parent: int,
    terminal: tuple[int, int, int] | None,
    inherited: tuple[Callable[..., Any], tuple[Any, ...]] | None,
) -> NoReturn:
    die_with_parent(parent)
    # Ctrl-C reaches every process of the terminal; only the launcher answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _redirect(task, rank, terminal)
    folder = Path(task.folder)
    notes = Recorder(folder / "record", rank, task.generation)
    threading.Thread(target=_watch, args=(lifeline, notes, 0 if rank else task.launcher), daemon=True, name="weft-heartbeat").start()
    code = 0
    try:
        os.environ.update(task.env)
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(task.threads)
        torch.set_num_threads(task.threads)
        if matmul_backend.PRODUCTS in os.environ:
            matmul_backend.apply(os.environ[matmul_backend.PRODUCTS])
        function, arguments = _sent(task, folder) if inherited is None else inherited
        store = private.file_store(str(folder / "store"), task.num_ranks) if task.num_ranks > 1 else None
        world = World(
            rank,
            task.num_ranks,
            store,
            device=pick_device(task.device, rank),
            generation=task.generation,
            threads=task.threads,
            may_add_threads=task.may_add_threads,
            recorder=notes,
            timeout_s=task.collective_timeout_s,
            catch_sigterm=True,
            transport=os.environ.get(TRANSPORT, ""),
        )
        set_world(world)
        notes.phase(recorder.RUNNING)
        result = function(world, *arguments)
        world.synchronize()  # what others wait for on a GPU is on its way
        _write(folder / f"result-{rank}", encoding.dump(result, "the result"))
        notes.phase(recorder.DONE)
        _flush()
        # The end of this process would cut off ranks that still receive from it.
        until = time.monotonic() + LINGER_S
        while not notes.settled() and time.monotonic() < until:
            time.sleep(0.005)
    except BaseException as error:  # SystemExit included: it would end the rank without a word
        code = 1
        _write(folder / f"failure-{rank}", json.dumps(failure(error, rank)).encode())
        notes.phase(recorder.FAILED)
    finally:
        _flush()
        os._exit(code)


def _sent(task: Task, folder: Path) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function that the task names, found as its launcher would, and the arguments that lie in the task's folder."""
    os.chdir(task.cwd)
    sys.path[:] = task.sys_path
    os.environ[IMPORTING] = "1"
    function = _found(*task.function)
    del os.environ[IMPORTING]
    return function, encoding.load((folder / "arguments").read_bytes())


def pick_device(name: str, local_rank: int) -> torch.device:
    """`cpu`, `cuda` or `auto` for one rank; ranks share GPUs in turn where there are more of them. Raises UsageError without a GPU."""
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
    """What the launcher needs to know of an exception: plain data."""
    kept = (
        next((c.__name__ for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c), "")
        if isinstance(error, WeftError)
        else ""
    )
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    lost = any(isinstance(e, LostPeer) or (type(e) is RuntimeError and any(part in str(e) for part in LOST)) for e in chain)
    text = str(error)
    if any(part in text for part in _SPOILED_FORK):
        text = f"{text.splitlines()[0]}; {FRESH}"
    if isinstance(error, SystemExit):
        text = f"the function called sys.exit({error.code!r}) before it returned"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    return {
        "rank": rank,
        "time": time.monotonic(),
        "type": type(error).__qualname__,
        "kept": kept,
        "message": text,
        "lost": lost,
        "traceback": "".join(traceback.format_exception(error)),
        "frames": [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames[-4:]],
    }


def _found(module: str, qualname: str, file: str) -> Callable[..., Any]:
    """The function at module level that `launch` was given, from the module's name or, failing that, from its file."""
    try:
        if module == "__main__":
            raise ModuleNotFoundError(module)
        found: Any = importlib.import_module(module)
        if not _same_file(getattr(found, "__file__", None), file):
            raise ModuleNotFoundError(f"{module} is another file here: {found.__file__}")
    except ModuleNotFoundError as error:
        if error.name not in (None, module, module.partition(".")[0]):
            raise
        name = "__weft_main__" if module == "__main__" else module
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise UsageError(f"{file} cannot be imported in a new process") from None
        found = importlib.util.module_from_spec(spec)
        sys.modules[name] = found
        spec.loader.exec_module(found)
    for name in qualname.split("."):
        found = getattr(found, name)
    return found  # type: ignore[no-any-return]


def _same_file(a: str | None, b: str) -> bool:
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
    # The forked streams may be a notebook's or a test's, and hold text that their owner will write.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    faulthandler.enable(sys.stderr, all_threads=False)


def _watch(lifeline: int, notes: Recorder, launcher: int) -> None:
    """The heartbeat, the end of the process when the launcher's end of the pipe closes, and a word where the launcher is stopped."""
    poll = select.poll()
    poll.register(lifeline, select.POLLIN | select.POLLHUP)
    beats, said = 0, False
    while True:
        notes.beat()
        if poll.poll(BEAT_S * 1000):
            os._exit(1)
        beats += 1
        if launcher and beats % BEATS_A_LOOK == 0:
            stopped = process_state(launcher) == "T"
            if stopped and not said:
                print(f"the launcher (process {launcher}) is stopped and watches nobody: `kill -CONT {launcher}`", file=sys.stderr)
            said = stopped


def _write(path: Path, data: bytes) -> None:
    made = path.with_suffix(".part")
    made.write_bytes(data)
    made.replace(path)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
