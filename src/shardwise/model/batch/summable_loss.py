"""Summable losses for gradient accumulation: rewrite the graph of a microbatch so that its losses add up to the batch's.

A mean over targets that count (cross-entropy with `ignore_index`) becomes their sum divided by their number; that number is a total,
counted over the whole batch before the step and read as a constant (`BatchTotal`). A mean over samples is multiplied by the microbatch's
share of the samples, a constant as well, and so are values independent of samples (a weight penalty) and those that do not add up. Numbers
that the model's code derives from its number of samples (`loss.sum() / len(x)`) are those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardwise.model.batch.additive import BatchAdditivity
from shardwise.model.dataflow import required_operators
from shardwise.model.graph import Arg, Graph, Operator, Ref, Tensor, Variable, rename_inputs
from shardwise.model.stages.stages import Stage, split
from shardwise.ops import is_elementwise, is_sum, jointly_linear_in, record_of
from shardwise.ops.vocabulary import Linearity, Reduction
from shardwise.plan.ir.placement import P

SHARE = "batch_share"


@dataclass(frozen=True, slots=True)
class BatchTotal:
    """`value` is of a microbatch; `variable` is its sum over the batch."""

    value: str
    variable: str


@dataclass(frozen=True)
class SummableLossGraph:
    """`graph`: of a microbatch. `is_summable`: whether losses add up to the batch's; else they are weighted by shares of the samples.

    `share_constant`: the constant with the microbatch's share of the batch, "" where nothing reads it. `totals`: constants counted before
    the step, in order.
    """

    graph: Graph
    is_summable: bool = False
    share_constant: str = ""
    totals: tuple[BatchTotal, ...] = ()

    @property
    def microbatch_constants(self) -> frozenset[str]:
        """Constants supplied with every microbatch."""
        return frozenset({self.share_constant} - {""} | {total.variable for total in self.totals})

    @property
    def divisor(self) -> str:
        """The total that the whole loss, and nothing else in it, is divided by; "" where there is none."""
        last = self.graph.producers.get(self.graph.loss)
        if (
            last is None
            or record_of(last).linear != Linearity.NUMERATOR
            or len(last.args) != 2
            or len(self.totals) != 1
            or self.share_constant
        ):
            return ""
        (total,), by = self.totals, last.args[1]
        once = sum(op.inputs.count(total.variable) for op in self.graph.operators) == 1
        return total.variable if once and by == Ref(total.variable) and not self.graph.tensors[total.variable].shape else ""

    @property
    def total_inputs(self) -> frozenset[str]:
        """Batch inputs from which totals are counted; no gradient flows to them through totals."""
        return frozenset(v for op in self.total_operators(self.totals) for v in op.inputs) & {v.value for v in self.graph.inputs}

    def split_stages(self, sites: Sequence[str], trains: bool = True) -> tuple[Stage, ...]:
        """Partition the graph into stages, as `split` does. A stage that reads totals also has the inputs they are counted from."""
        variables = {v.value: i for i, v in enumerate(self.graph.variables)}
        stages = []
        for stage in split(self.graph, sites, trains):
            totals_here = self.totals_read_by(stage)
            total_inputs = {v for op in self.total_operators(totals_here) for v in op.inputs if v in variables}
            stages.append(replace(stage, variables=tuple(sorted({*stage.variables, *total_inputs}, key=variables.__getitem__))))
        return tuple(stages)

    def totals_read_by(self, stage: Stage) -> tuple[BatchTotal, ...]:
        """Return the totals that a stage reads, and those needed to count them."""
        wanted = set(stage.variables)
        while True:
            totals_here = tuple(t for t in self.totals if t.variable in wanted)
            missing = {v for op in self.total_operators(totals_here) for v in op.inputs} - wanted
            if not missing & {t.variable for t in self.totals}:
                return totals_here
            wanted |= missing

    def total_operators(self, totals: Sequence[BatchTotal]) -> tuple[Operator, ...]:
        """Return the operators that count these totals in a microbatch, in order."""
        return required_operators(self.graph.operators, {total.value for total in totals})


def with_counted_means(graph: Graph) -> Graph:
    """Return the graph with a sum and a count in place of every mean over targets that count."""
    tensors = dict(graph.tensors)
    operators: list[Operator] = []
    for op in graph.operators:
        operators += _split_mean(op, tensors) or (op,)
    return replace(graph, operators=tuple(operators), tensors=tensors) if len(operators) > len(graph.operators) else graph


def _split_mean(op: Operator, tensors: dict[str, Tensor]) -> list[Operator]:
    """Return the operators of a mean over targets that count, split into sum and count; empty for any other operator."""
    if record_of(op).reduction != Reduction.CLASS_LOSS or tensors[op.inputs[0]].shape == tensors[op.inputs[1]].shape:
        return []
    names = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    arguments = dict(zip(names, op.args, strict=False)) | dict(op.kwargs)
    if arguments.get("reduction", 1) != 1:
        return []
    target, weight, (out,) = arguments["target"], arguments.get("weight"), op.outputs
    assert isinstance(target, Ref)
    operators: list[Operator] = []

    def call(word: str, target_of: str, args: tuple[Arg, ...], like: Tensor) -> Ref:
        tensors[f"{out}_{word}"] = like
        operators.append(Operator(f"{op.name}_{word}", target_of, args, (), (f"{out}_{word}",), f"{op.site}_{word}", autocast=op.autocast))
        return Ref(f"{out}_{word}")

    of_target = tensors[target.value]
    counts = call("counts", "aten.ne.Scalar", (target, arguments.get("ignore_index", -100)), replace(of_target, dtype="bool"))
    if isinstance(weight, Ref):
        weighed = replace(of_target, dtype=tensors[weight.value].dtype)
        rows = call("rows", "aten.mul.Tensor", (target, counts), of_target)
        row_weights = call("picked", "aten.index.Tensor", (weight, (rows,)), weighed)
        counts = call("weighed", "aten.mul.Tensor", (row_weights, counts), weighed)
    count = call("count", "aten.sum.default", (counts,), Tensor((), tensors[weight.value].dtype if isinstance(weight, Ref) else "int64"))
    tail = (arguments["label_smoothing"],) if "label_smoothing" in arguments else ()
    tensors[f"{out}_sum"] = tensors[out]
    summed = (arguments["self"], target, weight, 2, arguments.get("ignore_index", -100), *tail)
    operators.append(replace(op, args=summed, kwargs=(), outputs=(f"{out}_sum",)))
    quotient = (Ref(f"{out}_sum"), count)
    return [*operators, Operator(f"{op.name}_mean", "aten.div.Tensor", quotient, (), (out,), f"{op.site}_mean", autocast=op.autocast)]


def normalize_loss(part: Graph, full: Graph, additive: BatchAdditivity) -> SummableLossGraph:
    """Return the graph of a microbatch whose losses add up to the batch's. Both graphs have counted means, and the same operators."""
    return _LossRewriter(part, full, additive).rewrite()


