"""Cost of each layer under each of its shardings. In: a graph, a cluster, a batch, a number of ranks. Out: a `Layer` per pattern.

A layer is an operator that has weights, multiplies or saves tensors for backward; repeated ones are one, with their count. Each is isolated
from its model and priced by the planner's own pricer: sharded by every label of its factor rule that divides, and replicated. Its
communication is that of the sharding itself, with neighbours that produce and read values in its placements; `moved` is the additional
redistribution if they are replicated. The step is one microbatch. Not modelled: products that run as one because they read the same
input (q, k and v), storages that a layer saves and reads a part of, operands that autocast has cast already, overlap, and shardings of
one layer by two labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from shardwise.cluster.cluster import Cluster
from shardwise.cost.memory.memory import Inventory
from shardwise.cost.network.network import FACTORS
from shardwise.cost.operators.operators import OperatorPricer
from shardwise.cost.operators.sharded_inventory import ShardedInventory, saved_by_operator
from shardwise.cost.operators.sharding_choice import placement_axis_sizes
from shardwise.errors import LayoutError
from shardwise.model.dims.labels import LabelMeaning, expert_weights, image_positions, label_meanings
from shardwise.model.gradients import differentiable_values
from shardwise.model.graph import Graph, Operator, Ref, Tensor, Variable
from shardwise.model.sharding.axis_problem import AxisProblem, OperatorStrategy
from shardwise.model.sharding.axis_values import FixedShards, OtherAxes
from shardwise.model.sharding.sharding import Prices, Redistribution, Sharding, redistribution_collectives
from shardwise.model.work import values_following_batch
from shardwise.ops import Rule, record_of
from shardwise.ops.vocabulary import CostKind
from shardwise.plan.ir.axis import EXPERTS, POSITIONS, SAMPLES, axis_of
from shardwise.plan.ir.patterns import pattern_of
from shardwise.plan.ir.placement import D, P, Placement, R, Shard, is_halo, is_sharded
from shardwise.plan.layout import Layout

REPLICATED = "whole"
# Kinds of labels by which a layer is sharded, and the layout that shards by them.
LAYOUTS = {
    SAMPLES: "data={n}", "height": "spatial={n}x1", "width": "spatial=1x{n}", "planes": "spatial={n}x1x1", "outputs": "tensor={n}",
    "inputs": "tensor={n}", EXPERTS: "data={n} expert={n}", "heads": "tensor={n}", "features": "tensor={n}", "vocabulary": "tensor={n}",
    "positions": "tensor={n} sequence_parallel=on",
}  # fmt: skip
CONTEXT = "context={n} attention=gather"  # for attention, which all-gathers keys and values


@dataclass(frozen=True, slots=True)
class LayerSharding:
    """A layer sharded by `label` of `kind` over the ranks of `layout`; the replicated layer has no label.

    Per rank and step: FLOPs forward and backward; bytes that it saves for backward and no earlier layer does, of its weights, and
    sent: for its result, for its operands' gradients, to reduce its weights' gradients, and to neighbours that are replicated.
    Seconds of its kernels, of communication in forward and backward, of gradient reduction, and of replicated neighbours.
    """

    kind: str
    label: str
    layout: str
    flops: float
    kept_bytes: float
    parameter_bytes: float
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    gradient_bytes: float = 0.0
    moved_bytes: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    gradient_s: float = 0.0
    moved_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds with neighbours in matching placements."""
        return self.compute_s + self.communication_s + self.gradient_s


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that occurs `count` times at `site`, a pattern; `first` is the name of one operator, `shape` its result's. `shardings`:
    replicated, then by each label that divides."""

    site: str
    first: str
    count: int
    operator: str
    shape: tuple[int, ...]
    shardings: tuple[LayerSharding, ...]


def price_layers(graph: Graph, cluster: Cluster, batch_size: int, ranks: int, precision: str = "float32") -> tuple[Layer, ...]:
    """Price every layer of the model in order, each over `ranks` ranks in every sharding.

    Raises:
        LayoutError: no ranks. Infeasible: a precision that the devices lack.
    """
    if ranks < 1:
        raise LayoutError(f"{ranks} ranks share no layer; give 1 or more")
    model = _LayerPricer(graph, cluster, batch_size, ranks, precision)
    by_kind: dict[tuple[object, ...], list[Operator]] = {}
    for op in graph.operators:
        shapes = tuple(graph.tensors[v].shape for v in (*op.inputs, *op.outputs))
        by_kind.setdefault((pattern_of(op.site), op.target, shapes, model.is_first_saver(op)), []).append(op)
    rows = []
    for (site, *_), members in by_kind.items():
        shardings = tuple(model.price_shardings(members[0]))
        if shardings[0].flops or shardings[0].parameter_bytes or shardings[0].kept_bytes:
            op = members[0]
            rows.append(Layer(str(site), op.name, len(members), op.target.split(".")[1], graph.tensors[op.outputs[0]].shape, shardings))
    return tuple(rows)


@dataclass
class _LayerPricer:
    """A model whose layers are isolated and priced."""

    graph: Graph
    cluster: Cluster
    batch_size: int
    ranks: int
    precision: str

    @cached_property
    def meanings(self) -> Mapping[str, LabelMeaning]:
        return label_meanings(self.graph, self.graph.rules)

    @cached_property
    def positions(self) -> Mapping[tuple[str, int], frozenset[str]]:
        return image_positions(self.graph, self.graph.rules)

    @cached_property
    def differentiable(self) -> set[str]:
        """Values with a gradient."""
        return differentiable_values(self.graph)

    @cached_property
    def batched(self) -> set[str]:
        """Values whose size scales with the batch."""
        return values_following_batch(self.graph)

    @cached_property
    def first_savers(self) -> Mapping[tuple[str, str], str]:
        """[storage, copy] -> the first operator that saves it."""
        inventory = self.inventory
        readers: dict[tuple[str, str], str] = {}
        for op in inventory.graph.operators:
            for value, copy, _ in inventory.saved[op.name].storages:
                readers.setdefault((inventory.storage_root.get(value, value), copy), op.name)
        return readers

    def is_first_saver(self, op: Operator) -> tuple[bool, ...]:
        """Return, for each storage that an operator saves, whether no earlier operator does."""
        root = self.inventory.storage_root
        return tuple(
            self.first_savers[root.get(value, value), copy] == op.name for value, copy, _ in self.inventory.saved[op.name].storages
        )

    @cached_property
    def inventory(self) -> Inventory:
        pricer = OperatorPricer(self.graph, self.cluster, self.batch_size)
        return pricer.inventory_in_precision(Layout(precision=self.precision))

    def price_shardings(self, op: Operator) -> Iterator[LayerSharding]:
        """Yield the prices of an operator replicated, then sharded by each label."""
        isolated = _IsolatedLayer.of(self, op)
        yield isolated.price_sharding(REPLICATED, "", Layout(precision=self.precision))
        rule = self.graph.rules[op.name]
        if rule is None or self.ranks == 1:
            return
        for label in rule.labels:
            kind = self.label_kind(op, rule, label)
            template = CONTEXT if kind == "positions" and record_of(op).kind == CostKind.ATTENTION else LAYOUTS[kind]
            layout = Layout.parse(f"{template.format(n=self.ranks)} precision={self.precision}")
            try:  # expert parallelism: tokens are dispatched from sample shards to experts and combined back
                sharded_label = (
                    next((x for x in rule.labels if self.label_kind(op, rule, x) == SAMPLES), label) if kind == EXPERTS else label
                )
                yield replace(isolated.price_sharding(kind, sharded_label, layout), label=label)
            except LayoutError:  # the rule does not allow it, or the length does not divide
                continue

    def label_kind(self, op: Operator, rule: Rule, label: str) -> str:
        """Return the kind of a label: a key of `LAYOUTS`."""
        meaning = self.meanings[op.name]
        if label in meaning.samples:
            return SAMPLES
        rows = [(v, row) for v, row in (*zip(op.inputs, rule.inputs, strict=True), *zip(op.outputs, rule.outputs, strict=True)) if row]
        position_kinds = [self.positions.get((v, row.index(label)), frozenset()) for v, row in rows if label in row]
        if (positions := next((kind for kind in POSITIONS if any(kind in kinds for kinds in position_kinds)), None)) is not None:
            return positions
        if rule.kernels.get(label) == "vocabulary":
            return "vocabulary"
        weights = {v.value for v in self.graph.parameters}
        if label in (meaning.weight_labels or ()):
            if not any(label in row for row in rule.outputs):
                return "inputs"
            stacked = any(len(row) > 2 and row[0] == label for v, row in rows if v in weights)
            return EXPERTS if stacked and any(label in row for v, row in rows if v not in weights and v in op.inputs) else "outputs"
        if label in meaning.features:
            return "heads" if record_of(op).kind == CostKind.ATTENTION else "features"
        return "positions"


@dataclass(frozen=True)
class _IsolatedLayer:
    """One operator as a separate graph, between producers of its operands and a reader of each result."""

    model: _LayerPricer
    op: Operator
    graph: Graph

    @classmethod
    def of(cls, model: _LayerPricer, op: Operator) -> _IsolatedLayer:
        model_graph, tensors = model.graph, {v: model.graph.tensors[v] for v in (*op.inputs, *op.outputs)}
        variables = {
            kind: tuple(v for v in getattr(model_graph, kind) if v.value in op.inputs) for kind in ("parameters", "buffers", "constants")
        }
        known = {v.value for group in variables.values() for v in group}
        graph_inputs: list[Variable] = []
        producers: list[Operator] = []
        tensors["unit"], scalar = Tensor((), "float32"), Variable("unit", "unit", Tensor((), "float32"), trainable=True)
        for value in dict.fromkeys(op.inputs):
            if value in known:
                continue
            entering = value
            if value in model_graph.producer_index:
                entering = f"{value}_given"
                tensors[entering] = tensors[value]
                addend = Ref("unit") if value in model.differentiable else 1.0
                producers.append(Operator(f"{value}_source", _ADD, (Ref(entering), addend), (), (value,), f"{value}/source"))
            graph_inputs.append(Variable(entering, entering, tensors[value], batched=value in model.batched))
        readers = []
        for value in op.outputs:
            if model_graph.last_reader_index.get(value) is not None or value in (model_graph.loss, *model_graph.outputs):
                tensors[f"{value}_read"] = tensors[value]
                readers.append(Operator(f"{value}_reader", _ADD, (Ref(value), Ref("unit")), (), (f"{value}_read",), f"{value}/reader"))
        results = tuple(f"{value}_read" for value in op.outputs if f"{value}_read" in tensors)
        graph = Graph(
            (*variables["parameters"], scalar), variables["buffers"], tuple(graph_inputs), variables["constants"],
            (*producers, op, *readers), tensors, results[0] if results else op.outputs[0], model_graph.batch_size, results[1:],
        )  # fmt: skip
        return cls(model, op, graph)

    def price_sharding(self, kind: str, label: str, layout: Layout) -> LayerSharding:
        """Price this layer sharded by `label`.

        Raises:
            LayoutError: the rule does not allow it, or the length does not divide.
        """
        alike = self._place(layout, label, has_aligned_neighbours=True)
        replicated = alike if kind in (REPLICATED, SAMPLES, EXPERTS) else self._place(layout, label, has_aligned_neighbours=False)
        op, model = self.op, self.model
        index = self.graph.producer_index[op.outputs[0]]
        compute = alike.seconds[0] + alike.seconds[1]
        collective_s = [float(pair[0].sum() + pair[1].sum()) for pair in ((p.seconds[2], p.seconds[3]) for p in (alike, replicated))]
        weights = [(v, alike.num_shards(v.value)) for v in self.graph.parameters if v.value in op.inputs]
        size = sum(v.tensor.size / ways for v, ways in weights)
        num_reduced = sum(v.tensor.size / ways for v, ways in weights if alike.is_reduced(v.value) and v.trainable)
        pricer = alike.pricer
        widths = pricer.devices.widths(layout)
        group = pricer.group(layout, *(axis for axis, n in layout.axes if n > 1))
        ring_factor = FACTORS["all_reduce"][0](group.size) if group.size > 1 else 0.0
        forward, backward = alike.sent_bytes()
        work = pricer.inventory.works[op.name]
        samples = pricer.samples(layout) / pricer.graph.batch_size if op.outputs[0] in model.batched else 1.0
        ranks = prod(n for axis, n in alike.sizes.items() if not axis_of(axis).shards_samples)
        return LayerSharding(
            kind,
            label,
            str(layout),
            (work.flops + work.backward_flops) * samples / ranks,
            alike.saved_bytes(index, model.first_savers, model.inventory.storage_root),
            widths.weight * size,
            forward,
            backward,
            ring_factor * widths.gradient * num_reduced,
            sum(replicated.sent_bytes()) - forward - backward,
            float(compute[index]),
            collective_s[0],
            pricer.collective("all_reduce", widths.gradient * num_reduced, group) if num_reduced else 0.0,
            max(0.0, collective_s[1] - collective_s[0]),
        )

    def _place(self, layout: Layout, label: str, has_aligned_neighbours: bool) -> _PricedLayer:
        pricer = OperatorPricer(self.graph, self.model.cluster, self.model.batch_size)
        if not label:
            return _PricedLayer(pricer, layout, self.op, None)
        ((axis, n),) = ((a, n) for a, n in placement_axis_sizes(layout, self.graph.batch_size).items() if n > 1)
        choice = self._strategy(axis, n, label)
        sharding = _isolated_sharding(self.graph, self.op, axis, n, choice, has_aligned_neighbours)
        pricer.set_sharding(layout, sharding)
        return _PricedLayer(pricer, layout, self.op, sharding)

    def _strategy(self, axis: str, n: int, label: str) -> OperatorStrategy:
        """Return the operator's strategy with `label` sharded: with partial sums as results if it produces them."""
        error = None
        for text in (label, f"{label}+"):
            problem = AxisProblem(self.graph, axis, n, Prices(), FixedShards({}, {self.op.site: text}), OtherAxes())
            try:
                return problem.strategies(self.op)[0]
            except LayoutError as refused:
                error = refused
        assert error is not None
        raise error


