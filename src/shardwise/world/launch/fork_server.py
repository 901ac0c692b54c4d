"""The fork server: a preloaded process that forks ranks on request. Four ranks cost one import of torch, a new launch milliseconds.

In: launches over a socket (a task file and the terminal's descriptors). Out: process ids, and exit codes. It has one thread, so that a fork
is safe at any time. It ends, and its ranks with it, when the launcher's end of the socket closes.

Without replacement of failed ranks, it forks them itself, computes nothing and holds no store. With replacement, it forks a fork server for
this launch, which does once what each rank would do (`prepare`: capture a model) and holds the ranks' persistent memory.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from shardwise.world.launch.children import LARGEST_MESSAGE
from shardwise.world.launch.prepared_rank import (
    LaunchSpec,
    PreparedCall,
    apply_settings,
    die_with_parent,
    ignore_stop_signals,
    import_function,
    load_call,
    run_rank,
)
from shardwise.world.persistent_memory import MemoryFiles, PersistentMemory, create_memory_files

Terminal = tuple[int, int, int] | None


@dataclass
class _Launch:
    """The socket to the launcher, and the living ranks. `call`, `memory_files`: what ranks inherit, with replacement of failed ones."""

    task: LaunchSpec
    events: socket.socket
    lifeline: int
    terminal: Terminal
    selector: selectors.BaseSelector
    call: PreparedCall | None = None
    memory_files: MemoryFiles | None = None
    living: dict[int, int] = field(default_factory=dict)  # rank -> pid

    def start(self) -> None:
        self.selector.register(self.events, selectors.EVENT_READ, self._on_request)
        for rank in range(self.task.num_ranks):
            self._fork_rank(rank, self.task.generation)
        self.send_event(pids=[self.living[rank] for rank in range(self.task.num_ranks)])

    @property
    def is_open(self) -> bool:
        return self.events.fileno() >= 0

    def send_event(self, **event: Any) -> None:
        with suppress(OSError):
            self.events.send(json.dumps(event).encode())

    def kill(self) -> None:
        for pid in self.living.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _on_request(self) -> None:
        """Replace a failed rank. Any other message, or the end of the stream, asks to end this launch."""
        request = self.events.recv(LARGEST_MESSAGE)
        if request.startswith(b"{"):
            command = json.loads(request)
            self._fork_rank(command["fork"], command["generation"])
            self.send_event(forked=command["fork"], pid=self.living[command["fork"]])
            return
        if not request:
            self.selector.unregister(self.events)
            self.events.close()
        self.kill()

    def _fork_rank(self, rank: int, generation: int) -> None:
        def run(parent: int) -> NoReturn:
            memory = None if self.memory_files is None else PersistentMemory(rank, self.memory_files)
            run_rank(replace(self.task, generation=generation), rank, self.lifeline, parent, self.terminal, self.call, memory)

        self.living[rank] = _fork_child(self.selector, run, partial(self._on_exit, rank))

    def _on_exit(self, rank: int, code: int) -> None:
        del self.living[rank]
        self.send_event(rank=rank, code=code)


def serve_launches(control: socket.socket, lifeline: int) -> NoReturn:
    """Fork ranks until `control` closes, then end this process and them."""
    control.send(b"ready")
    _freeze_memory()
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ, partial(_accept_launch, control, lifeline, selector, []))
    while True:
        _handle_events(selector)


def _accept_launch(control: socket.socket, lifeline: int, selector: selectors.BaseSelector, launches: list[_Launch]) -> None:
    """Fork the ranks of one launch, or its own fork server; end this process and the ranks if the launcher has ended."""
    request, descriptors = b"", list[int]()
    with suppress(OSError):
        request, descriptors, _, _ = socket.recv_fds(control, LARGEST_MESSAGE, 4)
    launches[:] = [launch for launch in launches if launch.is_open]
    if not request:
        for launch in launches:
            launch.kill()
            shutil.rmtree(launch.task.folder, ignore_errors=True)  # the launcher cannot do it any more
        os._exit(0)  # torch's orderly shutdown takes longer than orphans may live
    task = LaunchSpec.from_json((Path(request.decode()) / "task.json").read_text())
    events, terminal = socket.socket(fileno=descriptors[0]), descriptors[1:]
    shown = (terminal[0], terminal[1], terminal[2]) if len(terminal) == 3 else None
    if task.recovers:
        _fork_child(selector, partial(_serve_with_replacement, task, events, lifeline, shown), lambda code: None)
        events.close()  # that fork server communicates with the launcher directly
    else:
        launches.append(_Launch(task, events, lifeline, shown, selector))
        launches[-1].start()
    for descriptor in terminal:
        os.close(descriptor)


def _serve_with_replacement(task: LaunchSpec, events: socket.socket, lifeline: int, terminal: Terminal, parent: int) -> NoReturn:
    """Serve one launch with replacement of failed ranks until the launcher closes the socket, and end this process."""
    try:
        die_with_parent(parent)
        ignore_stop_signals()
        launch = _Launch(task, events, lifeline, terminal, selectors.DefaultSelector(), memory_files=create_memory_files(task.num_ranks))
        launch.send_event(nest=os.getpid())
        launch.call = _prepare_call(task)
        _freeze_memory()
        launch.start()
        while launch.is_open:
            _handle_events(launch.selector)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _prepare_call(task: LaunchSpec) -> PreparedCall | None:
    """Return the function, its arguments and its prepared value; None on failure: the ranks then fail likewise, and report it."""
    try:
        apply_settings(task, 1)
        function, arguments = load_call(task, Path(task.folder))
        return PreparedCall(function, arguments, import_function(task.prepare)(*arguments) if task.prepare[0] else None)
    except Exception:
        traceback.print_exc()
        return None


def _freeze_memory() -> None:
    """Let forked processes share this one's pages, instead of copying them at their first collection."""
    gc.collect()
    gc.freeze()


def _handle_events(selector: selectors.BaseSelector) -> None:
    for key, _ in selector.select():
        key.data()


def _fork_child(selector: selectors.BaseSelector, run: Callable[[int], NoReturn], on_exit: Callable[[int], None]) -> int:
    """Fork a process that calls `run` with its parent's id, and call `on_exit` with its exit code. Returns its id."""
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        # A copy of a socket's end in a child would hide the death of this process from the launcher.
        for key in list(selector.get_map().values()):
            os.close(key.fd)
        run(parent)
    descriptor = os.pidfd_open(pid)
    selector.register(descriptor, selectors.EVENT_READ, partial(_reap_child, selector, descriptor, pid, on_exit))
    return pid


def _reap_child(selector: selectors.BaseSelector, descriptor: int, pid: int, on_exit: Callable[[int], None]) -> None:
    selector.unregister(descriptor)
    os.close(descriptor)
    _, status = os.waitpid(pid, 0)
    on_exit(os.waitstatus_to_exitcode(status))


def main() -> None:
    """Run the process: arguments are the descriptors `control` and `lifeline`, then modules to import beforehand."""
    control, lifeline, *modules = sys.argv[1:]
    ignore_stop_signals()
    for module in modules:
        __import__(module)
    serve_launches(socket.socket(fileno=int(control)), int(lifeline))


if __name__ == "__main__":
    main()
