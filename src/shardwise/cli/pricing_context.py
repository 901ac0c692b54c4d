"""Pricing context of a verb: a model captured once, a cluster and a batch size, in which layouts are priced.

Prices are those of the search: `shardwise.api.plan` where a plan is chosen, the closed-form cost and the simulated clock for a given
layout.
Unlike in the search, a layout that does not fit in memory is priced too, with a note.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli import options
from shardwise.errors import Infeasible, ModelError, UsageError
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan, Prediction
from shardwise.zoo.listing import check_model_text

if TYPE_CHECKING:
    from torch import nn

    from shardwise.api import ModelSubject
    from shardwise.cli.output import CommandOutput
    from shardwise.cluster.cluster import Cluster
    from shardwise.model.graph import Graph
    from shardwise.model.sharding.sharding import Sharding
    from shardwise.run.rank_model.model_source import CachedModelSource
    from shardwise.zoo.resolved import ResolvedModel


@dataclass(frozen=True)
class PricedVariant:
    """A layout with its price in a context. `prediction` is None where it is infeasible; `note`: the reason, or what does not fit."""

    name: str
    context: PricingContext
    layout: Layout
    prediction: Prediction | None
    note: str = ""
    fits: bool = True


@dataclass(frozen=True)
class PricingContext:
    """`model`, by name and sequence length, on `cluster` with `batch_size` samples a step; captured when first needed."""

    model: str
    cluster: Cluster
    batch_size: int
    sequence: int | None = None
    # Where the model has no name: its factory and batch, and the module itself if there is one.
    given_model: ResolvedModel | None = field(default=None, repr=False, compare=False)
    module: nn.Module | None = field(default=None, repr=False, compare=False)
    _pricers: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def resolved(self) -> ResolvedModel:
        if self.given_model is not None:
            return self.given_model
        from shardwise.zoo.resolve import resolve  # here: the command starts fast

        return resolve(self.model, self.batch_size, self.sequence)

    @cached_property
    def source(self) -> CachedModelSource:
        from shardwise.run.rank_model.model_source import CachedModelSource  # here: the command starts fast

        return CachedModelSource.from_model(self.module if self.module is not None else self.resolved.make)

    @cached_property
    def given(self) -> Any:
        """The batch: fake tensors where the model can be captured, since values take memory and time and the graph needs none."""
        from shardwise import api  # here: the command starts fast

        if self.module is not None:
            return self.resolved.batch(self.batch_size)
        return api.batch_shapes(self.resolved, self.batch_size, self.source)

    @cached_property
    def graph(self) -> Graph:
        """The model's graph on the whole batch.

        Raises:
            UsageError: the model cannot be captured, so nothing can be priced.
        """
        try:
            return self.source.capture(self.given, self.resolved.loss, self.batch_size).graph
        except ModelError as error:
            raise UsageError(f"{self.model} cannot be captured ({error}), so no layout can be priced for it") from None

    @property
    def subject(self) -> ModelSubject:
        """The model as functions of `shardwise.api` take it."""
        return self.model, self.resolved.make, self.given, self.resolved.loss

    @property
    def variable_names(self) -> list[str]:
        """Names of all parameters and buffers."""
        return [v.name for v in (*self.graph.parameters, *self.graph.buffers)]

    def with_changes(self, cluster: Cluster | None = None, batch_size: int | None = None, sequence: int | None = None) -> PricingContext:
        """Return the context with changes; the capture is dropped where the model's shapes change."""
        if batch_size is None and sequence is None:
            other = replace(self, cluster=cluster or self.cluster, _pricers={})
            for name in ("resolved", "source", "given", "graph"):
                if name in self.__dict__:
                    other.__dict__[name] = self.__dict__[name]
            return other
        if sequence is not None and self.given_model is not None:
            raise UsageError(f"{self.model} was given as it is, not by name: so it cannot be built for sequence={sequence}")
        size = batch_size or self.batch_size
        return PricingContext(self.model, cluster or self.cluster, size, sequence or self.sequence, self.given_model, self.module)

    def plan(
        self,
        constraints: Sequence[str] = (),
        objective: str = "time",
        layout: Layout | None = None,
        trials: int = 0,
        say: Callable[[str], object] = lambda line: None,
    ) -> Plan:
        """Return the plan that the search chooses, or `layout` as a plan, with shards as patterns. `trials`, `say`: as `PlanRequest`."""
        from shardwise import api  # here: the command starts fast
        from shardwise.plan.ir.patterns import shorten_patterns

        limit = max(0.0, self.cluster.memory_limit_bytes - self.cluster.device.scratch_bytes)
        chosen = api.plan_with_trials(
            self.subject,
            api.PlanRequest(
                self.cluster, layout, constraints, objective, source=self.source, device_memory=limit, trials=trials,
                sequence=self.sequence, say=say,
            ),
        )  # fmt: skip
        if chosen.uncaptured:
            return chosen
        shards = tuple((axis, shorten_patterns(cuts, self.variable_names)) for axis, cuts in chosen.shards)
        return replace(chosen, shards=shards)

    def best_variant(self, name: str, constraints: Sequence[str] = ()) -> PricedVariant:
        """Return the search's choice; without a prediction where nothing fits, or the model could not be captured."""
        try:
            plan = self.plan(constraints)
        except Infeasible as error:
            return PricedVariant(name, self, Layout(), None, _first_clause(error), False)
        return PricedVariant(name, self, plan.layout, plan.prediction, plan.uncaptured)

    def price_plan(self, plan: Plan, name: str) -> PricedVariant:
        """Price the plan itself.

        Raises:
            Infeasible: it does not apply to this cluster or batch size: an edited plan, or one of another model.
        """
        from shardwise.solve.search import check_layout  # here: the command starts fast

        check_layout(plan.layout, self.cluster, self.batch_size)
        priced = self.price(plan.layout, plan, name)
        if priced.prediction is None:
            raise Infeasible(f"{name}: {plan.layout} cannot be on {self.cluster.name} with a batch of {self.batch_size}: {priced.note}")
        return priced

    def price(self, layout: Layout, reference: Plan | None = None, name: str = "", note: str = "") -> PricedVariant:
        """Price `layout`, with the shards and stages of `like` where they apply."""
        from shardwise.cost.step_time.heterogeneous import build_pricer  # here: the command starts fast
        from shardwise.plan.ir.patterns import expand_shards
        from shardwise.solve.search import check_layers, check_layout, price, simulate_time

        cuts = expand_shards(reference.shards, self.variable_names) if reference is not None else {}
        key = tuple(sorted(cuts.items()))
        if key not in self._pricers:
            self._pricers[key] = build_pricer(self.graph, self.cluster, self.batch_size, 2, cuts or None)
        pricer = self._pricers[key]
        stages = reference.stages if reference is not None and reference.layout.num_stages == layout.num_stages else ()
        try:
            check_layout(layout, self.cluster, self.batch_size)
            priced = price(pricer, layout, stages)
            check_layers(pricer, priced)
            priced = simulate_time(pricer, priced)
        except Infeasible as error:
            return PricedVariant(name, self, layout, None, "; ".join(filter(None, (note, _first_clause(error)))), False)
        try:
            pricer.check_memory(layout, priced.prediction)
        except Infeasible:
            have = self.cluster.memory_of(layout.num_ranks) / 2**30
            need = priced.prediction.memory.total / 2**30
            shortage = f"does not fit: {need:.1f} GiB of {have:.1f}"
            return PricedVariant(name, self, layout, priced.prediction, "; ".join(filter(None, (note, shortage))), False)
        return PricedVariant(name, self, layout, priced.prediction, note)

    def sharding(self, plan: Plan) -> Sharding:
        """Return the placements of all values of the model under a plan."""
        return self.source.sharding(plan, self.graph)


