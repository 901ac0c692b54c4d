"""A background thread that runs a group's jobs in submission order. In: functions. Out: `WorkerJob`s, to wait for.

Multi-step collectives overlap backward only if something starts each step when the previous one has ended. Over gloo a received message
cannot be detected without waiting for it (`is_completed` of a receive stays false until `wait`), so that hooks cannot drive them. A thread
that waits holds neither the interpreter nor a core.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

END_S = 1.0  # for running jobs at the interpreter's end; peers may have ended


class WorkerJob:
    """A function that was submitted to a `BackgroundWorker`."""

    __slots__ = ("_do", "_ended", "_error")

    def __init__(self, do: Callable[[], None]) -> None:
        self._do: Callable[[], None] | None = do
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the function; called once, by the worker."""
        do, self._do = self._do, None
        assert do is not None
        try:
            do()
        except BaseException as error:
            self._error = error
        self._ended.set()

    def wait(self) -> None:
        """Return when it has ended; raise what it raised."""
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""
        return self._ended.is_set()


class BackgroundWorker:
    """Runs jobs in sequence in a thread of its own, which starts with the first job and ends with this object.

    >>> worker, done = BackgroundWorker(), []
    >>> jobs = [worker.submit(lambda i=i: done.append(i)) for i in range(3)]
    >>> jobs[-1].wait(); done
    [0, 1, 2]
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[WorkerJob | None] = SimpleQueue()
        self._unfinished = _UnfinishedJobs()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None], inline: bool = False) -> WorkerJob:
        """Run `work` after all earlier jobs. `inline`: the caller will wait, so run it in the calling thread if no job is unfinished."""
        job = WorkerJob(work)
        if self._unfinished.enter() and inline:
            _run_job(job, self._unfinished)
            return job
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve_jobs, args=(self._jobs, self._unfinished), name="shardwise-collectives", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None).atexit = False
            weakref.finalize(self._thread, _end_thread, self._jobs, weakref.ref(self._thread))
        self._jobs.put(job)
        return job


class _UnfinishedJobs:
    """The number of jobs that have not ended."""

    def __init__(self) -> None:
        self._count = 0
        self._guard = threading.Lock()
        self.running = threading.Lock()

    def enter(self) -> bool:
        """Count one more; return whether it is the only one."""
        with self._guard:
            self._count += 1
            return self._count == 1

    def leave(self) -> None:
        with self._guard:
            self._count -= 1


def _run_job(job: WorkerJob, unfinished: _UnfinishedJobs) -> None:
    with unfinished.running:
        job.run()
    unfinished.leave()


def _end_thread(jobs: SimpleQueue[WorkerJob | None], thread: weakref.ref[threading.Thread]) -> None:
    """End the thread at the interpreter's exit. One that returns from C++ to a finalised interpreter aborts the process (one in twelve
    runs that left a DDP loop at once)."""
    jobs.put(None)
    if (living_thread := thread()) is not None:
        living_thread.join(END_S)


def _serve_jobs(jobs: SimpleQueue[WorkerJob | None], unfinished: _UnfinishedJobs) -> None:
    while (job := jobs.get()) is not None:
        _run_job(job, unfinished)
        del job
