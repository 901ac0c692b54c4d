"""What each layer costs under each way of cutting it. In: a graph, a cluster, a batch, a number of ranks. Out: a `Layer` a pattern.

A layer is an operator that has weights, multiplies or keeps something for backward; repeated ones are one, with their count. Each is taken
out of its model and priced alone by the planner's own pricer: cut by every label of its factor rule that divides, and whole. What it
sends is what the cut itself asks for, where its neighbours hand on and take what it reads and makes as it lies; `moved` is what comes on
top where they are whole on every rank. The step is one microbatch. Not modelled: products that run as one where they read the same
input (q, k and v), storages that a layer keeps and reads a part of, operands that autocast has narrow already, overlap, and cuts of one
layer by two labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from weft.cluster.cluster import Cluster
from weft.cost.memory.memory import Inventory
from weft.cost.network.network import FACTORS
from weft.cost.operators.operators import OperatorPricer
from weft.cost.operators.parts import Parts, keeps
from weft.cost.operators.placed import placed_sizes
from weft.errors import LayoutError
from weft.model.dims.labels import Meaning, expert_weights, meanings, positions
from weft.model.graph import Graph, Operator, Ref, Tensor, Variable
from weft.model.sharding.axis_problem import AxisProblem, Choice
from weft.model.sharding.axis_values import Given, Others
from weft.model.sharding.sharding import Move, Prices, Sharding, move_collectives
from weft.model.work import batched, differentiable
from weft.ops import Rule, record_of
from weft.plan.axis import EXPERTS, POSITIONS, SAMPLES, axis_of
from weft.plan.layout import Layout
from weft.plan.patterns import pattern_of
from weft.plan.placement import D, P, Placement, R, Shard, is_cut, is_halo

REPLICATED = "whole"
# Kinds of labels by which a layer is cut, and the layout that cuts by them.
LAYOUTS = {
    SAMPLES: "data={n}", "height": "spatial={n}x1", "width": "spatial=1x{n}", "planes": "spatial={n}x1x1", "outputs": "tensor={n}",
    "inputs": "tensor={n}", EXPERTS: "data={n} expert={n}", "heads": "tensor={n}", "features": "tensor={n}", "vocabulary": "tensor={n}",
    "positions": "tensor={n} sequence_parallel=on",
}  # fmt: skip
CONTEXT = "context={n} attention=gather"  # of attention, which gathers keys and values


@dataclass(frozen=True, slots=True)
class Way:
    """A layer cut by `label`, which is `kind`, over the ranks of `layout`; the whole layer on every rank has no label.

    Of one rank and one step: FLOPs forward and backward, bytes that it keeps for backward and no layer before it does, of its weights, and
    that it sends: for its result, for its operands' gradients, to sum its weights' gradients, and where its neighbours are whole.
    Seconds of its kernels, of what it sends in forward and backward, of its weights' sums, and where its neighbours are whole.
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
        """Its seconds beside neighbours that lie as it does."""
        return self.compute_s + self.communication_s + self.gradient_s


@dataclass(frozen=True, slots=True)
class Layer:
    """`count` operators alike at `site`, a pattern; `first` names one of them, `shape` is its result's. `ways`: whole, then each cut that
    divides."""

    site: str
    first: str
    count: int
    operator: str
    shape: tuple[int, ...]
    ways: tuple[Way, ...]


def layers(graph: Graph, cluster: Cluster, batch_size: int, ranks: int, precision: str = "float32") -> tuple[Layer, ...]:
    """Every layer of the model in its order, each over `ranks` ranks in every way there is.

    Raises:
        LayoutError: no ranks. Infeasible: a precision that the devices do not have.
    """
    if ranks < 1:
        raise LayoutError(f"{ranks} ranks share no layer; give 1 or more")
    model = _Model(graph, cluster, batch_size, ranks, precision)
    by_kind: dict[tuple[object, ...], list[Operator]] = {}
    for op in graph.operators:
        shapes = tuple(graph.tensors[v].shape for v in (*op.inputs, *op.outputs))
        by_kind.setdefault((pattern_of(op.site), op.target, shapes, model.keeps_first(op)), []).append(op)
    rows = []
    for (site, *_), members in by_kind.items():
        ways = tuple(model.ways(members[0]))
        if ways[0].flops or ways[0].parameter_bytes or ways[0].kept_bytes:
            one = members[0]
            rows.append(Layer(str(site), one.name, len(members), one.target.split(".")[1], graph.tensors[one.outputs[0]].shape, ways))
    return tuple(rows)


