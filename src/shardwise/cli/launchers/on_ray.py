"""Launch a job on a Ray cluster: each rank is a task with its own cores or GPU, in a placement group.

The ranks' working folder has the same path as here (a shared file system).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
from typing import Any

from shardwise.cli.launchers.host import exit_code, rank_environment
from shardwise.cli.launchers.job import LaunchJob
from shardwise.errors import ConfigError, UsageError
from shardwise.world.guard import TOKEN_VARIABLE
from shardwise.world.launch.current import configure_local_ray

EMBEDDED = "local"
_START_S = 120.0


def run(job: LaunchJob, address: str = "auto") -> int:
    """Run the job's ranks on the cluster at `address` ("auto": the one running here, "local": one started for the job).

    Raises:
        UsageError: no ray installed, or no cluster at the address. ConfigError: fewer cores or GPUs than the job is for.
    """
    if address == EMBEDDED:
        configure_local_ray()
    try:
        import ray  # here: an extra
    except ImportError as error:
        raise UsageError('ray is not installed here: pip install "ray[default]"') from error
    ray_api: Any = ray
    processors = os.cpu_count() or 1
    here: dict[str, Any] = {"num_cpus": processors, "include_dashboard": False} if address == EMBEDDED else {"address": address}
    try:
        ray_api.init(**here)
    except ConnectionError as error:
        raise UsageError(f"no Ray cluster at {address}: start one with `ray start --head`, or use --ray local") from error
    try:
        _check(job, ray_api.cluster_resources())
        return _run(job, ray_api)
    finally:
        ray_api.shutdown()


def _check(job: LaunchJob, there: dict[str, float]) -> None:
    kind, each = ("GPU", 1) if job.has_gpus else ("CPU", job.threads_per_rank)
    if there.get(kind, 0) < job.num_ranks * each:
        raise ConfigError(
            f"the plan is for {job.num_ranks} ranks with {each} {kind} each, and the Ray cluster has {there.get(kind, 0):g} {kind}; plan "
            "for what is there with plan.cluster and plan.layout"
        )


def _run(job: LaunchJob, ray: Any) -> int:
    needs = {"num_gpus": 1, "num_cpus": job.threads_per_rank} if job.has_gpus else {"num_cpus": job.threads_per_rank}
    group = ray.util.placement_group(
        [{"GPU": 1, "CPU": job.threads_per_rank} if job.has_gpus else {"CPU": job.threads_per_rank}] * job.num_ranks, "PACK"
    )
    if not group.wait(_START_S):
        raise ConfigError(f"the Ray cluster has no room for {job.num_ranks} ranks within {_START_S:g} s; wait for its other jobs to end")
    try:
        place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy

        def task(function: Any, number: int, *args: Any) -> Any:
            remote_function = ray.remote(function).options(scheduling_strategy=place(group, number), max_retries=0, **needs)
            return remote_function.remote(*args)

        address, port = ray.get(task(_find_rendezvous, 0))
        token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(16)
        waiting = [task(_run_rank, rank, job, rank, address, port, token) for rank in range(job.num_ranks)]
        code = 0
        while waiting and not code:
            (done, *_), waiting = ray.wait(waiting, num_returns=1)
            code = ray.get(done)
        for task_ref in waiting:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.cancel(task_ref, force=True)
        return int(code)
    finally:
        ray.util.remove_placement_group(group)


def _find_rendezvous() -> tuple[str, int]:
    """Return the rendezvous: this node's address and a free port."""
    import ray  # here: an extra

    ray_api: Any = ray
    address = ray_api.util.get_node_ip_address()
    with socket.socket() as listener:
        listener.bind((address, 0))
        return str(address), int(listener.getsockname()[1])


def _run_rank(job: LaunchJob, rank: int, address: str, port: int, token: str) -> int:
    """Run one rank in a process of its own, which is terminated with this task."""
    variables = rank_environment(job, 0, 0, address, port) | {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        TOKEN_VARIABLE: token,
    }
    # A Ray worker's own settings are not the rank's; a task with a GPU sees no other.
    env = {**os.environ, "OMP_NUM_THREADS": str(job.threads_per_rank), **variables}
    with subprocess.Popen([job.python, "-m", "shardwise", *job.words], cwd=job.folder, env=env, stdin=subprocess.DEVNULL) as process:
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            raise
    return exit_code(code)
