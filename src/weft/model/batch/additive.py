"""Gradient accumulation: which values of a batch can be combined from those of its microbatches.

A batch may be computed in parts, one after another (microbatches). A value of a part has a placement relative to the batch's, as along a
mesh axis (`plan/placement`), or none:

    Replicate  the same in every part: independent of samples, or counted over the whole batch before the step
    Shard(2)   the part's samples are in dimension 2
    Partial    a partial sum: the parts' values add up to the batch's
    MIXED      computed from several samples of the part in another way, so the batch's value does not follow from the parts'

A partial sum that depends on the batch only (a count of targets, a sum of weights) is a *total*: it can be computed for the whole batch
before the step, and its readers read that. So a loss that is a sum over samples divided by such a count is a partial sum itself. Where a
trained value is mixed, samples are *coupled*, and microbatches change what is trained: batch norm, contrastive losses.

Not modeled: totals that are no sums (the maximum of a batch).
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
    """An operator whose output depends on several samples together, and the reason."""

    site: str
    why: str


def local_statistics(graph: Graph) -> tuple[Coupling, ...]:
    """Return the operators for which `batch_norm=local` differs from training on the whole batch."""
    why = "takes statistics over each replica's samples"
    return tuple(Coupling(op.site, why) for op in graph.operators if record_of(op).over_samples and takes_statistics(op))


def coupling_words(coupled: Sequence[Coupling]) -> str:
    """Describe where microbatches differ from the whole batch; empty where they do not.

    >>> coupling_words([Coupling("norm/batch_norm", "takes statistics over samples"), Coupling("b", "")])
    'norm/batch_norm takes statistics over samples (and 1 more)'
    """
    if not coupled:
        return ""
    more = f" (and {len(coupled) - 1} more)" if len(coupled) > 1 else ""
    return f"{coupled[0].site} {coupled[0].why}{more}"


def microbatch_words(coupled: Sequence[Coupling]) -> str:
    """Describe in one line that and where microbatches change what is trained; empty where they do not."""
    if not coupled:
        return ""
    return (
        f"microbatches change what is trained: {coupling_words(coupled)}, in each microbatch by itself; "
        "every other axis is exact, and microbatches=1 is the step on the whole batch"
    )


@dataclass(frozen=True)
class Additive:
    """`placements`: of every value. `mean_operators`: operators whose partial sums are means, so that parts are weighted by their samples.

    `totals`: values summed over the batch before the step. `coupled`: where parts of the batch differ from the whole.
    """

    forms: Mapping[str, Form]
    averages: frozenset[str]
    totals: frozenset[str]
    coupled: tuple[Coupling, ...]


def additive(graph: Graph, part: Graph | None = None) -> Additive:
    """Analyze a graph that ends in a loss: which values of a batch (of two samples at least) are sums over its parts.

    `part`: the same operators for a part of the batch; it reveals values that depend on the number of samples only (`torch.ones(len(x))`).
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
    """Return the loss and every value that it depends on."""
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
    even: dict[str, frozenset[int]] = field(default_factory=dict)  # of replicated values: dimensions along which they are uniform
    averages: set[str] = field(default_factory=set)
    totals: set[str] = field(default_factory=set)
    coupled: list[tuple[Operator, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.placed = {v.value: v for v in (*self.graph.parameters, *self.graph.buffers)}
        self.forms.update({v.value: R for v in self.graph.variables})
        self.forms.update({v.value: Shard(0) for v in self.graph.inputs if v.batched})

    def through(self, op: Operator) -> None:
        """Determine the placements of an operator's outputs."""
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
            forms_out = self._mixed(op, "combines single samples with a value of all of them")
        else:
            forms_out = self._rows(op, rule, forms)
        for value, form in zip(op.outputs, forms_out, strict=True):
            free = op.name in self.graph.free and not draws(op)
            if form is P and free:
                self.totals.add(value)
            self.forms[value] = R if form is P and free else self._sized(op, value) if form is R else form

    def _sized(self, op: Operator, value: str) -> Form:
        """Return the placement of a value that depends on no sample's values: it may still have one row per sample."""
        extents = self.graph.tensors[value].shape
        shape = extents if self.part is None else self.part.tensors[value].shape
        grown = [d for d, (n, m) in enumerate(zip(extents, shape, strict=True)) if n != m]
        if not grown:
            return R
        if len(grown) == 1 and grown[0] in self.even.get(value, ()):
            return Shard(grown[0])
        self.coupled.append((op, "makes a value that depends on the position of a sample"))
        return MIXED

    def _mixed(self, op: Operator, why: str) -> list[Form]:
        self.coupled.append((op, why))
        return [MIXED] * len(op.outputs)

    def _shared_dims(self, op: Operator, rule: Rule | None) -> None:
        """Record the dimensions along which outputs of replicated inputs are uniform."""
        record = record_of(op)
        for number, value in enumerate(op.outputs):
            shape = self.graph.tensors[value].shape
            if record.sample_invariant or draws(op):
                self.even[value] = frozenset(range(len(shape)))
            elif record.moves == "repeat":  # dimensions that had one row, or none
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
        """Combine partial sums with replicated and mixed values: a partial sum where the operator is linear."""
        summands = [form is P for form in forms]
        if not any(summands):
            return [MIXED] * len(op.outputs)
        is_numeric = all(self.graph.tensors[v].can_learn or self.graph.tensors[v].dtype == "int64" for v in op.outputs)
        linear_in = together(op) if is_numeric else []
        if is_numeric and sums(op):
            linear_in = list(op.inputs)  # an added number is weighted by shares, see `summable_loss`
        if linear_in and all(form is R or v in linear_in for v, form in zip(op.inputs, forms, strict=True)):
            return [P] * len(op.outputs)
        if is_numeric and sum(summands) == 1 and summands.index(True) in each(op) and MIXED not in forms:
            return [P] * len(op.outputs)
        if MIXED in forms:
            return [MIXED] * len(op.outputs)
        return self._mixed(op, "is no sum over samples")

    def _rows(self, op: Operator, rule: Rule | None, forms: list[Form]) -> list[Form]:
        """Return placements of outputs computed sample by sample, from shards and replicated values."""
        if rule is None:
            return self._mixed(op, "has no rule for its samples")
        read = [(v, form, row) for v, form, row in zip(op.inputs, forms, rule.inputs, strict=True) if row is not None]
        labels = {row[form.dim] for _, form, row in read if is_shard(form)}
        if not labels:  # only the shape of samples is read
            for value in op.outputs:
                self.even[value] = frozenset(range(len(self.graph.tensors[value].shape)))
            return [R] * len(op.outputs)
        (label, *other_labels) = labels
        kernel = rule.kernels.get(label)
        if other_labels or not label or kernel in ("extreme", "vocabulary", "apart"):
            return self._mixed(op, "works on several samples at once")
        if kernel in MIXING:
            self.coupled.append((op, "takes statistics over samples" if kernel == "statistics" else "counts over samples in order"))
        if any(form is R and label in row and row.index(label) not in self.even.get(v, ()) for v, form, row in read):
            self.coupled.append((op, "reads a value that depends on the position of a sample"))
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