@dataclass
class _Model:
    """A model of which layers are taken out."""

    graph: Graph
    cluster: Cluster
    batch_size: int
    ranks: int
    precision: str

    @cached_property
    def meanings(self) -> Mapping[str, Meaning]:
        return meanings(self.graph, self.graph.rules)

    @cached_property
    def positions(self) -> Mapping[tuple[str, int], frozenset[str]]:
        return positions(self.graph, self.graph.rules)

    @cached_property
    def learned(self) -> set[str]:
        """Values that have a gradient."""
        return differentiable(self.graph)

    @cached_property
    def batched(self) -> set[str]:
        """Values whose size follows the samples."""
        return batched(self.graph)

    @cached_property
    def keepers(self) -> Mapping[tuple[str, str], str]:
        """[storage, copy] -> the first operator that keeps it."""
        inventory = self.inventory
        readers: dict[tuple[str, str], str] = {}
        for op in inventory.graph.operators:
            for value, copy, _ in inventory.kept[op.name].storages:
                readers.setdefault((inventory.root.get(value, value), copy), op.name)
        return readers

    def keeps_first(self, op: Operator) -> tuple[bool, ...]:
        """Of each storage that an operator keeps, whether none before it does."""
        root = self.inventory.root
        return tuple(self.keepers[root.get(value, value), copy] == op.name for value, copy, _ in self.inventory.kept[op.name].storages)

    @cached_property
    def inventory(self) -> Inventory:
        pricer = OperatorPricer(self.graph, self.cluster, self.batch_size)
        return pricer.held_inventory(Layout(precision=self.precision))

    def ways(self, op: Operator) -> Iterator[Way]:
        """Whole, then by label."""
        alone = _Alone.of(self, op)
        yield alone.way(REPLICATED, "", Layout(precision=self.precision))
        rule = self.graph.rules[op.name]
        if rule is None or self.ranks == 1:
            return
        for label in rule.labels:
            kind = self.kind_of(op, rule, label)
            words = CONTEXT if kind == "positions" and record_of(op).kind == "attention" else LAYOUTS[kind]
            layout = Layout.parse(f"{words.format(n=self.ranks)} precision={self.precision}")
            try:  # tokens come from samples to experts, and go back
                cut = next((x for x in rule.labels if self.kind_of(op, rule, x) == SAMPLES), label) if kind == EXPERTS else label
                yield replace(alone.way(kind, cut, layout), label=label)
            except LayoutError:  # the rule does not allow it, or the length does not divide
                continue

    def kind_of(self, op: Operator, rule: Rule, label: str) -> str:
        """What a label stands for: a key of `LAYOUTS`."""
        meaning = self.meanings[op.name]
        if label in meaning.samples:
            return SAMPLES
        rows = [(v, row) for v, row in (*zip(op.inputs, rule.inputs, strict=True), *zip(op.outputs, rule.outputs, strict=True)) if row]
        places = [self.positions.get((v, row.index(label)), frozenset()) for v, row in rows if label in row]
        if (positions := next((kind for kind in POSITIONS if any(kind in place for place in places)), None)) is not None:
            return positions
        if rule.kernels.get(label) == "vocabulary":
            return "vocabulary"
        weights = {v.value for v in self.graph.parameters}
        if label in (meaning.shared or ()):
            if not any(label in row for row in rule.outputs):
                return "inputs"
            stacked = any(len(row) > 2 and row[0] == label for v, row in rows if v in weights)
            return EXPERTS if stacked and any(label in row for v, row in rows if v not in weights and v in op.inputs) else "outputs"
        if label in meaning.features:
            return "heads" if record_of(op).kind == "attention" else "features"
        return "positions"


