"""Hosts that ssh reaches. In: their names, a `Job`. Out: the exit code. Ranks meet at the first host.

Each host runs one command, which starts its ranks and ends when this process, or the connection, does. Keys and users are ssh's own
business; files are where they are here (a shared file system).
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence

from weft.cli.elsewhere import PORT
from weft.cli.elsewhere.host import GRACE_S, exit_code
from weft.cli.elsewhere.job import Job
from weft.errors import UsageError

OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
_LOOK_S = 0.2


def run(job: Job, hosts: Sequence[str], address: str = "", port: int = PORT) -> int:
    """Start the job's ranks on all hosts and wait; the exit code of the first that failed.

    Raises:
        UsageError: no ssh, a host twice or none, another number of hosts than the job is for.
    """
    if shutil.which("ssh") is None:
        raise UsageError("there is no ssh here; install it, or start weft train on every machine with torchrun")
    if len(set(hosts)) < len(hosts) or not all(hosts) or any(host.startswith("-") for host in hosts):
        raise UsageError(f"--ssh {','.join(hosts)}: give each host once, by its name")
    if len(hosts) != job.hosts:
        raise UsageError(f"--ssh names {len(hosts)} hosts, and the job is for {job.hosts}; name as many")
    address = address or hosts[0].rpartition("@")[2]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for number, host in enumerate(hosts):
            start = job.on_host(str(number), shlex.quote(address), port, held=True)
            there = f"cd {shlex.quote(job.folder)} && exec {start}"
            running.append(subprocess.Popen(["ssh", *OPTIONS, host, there], stdin=subprocess.PIPE))
        while True:
            codes = [one.poll() for one in running]
            failed = next((code for code in codes if code), 0)
            if failed or all(code is not None for code in codes):
                return exit_code(failed)
            time.sleep(_LOOK_S)
    finally:
        _end(running)


def _end(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Let go of all hosts, which end their ranks then."""
    for one in running:
        if one.stdin is not None and not one.stdin.closed:
            one.stdin.close()
    until = time.monotonic() + GRACE_S
    for one in running:
        try:
            one.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()
