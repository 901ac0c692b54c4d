"""Detect the launcher of this process as one of several ranks. In: environment variables. Out: the same under torchrun's names.

torchrun, Open MPI's mpirun, that of MPICH and Intel MPI (Hydra), and srun. An mpirun inside a SLURM job takes precedence over srun: there
all ranks of a host inherit the batch script's own number.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from shardwise.errors import UsageError

LAUNCHER_VARIABLE = "SHARDWISE_STARTER"  # the environment variable: the process that starts a host's ranks, with which they end
PORTS = (20000, 20000)  # first, count


class LauncherVariables(NamedTuple):
    """The environment variables of a launcher; `local_size`: number of ranks on this host, if it sets one."""

    rank: str
    size: str
    local_rank: str
    local_size: str = ""


TORCHRUN = LauncherVariables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SRUN = LauncherVariables("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
LAUNCHERS = (
    TORCHRUN,
    LauncherVariables("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    LauncherVariables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    SRUN,
)


def launcher_of(environment: Mapping[str, str]) -> LauncherVariables | None:
    """Return the launcher of this process; None for a single process."""
    return next((launcher for launcher in LAUNCHERS if launcher.rank in environment), None)


def rank_from_environment(environment: Mapping[str, str]) -> int | None:
    """Return the number of this rank; None for a single process.

    >>> rank_from_environment({"PMI_RANK": "3"}), rank_from_environment({})
    (3, None)
    """
    launcher = launcher_of(environment)
    return int(environment[launcher.rank]) if launcher is not None else None


def as_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the launcher's variables under torchrun's names; with a rendezvous address if all ranks are on one host or under SLURM."""
    env, launcher = dict(environment), launcher_of(environment)
    if launcher is None or launcher is TORCHRUN:
        return env
    env |= {target: env[source] for target, source in zip(TORCHRUN, launcher, strict=True) if source in env}
    if "SLURM_RESTART_COUNT" in env:
        env["TORCHELASTIC_RESTART_COUNT"] = env["SLURM_RESTART_COUNT"]
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))
    first, count = PORTS
    job = int(re.sub(r"\D", "", env.get("SLURM_JOB_ID", "")) or 0)
    if nodes:
        env.setdefault("MASTER_ADDR", first_host(nodes))
    elif launcher is not SRUN and env.get("LOCAL_WORLD_SIZE", "") == env.get("WORLD_SIZE"):
        env.setdefault("MASTER_ADDR", "127.0.0.1")
        job = starting_process(os.getpid(), launcher.rank)
    # Jobs that share a node must not share a port.
    env.setdefault("MASTER_PORT", str(first + job % count))
    return env


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list.

    >>> first_host("node[007-010,12],login1")
    'node007'
    """
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^\[,]*))?", nodes)
    if match is None:
        raise UsageError(f"the node list {nodes!r} names no host; set MASTER_ADDR to the host of rank 0")
    return match[1] + (match[2] or "") + (match[3] or "")


def starting_process(pid: int, variable: str) -> int:
    """Return the process that set `variable` for a process: its nearest ancestor without it; 0: none."""
    try:
        variables = has_variable(pid, variable)
        while variables:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            variables = has_variable(pid, variable)
            if not variables:
                return pid
    except (OSError, ValueError, IndexError):  # no /proc, or another user's process
        pass
    return 0


def has_variable(pid: int, variable: str) -> bool:
    """Return whether a process was started with an environment variable. Raises OSError for another user's."""
    environment = b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    return b"\0" + variable.encode() + b"=" in environment
