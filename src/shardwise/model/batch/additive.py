"""Gradient accumulation: which values of a batch can be combined from those of its microbatches.

A batch may be computed in parts, one after another (microbatches). A value of a part has a placement relative to the batch's, as along a
mesh axis (`plan/ir/placement`), or none:

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

from shardwise.model.dataflow import propagate_backward
from shardwise.model.graph import Graph, Operator, uses_batch_statistics, writes_buffer, written_buffers
from shardwise.model.stages.stages import batch_only_operators
from shardwise.ops import Rule, is_random, is_sum, jointly_linear_in, record_of, separately_linear_in
from shardwise.ops.rule import SAMPLE_MIXING
from shardwise.ops.vocabulary import ViewKind
from shardwise.plan.ir.placement import P, Placement, R, Shard, is_shard

MIXED = None
BatchPlacement = Placement | None


@dataclass(frozen=True, slots=True)
class SampleCoupling:
    """An operator whose output depends on several samples together, and the reason."""

    site: str
    reason: str


def local_statistics_couplings(graph: Graph) -> tuple[SampleCoupling, ...]:
    """Return the operators for which `batch_norm=local` differs from training on the whole batch."""
    why = "takes statistics over each replica's samples"
    return tuple(
        SampleCoupling(op.site, why) for op in graph.operators if record_of(op).statistics.over_samples and uses_batch_statistics(op)
    )


def describe_couplings(coupled: Sequence[SampleCoupling]) -> str:
    """Describe where microbatches differ from the whole batch; empty where they do not.

    >>> describe_couplings([SampleCoupling("norm/batch_norm", "takes statistics over samples"), SampleCoupling("b", "")])
    'norm/batch_norm takes statistics over samples (and 1 more)'
    """
    if not coupled:
        return ""
    more = f" (and {len(coupled) - 1} more)" if len(coupled) > 1 else ""
    return f"{coupled[0].site} {coupled[0].reason}{more}"


def describe_microbatch_couplings(coupled: Sequence[SampleCoupling]) -> str:
    """Describe in one line that and where microbatches change what is trained; empty where they do not."""
    if not coupled:
        return ""
    return (
        f"microbatches change what is trained: {describe_couplings(coupled)}, in each microbatch by itself; "
        "every other axis is exact, and microbatches=1 is the step on the whole batch"
    )


@dataclass(frozen=True)
class BatchAdditivity:
    """`placements`: of every value. `mean_operators`: operators whose partial sums are means, so that parts are weighted by their samples.

    `totals`: values summed over the batch before the step. `coupled`: where parts of the batch differ from the whole.
    """

    placements: Mapping[str, BatchPlacement]
    mean_operators: frozenset[str]
    totals: frozenset[str]
    coupled: tuple[SampleCoupling, ...]


def analyze_additivity(graph: Graph, part: Graph | None = None) -> BatchAdditivity:
    """Analyze a graph that ends in a loss: which values of a batch (of two samples at least) are sums over its parts.

    `part`: the same operators for a part of the batch; it reveals values that depend on the number of samples only (`torch.ones(len(x))`).
    """
    followed = _AdditivityAnalysis(graph, part)
    for op in graph.operators:
        followed.visit(op)
    reached = propagate_backward(graph.operators, {graph.loss})
    coupled = tuple(SampleCoupling(op.site, why) for op, why in followed.coupled if reached.intersection(op.outputs))
    written = [v.name for v in graph.buffers if v.value in written_buffers(graph)]
    if written and not coupled:
        coupled = (SampleCoupling(written[0], "is written in every microbatch"),)
    return BatchAdditivity(followed.placements, frozenset(followed.mean_operators), frozenset(followed.totals), coupled)


@dataclass
class _AdditivityAnalysis:
    graph: Graph
    part: Graph | None = None
    placements: dict[str, BatchPlacement] = field(default_factory=dict)
    uniform_dims: dict[str, frozenset[int]] = field(default_factory=dict)  # of replicated values: dimensions along which they are uniform
    mean_operators: set[str] = field(default_factory=set)
    totals: set[str] = field(default_factory=set)
    coupled: list[tuple[Operator, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.placements.update({v.value: R for v in self.graph.variables})
        self.placements.update({v.value: Shard(0) for v in self.graph.inputs if v.batched})

    def visit(self, op: Operator) -> None:
        """Determine the placements of an operator's outputs."""
        forms = [self.placements[v] for v in op.inputs]
        rule = self.graph.rules[op.name]
        if writes_buffer(op, self.graph.state):
            forms_out: list[BatchPlacement] = [R if all(form is R for form in forms) else MIXED] * len(op.outputs)
        elif all(form is R for form in forms):
            forms_out = [R] * len(op.outputs)
            self._note_uniform_dims(op, rule)
        elif not any(is_shard(form) for form in forms):
            forms_out = self._combine_summands(op, forms)
        elif MIXED in forms:
            forms_out = [MIXED] * len(op.outputs)
        elif P in forms:
            forms_out = self._mark_mixed(op, "combines single samples with a value of all of them")
        else:
            forms_out = self._visit_samples(op, rule, forms)
        for value, form in zip(op.outputs, forms_out, strict=True):
            free = op.name in batch_only_operators(self.graph) and not is_random(op)
            if form is P and free:
                self.totals.add(value)
            self.placements[value] = R if form is P and free else self._placement_by_size(op, value) if form is R else form

    def _placement_by_size(self, op: Operator, value: str) -> BatchPlacement:
        """Return the placement of a value that depends on no sample's values: it may still have one row per sample."""
        extents = self.graph.tensors[value].shape
        shape = extents if self.part is None else self.part.tensors[value].shape
        grown = [d for d, (n, m) in enumerate(zip(extents, shape, strict=True)) if n != m]
        if not grown:
            return R
        if len(grown) == 1 and grown[0] in self.uniform_dims.get(value, ()):
            return Shard(grown[0])
        self.coupled.append((op, "makes a value that depends on the position of a sample"))
        return MIXED

    def _mark_mixed(self, op: Operator, reason: str) -> list[BatchPlacement]:
        self.coupled.append((op, reason))
        return [MIXED] * len(op.outputs)

    def _note_uniform_dims(self, op: Operator, rule: Rule | None) -> None:
        """Record the dimensions along which outputs of replicated inputs are uniform."""
        record = record_of(op)
        for number, value in enumerate(op.outputs):
            shape = self.graph.tensors[value].shape
            if record.output.sample_invariant or is_random(op):
                self.uniform_dims[value] = frozenset(range(len(shape)))
            elif record.view.kind == ViewKind.REPEAT:  # dimensions that had one row, or none
                source = self.graph.tensors[op.inputs[0]].shape
                extra = len(shape) - len(source)
                self.uniform_dims[value] = frozenset(d for d in range(len(shape)) if d < extra or source[d - extra] == 1)
            elif rule is not None:
                rows = [(v, row) for v, row in zip(op.inputs, rule.inputs, strict=True) if row is not None]
                self.uniform_dims[value] = frozenset(
                    d
                    for d, label in enumerate(rule.outputs[number])
                    if label and all(row.index(label) in self.uniform_dims.get(v, ()) for v, row in rows if label in row)
                )

    def _combine_summands(self, op: Operator, forms: list[BatchPlacement]) -> list[BatchPlacement]:
        """Combine partial sums with replicated and mixed values: a partial sum where the operator is linear."""
        summands = [form is P for form in forms]
        if not any(summands):
            return [MIXED] * len(op.outputs)
        is_numeric = all(self.graph.tensors[v].is_differentiable or self.graph.tensors[v].dtype == "int64" for v in op.outputs)
        linear_in = jointly_linear_in(op) if is_numeric else []
        if is_numeric and is_sum(op):
            linear_in = list(op.inputs)  # an added number is weighted by shares, see `summable_loss`
        if linear_in and all(form is R or v in linear_in for v, form in zip(op.inputs, forms, strict=True)):
            return [P] * len(op.outputs)
        if is_numeric and sum(summands) == 1 and summands.index(True) in separately_linear_in(op) and MIXED not in forms:
            return [P] * len(op.outputs)
        if MIXED in forms:
            return [MIXED] * len(op.outputs)
        return self._mark_mixed(op, "is no sum over samples")

    def _visit_samples(self, op: Operator, rule: Rule | None, forms: list[BatchPlacement]) -> list[BatchPlacement]:
        """Return placements of outputs computed sample by sample, from shards and replicated values."""
        if rule is None:
            return self._mark_mixed(op, "has no rule for its samples")
        read = [(v, form, row) for v, form, row in zip(op.inputs, forms, rule.inputs, strict=True) if row is not None]
        labels = {row[form.dim] for _, form, row in read if is_shard(form)}
        if not labels:  # only the shape of samples is read
            for value in op.outputs:
                self.uniform_dims[value] = frozenset(range(len(self.graph.tensors[value].shape)))
            return [R] * len(op.outputs)
        (label, *other_labels) = labels
        kernel = rule.kernels.get(label)
        if other_labels or not label or kernel in ("extreme", "vocabulary", "apart"):
            return self._mark_mixed(op, "works on several samples at once")
        if kernel in SAMPLE_MIXING:
            self.coupled.append((op, "takes statistics over samples" if kernel == "statistics" else "counts over samples in order"))
        if any(form is R and label in row and row.index(label) not in self.uniform_dims.get(v, ()) for v, form, row in read):
            self.coupled.append((op, "reads a value that depends on the position of a sample"))
        forms_out: list[BatchPlacement] = []
        for row in rule.outputs:
            if label in row:
                forms_out.append(Shard(row.index(label)))
            elif kernel in ("average", "summands") or (kernel is None and record_of(op).reduction.is_sum):
                forms_out.append(P)
            else:
                return self._mark_mixed(op, "works on several samples at once")
        if kernel == "average":
            self.mean_operators.add(op.name)
        return forms_out
