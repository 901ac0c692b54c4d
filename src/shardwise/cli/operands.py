"""Parsers of the operands MODEL and CLUSTER that the verbs share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.cli.output import CommandOutput

if TYPE_CHECKING:
    from shardwise.cluster.cluster import Cluster
    from shardwise.zoo.resolved import ResolvedModel


def load_model(text: str, batch: int | None = None, sequence: int | None = None) -> ResolvedModel:
    """Resolve the model that MODEL names.

    Raises:
        UsageError, ModelError: an unknown name, a missing file, a factory that raises.
    """
    from shardwise.zoo.resolve import resolve

    return resolve(text, batch=batch, sequence=sequence)


def load_cluster(text: str, out: CommandOutput) -> Cluster:
    """Return the cluster that CLUSTER names; `here` is measured once and cached."""
    if text == "here":
        from shardwise.cluster.probe import probe

        with out.working("measuring this machine (some seconds)"):
            return probe()
    from shardwise.cluster.cluster import Cluster

    return Cluster.parse(text)
