"""The job to launch: a `shardwise train` command, the number of hosts, and the ranks of each.

The number of ranks follows from the configuration: its layout, its plan file, or all devices of its cluster.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.cli.launchers import PORT
from shardwise.cluster.cluster import Cluster
from shardwise.errors import ConfigError, UsageError
from shardwise.plan.layout import Layout
from shardwise.plan.plan_file import read_plan
from shardwise.train.config import TrainingConfig


@dataclass(frozen=True, slots=True)
class LaunchJob:
    """`ranks_per_host` on each of `num_hosts`, each rank running `python -m shardwise` with `words` in `folder`.

    `has_gpus`: each rank has a GPU. `threads_per_rank`: cores of a rank. `python`: on the hosts. `run_folder`: of the training run.
    """

    words: tuple[str, ...]
    num_hosts: int
    ranks_per_host: int
    has_gpus: bool = False
    threads_per_rank: int = 1
    folder: str = "."
    python: str = sys.executable
    name: str = "shardwise"
    run_folder: str = "runs/run"
    device: str = ""

    def __post_init__(self) -> None:
        if self.num_hosts < 1 or self.ranks_per_host < 1:
            raise UsageError(f"{self.num_hosts} hosts with {self.ranks_per_host} ranks each; a job has 1 or more of both")

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.ranks_per_host

    @property
    def command(self) -> str:
        """Shell command of every rank."""
        return shlex.join([self.python, "-m", "shardwise", *self.words])

    def host_command(self, host: str, address: str, port: int = PORT, ends_with_input: bool = False) -> str:
        """Shell command that starts a host's ranks. `host`, `address`: shell words. `held`: end the ranks when standard input closes."""
        start = shlex.join([self.python, "-m", "shardwise", "launch"])
        arguments = f"--host {host} --hosts {self.num_hosts} --ranks {self.ranks_per_host} --threads {self.threads_per_rank} --address {address} --port {port}"  # noqa: E501
        return f"{start} {arguments}{' --held' if ends_with_input else ''} -- {shlex.join(self.words)}"


def parse_job(words: Sequence[str], hosts: int, ranks: int, threads: int = 0, python: str = "") -> LaunchJob:
    """Build the job of a command line `train CONFIG.toml key=value ...`.

    Args:
        hosts: machines, 0 for the cluster's. ranks: on each, 0 for the plan's. threads: cores of a rank.

    Raises:
        UsageError: other words than `train CONFIG`. ConfigError: ranks that do not divide, fewer hosts than the plan is for.
    """
    if len(words) < 2 or words[0] != "train":
        raise UsageError(f"give the command after --, train CONFIG.toml; {shlex.join(words) or 'nothing'} is not")
    words_of_config, layout = _split(words[2:])
    config = TrainingConfig.read(Path(words[1]), [*words_of_config, *([f"plan.layout={layout}"] if layout else [])])
    cluster = None if config.plan.cluster == "here" else Cluster.parse(config.plan.cluster)
    wanted = _configured_ranks(config, cluster)
    hosts = hosts or (cluster.num_nodes if cluster is not None else 1)
    if cluster is not None and wanted > hosts * cluster.node_size:
        raise ConfigError(
            f"plan.cluster = {config.plan.cluster} is {cluster.num_nodes} machines of {cluster.node_size} {cluster.device.name}, of which "
            f"{wanted} devices are asked for, and the job has {hosts} machines: give {-(-wanted // cluster.node_size)}, or plan for these "
            "with plan.cluster"
        )
    if not wanted and not ranks:
        raise ConfigError('plan.cluster = here does not describe other machines: give --ranks, or a layout (plan.layout="data=2")')
    ranks = ranks or -(-wanted // hosts)
    if wanted and wanted != hosts * ranks:
        raise ConfigError(f"the plan has {wanted} ranks, and {hosts} hosts with {ranks} ranks each have {hosts * ranks}; give as many")
    extra_words: tuple[str, ...] = ()
    if not (config.plan.layout or config.plan.file):  # the plan is chosen by the job, for all its ranks
        constraints = [*(text for text in config.plan.constrain if not text.startswith("ranks")), f"ranks={hosts * ranks}"]
        extra_words = (f"plan.constrain={json.dumps(constraints)}",)
    name = re.sub(r"[^a-z0-9]+", "-", f"shardwise-{Path(words[1]).stem}".lower()).strip("-")[:50]
    gpus = cluster is not None and not cluster.kind.shares_hosts
    device = cluster.device.name if cluster is not None else ""
    job = LaunchJob(
        (*words, *extra_words), hosts, ranks, gpus, threads or 1, os.getcwd(), name=name, run_folder=config.run.folder, device=device
    )
    return replace(job, python=python) if python else job


def _split(words: Sequence[str]) -> tuple[list[str], str]:
    """Split off the value of --layout from words `key=value`."""
    words_of_config, layout = [], ""
    rest = iter(words)
    for word in rest:
        if word == "--layout":
            layout = next(rest, "")
        elif word.startswith("--layout="):
            layout = word.partition("=")[2]
        elif not word.startswith("--"):
            words_of_config.append(word)
    return words_of_config, layout


def _configured_ranks(config: TrainingConfig, cluster: Cluster | None) -> int:
    """Number of ranks of the configuration; 0 where it sets none."""
    if config.plan.file:
        return read_plan(config.plan.file).layout.num_ranks
    if config.plan.layout:
        return Layout.parse(config.plan.layout).num_ranks
    if config.plan.ranks:
        return config.plan.ranks
    return cluster.num_devices if cluster is not None and not cluster.kind.shares_hosts else 0
