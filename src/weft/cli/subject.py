"""MODEL and CLUSTER as the verbs take them. In: the words of the command line. Out: a plan, a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.cli.output import Output

if TYPE_CHECKING:
    from weft.cluster.cluster import Cluster
    from weft.plan.layout import Layout
    from weft.plan.plan import Plan
    from weft.zoo.resolve import Resolved


@dataclass(frozen=True)
class Subject:
    """A model by the name that it was given, and the samples of a step."""

    model: Resolved
    batch_size: int

    def plan(self, machines: Cluster, layout: Layout | None = None, constraints: Sequence[str] = (), objective: str = "time") -> Plan:
        """weft's choice, or the price of `layout`.

        Raises:
            ModelError: the model cannot be captured; Infeasible: nothing meets the constraints.
        """
        from weft.run.build import Source
        from weft.solve.search import search

        model = self.model
        captured = Source.of(model.make).capture(model.batch(self.batch_size), model.loss, self.batch_size)
        return search(captured.graph, machines, self.batch_size, model.name, " ".join(constraints), layout, objective)


def load_model(text: str, batch: int | None = None, sequence: int | None = None) -> Subject:
    """The model that MODEL names.

    Raises:
        UsageError, ModelError: an unknown name, a missing file, a factory that raises.
    """
    from weft.zoo.resolve import resolve

    model = resolve(text, batch=batch, sequence=sequence)
    return Subject(model, batch or model.default_batch)


def load_cluster(text: str, out: Output) -> Cluster:
    """The machines that CLUSTER names; `here` is measured, once."""
    if text == "here":
        from weft.cluster.probe import probe

        with out.working("measuring this machine (once, some seconds)"):
            return probe()
    from weft.cluster.cluster import Cluster

    return Cluster.parse(text)
