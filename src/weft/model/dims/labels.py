"""What the labels of every operator stand for: samples, features of a weight, positions of an image, or something else.

In: a graph and its factor rules. Out: for every operator the labels that carry samples and those that carry features, followed from
the batched inputs and from the weights through the rules; and the dimensions that are positions of an image: those along which windows
slide, and whatever lies as they do, before and behind; and how many entries of a dimension stay together wherever it goes. Not modelled:
operators without a rule, behind which nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd

from weft.model.graph import Graph, Operator
from weft.model.joined import Joined, T
from weft.model.work import operator_flops
from weft.ops import Rule, record_of
from weft.ops.rule import HALO, Labels
from weft.plan.axis import OUTERMOST, POSITIONS

Dim = tuple[str, int]  # a value, and one of its dimensions


@dataclass(frozen=True, slots=True)
class Meaning:
    """Labels of one operator that may be cut over an axis other than data.

    `samples` belong to data alone, unless they are asked for: cutting them everywhere would be data parallelism under another name.
    `features` come from weights. `shared`: the labels of the weights that a product reads, None where it reads none; a product that is not
    cut by one of them leaves its weight whole on every rank, which is for samples alone.
    """

    samples: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    shared: frozenset[str] | None = None

    def admits(self, label: str, sequence: bool, samples: bool = False) -> bool:
        """Whether a tensor axis may cut `label`; with `sequence` also what is neither sample nor feature, around the products; with
        `samples` these as well, in products too."""
        if label in self.samples:
            return samples
        if self.shared is not None and label not in self.shared:
            return False
        return sequence or label in self.features


def meanings(graph: Graph, rules: Mapping[str, Rule | None]) -> dict[str, Meaning]:
    """[operator's name] -> what its labels mean.

    A weight is a parameter of two or more dimensions that a product or an embedding reads, or what is made of parameters alone (its
    transpose, its direction) and read so; a table of positions that is only added makes no feature of the position.
    """
    samples: dict[str, set[int]] = {v.value: {0} for v in graph.inputs if v.batched and v.tensor.shape}
    from_parameters = _made_of_parameters(graph)
    features = {value: set(range(len(graph.tensors[value].shape))) for value in from_parameters}
    weights = {value for value in (*from_parameters, *(v.value for v in graph.parameters)) if len(graph.tensors[value].shape) > 1}
    meaning_of: dict[str, Meaning] = {}
    for op in graph.operators:
        rule = rules[op.name]
        if rule is None:
            meaning_of[op.name] = Meaning()
            continue
        rows = [(value, row) for value, row in zip(op.inputs, rule.inputs, strict=True) if row is not None]
        product = _reads_weights(graph, op)
        shared = {label for value, row in rows if product and value in weights for label in row if label}
        of_samples = {row[dim] for value, row in rows for dim in samples.get(value, ()) if row[dim]}
        of_features = shared | {row[dim] for value, row in rows for dim in features.get(value, ()) if row[dim]}
        for value, row in zip(op.outputs, rule.outputs, strict=True):
            samples[value] = {dim for dim, label in enumerate(row) if label in of_samples}
            features[value] = {dim for dim, label in enumerate(row) if label in of_features} | (
                features[value] if value in from_parameters else set()
            )
        meaning_of[op.name] = Meaning(frozenset(of_samples), frozenset(of_features), frozenset(shared) if shared else None)
    return meaning_of


def _reads_weights(graph: Graph, op: Operator) -> bool:
    return record_of(op).looks_up or operator_flops(op, graph.tensors) > 0


def _made_of_parameters(graph: Graph) -> set[str]:
    """Weights that products read and that are made of parameters alone, and what they are made of, the parameters themselves too."""
    state = {v.value for v in (*graph.parameters, *graph.buffers)}
    chain: list[Operator] = []
    for op in graph.operators:
        if op.inputs and state.issuperset(op.inputs):
            state.update(op.outputs)
            chain.append(op)
    outputs = {value for op in chain for value in op.outputs}
    read = {value for op in graph.operators if _reads_weights(graph, op) for value in op.inputs if value in outputs}
    for op in reversed(chain):
        if read.intersection(op.outputs):
            read.update(op.inputs)
    return read


def positions(graph: Graph, rules: Mapping[str, Rule | None]) -> dict[tuple[str, int], frozenset[str]]:
    """[value, dimension] -> which of an image's positions it is, by the kinds of `weft.plan.axis`; others are left out."""
    joined, slides = _joined_dims(graph, rules), list[tuple[Dim, str]]()
    for op in graph.operators:
        rule = rules[op.name]
        if rule is not None and record_of(op).windows is not None and (first := rule.inputs[0]):
            image = len(first) - 2  # behind samples and channels
            for dim, label in enumerate(first):
                if label in rule.kernels and dim >= 2 and image <= len(POSITIONS):
                    slides.append(((op.inputs[0], dim), POSITIONS[dim - 2 - image]))
                    slides += [((op.inputs[0], dim), OUTERMOST)] * (dim == 2)
    kinds: dict[Dim, set[str]] = {}
    for place, kind in slides:
        kinds.setdefault(joined.root(place), set()).add(kind)
    return {place: frozenset(kinds[above]) for place in joined.parent if (above := joined.root(place)) in kinds}


def channels(graph: Graph, rules: Mapping[str, Rule | None]) -> frozenset[Dim]:
    """(value, dimension) that is channels of an image, of what convolutions read or make, and whatever lies as these do. Windows of what is
    only padded (labels of a text) have none."""
    joined = _joined_dims(graph, rules)
    slide = [op for op in graph.operators if rules[op.name] is not None and record_of(op).kind == "convolution"]
    roots = {joined.root((value, 1)) for op in slide for value in (op.inputs[0], op.outputs[0])}
    return frozenset(place for place in joined.parent if joined.root(place) in roots)


def _joined_dims(graph: Graph, rules: Mapping[str, Rule | None]) -> Joined[Dim]:
    """Dimensions that any operator has one label for."""
    joined = Joined[Dim]()
    for op in graph.operators:
        rule = rules[op.name]
        for places in by_label(op, rule).values() if rule is not None else ():
            joined.add(places)
    return joined


def granules(graph: Graph, rules: Mapping[str, Rule | None], *, products: bool) -> dict[Dim, int]:
    """[value, dimension] -> into how many units it can be cut so that the same cut goes through all operators that share it: of features
    of 8 heads of 64 these are 8, however they are shaped. With `products` only operators that multiply have a say, where one does: what
    lies between (three parts in a row) is rather put together. Windows that slide do not join."""
    joined, said = Joined[Dim](), []
    for op in graph.operators:
        rule = rules[op.name]
        if rule is None:
            continue
        multiplies = products and operator_flops(op, graph.tensors) > 0
        for label, places in by_label(op, rule).items():
            if rule.kernels.get(label) != HALO:
                joined.add(places)
                units = rule.units.get(label, 0)
                said += [((value, dim), multiplies, gcd(graph.tensors[value].shape[dim], units)) for value, dim in places]
    return common(joined, said)


def common(joined: Joined[T], said: Iterable[tuple[T, bool, int]]) -> dict[T, int]:
    """[one] -> the greatest number that divides all that is said of whatever is joined with it. `said`: of whom, whether it has a say
    before others, the number."""
    strong: dict[T, int] = {}
    weak: dict[T, int] = {}
    for one, first, number in said:
        above, counts = joined.root(one), strong if first else weak
        counts[above] = gcd(counts.get(above, 0), number)
    return {one: strong.get(above) or weak[above] for one in joined.parent if (above := joined.root(one)) in strong or above in weak}


def labelled(op: Operator, rule: Rule) -> Iterator[tuple[str, Labels]]:
    """An operator's tensors with their labels."""
    for value, row in (*zip(op.inputs, rule.inputs, strict=True), *zip(op.outputs, rule.outputs, strict=True)):
        if row is not None:
            yield value, row


def places_of(op: Operator, rule: Rule, label: str) -> list[Dim]:
    """The dimension that has a label, of each of an operator's tensors where one has it."""
    return [(value, row.index(label)) for value, row in labelled(op, rule) if label in row]


def by_label(op: Operator, rule: Rule) -> dict[str, list[Dim]]:
    """The dimensions that have each label of an operator."""
    dims: dict[str, list[Dim]] = {}
    for value, row in labelled(op, rule):
        for dim, label in enumerate(row):
            if label:
                dims.setdefault(label, []).append((value, dim))
    return dims


def expert_weights(graph: Graph) -> dict[str, str]:
    """Weights of experts, one matrix each in dimension 0, by value: the product that reads them.

    A product keeps the experts apart, sums over one of a matrix's dimensions and makes the other. What is read with rows of experts, biases
    too, is theirs.
    """
    trained = {v.value for v in graph.parameters if v.trainable}
    stacked = {v.value for v in graph.parameters if v.trainable and len(v.tensor.shape) == 3}
    axes: dict[str, str] = {}
    for op in graph.operators:
        weights = [value for value in op.inputs if value in stacked]
        rule = graph.rules[op.name] if weights and record_of(op).product == "stacked" else None
        if rule is not None:
            rows = dict(zip(op.inputs, rule.inputs, strict=True))
            output = set(rule.outputs[0])
            for value in weights:
                experts, *matrix = rows[value] or ("",)
                read = {label for other, row in rows.items() if other != value for label in row or ()}
                if experts in output and sum(x not in output for x in matrix) == 1 and any(x in output and x not in read for x in matrix):
                    axes[value] = op.name
        elif record_of(op).product == "grouped":
            axes.update(dict.fromkeys(trained.intersection(op.inputs[2:]), op.name))
    return axes