@dataclass(frozen=True)
class _Alone:
    """One operator as a model of its own, between what makes its operands and a reader of each result."""

    model: _Model
    op: Operator
    graph: Graph

    @classmethod
    def of(cls, model: _Model, op: Operator) -> _Alone:
        full_graph, tensors = model.graph, {v: model.graph.tensors[v] for v in (*op.inputs, *op.outputs)}
        held = {
            kind: tuple(v for v in getattr(full_graph, kind) if v.value in op.inputs) for kind in ("parameters", "buffers", "constants")
        }
        present = {v.value for group in held.values() for v in group}
        inputs: list[Variable] = []
        before: list[Operator] = []
        tensors["unit"], scalar = Tensor((), "float32"), Variable("unit", "unit", Tensor((), "float32"), trainable=True)
        for value in dict.fromkeys(op.inputs):
            if value in present:
                continue
            entering = value
            if value in full_graph.place:
                entering = f"{value}_given"
                tensors[entering] = tensors[value]
                other = Ref("unit") if value in model.learned else 1.0
                before.append(Operator(f"{value}_source", _ADD, (Ref(entering), other), (), (value,), f"{value}/source"))
            inputs.append(Variable(entering, entering, tensors[value], batched=value in model.batched))
        behind = []
        for value in op.outputs:
            if full_graph.last_reader.get(value) is not None or value in (full_graph.loss, *full_graph.outputs):
                tensors[f"{value}_read"] = tensors[value]
                behind.append(Operator(f"{value}_reader", _ADD, (Ref(value), Ref("unit")), (), (f"{value}_read",), f"{value}/reader"))
        read = tuple(f"{value}_read" for value in op.outputs if f"{value}_read" in tensors)
        graph = Graph(
            (*held["parameters"], scalar), held["buffers"], tuple(inputs), held["constants"], (*before, op, *behind), tensors,
            read[0] if read else op.outputs[0], full_graph.batch_size, read[1:],
        )  # fmt: skip
        return cls(model, op, graph)

    def way(self, kind: str, label: str, layout: Layout) -> Way:
        """This layer cut by `label`.

        Raises:
            LayoutError: the rule does not allow it, or the length does not divide.
        """
        beside = self._priced(layout, label, replicated=True)
        apart = beside if kind in (REPLICATED, SAMPLES, EXPERTS) else self._priced(layout, label, replicated=False)
        op, model = self.op, self.model
        at = self.graph.place[op.outputs[0]]
        compute = beside.seconds[0] + beside.seconds[1]
        talk = [float(both[0].sum() + both[1].sum()) for both in ((p.seconds[2], p.seconds[3]) for p in (beside, apart))]
        weights = [(v, beside.ways(v.value)) for v in self.graph.parameters if v.value in op.inputs]
        size = sum(v.tensor.size / ways for v, ways in weights)
        summed = sum(v.tensor.size / ways for v, ways in weights if beside.is_summed(v.value) and v.trainable)
        pricer = beside.pricer
        widths = pricer.devices.widths(layout.precision)
        group = pricer.group(layout, *(axis for axis, n in layout.axes if n > 1))
        share = FACTORS["all_reduce"][0](group.size) if group.size > 1 else 0.0
        forward, backward = beside.sent()
        done = pricer.inventory.works[op.name]
        samples = pricer.samples(layout) / pricer.graph.batch_size if op.outputs[0] in model.batched else 1.0
        ranks = prod(n for axis, n in beside.sizes.items() if not axis_of(axis).cuts_samples)
        return Way(
            kind,
            label,
            str(layout),
            (done.flops + done.backward_flops) * samples / ranks,
            beside.kept(at, model.keepers, model.inventory.root),
            widths.weight * size,
            forward,
            backward,
            share * widths.gradient * summed,
            sum(apart.sent()) - forward - backward,
            float(compute[at]),
            talk[0],
            pricer.collective("all_reduce", widths.gradient * summed, group) if summed else 0.0,
            max(0.0, talk[1] - talk[0]),
        )

    def _priced(self, layout: Layout, label: str, replicated: bool) -> _Priced:
        pricer = OperatorPricer(self.graph, self.model.cluster, self.model.batch_size)
        if not label:
            return _Priced(pricer, layout, self.op, None)
        ((axis, n),) = ((a, n) for a, n in placed_sizes(layout, self.graph.batch_size).items() if n > 1)
        choice = self._choice(axis, n, label)
        sharding = _sharding(self.graph, self.op, axis, n, choice, replicated)
        pricer.place(layout, sharding)
        return _Priced(pricer, layout, self.op, sharding)

    def _choice(self, axis: str, n: int, label: str) -> Choice:
        """How the operator runs where `label` is cut: as summands where it leaves some."""
        error = None
        for word in (label, f"{label}+"):
            problem = AxisProblem(self.graph, axis, n, Prices(), Given({}, {self.op.site: word}), Others())
            try:
                return problem.choices(self.op)[0]
            except LayoutError as refused:
                error = refused
        assert error is not None
        raise error


