"""Manifests for systems that start jobs themselves: a Kubernetes indexed job, and a SkyPilot task.

Not modelled: volumes, secrets, queues; complete the files by hand where a cluster needs them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise import __version__
from shardwise.cli.launchers import IMAGE, PORT
from shardwise.cli.launchers.job import LaunchJob
from shardwise.world.guard import TOKEN_VARIABLE

_SKYPILOT = {"A100-40": "A100", "A100-80": "A100-80GB", "V100-16": "V100", "V100-32": "V100-32GB"}  # its device names, where others


def to_yaml(value: Any, indent: int = 0) -> str:
    """Format nested mappings, lists, texts and numbers as YAML, with texts quoted as JSON, which YAML reads too.

    >>> print(to_yaml({"a": {"b": [1, "x: y"]}}))
    a:
      b:
        - 1
        - "x: y"
    """
    space = "  " * indent
    if isinstance(value, Mapping):
        return "\n".join(f"{space}{key}:{_nested_yaml(item, indent)}" for key, item in value.items())
    return "\n".join(
        f"{space}- {to_yaml(item, indent + 1).lstrip()}" if isinstance(item, Mapping) else f"{space}- {json.dumps(item)}" for item in value
    )


def _nested_yaml(item: Any, indent: int) -> str:
    if isinstance(item, str) and "\n" in item:
        inner = "  " * (indent + 1)
        return " |\n" + "\n".join(inner + line for line in item.rstrip("\n").splitlines())
    if isinstance(item, Mapping | list) and item:
        return "\n" + to_yaml(item, indent + 1)
    return f" {json.dumps(item)}"


def kubernetes_manifest(job: LaunchJob, image: str = IMAGE) -> str:
    """Return a secret with the run's token, a headless service for the rendezvous, and an indexed job with one pod per host."""
    remote_job = replace(job, python="python")
    labels = {"app": job.name}
    gpus = {"nvidia.com/gpu": job.ranks_per_host} if job.has_gpus else {}
    limits = {"cpu": job.ranks_per_host * job.threads_per_rank, **gpus}
    container = {
        "name": "shardwise",
        "image": image,
        "workingDir": job.folder,
        "command": ["/bin/sh", "-c", "exec " + remote_job.host_command("$JOB_COMPLETION_INDEX", f"{job.name}-0.{job.name}")],
        "env": [
            {"name": "OMP_NUM_THREADS", "value": str(job.threads_per_rank)},
            {"name": TOKEN_VARIABLE, "valueFrom": {"secretKeyRef": {"name": job.name, "key": "token"}}},
        ],
        "ports": [{"containerPort": PORT}],
        "resources": {"limits": limits, "requests": limits},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        "subdomain": job.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 150,
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        "spec": {"clusterIP": "None", "selector": labels, "ports": [{"port": PORT}], "publishNotReadyAddresses": True},
    }
    batch = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.name, "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": job.num_hosts,
            "parallelism": job.num_hosts,
            "backoffLimit": 3,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": job.name}, "stringData": {"token": secrets.token_hex(16)}}
    return f"{to_yaml(secret)}\n---\n{to_yaml(service)}\n---\n{to_yaml(batch)}\n"


def skypilot_task(job: LaunchJob) -> str:
    """Return a task with one node per host; SkyPilot copies the current folder to them."""
    remote_job = replace(job, python="python")
    first = 'first=$(echo "$SKYPILOT_NODE_IPS" | head -n1)'
    task: dict[str, Any] = {"name": job.name, "workdir": ".", "num_nodes": job.num_hosts}
    if job.has_gpus:
        task["resources"] = {"accelerators": f"{_SKYPILOT.get(job.device, job.device)}:{job.ranks_per_host}"}
    else:
        task["resources"] = {"cpus": f"{job.ranks_per_host * job.threads_per_rank}+"}
    task["envs"] = {"OMP_NUM_THREADS": str(job.threads_per_rank)}
    task["secrets"] = {TOKEN_VARIABLE: secrets.token_hex(16)}  # SkyPilot neither shows nor logs them
    task["setup"] = f"pip install shardwise=={__version__}"
    task["run"] = f"{first}\n{remote_job.host_command('$SKYPILOT_NODE_RANK', chr(34) + '$first' + chr(34))}\n"
    return to_yaml(task) + "\n"