@dataclass
class _LossRewriter:
    part: Graph
    full: Graph
    additive: BatchAdditivity
    tensors: dict[str, Tensor] = field(init=False)
    operators: list[Operator] = field(default_factory=list)
    replaced: dict[str, str] = field(default_factory=dict)  # value -> the total that is read in its place
    uses_share: bool = False

    def __post_init__(self) -> None:
        self.tensors = dict(self.part.tensors)

    def rewrite(self) -> SummableLossGraph:
        """Rewrite every operator in order, the loss last."""
        for op, other in zip(self.part.operators, self.full.operators, strict=True):
            self._rewrite_operator(op, other)
        loss, form = self.part.loss, self.additive.placements[self.part.loss]
        if form is not P or loss in self.replaced:
            site = f"{self.part.producers[loss].site}_part"
            loss = self._times_share(Ref(self.replaced.get(loss, loss)), f"{loss}_part", site, "").value
        read = {v for op in self.operators for v in op.inputs} | {loss}
        totals = tuple(BatchTotal(value, variable) for value, variable in self.replaced.items() if variable in read)
        constants = [Variable(t.variable, t.variable, self.tensors[t.variable]) for t in totals]
        if self.uses_share:
            constants.append(Variable(SHARE, SHARE, self.tensors[SHARE]))
        graph = replace(
            self.part, operators=tuple(self.operators), tensors=self.tensors, loss=loss, constants=(*self.part.constants, *constants)
        )
        return SummableLossGraph(graph, True, SHARE if self.uses_share else "", totals)

    def _rewrite_operator(self, op: Operator, full_batch_op: Operator) -> None:
        op = _with_full_batch_numbers(rename_inputs(op, lambda value: self.replaced.get(value, value)), full_batch_op)
        if self.additive.placements[op.outputs[0]] is P:
            op = self._scale_non_summands(op, full_batch_op)
        if op.name in self.additive.mean_operators:
            self.tensors.update({f"{out}_mean": self.tensors[out] for out in op.outputs})
            self.operators.append(replace(op, outputs=tuple(f"{out}_mean" for out in op.outputs)))
            for out in op.outputs:
                self._times_share(Ref(f"{out}_mean"), out, f"{op.site}_share", op.autocast)
        else:
            self.operators.append(op)
        for value in op.outputs:
            if value in self.additive.totals:
                self.replaced[value] = f"{value}_total"
                self.tensors[f"{value}_total"] = self.tensors[value]

    def _scale_non_summands(self, op: Operator, full_batch_op: Operator) -> Operator:
        """Multiply the operands of a sum that are no partial sums by the share."""
        summands = {v for v in full_batch_op.inputs if self.additive.placements[v] is P}
        linear_in = set(op.inputs) if is_sum(op) else set(jointly_linear_in(op) or ())
        if not summands or not linear_in:
            return op

        def share(arg: Arg, number: int) -> Arg:
            if isinstance(arg, tuple):
                return tuple(share(a, 10 * (number + 1) + i) for i, a in enumerate(arg))
            if isinstance(arg, Ref):
                return (
                    arg
                    if arg.value in summands or arg.value not in linear_in
                    else self._times_share(arg, f"{op.outputs[0]}_part{number}", f"{op.site}_share{number}", op.autocast)
                )
            if is_sum(op) and number < 2 and isinstance(arg, int | float):
                return self._times_share(arg, f"{op.outputs[0]}_part{number}", f"{op.site}_share{number}", op.autocast)
            return arg

        target = op.target.replace(".Scalar", ".Tensor") if is_sum(op) else op.target
        return replace(op, target=target, args=tuple(share(a, i) for i, a in enumerate(op.args)))

    def _times_share(self, of: Ref | int | float, out: str, site: str, autocast: str) -> Ref:
        """Return `of` times the microbatch's share of the batch."""
        self.uses_share = True
        kind = self.part.tensors[self.part.loss].dtype
        self.tensors.setdefault(SHARE, Tensor((), kind))
        self.tensors[out] = self.tensors[of.value] if isinstance(of, Ref) and self.tensors[of.value].is_float else self.tensors[SHARE]
        args = (of, Ref(SHARE)) if isinstance(of, Ref) else (Ref(SHARE), of)
        self.operators.append(Operator(f"{out}_share", "aten.mul.Tensor", args, (), (out,), site, autocast=autocast))
        return Ref(out)


def matches_full_batch(op: Operator, full_batch_op: Operator) -> bool:
    """Return whether an operator of a microbatch has the same numbers as for the whole batch, except for sizes."""
    return _with_full_batch_numbers(op, full_batch_op) == op


def _with_full_batch_numbers(op: Operator, full_batch_op: Operator) -> Operator:
    """Return an operator of a microbatch with the numbers that it has for the whole batch, where these are no sizes."""
    if (op.args, op.kwargs) == (full_batch_op.args, full_batch_op.kwargs):
        return op
    at = record_of(op).output.fill_at
    if at is not None and len(op.args) > at:
        return replace(op, args=(*op.args[:at], full_batch_op.args[at], *op.args[at + 1 :]))
    if not is_elementwise(op):
        return op

    def number(part: Arg, full: Arg) -> Arg:
        return full if isinstance(part, int | float) and isinstance(full, int | float) else part

    kwargs = dict(full_batch_op.kwargs)
    return replace(
        op,
        args=tuple(number(a, b) for a, b in zip(op.args, full_batch_op.args, strict=True)),
        kwargs=tuple((k, number(a, kwargs.get(k))) for k, a in op.kwargs),
    )
