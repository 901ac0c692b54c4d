"""Clusters by name: measured machines, the catalogue's, files, parts and mixtures of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from shardwise.cluster.catalogue import build_machine, catalogue_names, load, node_network
from shardwise.cluster.cluster import Cluster
from shardwise.cluster.heterogeneous import mix_clusters, order_parts
from shardwise.cluster.resize import resize_cluster
from shardwise.errors import UsageError, did_you_mean


def find_cluster(text: str) -> Cluster:
    """Find the cluster that `text` names; see `Cluster.parse`."""
    if text == "here":
        from shardwise.cluster.probe import probe  # here: only the probe needs torch

        return probe()
    if part := re.fullmatch(r"(\d+) devices? of (.+)", text):
        return resize_cluster(find_cluster(part[2]), int(part[1]))
    if file := re.fullmatch(r"(.+\.toml)(?::([^/]+))?", text):
        read = load(Path(file[1]))
        return order_parts(read, file[2].split("+")) if file[2] else read
    if "+" in text:
        return _find_mixed(text)
    machines, _, stack = text.partition("@")
    if stack and stack not in catalogue_names("stack"):
        stacks = catalogue_names("stack")
        raise UsageError(
            f"cluster {text}: the efficiency set {stack!r} is unknown{did_you_mean(stack, stacks)}; known: {', '.join(stacks)}"
        )
    match = re.fullmatch(r"(?:(\d+)x)?(.+)", machines)
    if match is None:
        raise UsageError(f"cluster {text!r} names nothing; use here, COUNTxNAME such as 8xp3.16xlarge, or a TOML file")
    count, name = int(match[1] or 1), match[2]
    if count < 1:
        raise UsageError(f"cluster {text}: {count} machines; use 1 or more")
    return replace(build_machine(text, count, name), stack=stack)


def _find_mixed(text: str) -> Cluster:
    parts = [find_cluster(word.strip()) for word in text.split("+")]
    networks = [node_network(part) for part in parts]
    return mix_clusters(text, parts, min(networks, key=lambda link: link.bandwidth_bytes_per_s * link.ports))
