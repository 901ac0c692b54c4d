"""The fork server of one launch: forks its ranks, and replacements of failed ones. In: a launch spec. Out: ranks, and their exit codes.

It is forked from the prepared process, does once what each rank would do (`prepare`: capture a model), and holds the ranks' persistent
memory. It has one thread, so that a fork is safe at any time. It dies with the prepared process, and its ranks with it.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from shardwise.world.launch.children import LARGEST_MESSAGE
from shardwise.world.launch.prepared_rank import (
    LaunchSpec,
    PreparedCall,
    apply_settings,
    die_with_parent,
    ignore_terminal_signals,
    import_function,
    load_call,
    run_rank,
)
from shardwise.world.persistent_memory import PersistentMemory, create_memory_files

Terminal = tuple[int, int, int] | None


def run_fork_server(task: LaunchSpec, events: int, lifeline: int, parent: int, terminal: Terminal) -> NoReturn:
    """Serve one launch, and end this process."""
    try:
        die_with_parent(parent)
        ignore_terminal_signals()
        _ForkServer(task, socket.socket(fileno=events), lifeline, terminal).serve()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(0)


class _ForkServer:
    def __init__(self, task: LaunchSpec, events: socket.socket, lifeline: int, terminal: Terminal) -> None:
        self._task, self._events, self._lifeline, self._terminal = task, events, lifeline, terminal
        self._files, self._living = create_memory_files(task.num_ranks), dict[int, int]()  # rank -> pid
        self._selector = selectors.DefaultSelector()
        self._send_event(nest=os.getpid())
        self._call = self._prepare_call()

    def _prepare_call(self) -> PreparedCall | None:
        """Return the function, its arguments and its prepared value; None on failure: the ranks then fail likewise, and report it."""
        try:
            apply_settings(self._task, 1)
            function, arguments = load_call(self._task, Path(self._task.folder))
            return PreparedCall(function, arguments, import_function(self._task.prepare)(*arguments) if self._task.prepare[0] else None)
        except Exception:
            traceback.print_exc()
            return None

    def serve(self) -> NoReturn:
        """Serve requests until the launcher closes the socket."""
        gc.collect()
        gc.freeze()
        self._selector.register(self._events, selectors.EVENT_READ, self._on_request)
        for rank in range(self._task.num_ranks):
            self._fork_rank(rank, self._task.generation)
        self._send_event(pids=[self._living[rank] for rank in range(self._task.num_ranks)])
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _on_request(self) -> None:
        request = self._events.recv(LARGEST_MESSAGE)
        if request.startswith(b"{"):
            command = json.loads(request)
            self._fork_rank(command["fork"], command["generation"])
            self._send_event(forked=command["fork"], pid=self._living[command["fork"]])
            return
        for pid in self._living.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not request:
            os._exit(0)

    def _fork_rank(self, rank: int, generation: int) -> None:
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            # A copy of a socket's end in a rank would hide the death of this process from the launcher.
            for key in list(self._selector.get_map().values()):
                os.close(key.fd)
            run_rank(self._task, rank, self._lifeline, parent, self._terminal, self._call, PersistentMemory(rank, self._files), generation)
        self._living[rank] = pid
        descriptor = os.pidfd_open(pid)
        self._selector.register(descriptor, selectors.EVENT_READ, lambda: self._on_exit(descriptor, rank, pid))

    def _on_exit(self, descriptor: int, rank: int, pid: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        del self._living[rank]
        self._send_event(rank=rank, code=os.waitstatus_to_exitcode(status))

    def _send_event(self, **event: Any) -> None:
        with suppress(OSError):
            self._events.send(json.dumps(event).encode())
