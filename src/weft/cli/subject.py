"""MODEL and CLUSTER as the verbs take them. In: the words of the command line. Out: what `weft.api` works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.cli.output import Output
from weft.errors import UsageError

if TYPE_CHECKING:
    from weft.cluster.cluster import Cluster
    from weft.plan.layout import Layout
    from weft.plan.plan import Plan

OBJECTIVES = ("time",)
LATER_OBJECTIVES = ("cost", "energy", "memory")


@dataclass(frozen=True)
class Subject:
    """A model by the name that it was given."""

    name: str
    model: Any

    def plan(self, machines: Cluster, layout: Layout | None, constraints: Sequence[str]) -> Plan:
        from weft import api

        return api.plan(self.model, cluster=machines, layout=layout, constraints=constraints)


def load_model(text: str, batch: int | None, sequence: int | None) -> Subject:
    """The model that MODEL names.

    Raises:
        UsageError, ModelError: an unknown name, a missing file, a factory that raises.
    """
    from weft.zoo.resolve import resolve

    return Subject(text, resolve(text, batch=batch, sequence=sequence))


def load_cluster(text: str, out: Output) -> Cluster:
    """The machines that CLUSTER names; `here` is measured, once."""
    if text == "here":
        from weft.cluster.probe import probe

        with out.working("measuring this machine (once, some seconds)"):
            return probe()
    from weft.cluster.cluster import Cluster

    return Cluster.parse(text)


def refuse_objective(objective: str) -> None:
    """Refuse an objective that is unknown, or not built yet.

    Raises:
        UsageError: it names those that are.
    """
    if objective in LATER_OBJECTIVES:
        raise UsageError(f"--objective {objective} is not built yet; use {', '.join(OBJECTIVES)}")
    if objective not in OBJECTIVES:
        raise UsageError(f"--objective {objective} is unknown; use {', '.join(OBJECTIVES)}")
