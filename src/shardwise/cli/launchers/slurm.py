"""Launch a job on SLURM: write its batch script and submit it with `sbatch`.

srun starts the ranks, which find each other by SLURM's variables; the surviving ranks continue when a node fails. SIGTERM comes 150
seconds before the time limit; shardwise then saves a checkpoint and exits with 75, and the job is requeued.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from shardwise.cli.launchers.host import SIGNAL_EXIT_CODE
from shardwise.cli.launchers.job import LaunchJob
from shardwise.cli.train import STOPPED_EXIT_CODE
from shardwise.errors import ConfigError, RunError, UsageError
from shardwise.report.run_folder import SUMMARY
from shardwise.world.guard import TOKEN_VARIABLE

_SIGNAL_S = 150


def job_folder(job: LaunchJob) -> Path:
    """Folder of the script and SLURM's output: next to the run folder, which only the run writes to."""
    return Path(f"{job.run_folder}.slurm")


def batch_script(job: LaunchJob, options: Sequence[str] = ()) -> str:
    """Return the batch script. `options`: further ones of sbatch, `time=02:00:00`."""
    settings = {"job-name": job.name, "nodes": job.num_hosts, "ntasks-per-node": job.ranks_per_host, "cpus-per-task": job.threads_per_rank}
    if job.has_gpus:
        settings["gpus-per-node"] = job.ranks_per_host
    settings |= {"output": f"{job_folder(job)}/%j.out", "open-mode": "append", "signal": f"TERM@{_SIGNAL_S}"}
    lines = [f"#SBATCH --{key}={value}" for key, value in settings.items() if not any(o.partition("=")[0] == key for o in options)]
    lines += [f"#SBATCH --{option}" for option in options]
    return "\n".join(
        [
            "#!/bin/bash", *lines, "#SBATCH --requeue", "#SBATCH --no-kill", "",
            f"cd {shlex.quote(job.folder)}",
            f"export OMP_NUM_THREADS={job.threads_per_rank}",
            "# A secret by which ranks authenticate.",
            f"export {TOKEN_VARIABLE}=${{{TOKEN_VARIABLE}:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' ')}}",
            "started=$(mktemp)",
            f"srun --no-kill --kill-on-bad-exit=0 {job.command}",
            "code=$?",
            "# The ranks of the other nodes may have finished without a failed node.",
            f'if [ "$code" -gt {SIGNAL_EXIT_CODE} ] && [ {shlex.quote(f"{job.run_folder}/{SUMMARY}")} -nt "$started" ]; then code=0; fi',
            f'if [ "$code" -eq {STOPPED_EXIT_CODE} ]; then scontrol requeue "$SLURM_JOB_ID"; fi  '
            "# it was asked to stop, has saved, and resumes",
            'exit "$code"', "",
        ]
    )  # fmt: skip


def check_nodes(job: LaunchJob) -> None:
    """Raise ConfigError where SLURM has fewer nodes than the job needs."""
    if shutil.which("sinfo") is None:
        return
    done = subprocess.run(["sinfo", "--noheader", "--format=%D"], capture_output=True, text=True, timeout=60)
    numbers = [int(line) for line in done.stdout.split() if line.isdecimal()]
    if done.returncode == 0 and numbers and sum(numbers) < job.num_hosts:
        raise ConfigError(f"the job is for {job.num_hosts} nodes, and SLURM has {sum(numbers)}; plan for fewer machines with plan.cluster")


def submit_job(job: LaunchJob, file: Path, options: Sequence[str] = ()) -> str:
    """Write the script, submit it with sbatch, and return the job's number.

    Raises:
        UsageError: no sbatch here. RunError: sbatch refused it.
    """
    if shutil.which("sbatch") is None:
        raise UsageError(f"there is no sbatch here; run this on a login node of the cluster, or write the script alone with -o {file}")
    check_nodes(job)
    job_folder(job).mkdir(parents=True, exist_ok=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(batch_script(job, options))
    done = subprocess.run(["sbatch", "--parsable", str(file)], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RunError(f"sbatch refused {file}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip().partition(";")[0]
