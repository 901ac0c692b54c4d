"""The prepared process: a preloaded process that forks ranks on request. Four ranks cost one import of torch, a new launch milliseconds.

In: launches over a socket (a task file and the terminal's descriptors). Out: process ids, and exit codes. It computes nothing, so that it
has one thread and forking it is safe, and holds no store. It ends, and its ranks with it, when the launcher's end of the socket closes.
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
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from shardwise.world.launch.children import LARGEST_MESSAGE
from shardwise.world.launch.fork_server import run_fork_server
from shardwise.world.launch.prepared_rank import LaunchSpec, ignore_terminal_signals, run_rank


@dataclass
class _ActiveLaunch:
    """One launch: the socket for its events, and its living ranks."""

    events: socket.socket
    folder: str
    living: dict[int, int] = field(default_factory=dict)  # rank -> pid

    def send_event(self, **event: Any) -> None:
        with suppress(OSError):
            self.events.send(json.dumps(event).encode())

    def kill(self) -> None:
        for pid in self.living.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def serve_launches(control: socket.socket, lifeline: int) -> NoReturn:
    """Fork ranks until `control` closes, then end this process and them."""
    control.send(b"ready")
    gc.collect()
    gc.freeze()  # ranks then share these pages instead of copying them at their first collection
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ, None)
    while True:
        for key, _ in selector.select():
            match key.data:
                case None:
                    if not _accept_launch(control, lifeline, selector):
                        for launch in [k.data for k in selector.get_map().values() if isinstance(k.data, _ActiveLaunch)]:
                            launch.kill()
                            shutil.rmtree(launch.folder, ignore_errors=True)  # the launcher cannot do it any more
                        os._exit(0)  # torch's orderly shutdown takes longer than orphans may live
                case _ActiveLaunch() as run:
                    # Any message, or the end of the stream, asks to end this launch.
                    if not run.events.recv(LARGEST_MESSAGE):
                        selector.unregister(run.events)
                        run.events.close()
                    run.kill()
                case partial() as reap:
                    reap()
                case (run, rank, pid):
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _, status = os.waitpid(pid, 0)
                    del run.living[rank]
                    run.send_event(rank=rank, code=os.waitstatus_to_exitcode(status))


def _accept_launch(control: socket.socket, lifeline: int, selector: selectors.BaseSelector) -> bool:
    """Fork the ranks of one launch; return False if the launcher has ended."""
    try:
        request, descriptors, _, _ = socket.recv_fds(control, LARGEST_MESSAGE, 4)
    except OSError:
        return False
    if not request:
        return False
    folder = request.decode()
    events, *terminal = descriptors
    run = _ActiveLaunch(socket.socket(fileno=events), folder)
    task = LaunchSpec.from_json((Path(folder) / "task.json").read_text())
    parent = os.getpid()
    shown = (terminal[0], terminal[1], terminal[2]) if len(terminal) == 3 else None
    sys.stdout.flush()
    sys.stderr.flush()
    if task.recovers:
        _start_fork_server(task, run, lifeline, selector, shown)
        return True
    for rank in range(task.num_ranks):
        pid = os.fork()
        if pid == 0:
            # A copy of a socket's end in a rank would hide the death of this process from the launcher.
            for key in list(selector.get_map().values()):
                os.close(key.fd)
            os.close(events)
            run_rank(task, rank, lifeline, parent, shown)
        run.living[rank] = pid
        selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (run, rank, pid))
    for descriptor in terminal:
        os.close(descriptor)
    selector.register(run.events, selectors.EVENT_READ, run)
    run.send_event(pids=[run.living[rank] for rank in range(task.num_ranks)])
    return True


def _start_fork_server(
    task: LaunchSpec, run: _ActiveLaunch, lifeline: int, selector: selectors.BaseSelector, shown: tuple[int, int, int] | None
) -> None:
    """Fork the launch's fork server, which then communicates with the launcher directly."""
    parent, events = os.getpid(), run.events.fileno()
    pid = os.fork()
    if pid == 0:
        for key in list(selector.get_map().values()):
            os.close(key.fd)
        run_fork_server(task, events, lifeline, parent, shown)
    run.events.close()
    for descriptor in shown or ():
        os.close(descriptor)
    pidfd = os.pidfd_open(pid)
    selector.register(pidfd, selectors.EVENT_READ, partial(_reap_process, selector, pidfd, pid))


def _reap_process(selector: selectors.BaseSelector, descriptor: int, pid: int) -> None:
    selector.unregister(descriptor)
    os.close(descriptor)
    os.waitpid(pid, 0)


def main() -> None:
    """Run the process: arguments are the descriptors `control` and `lifeline`, then modules to import beforehand."""
    control, lifeline, *modules = sys.argv[1:]
    ignore_terminal_signals()
    for module in modules:
        __import__(module)
    serve_launches(socket.socket(fileno=int(control)), int(lifeline))


if __name__ == "__main__":
    main()
