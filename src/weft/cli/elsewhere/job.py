"""The job to launch: a `weft train` command, the number of hosts, and the ranks of each.

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

from weft.cli.elsewhere import PORT
from weft.cluster.cluster import Cluster
from weft.errors import ConfigError, UsageError
from weft.plan.layout import Layout
from weft.plan.plan_file import read_plan
from weft.train.config import Config


@dataclass(frozen=True, slots=True)
class Job:
    """`ranks` on each of `hosts`, each rank running `python -m weft` with `words` in `folder`.

    `gpus`: each rank has a GPU. `threads`: cores of a rank. `python`: on the hosts. `run_folder`: of the training run.
    """

    words: tuple[str, ...]
    hosts: int
    ranks: int
    gpus: bool = False
    threads: int = 1
    folder: str = "."
    python: str = sys.executable
    name: str = "weft"
    run_folder: str = "runs/run"
    device: str = ""

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.ranks < 1:
            raise UsageError(f"{self.hosts} hosts with {self.ranks} ranks each; a job has 1 or more of both")

    @property
    def num_ranks(self) -> int:
        return self.hosts * self.ranks

    @property
    def command(self) -> str:
        """Shell command of every rank."""
        return shlex.join([self.python, "-m", "weft", *self.words])

    def on_host(self, host: str, address: str, port: int = PORT, held: bool = False) -> str:
        """Shell command that starts a host's ranks. `host`, `address`: shell words. `held`: end the ranks when standard input closes."""
        start = shlex.join([self.python, "-m", "weft", "launch"])
        arguments = f"--host {host} --hosts {self.hosts} --ranks {self.ranks} --threads {self.threads} --address {address} --port {port}"
        return f"{start} {arguments}{' --held' if held else ''} -- {shlex.join(self.words)}"


def job_of(words: Sequence[str], hosts: int, ranks: int, threads: int = 0, python: str = "") -> Job:
    """Build the job of a command line `train CONFIG.toml key=value ...`.

    Args:
        hosts: machines, 0 for the cluster's. ranks: on each, 0 for the plan's. threads: cores of a rank.

    Raises:
        UsageError: other words than `train CONFIG`. ConfigError: ranks that do not divide, fewer hosts than the plan is for.
    """
    if len(words) < 2 or words[0] != "train":
        raise UsageError(f"give the command after --, train CONFIG.toml; {shlex.join(words) or 'nothing'} is not")
    words_of_config, layout = _split(words[2:])
    config = Config.read(Path(words[1]), [*words_of_config, *([f"plan.layout={layout}"] if layout else [])])
    cluster = None if config.plan.cluster == "here" else Cluster.parse(config.plan.cluster)
    wanted = _ranks_of(config, cluster)
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
    name = re.sub(r"[^a-z0-9]+", "-", f"weft-{Path(words[1]).stem}".lower()).strip("-")[:50]
    gpus = cluster is not None and not cluster.kind.shares_hosts
    device = cluster.device.name if cluster is not None else ""
    job = Job((*words, *extra_words), hosts, ranks, gpus, threads or 1, os.getcwd(), name=name, run_folder=config.run.folder, device=device)
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


def _ranks_of(config: Config, cluster: Cluster | None) -> int:
    """Number of ranks of the configuration; 0 where it sets none."""
    if config.plan.file:
        return read_plan(config.plan.file).layout.num_ranks
    if config.plan.layout:
        return Layout.parse(config.plan.layout).num_ranks
    if config.plan.ranks:
        return config.plan.ranks
    return cluster.num_devices if cluster is not None and not cluster.kind.shares_hosts else 0