@dataclass(frozen=True)
class _PricedLayer:
    """A layer under one sharding, priced."""

    pricer: OperatorPricer
    layout: Layout
    op: Operator
    sharding: Sharding | None

    @cached_property
    def inventory(self) -> ShardedInventory:
        return self.pricer.cast_sharded_inventory(self.layout)

    @cached_property
    def seconds(self) -> tuple[np.ndarray, ...]:
        return self.pricer.operator_seconds(self.layout)

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.sharding.sizes if self.sharding is not None else {}

    def num_shards(self, value: str) -> int:
        """Return the number of shards of a variable."""
        if self._is_expert_sharded(value):
            return min(self.layout.expert, self.pricer.graph.tensors[value].shape[0])
        forms = self.sharding.placements[value] if self.sharding is not None else {}
        return prod(self.sizes[axis] for axis, form in forms.items() if is_sharded(form))

    def is_reduced(self, value: str) -> bool:
        """Return whether the gradient of a variable is reduced over the ranks."""
        return self.sharding is not None and value in self.sharding.gradient_axes and not self._is_expert_sharded(value)

    def _is_expert_sharded(self, value: str) -> bool:
        return self.layout.expert > 1 and value in expert_weights(self.pricer.graph)

    def sent_bytes(self) -> tuple[float, float]:
        """Return the bytes that a rank sends, forward and backward, without weights' gradients."""
        pricer, layout = self.pricer, self.layout
        sent_bytes = [
            FACTORS[collective.name][0](pricer.collective_group(layout, collective).size) * size if size else 0.0
            for collective, size in zip(self.inventory.collectives, pricer.collective_bytes(layout), strict=True)
        ]
        forward, backward = (sum(sent_bytes[i] for i in entries) for _, entries in (self.inventory.forward, self.inventory.backward))
        return forward, backward

    def saved_bytes(self, at: int, keepers: Mapping[tuple[str, str], str], root: Mapping[str, str]) -> float:
        """Return the bytes that the layer saves and no earlier layer does."""
        storages = ((s, s.root.split()[0]) for s in self.inventory.saved[at])
        first_saved = [s for s, value in storages if keepers.get((root.get(value, value), s.copy), self.op.name) == self.op.name]
        inventory = replace(self.inventory, saved=(*self.inventory.saved[:at], tuple(first_saved), *self.inventory.saved[at + 1 :]))
        half = self.pricer.devices.is_half(self.layout)
        return saved_by_operator(inventory, [at], half)[0].at(self.pricer.microbatch(self.layout), self.layout.data)


