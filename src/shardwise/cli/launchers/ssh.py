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

from shardwise.cli.launchers import PORT
from shardwise.cli.launchers.host import GRACE_S, SIGNAL_EXIT_CODE, combined_exit_code, exit_code
from shardwise.cli.launchers.job import LaunchJob
from shardwise.errors import UsageError
from shardwise.world.guard import TOKEN_VARIABLE

OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4")
_POLL_INTERVAL_S = 0.2


def run(job: LaunchJob, hosts: Sequence[str], address: str = "", port: int = PORT) -> int:
    """Start the job's ranks on all hosts and wait; return the exit code of the first that failed.

    Raises:
        UsageError: no ssh, a host twice or none, another number of hosts than the job is for.
    """
    if shutil.which("ssh") is None:
        raise UsageError("there is no ssh here; install it, or start shardwise train on every machine with torchrun")
    if len(set(hosts)) < len(hosts) or not all(hosts) or any(host.startswith("-") for host in hosts):
        raise UsageError(f"--ssh {','.join(hosts)}: give each host once, by its name")
    if len(hosts) != job.num_hosts:
        raise UsageError(f"--ssh names {len(hosts)} hosts, and the job is for {job.num_hosts}; name as many")
    address = address or hosts[0].rpartition("@")[2]
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(16)
    running: list[subprocess.Popen[bytes]] = []
    try:
        for number, host in enumerate(hosts):
            start = job.host_command(str(number), shlex.quote(address), port, ends_with_input=True)
            remote_command = f"cd {shlex.quote(job.folder)} && exec {start}"
            process = subprocess.Popen(["ssh", *OPTIONS, host, remote_command], stdin=subprocess.PIPE)
            running.append(process)
            _send_token(process, token)
        return _wait_for_hosts(running, hosts)
    finally:
        _stop_hosts(running)


def _send_token(process: subprocess.Popen[bytes], token: str) -> None:
    assert process.stdin is not None
    with suppress(OSError):  # it has ended already; its exit code tells why
        process.stdin.write(f"{token}\n".encode())
        process.stdin.flush()


def _wait_for_hosts(running: Sequence[subprocess.Popen[bytes]], hosts: Sequence[str]) -> int:
    """Wait for all hosts, or the first failure that was no signal; return the exit code."""
    failed_hosts = set[str]()
    while True:
        codes = {host: process.poll() for host, process in zip(hosts, running, strict=True)}
        ended = [exit_code(code) for code in codes.values() if code is not None]
        if len(ended) == len(running) or any(0 < code < SIGNAL_EXIT_CODE for code in ended):
            return combined_exit_code(ended)
        for host, code in codes.items():
            if code and host not in failed_hosts:
                failed_hosts.add(host)
                print(
                    f"shardwise: host {host} is lost (exit code {exit_code(code)}); the others go on where they have a plan",
                    file=sys.stderr,
                )
        time.sleep(_POLL_INTERVAL_S)


def _stop_hosts(running: Sequence[subprocess.Popen[bytes]]) -> None:
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
