"""Meaning of the labels of every operator: samples, features of a weight, image positions, or something else.

Followed from the batched inputs and from the weights through the factor rules. Also: dimensions that are image positions (those along which
windows slide, and all joined with them), and the number of indivisible units of each dimension. Not modeled: operators without a rule,
after which nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd

from shardwise.model.dataflow import cached_on_graph, propagate_backward
from shardwise.model.graph import Graph, Operator
from shardwise.model.union_find import T, UnionFind
from shardwise.model.work import operator_flops
from shardwise.ops import Rule, record_of
from shardwise.ops.rule import HALO, Labels
from shardwise.ops.vocabulary import CostKind, MatmulKind
from shardwise.plan.ir.axis import OUTERMOST, POSITIONS

ValueDim = tuple[str, int]  # a value, and one of its dimensions


@dataclass(frozen=True, slots=True)
class LabelMeaning:
    """Labels of one operator that may be sharded over an axis other than data.

    `samples` are for data axes, unless requested otherwise: sharding them everywhere would be data parallelism under another name.
    `features` come from weights. `weight_labels`: labels of the weights that a product reads, None where it reads none; a product that is
    not sharded on one of them replicates its weight, which is for sample axes only.
    """

    samples: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    weight_labels: frozenset[str] | None = None

    def admits(self, label: str, sequence: bool, samples: bool = False) -> bool:
        """Return whether a tensor axis may shard `label`; with `sequence` also labels that are neither samples nor features, between
        products; with `samples` these as well, in products too."""
        if label in self.samples:
            return samples
        if self.weight_labels is not None and label not in self.weight_labels:
            return False
        return sequence or label in self.features


def label_meanings(graph: Graph, rules: Mapping[str, Rule | None]) -> dict[str, LabelMeaning]:
    """Return, by operator name, the meaning of its labels.

    A weight is a parameter of two or more dimensions that a product or an embedding reads, or a value computed from parameters only (its
    transpose, its direction) and read so; a position table that is only added does not make positions features.
    """
    samples: dict[str, set[int]] = {v.value: {0} for v in graph.inputs if v.batched and v.tensor.shape}
    from_parameters = _derived_weights(graph)
    features = {value: set(range(len(graph.tensors[value].shape))) for value in from_parameters}
    weights = {value for value in (*from_parameters, *(v.value for v in graph.parameters)) if len(graph.tensors[value].shape) > 1}
    meaning_of: dict[str, LabelMeaning] = {}
    for op in graph.operators:
        rule = rules[op.name]
        if rule is None:
            meaning_of[op.name] = LabelMeaning()
            continue
        rows = [(value, row) for value, row in zip(op.inputs, rule.inputs, strict=True) if row is not None]
        reads_weights = _reads_weights(graph, op)
        shared = {label for value, row in rows if reads_weights and value in weights for label in row if label}
        of_samples = {row[dim] for value, row in rows for dim in samples.get(value, ()) if row[dim]}
        of_features = shared | {row[dim] for value, row in rows for dim in features.get(value, ()) if row[dim]}
        for value, row in zip(op.outputs, rule.outputs, strict=True):
            samples[value] = {dim for dim, label in enumerate(row) if label in of_samples}
            features[value] = {dim for dim, label in enumerate(row) if label in of_features} | (
                features[value] if value in from_parameters else set()
            )
        meaning_of[op.name] = LabelMeaning(frozenset(of_samples), frozenset(of_features), frozenset(shared) if shared else None)
    return meaning_of


def _reads_weights(graph: Graph, op: Operator) -> bool:
    return record_of(op).product.is_lookup or operator_flops(op, graph.tensors) > 0


def _derived_weights(graph: Graph) -> set[str]:
    """Return weights that products read and that are computed from parameters only, and their ancestors, the parameters included."""
    state, chain = set(graph.state), list[Operator]()
    for op in graph.operators:
        if op.inputs and state.issuperset(op.inputs):
            state.update(op.outputs)
            chain.append(op)
    outputs = {value for op in chain for value in op.outputs}
    read = {value for op in graph.operators if _reads_weights(graph, op) for value in op.inputs if value in outputs}
    return propagate_backward(chain, read)


def image_positions(graph: Graph, rules: Mapping[str, Rule | None]) -> dict[tuple[str, int], frozenset[str]]:
    """Return, by (value, dimension), which image positions it is, by the kinds of `shardwise.plan.ir.axis`; others are left out."""
    joined, slides = _union_dims(graph, rules), list[tuple[ValueDim, str]]()
    for op, rule in ruled_operators(graph, rules):
        if record_of(op).windows is not None and (first := rule.inputs[0]):
            image = len(first) - 2  # behind samples and channels
            for dim, label in enumerate(first):
                if label in rule.kernels and dim >= 2 and image <= len(POSITIONS):
                    slides.append(((op.inputs[0], dim), POSITIONS[dim - 2 - image]))
                    slides += [((op.inputs[0], dim), OUTERMOST)] * (dim == 2)
    kinds: dict[ValueDim, set[str]] = {}
    for place, kind in slides:
        kinds.setdefault(joined.root(place), set()).add(kind)
    return {place: frozenset(kinds[above]) for place in joined.parent if (above := joined.root(place)) in kinds}


def image_channels(graph: Graph, rules: Mapping[str, Rule | None]) -> frozenset[ValueDim]:
    """Return (value, dimension) that are image channels: of inputs and outputs of convolutions, and all joined with them. Windows that only
    pad (labels of a text) have none."""
    joined = _union_dims(graph, rules)
    slide = [op for op, _ in ruled_operators(graph, rules) if record_of(op).kind == CostKind.CONVOLUTION]
    roots = {joined.root((value, 1)) for op in slide for value in (op.inputs[0], op.outputs[0])}
    return frozenset(place for place in joined.parent if joined.root(place) in roots)


def _union_dims(graph: Graph, rules: Mapping[str, Rule | None]) -> UnionFind[ValueDim]:
    """Return the union-find of dimensions that share a label in some operator."""
    joined = UnionFind[ValueDim]()
    for op, rule in ruled_operators(graph, rules):
        for places in dims_by_label(op, rule).values():
            joined.union(places)
    return joined


@cached_on_graph
def num_units_by_dim(graph: Graph, products: bool) -> dict[ValueDim, int]:
    """Return, by (value, dimension), the number of units into which it can be sharded consistently in all operators that share it: features
    of 8 heads of 64 have 8 units, in any shape. With `products` only operators that multiply count, where there are any: what is between
    them (three parts in a row) is rather gathered. Windows that slide do not join."""
    joined, said = UnionFind[ValueDim](), []
    for op, rule in ruled_operators(graph, graph.rules):
        multiplies = products and operator_flops(op, graph.tensors) > 0
        for label, places in dims_by_label(op, rule).items():
            if rule.kernels.get(label) != HALO:
                joined.union(places)
                units = rule.num_units.get(label, 0)
                said += [((value, dim), multiplies, gcd(graph.tensors[value].shape[dim], units)) for value, dim in places]
    return common_divisors(joined, said)


def common_divisors(union: UnionFind[T], statements: Iterable[tuple[T, bool, int]]) -> dict[T, int]:
    """Return, by element, the greatest common divisor of all numbers stated for its set. `said`: (element, whether the statement has
    precedence, number)."""
    strong: dict[T, int] = {}
    weak: dict[T, int] = {}
    for element, has_precedence, number in statements:
        top, divisors = union.root(element), strong if has_precedence else weak
        divisors[top] = gcd(divisors.get(top, 0), number)
    return {element: strong.get(top) or weak[top] for element in union.parent if (top := union.root(element)) in strong or top in weak}


def ruled_operators(graph: Graph, rules: Mapping[str, Rule | None]) -> Iterator[tuple[Operator, Rule]]:
    """Yield the operators that have a rule, with it."""
    for op in graph.operators:
        if (rule := rules[op.name]) is not None:
            yield op, rule


def labeled_tensors(op: Operator, rule: Rule) -> Iterator[tuple[str, Labels]]:
    """Yield an operator's tensors with their labels."""
    for value, row in (*zip(op.inputs, rule.inputs, strict=True), *zip(op.outputs, rule.outputs, strict=True)):
        if row is not None:
            yield value, row


