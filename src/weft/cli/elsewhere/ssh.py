"""Launch a job on hosts over ssh; the rendezvous is at the first host.

Each host runs one command, which starts its ranks and ends with this process or the connection. It gets the run's token on standard
input, where no process list shows it. When a host fails, the ranks of the others continue without it. Keys and users are configured in
ssh; files have the same paths as here (a shared file system).
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from weft.cli.elsewhere import PORT
from weft.cli.elsewhere.host import GRACE_S, LOST, exit_code, outcome
from weft.cli.elsewhere.job import Job
from weft.errors import UsageError
from weft.world.guard import TOKEN

OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4")
_LOOK_S = 0.2


def run(job: Job, hosts: Sequence[str], address: str = "", port: int = PORT) -> int:
    """Start the job's ranks on all hosts and wait; return the exit code of the first that failed.

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
    token = os.environ.get(TOKEN) or secrets.token_hex(16)
    running: list[subprocess.Popen[bytes]] = []
    try:
        for number, host in enumerate(hosts):
            start = job.on_host(str(number), shlex.quote(address), port, held=True)
            remote_command = f"cd {shlex.quote(job.folder)} && exec {start}"
            process = subprocess.Popen(["ssh", *OPTIONS, host, remote_command], stdin=subprocess.PIPE)
            running.append(process)
            _give(process, token)
        return _wait(running, hosts)
    finally:
        _end(running)


def _give(process: subprocess.Popen[bytes], token: str) -> None:
    assert process.stdin is not None
    with suppress(OSError):  # it has ended already; its exit code tells why
        process.stdin.write(f"{token}\n".encode())
        process.stdin.flush()


def _wait(running: Sequence[subprocess.Popen[bytes]], hosts: Sequence[str]) -> int:
    """Wait for all hosts, or the first failure that was no signal; return the exit code."""
    failed_hosts = set[str]()
    while True:
        codes = {host: process.poll() for host, process in zip(hosts, running, strict=True)}
        ended = [exit_code(code) for code in codes.values() if code is not None]
        if len(ended) == len(running) or any(0 < code < LOST for code in ended):
            return outcome(ended)
        for host, code in codes.items():
            if code and host not in failed_hosts:
                failed_hosts.add(host)
                print(f"weft: host {host} is lost (exit code {exit_code(code)}); the others go on where they have a plan", file=sys.stderr)
        time.sleep(_LOOK_S)


def _end(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Close the standard input of all hosts, which then end their ranks, and wait."""
    for process in running:
        if process.stdin is not None and not process.stdin.closed:
            process.stdin.close()
    deadline = time.monotonic() + GRACE_S
    for process in running:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
