"""Manifests for systems that start jobs themselves: a Kubernetes indexed job, and a SkyPilot task.

Not modelled: volumes, secrets, queues; complete the files by hand where a cluster needs them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.cli.elsewhere import IMAGE, PORT
from weft.cli.elsewhere.job import Job
from weft.world.guard import TOKEN

_SKYPILOT = {"A100-40": "A100", "A100-80": "A100-80GB", "V100-16": "V100", "V100-32": "V100-32GB"}  # its device names, where others


def yaml(value: Any, indent: int = 0) -> str:
    """Format nested mappings, lists, texts and numbers as YAML, with texts quoted as JSON, which YAML reads too.

    >>> print(yaml({"a": {"b": [1, "x: y"]}}))
    a:
      b:
        - 1
        - "x: y"
    """
    space = "  " * indent
    if isinstance(value, Mapping):
        return "\n".join(f"{space}{key}:{_below(item, indent)}" for key, item in value.items())
    return "\n".join(
        f"{space}- {yaml(item, indent + 1).lstrip()}" if isinstance(item, Mapping) else f"{space}- {json.dumps(item)}" for item in value
    )


def _below(item: Any, indent: int) -> str:
    if isinstance(item, str) and "\n" in item:
        inner = "  " * (indent + 1)
        return " |\n" + "\n".join(inner + line for line in item.rstrip("\n").splitlines())
    if isinstance(item, Mapping | list) and item:
        return "\n" + yaml(item, indent + 1)
    return f" {json.dumps(item)}"


def kubernetes(job: Job, image: str = IMAGE) -> str:
    """Return a secret with the run's token, a headless service for the rendezvous, and an indexed job with one pod per host."""
    remote_job = replace(job, python="python")
    labels = {"app": job.name}
    gpus = {"nvidia.com/gpu": job.ranks} if job.gpus else {}
    limits = {"cpu": job.ranks * job.threads, **gpus}
    container = {
        "name": "weft",
        "image": image,
        "workingDir": job.folder,
        "command": ["/bin/sh", "-c", "exec " + remote_job.on_host("$JOB_COMPLETION_INDEX", f"{job.name}-0.{job.name}")],
        "env": [
            {"name": "OMP_NUM_THREADS", "value": str(job.threads)},
            {"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": job.name, "key": "token"}}},
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
            "completions": job.hosts,
            "parallelism": job.hosts,
            "backoffLimit": 3,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": job.name}, "stringData": {"token": secrets.token_hex(16)}}
    return f"{yaml(secret)}\n---\n{yaml(service)}\n---\n{yaml(batch)}\n"


def skypilot(job: Job) -> str:
    """Return a task with one node per host; SkyPilot copies the current folder to them."""
    remote_job = replace(job, python="python")
    first = 'first=$(echo "$SKYPILOT_NODE_IPS" | head -n1)'
    task: dict[str, Any] = {"name": job.name, "workdir": ".", "num_nodes": job.hosts}
    if job.gpus:
        task["resources"] = {"accelerators": f"{_SKYPILOT.get(job.device, job.device)}:{job.ranks}"}
    else:
        task["resources"] = {"cpus": f"{job.ranks * job.threads}+"}
    task["envs"] = {"OMP_NUM_THREADS": str(job.threads), TOKEN: secrets.token_hex(16)}
    task["setup"] = "pip install weft"
    task["run"] = f"{first}\n{remote_job.on_host('$SKYPILOT_NODE_RANK', chr(34) + '$first' + chr(34))}\n"
    return yaml(task) + "\n"
