"""One thread that does a group's work in the order in which it was given. In: functions. Out: `Job`s, to wait for.

Collectives of several steps go on while backward computes only if somebody takes each step when the one before has ended. Over gloo a
message that has come cannot even be seen without waiting for it (`is_completed` of a receive stays false until `wait`), so that hooks
cannot drive them. A thread that waits holds neither the interpreter nor a core.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

END_S = 1.0  # for what is under way at the interpreter's end; others may be gone


class Job:
    """Work that was given to a `Worker`."""

    __slots__ = ("_do", "_ended", "_error")

    def __init__(self, do: Callable[[], None]) -> None:
        self._do: Callable[[], None] | None = do
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Called once, by the worker."""
        do, self._do = self._do, None
        assert do is not None
        try:
            do()
        except BaseException as error:
            self._error = error
        self._ended.set()

    def wait(self) -> None:
        """Returns when it has ended; raises what it raised."""
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._ended.is_set()


class Worker:
    """Does jobs one after the other, in one thread of its own, which begins with the first and ends with this object.

    >>> worker, done = Worker(), []
    >>> jobs = [worker.do(lambda i=i: done.append(i)) for i in range(3)]
    >>> jobs[-1].wait(); done
    [0, 1, 2]
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._left = _Left()
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[[], None], now: bool = False) -> Job:
        """Starts `work` after all that was given before. `now`: who asks will wait, so it is done at once where nothing is under way."""
        job = Job(work)
        if self._left.enter() and now:
            _run(job, self._left)
            return job
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._jobs, self._left), name="weft-collectives", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None).atexit = False
            weakref.finalize(self._thread, _let_end, self._jobs, weakref.ref(self._thread))
        self._jobs.put(job)
        return job


class _Left:
    """How many jobs have not ended."""

    def __init__(self) -> None:
        self._count = 0
        self._guard = threading.Lock()
        self.running = threading.Lock()

    def enter(self) -> bool:
        """Counts one more; whether it is the only one."""
        with self._guard:
            self._count += 1
            return self._count == 1

    def leave(self) -> None:
        with self._guard:
            self._count -= 1


def _run(job: Job, left: _Left) -> None:
    with left.running:
        job.run()
    left.leave()


def _let_end(jobs: SimpleQueue[Job | None], thread: weakref.ref[threading.Thread]) -> None:
    """At the interpreter's end. A thread that comes back from C++ to an interpreter that has ended aborts the process (one in twelve that
    left a loop of DDP's at once)."""
    jobs.put(None)
    if (still := thread()) is not None:
        still.join(END_S)


def _serve(jobs: SimpleQueue[Job | None], left: _Left) -> None:
    while (job := jobs.get()) is not None:
        _run(job, left)
        del job