_ADD = "aten.add.Tensor"


def _isolated_sharding(graph: Graph, op: Operator, axis: str, n: int, choice: OperatorStrategy, has_aligned_neighbours: bool) -> Sharding:
    """Return the sharding of an isolated layer. `has_aligned_neighbours`: neighbouring values are in its own placements, without partial
    sums; else they are replicated."""
    forms: dict[str, dict[str, Placement]] = {value: {axis: R} for value in graph.tensors}
    needs: dict[str, tuple[dict[str, Placement | None], ...]] = {o.name: tuple({axis: R} for _ in o.inputs) for o in graph.operators}
    gradients: dict[str, tuple[str, ...]] = {}
    moves: list[Redistribution] = []
    needs[op.name] = tuple({axis: need} for need in choice.input_placements)
    variables = {v.value for v in (*graph.parameters, *graph.buffers)}
    gathers = axis_of(axis).shards_sequences  # keys and values are sharded by positions, as queries are
    sequence_shard = next((need for need in choice.input_placements if is_sharded(need) and not is_halo(need)), None)
    for value, need in zip(op.inputs, choice.input_placements, strict=True):
        if need is None:
            continue
        if value in variables:
            forms[value] = {axis: need}
            if need is D:
                gradients[value] = (axis,)
            continue
        placement = Shard(need.dim) if is_halo(need) else need if is_sharded(need) else R
        if gathers and sequence_shard is not None and len(graph.tensors[value].shape) > max(2, sequence_shard.dim):
            placement = sequence_shard
        produced_as: Placement = placement if has_aligned_neighbours else R
        forms[value] = {axis: produced_as}
        if produced_as is not need and all(m.value != value or m.target is not need for m in moves):
            moves.append(Redistribution(value, op.name, axis, produced_as, need, *redistribution_collectives(produced_as, need)))
    for value, output_placement in zip(op.outputs, choice.output_placements, strict=True):
        forms[value] = {axis: output_placement}
    for reader in graph.operators:
        for index, value in enumerate(reader.inputs):
            if reader is not op and value in op.outputs and (produced := forms[value][axis]) is not R:
                wanted = R if produced is P or not has_aligned_neighbours else produced
                needs[reader.name] = (*needs[reader.name][:index], {axis: wanted}, *needs[reader.name][index + 1 :])
                if wanted is not produced:
                    moves.append(Redistribution(value, reader.name, axis, produced, wanted, *redistribution_collectives(produced, wanted)))
    ops = {o.name: {axis: choice.label if o is op else ""} for o in graph.operators}
    return Sharding({axis: n}, ops, forms, needs, gradients, tuple(moves), ())