def read_plan_in_context(
    file: Path, out: CommandOutput, cluster: str | None = None, sequence: int | None = None
) -> tuple[Plan, PricingContext]:
    """Read a plan and its pricing context. The cluster is `cluster`, or the cluster file next to a plan in a run folder, or the plan's."""
    from shardwise.plan.plan_file import read_plan  # here: the command starts fast
    from shardwise.report.run_folder import MACHINE

    plan, cluster_file = read_plan(file), file.with_name(MACHINE)
    text = cluster or (str(cluster_file) if cluster_file.exists() else plan.cluster)
    return plan, PricingContext(plan.model, options.load_cluster(text, out), plan.batch_size, sequence)


def pricing_context_of_name(model: str, machines: Cluster, batch: int | None, sequence: int | None) -> PricingContext:
    """Return the pricing context of a model by name; without a batch with the model's usual one."""
    check_model_text(model)
    from shardwise.zoo.resolve import resolve  # here: the command starts fast

    name, sequence = name_with_sequence(model, sequence)
    return PricingContext(name, machines, batch or resolve(name, None, sequence).default_batch, sequence)


def name_with_sequence(model: str, sequence: int | None) -> tuple[str, int | None]:
    """Put a zoo model's sequence length into its name, so that a plan file is complete; other models keep it as an option.

    >>> name_with_sequence("gpt-39b", 2048), name_with_sequence("gpt:layers=2", 64), name_with_sequence("hf:config.json", 64)
    (('gpt-39b:sequence=2048', None), ('gpt:layers=2,sequence=64', None), ('hf:config.json', 64))
    """
    if sequence is None or model.startswith("hf:") or ".py" in model:
        return model, sequence
    words = model.partition(":")[2]
    if any(word.partition("=")[0].strip() == "sequence" for word in words.split(",")):
        return model, sequence
    return f"{model}{',' if words else ':'}sequence={sequence}", None


def _first_clause(error: Exception) -> str:
    return str(error).partition(";")[0]
