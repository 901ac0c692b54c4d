"""What of a graph can be put together from parts of its batch. In: a graph of a batch. Out: how each value of a part lies to the whole's.

A batch may be divided into parts that are computed one after another (microbatches). A value of a part then has a placement, as
along a mesh axis (`plan/placement`), or none:

    Replicate  the same in every part: it does not depend on samples, or is counted over the whole batch before the step
    Shard(2)   the part's samples lie in dimension 2
    Partial    a summand: the parts' add up to the whole's
    MIXED      made of several samples of the part in another way, so that the whole's cannot be had from the parts'

What is a summand and follows from the batch alone (a count of targets, a sum of weights) is a *total*: it can be had of the whole batch
before the step, and what reads it reads that. So a loss that is a sum over samples divided by such a count is a summand itself. Where a
trained value is mixed, samples are *coupled*, and microbatches change what is trained: batch norm, contrastive losses.

Not modelled: totals that are no sums (the largest of a batch).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weft.model.graph import Graph, Operator, takes_statistics, writes_buffer, written_buffers
from weft.ops import Rule, draws, record_of
from weft.ops.linear import each, sums, together
from weft.ops.rule import MIXING
from weft.plan.placement import P, Placement, R, Shard, is_shard

MIXED = None
Form = Placement | None


@dataclass(frozen=True, slots=True)
class Coupling:
    """An operator that makes what it makes of several samples together, and in which way."""

    site: str
    why: str


def local_statistics(graph: Graph) -> tuple[Coupling, ...]:
    """Where `batch_norm=local` trains something else than the whole batch."""
    why = "takes statistics over each replica's samples"
    return tuple(Coupling(op.site, why) for op in graph.operators if record_of(op).over_samples and takes_statistics(op))


def coupling_words(coupled: Sequence[Coupling]) -> str:
    """Where microbatches differ from the whole batch, in words; empty where they do not.

    >>> coupling_words([Coupling("norm/batch_norm", "takes statistics over samples"), Coupling("b", "")])
    'norm/batch_norm takes statistics over samples (and 1 more)'
    """
    if not coupled:
        return ""
    more = f" (and {len(coupled) - 1} more)" if len(coupled) > 1 else ""
    return f"{coupled[0].site} {coupled[0].why}{more}"


def microbatch_words(coupled: Sequence[Coupling]) -> str:
    """That microbatches change what is trained, and where, in one line; empty where they do not."""
    if not coupled:
        return ""
    return (
        f"microbatches change what is trained: {coupling_words(coupled)}, in each microbatch by itself; "
        "every other axis is exact, and microbatches=1 is the step on the whole batch"
    )


@dataclass(frozen=True)
class Additive:
    """`forms`: of every value. `averages`: operators whose summands are means, so that each part counts by its samples.

    `totals`: values that are summed over the batch before the step. `coupled`: where parts of the batch differ from the whole.
    """

    forms: Mapping[str, Form]
    averages: frozenset[str]
    totals: frozenset[str]
    coupled: tuple[Coupling, ...]


def additive(graph: Graph, part: Graph | None = None) -> Additive:
    """Follow the samples of a batch (two at least) through a graph that ends in a loss.

    `part`: the same operators for a part of the batch; what follows the samples in size alone (`torch.ones(len(x))`) is seen by it.
    """
    followed = _Followed(graph, part)
    for op in graph.operators:
        followed.through(op)
    reached = _behind(graph)
    coupled = tuple(Coupling(op.site, why) for op, why in followed.coupled if reached.intersection(op.outputs))
    written = [v.name for v in graph.buffers if v.value in written_buffers(graph)]
    if written and not coupled:
        coupled = (Coupling(written[0], "is written in every microbatch"),)
    return Additive(followed.forms, frozenset(followed.averages), frozenset(followed.totals), coupled)


def _behind(graph: Graph) -> set[str]:
    """The loss and every value that it is made of."""
    reached = {graph.loss}
    for op in reversed(graph.operators):
        if reached.intersection(op.outputs):
            reached.update(op.inputs)
    return reached


@dataclass
class _Followed:
    graph: Graph
    part: Graph | None = None
    forms: dict[str, Form] = field(default_factory=dict)
    even: dict[str, frozenset[int]] = field(default_factory=dict)  # of what is replicated: dimensions along which it is alike everywhere
    averages: set[str] = field(default_factory=set)
    totals: set[str] = field(default_factory=set)
    coupled: list[tuple[Operator, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.placed = {v.value: v for v in (*self.graph.parameters, *self.graph.buffers)}
        self.forms.update({v.value: R for v in self.graph.variables})
        self.forms.update({v.value: Shard(0) for v in self.graph.inputs if v.batched})

    def through(self, op: Operator) -> None:
        """Tell what an operator makes."""
        forms = [self.forms[v] for v in op.inputs]
        rule = self.graph.rules[op.name]
        if writes_buffer(op, self.placed):
            forms_out: list[Form] = [R if all(form is R for form in forms) else MIXED] * len(op.outputs)
        elif all(form is R for form in forms):
            forms_out = [R] * len(op.outputs)
            self._shared_dims(op, rule)
        elif not any(is_shard(form) for form in forms):
            forms_out = self._combined(op, forms)
        elif MIXED in forms:
            forms_out = [MIXED] * len(op.outputs)
        elif P in forms:
            forms_out = self._mixed(op, "puts single samples beside what is made of all")
        else:
            forms_out = self._rows(op, rule, forms)
        for value, form in zip(op.outputs, forms_out, strict=True):
            free = op.name in self.graph.free and not draws(op)
            if form is P and free:
                self.totals.add(value)
            self.forms[value] = R if form is P and free else self._sized(op, value) if form is R else form

    def _sized(self, op: Operator, value: str) -> Form:
        """The form of what reads no sample's values: it may have a row for each sample all the same."""
        extents = self.graph.tensors[value].shape
        shape = extents if self.part is None else self.part.tensors[value].shape
        grown = [d for d, (n, m) in enumerate(zip(extents, shape, strict=True)) if n != m]
        if not grown:
            return R
        if len(grown) == 1 and grown[0] in self.even.get(value, ()):
            return Shard(grown[0])
        self.coupled.append((op, "makes something else for each number of a sample"))
        return MIXED

    def _mixed(self, op: Operator, why: str) -> list[Form]:
        self.coupled.append((op, why))
        return [MIXED] * len(op.outputs)

    def _shared_dims(self, op: Operator, rule: Rule | None) -> None:
        """Along which dimensions of what is made of the same in every part that is alike."""
        record = record_of(op)
        for number, value in enumerate(op.outputs):
            shape = self.graph.tensors[value].shape
            if record.sample_invariant or draws(op):
                self.even[value] = frozenset(range(len(shape)))
            elif record.moves == "repeat":  # what had one row, or none
                source = self.graph.tensors[op.inputs[0]].shape
                extra = len(shape) - len(source)
                self.even[value] = frozenset(d for d in range(len(shape)) if d < extra or source[d - extra] == 1)
            elif rule is not None:
                rows = [(v, row) for v, row in zip(op.inputs, rule.inputs, strict=True) if row is not None]
                self.even[value] = frozenset(
                    d
                    for d, label in enumerate(rule.outputs[number])
                    if label and all(row.index(label) in self.even.get(v, ()) for v, row in rows if label in row)
                )

    def _combined(self, op: Operator, forms: list[Form]) -> list[Form]:
        """Of summands, what is the same in every part, and what is mixed: a summand where the operator is linear."""
        summands = [form is P for form in forms]
        if not any(summands):
            return [MIXED] * len(op.outputs)
        floats = all(self.graph.tensors[v].can_learn or self.graph.tensors[v].dtype == "int64" for v in op.outputs)
        carried = together(op) if floats else []
        if floats and sums(op):
            carried = list(op.inputs)  # a number beside it counts in shares, see `normalise`
        if carried and all(form is R or v in carried for v, form in zip(op.inputs, forms, strict=True)):
            return [P] * len(op.outputs)
        if floats and sum(summands) == 1 and summands.index(True) in each(op) and MIXED not in forms:
            return [P] * len(op.outputs)
        if MIXED in forms:
            return [MIXED] * len(op.outputs)
        return self._mixed(op, "is no sum over samples")

    def _rows(self, op: Operator, rule: Rule | None, forms: list[Form]) -> list[Form]:
        """What is made of samples by themselves, besides what is the same in every part."""
        if rule is None:
            return self._mixed(op, "has no rule for its samples")
        read = [(v, form, row) for v, form, row in zip(op.inputs, forms, rule.inputs, strict=True) if row is not None]
        labels = {row[form.dim] for _, form, row in read if is_shard(form)}
        if not labels:  # of samples it takes but the shape
            for value in op.outputs:
                self.even[value] = frozenset(range(len(self.graph.tensors[value].shape)))
            return [R] * len(op.outputs)
        (label, *others) = labels
        kernel = rule.kernels.get(label)
        if others or not label or kernel in ("extreme", "vocabulary", "apart"):
            return self._mixed(op, "works on several samples at once")
        if kernel in MIXING:
            self.coupled.append((op, "takes statistics over samples" if kernel == "statistics" else "counts over samples in order"))
        if any(form is R and label in row and row.index(label) not in self.even.get(v, ()) for v, form, row in read):
            self.coupled.append((op, "reads something else for each number of a sample"))
        forms_out: list[Form] = []
        for row in rule.outputs:
            if label in row:
                forms_out.append(Shard(row.index(label)))
            elif kernel in ("average", "summands") or (kernel is None and record_of(op).contracts):
                forms_out.append(P)
            else:
                return self._mixed(op, "works on several samples at once")
        if kernel == "average":
            self.averages.add(op.name)
        return forms_out