@dataclass(frozen=True)
class _Priced:
    """One way of placing a layer, priced."""

    pricer: OperatorPricer
    layout: Layout
    op: Operator
    sharding: Sharding | None

    @cached_property
    def parts(self) -> Parts:
        return self.pricer.held_parts(self.layout)

    @cached_property
    def seconds(self) -> tuple[np.ndarray, ...]:
        return self.pricer.operator_seconds(self.layout)

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.sharding.sizes if self.sharding is not None else {}

    def ways(self, value: str) -> int:
        """Pieces of a variable."""
        if self._is_spread(value):
            return min(self.layout.expert, self.pricer.graph.tensors[value].shape[0])
        forms = self.sharding.forms[value] if self.sharding is not None else {}
        return prod(self.sizes[axis] for axis, form in forms.items() if is_cut(form))

    def is_summed(self, value: str) -> bool:
        """Whether the gradient of a variable is summed over the ranks."""
        return self.sharding is not None and value in self.sharding.gradients and not self._is_spread(value)

    def _is_spread(self, value: str) -> bool:
        return self.layout.expert > 1 and value in expert_weights(self.pricer.graph)

    def sent(self) -> tuple[float, float]:
        """Bytes that a rank sends, forward and backward, weights' gradients left out."""
        pricer, layout = self.pricer, self.layout
        parts = [
            FACTORS[one.name][0](pricer.moving(layout, one).size) * size if size else 0.0
            for one, size in zip(self.parts.collectives, pricer.moved_bytes(layout), strict=True)
        ]
        forward, backward = (sum(parts[i] for i in which) for _, which in (self.parts.forward, self.parts.backward))
        return forward, backward

    def kept(self, at: int, keepers: Mapping[tuple[str, str], str], root: Mapping[str, str]) -> float:
        """Bytes that the layer keeps and none before it does."""
        storages = ((s, s.root.split()[0]) for s in self.parts.stored[at])
        mine = [s for s, value in storages if keepers.get((root.get(value, value), s.copy), self.op.name) == self.op.name]
        alone = replace(self.parts, stored=(*self.parts.stored[:at], tuple(mine), *self.parts.stored[at + 1 :]))
        half = self.pricer.devices.is_half(self.layout)
        return keeps(alone, [at], half)[0].at(self.pricer.microbatch(self.layout), self.layout.data)


_ADD = "aten.add.Tensor"


def _sharding(graph: Graph, op: Operator, axis: str, n: int, choice: Choice, replicated: bool) -> Sharding:
    """The sharding of a layer alone; with `replicated` its neighbours' values lie as it wants them, without summands, else whole."""
    forms: dict[str, dict[str, Placement]] = {value: {axis: R} for value in graph.tensors}
    needs: dict[str, tuple[dict[str, Placement | None], ...]] = {o.name: tuple({axis: R} for _ in o.inputs) for o in graph.operators}
    gradients: dict[str, tuple[str, ...]] = {}
    moves: list[Move] = []
    needs[op.name] = tuple({axis: need} for need in choice.needs)
    held = {v.value for v in (*graph.parameters, *graph.buffers)}
    gathers = axis_of(axis).cuts_sequences  # keys and values come in pieces of positions, as queries do
    pieces = next((need for need in choice.needs if is_cut(need) and not is_halo(need)), None)
    for value, need in zip(op.inputs, choice.needs, strict=True):
        if need is None:
            continue
        if value in held:
            forms[value] = {axis: need}
            if need is D:
                gradients[value] = (axis,)
            continue
        lies = Shard(need.dim) if is_halo(need) else need if is_cut(need) else R
        if gathers and pieces is not None and len(graph.tensors[value].shape) > max(2, pieces.dim):
            lies = pieces
        source: Placement = lies if replicated else R
        forms[value] = {axis: source}
        if source is not need and all(m.value != value or m.target is not need for m in moves):
            moves.append(Move(value, op.name, axis, source, need, *move_collectives(source, need)))
    for value, form in zip(op.outputs, choice.makes, strict=True):
        forms[value] = {axis: form}
    for reader in graph.operators:
        for at, value in enumerate(reader.inputs):
            if reader is not op and value in op.outputs and (produced := forms[value][axis]) is not R:
                want = R if produced is P or not replicated else produced
                needs[reader.name] = (*needs[reader.name][:at], {axis: want}, *needs[reader.name][at + 1 :])
                if want is not produced:
                    moves.append(Move(value, reader.name, axis, produced, want, *move_collectives(produced, want)))
    ops = {o.name: {axis: choice.label if o is op else ""} for o in graph.operators}
    return Sharding({axis: n}, ops, forms, needs, gradients, tuple(moves), ())