def dims_with_label(op: Operator, rule: Rule, label: str) -> list[ValueDim]:
    """Return the dimension with a label in each of an operator's tensors that has it."""
    return [(value, row.index(label)) for value, row in labeled_tensors(op, rule) if label in row]


def dims_by_label(op: Operator, rule: Rule) -> dict[str, list[ValueDim]]:
    """Return the dimensions of each label of an operator."""
    dims: dict[str, list[ValueDim]] = {}
    for value, row in labeled_tensors(op, rule):
        for dim, label in enumerate(row):
            if label:
                dims.setdefault(label, []).append((value, dim))
    return dims


def expert_weights(graph: Graph) -> dict[str, str]:
    """Return weights of experts, one matrix each along dimension 0: by value, the product that reads them.

    A product keeps the experts separate, sums over one of a matrix's dimensions and outputs the other. Biases read with rows of experts
    count as well.
    """
    trained = {v.value for v in graph.parameters if v.trainable}
    stacked = {v.value for v in graph.parameters if v.trainable and len(v.tensor.shape) == 3}
    axes: dict[str, str] = {}
    for op in graph.operators:
        weights = [value for value in op.inputs if value in stacked]
        rule = graph.rules[op.name] if weights and record_of(op).product.kind == MatmulKind.BATCHED else None
        if rule is not None:
            rows = dict(zip(op.inputs, rule.inputs, strict=True))
            output = set(rule.outputs[0])
            for value in weights:
                experts, *matrix = rows[value] or ("",)
                read = {label for other, row in rows.items() if other != value for label in row or ()}
                if experts in output and sum(x not in output for x in matrix) == 1 and any(x in output and x not in read for x in matrix):
                    axes[value] = op.name
        elif record_of(op).product.kind == MatmulKind.GROUPED:
            axes.update(dict.fromkeys(trained.intersection(op.inputs[2:]), op.name))
    return axes
