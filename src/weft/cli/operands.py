"""Parsers of the operands MODEL and CLUSTER that the verbs share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.cli.output import Output

if TYPE_CHECKING:
    from weft.cluster.cluster import Cluster
    from weft.zoo.resolved import Resolved


def load_model(text: str, batch: int | None = None, sequence: int | None = None) -> Resolved:
    """Resolve the model that MODEL names.

    Raises:
        UsageError, ModelError: an unknown name, a missing file, a factory that raises.
    """
    from weft.zoo.resolve import resolve

    return resolve(text, batch=batch, sequence=sequence)


def load_cluster(text: str, out: Output) -> Cluster:
    """Return the cluster that CLUSTER names; `here` is measured once and cached."""
    if text == "here":
        from weft.cluster.probe import probe

        with out.working("measuring this machine (some seconds)"):
            return probe()
    from weft.cluster.cluster import Cluster

    return Cluster.parse(text)
