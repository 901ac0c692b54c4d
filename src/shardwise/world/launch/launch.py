"""Launch ranks on this host. In: a function of (world, *args) and a number of ranks. Out: what each rank returned, or one error.

A function at the top level of a module or file runs in ranks that a *prepared* process forks (`world/launch/fork_server`): torch is
imported once, each rank has its share of the cores. Any other function (a closure, a notebook's cell) runs in ranks
forked from this process, with one thread each: OpenMP's threads do not survive a fork, and a rank that asked for them would wait for ever.

Arguments and results are of the types of `world/comm/encoding`. Rank 0's output goes to this process's terminal, that of the others to
log files
that are shown if their rank fails first. Not modelled: several hosts (torchrun and srun start those, see `world/launch/join`).
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch

from shardwise.errors import RunError, UsageError
from shardwise.world import matmul_backend, recorder
from shardwise.world.comm import encoding
from shardwise.world.launch.children import LARGEST_MESSAGE, ForkedRanks, LostForkServer, PreparedRanks
from shardwise.world.launch.prepared_rank import IMPORTING, NEEDS_FRESH_PROCESS, LaunchSpec, PreparedCall, run_rank
from shardwise.world.launch.watch import (
    COLLECTIVE_TIMEOUT_S,
    HANG_AFTER_S,
    LaunchOptions,
    RecoveryPolicy,
    StopRequests,
    caught_signals,
    stop_error,
    supervise_ranks,
)

START_S = 120.0
KILL_S = 10.0
LOCK = "lock"  # in a launch's folder
# Modules that building an engine imports beyond torch: 1.5 to 2 s of one core for each rank, unless the prepared process has imported them.
ENGINE = ("shardwise.api", "torch._dynamo", "torch.export._trace")
_TRACES = "torch._dynamo"
# Freed memory stays in the process: after some warm-up a tensor of 100 MiB costs no page faults instead of 25600 (glibc 2.36). An older
# C library refuses a threshold above 32 MiB and keeps its own, which grows to that.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(4 << 30), "MALLOC_TOP_PAD_": str(64 << 20)}

# Ranks of one thread temporarily use more when idle ranks lend them cores. Threads that wait should sleep: a spinning one takes the core
# from the rank that got it back (and next to other users' processes two threads took ten times as long as one).
PASSIVE_WAIT = {"OMP_WAIT_POLICY": "PASSIVE"}
_PAUSE_HARD = 2  # omp_pause_hard, of OpenMP 5.0


def launch(  # noqa: PLR0913
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    threads: int = 0,
    device: str = "cpu",
    timeout_s: float | None = COLLECTIVE_TIMEOUT_S,
    hang_after_s: float = HANG_AFTER_S,
    env: Mapping[str, str] | None = None,
    generation: int = 0,
    folder: Path | None = None,
    stop_grace_s: float = 0.0,
    show: bool = True,
    allocator: bool = True,
    preload: Sequence[str] | None = None,
    recovery: RecoveryPolicy | None = None,
    prepare: Callable[..., Any] | None = None,
) -> list[Any]:
    """Run `function(world, *args)` on `num_ranks` processes of this host and return their results in the order of ranks.

    `threads` per rank (0: an equal share of the cores); `device` cpu, cuda or auto; `timeout_s` limit of a collective or of a gap between
    heartbeats (None: no limit); `hang_after_s` the same for work with a shorter announced limit, such as an engine's steps (0:
    `timeout_s`); `env` is set before torch is imported; `folder` receives the record and the logs; `stop_grace_s` time for ranks after
    SIGTERM or Ctrl-C, which they see as `world.stopping`; `show` rank 0's output; `allocator` the C library's settings for large
    tensors; `preload` modules to import once for all ranks (None: those that building an engine needs, if this process has imported
    them). With `recovery` a rank that is killed or hangs is replaced by a new process that runs `function` from its start, while the
    others get a LostPeer exception and continue with `World.next_generation`; `prepare(*args)` is called once before the ranks are
    forked, and its result is `world.recovery.prepared`.

    Raises RankError for the first rank that failed (also of that rank's own class, if it raised a ShardwiseError), UsageError for
    arguments that cannot be sent.

    >>> launch(lambda world, x: world.rank + x, 2, 10)
    [10, 11]
    """
    options = LaunchOptions(
        threads=threads, device=device, timeout_s=timeout_s, hang_after_s=hang_after_s, env=env or {}, generation=generation,
        folder=folder, stop_grace_s=stop_grace_s, show=show, recovery=recovery, prepare=prepare,
    )  # fmt: skip
    if import_reference(function) is None:
        return _launch_forked(PreparedCall(function, args), num_ranks, options)
    if preload is None:
        preload = engine_modules(device) if _TRACES in sys.modules else ()
    if num_ranks > 1 and (threads or num_cores() // num_ranks) <= 1:
        env = {**{key: os.environ.get(key, value) for key, value in PASSIVE_WAIT.items()}, **(env or {})}
    with Launcher(env=env, allocator=allocator, preload=preload) as launcher:
        return launcher.launch(function, num_ranks, *args, options=options)


def engine_modules(device: str) -> tuple[str, ...]:
    """Return the modules to `preload` for ranks that build engines on `device` (as of `launch`).

    None if torch has CUDA and may use it: a module that queries the driver at import would make the GPU unusable for all forks.
    """
    return ENGINE if device == "cpu" or torch.version.cuda is None else ()


def import_reference(function: Callable[..., Any]) -> tuple[str, str, str] | None:
    """Return (module, qualified name, file) by which another process can import `function`; None if it cannot."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    qualname = getattr(function, "__qualname__", "<")
    file = getattr(module, "__file__", None)
    if module is None or file is None or not os.path.isfile(file) or "<" in qualname:
        return None
    resolved: Any = module
    for name in qualname.split("."):
        resolved = getattr(resolved, name, None)
    if resolved is not function:
        return None
    name = module.__name__
    if name == "__main__" and getattr(module, "__spec__", None) is not None:
        name = module.__spec__.name  # type: ignore[union-attr]  # started with python -m
    return name, qualname, os.path.abspath(file)


def num_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Launcher:
    """A prepared process for many launches; a launch then takes tenths of a second. Launches may run concurrently in threads.

    `env` is set before torch is imported there, so that it affects the C library as well.
    """

    def __init__(self, env: Mapping[str, str] | None = None, allocator: bool = True, preload: Sequence[str] = ()) -> None:
        self._env = dict(env or {})
        self._allocator = allocator
        self._preload = tuple(preload)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._errors: IO[bytes] = io.BytesIO()
        self._close: Callable[[], object] = lambda: None

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Id of the prepared process; None if it is not running."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start the prepared process if it is not running; `launch` does so itself. Raises RunError if it does not start."""
        with self._lock:
            if self.pid is None:
                self._close()
                self._start()

    def close(self) -> None:
        """End the prepared process, and any ranks with it."""
        with self._lock:
            self._close()
            self._process = self._control = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lifeline, writer = os.pipe()
        single = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        env = {**os.environ, **(ALLOCATOR if self._allocator else {}), **self._env, **single}
        code = f"import sys; sys.path[:] = {sys.path!r}; from shardwise.world.launch.fork_server import main; main()"
        self._errors = errors = tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, "-c", code, str(theirs.fileno()), str(lifeline), *self._preload]
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, pass_fds=(theirs.fileno(), lifeline)
        )
        theirs.close()
        os.close(lifeline)
        self._process, self._control = process, ours
        self._close = weakref.finalize(self, _end_process, process, ours, writer)
        ours.settimeout(START_S)
        try:
            ready = ours.recv(LARGEST_MESSAGE)
        except TimeoutError:
            ready = b""
        if ready != b"ready":
            self._close()
            raise RunError(f"the process that starts ranks did not come up{self._last_output()}")
        ours.settimeout(None)

    def _last_output(self) -> str:
        """Return the last lines that the prepared process wrote, as a suffix for messages; empty if none."""
        self._errors.seek(0)
        return "".join(f"\n  {line}" for line in self._errors.read().decode(errors="replace").strip().splitlines()[-8:])

    def launch(
        self,
        function: Callable[..., Any],
        num_ranks: int,
        *args: Any,
        options: LaunchOptions = LaunchOptions(),  # noqa: B008
    ) -> list[Any]:
        """Launch like the function `launch`, but `env` is set in the ranks only: too late for the C library and for torch's own start."""
        named = import_reference(function)
        if named is None:
            return _launch_forked(PreparedCall(function, args), num_ranks, options)
        threads, recovery = options.threads, options.recovery
        _check_arguments(num_ranks, threads)
        task = LaunchSpec(
            "", num_ranks, threads or max(1, num_cores() // num_ranks), options.device, options.generation, options.collective_timeout_s,
            named, tuple(sys.path), os.getcwd(), {**self._env, **options.env}, launcher=os.getpid(), recovers=recovery is not None,
            prepare=(import_reference(options.prepare) if options.prepare else None) or ("", "", ""),
        )  # fmt: skip
        with _LaunchFolder(options.folder) as path:
            task = _prepare_folder(task, path)
            (path / "arguments").write_bytes(encoding.dump(args, "args"))
            (path / "task.json").write_text(task.to_json())
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ours, caught_signals() as stops:
                sys.stdout.flush()
                sys.stderr.flush()
                with theirs:
                    self._request(str(path), [theirs.fileno(), *((0, 1, 2) if options.show else ())])
                children = self._wait_for_ranks(ours, num_ranks, stops)
                if recovery is not None and not _can_abort_collectives(task):
                    options = replace(options, recovery=replace(recovery, replaces_all=True))
                return supervise_ranks(children, path, num_ranks, options, stops)

    def _wait_for_ranks(self, events: socket.socket, num_ranks: int, stops: StopRequests) -> PreparedRanks:
        """Return the ranks of one launch. Raises RunError if the prepared process does not start them; the next launch gets a new one."""
        pid = self.pid

        def check() -> None:
            if stops.count:
                raise stop_error(stops, 0.0)

        try:
            return PreparedRanks(events, num_ranks, pid or 0, START_S, check)
        except TimeoutError:
            if self.pid == pid:  # and no other launch has replaced it meanwhile
                self.close()
            raise RunError(
                f"the process that starts ranks (process {pid}) started none of {num_ranks} within {START_S:g} s: it was stopped (SIGSTOP, "
                "a debugger), or the machine is overloaded or out of memory; it was ended, so launch again when the machine has memory"
            ) from None
        except (LostForkServer, ConnectionError) as error:
            raise LostForkServer(f"{error}{self._last_output()}") from None

    def _request(self, folder: str, descriptors: list[int]) -> None:
        """Send one launch to the prepared process; to a new one if it has died since the last."""
        for last in (False, True):
            self.start()
            assert self._control is not None
            try:
                socket.send_fds(self._control, [folder.encode()], descriptors)
                return
            except OSError as error:
                self.close()
                if last:
                    raise RunError("the process that starts ranks dies as soon as it is up; is there memory for it?") from error


def _launch_forked(call: PreparedCall, num_ranks: int, options: LaunchOptions) -> list[Any]:
    """Launch ranks that are forked from this process, after its thread pool is ended."""
    _check_arguments(num_ranks, 1)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise UsageError(f"this process has used CUDA; {NEEDS_FRESH_PROCESS}")
    task = LaunchSpec(
        "", num_ranks, 1, options.device, options.generation, options.collective_timeout_s, ("", "", ""), (), os.getcwd(),
        dict(options.env), launcher=os.getpid(), may_add_threads=_end_thread_pool(),
    )  # fmt: skip
    with _LaunchFolder(options.folder) as path, caught_signals() as stops:
        task = _prepare_folder(task, path)
        sys.stdout.flush()
        sys.stderr.flush()
        lifeline, writer = os.pipe()
        parent = os.getpid()
        pids: list[int] = []
        try:
            for rank in range(num_ranks):
                pid = os.fork()
                if pid == 0:
                    os.close(writer)
                    gc.freeze()  # the rank shares its parent's pages; its first collection would copy them all
                    run_rank(task, rank, lifeline, parent, (0, 1, 2) if options.show else None, call)
                pids.append(pid)
            return supervise_ranks(ForkedRanks(pids), path, num_ranks, replace(options, recovery=None), stops)
        finally:
            os.close(writer)
            os.close(lifeline)


def _end_thread_pool() -> bool:
    """End OpenMP's thread pool, which is created anew when needed; return whether that succeeded.

    A fork copies the pool's state but not its threads: a rank that asks for more threads would wait for them for ever.
    """
    try:
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
        failed = sum(ctypes.CDLL(path).omp_pause_resource_all(_PAUSE_HARD) != 0 for path in sorted(mapped))
        return bool(mapped) and not failed
    except (OSError, AttributeError):  # no /proc, another library, or one that is older than OpenMP 5.0
        return False


class _LaunchFolder:
    """A private folder for one launch: the store, the record, logs and results; removed at the end, logs and record copied to `copies`.

    If this process is killed before, this user's next launch removes it: its lock is free then.
    """

    def __init__(self, copies: Path | None) -> None:
        self._copy_to = copies

    def __enter__(self) -> Path:
        _remove_stale_folders(Path(tempfile.gettempdir()))
        if self._copy_to is not None:
            self._copy_to.mkdir(parents=True, exist_ok=True)
        self.path = Path(tempfile.mkdtemp(prefix="shardwise-"))
        self._lock = _lock_folder(self.path)
        return self.path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._copy_to is not None:
            for file in (*self.path.glob("rank-*.log"), self.path / "record"):
                with suppress(OSError):  # a full disk, a folder that was removed: must not hide the launch's own result
                    shutil.copyfile(file, self._copy_to / file.name)
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _lock_folder(folder: Path) -> int:
    """Lock `folder` for as long as this process, or a rank that it forked, keeps the descriptor open."""
    descriptor = os.open(folder / "unlocked", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    with suppress(OSError):  # a file system without locks, where folders of killed launches stay
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        (folder / "unlocked").rename(folder / LOCK)
    return descriptor


def _remove_stale_folders(parent: Path) -> None:
    """Remove this user's folders of launches that have no living process."""
    for lock in parent.glob(f"shardwise-*/{LOCK}"):
        with suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)


def overriding_precision() -> str:
    """Return the user's matmul precision of ranks where this machine's own choice is another; else empty."""
    users = os.environ.get(matmul_backend.PRODUCTS, "")
    return users if users and users != matmul_backend.load_or_measure_timings().chosen else ""


def _prepare_folder(task: LaunchSpec, path: Path) -> LaunchSpec:
    recorder.create_record_file(path / "record", task.num_ranks, task.generation)
    env = {**matmul_backend.matmul_environment({**os.environ, **task.env}, task.device), **task.env}
    return LaunchSpec.from_json(json.dumps({**json.loads(task.to_json()), "folder": str(path), "env": env}))


def _can_abort_collectives(task: LaunchSpec) -> bool:
    """Return whether ranks can abort a collective that a failed peer will not join: over shared memory and gloo, not over NCCL."""
    return task.device == "cpu" or torch.version.cuda is None


def _check_arguments(num_ranks: int, threads: int) -> None:
    if os.environ.get(IMPORTING):
        raise UsageError('the script launches ranks when it is imported; put the call under `if __name__ == "__main__":`')
    if num_ranks < 1 or threads < 0:
        raise UsageError(
            f"{num_ranks} ranks with {threads} threads each; launch at least 1 rank, with 0 (a share of the cores) or more threads"
        )


def _end_process(process: subprocess.Popen[bytes], control: socket.socket, writer: int) -> None:
    """Close the prepared process's socket and lifeline, and wait for its end."""
    control.close()
    os.close(writer)
    try:
        process.wait(KILL_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
