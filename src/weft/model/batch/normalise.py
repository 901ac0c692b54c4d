"""Summable losses for gradient accumulation: rewrite the graph of a microbatch so that its losses add up to the batch's.

A mean over targets that count (cross-entropy with `ignore_index`) becomes their sum divided by their number; that number is a total,
counted over the whole batch before the step and read as a constant (`BatchTotal`). A mean over samples is multiplied by the microbatch's
share of the samples, a constant as well, and so are values independent of samples (a weight penalty) and those that do not add up. Numbers
that the model's code derives from its number of samples (`loss.sum() / len(x)`) are those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from weft.model.batch.additive import Additive
from weft.model.graph import Arg, Graph, Operator, Ref, Tensor, Variable
from weft.model.stages.stages import Stage, split
from weft.ops import by_elements, record_of
from weft.ops.linear import sums, together
from weft.plan.placement import P

SHARE = "batch_share"


@dataclass(frozen=True, slots=True)
class Total:
    """`value` is of a microbatch; `variable` is its sum over the batch."""

    value: str
    variable: str


@dataclass(frozen=True)
class Normalised:
    """`graph`: of a microbatch. `is_summable`: whether losses add up to the batch's; else they are weighted by shares of the samples.

    `share_constant`: the constant with the microbatch's share of the batch, "" where nothing reads it. `totals`: constants counted before
    the step, in order.
    """

    graph: Graph
    adds: bool = False
    share: str = ""
    totals: tuple[Total, ...] = ()

    @property
    def given(self) -> frozenset[str]:
        """Constants supplied with every microbatch."""
        return frozenset({self.share} - {""} | {total.variable for total in self.totals})

    @property
    def divisor(self) -> str:
        """The total that the whole loss, and nothing else in it, is divided by; "" where there is none."""
        last = next((op for op in self.graph.operators if self.graph.loss in op.outputs), None)
        if last is None or record_of(last).linear != "numerator" or len(last.args) != 2 or len(self.totals) != 1 or self.share:
            return ""
        (total,), by = self.totals, last.args[1]
        once = sum(op.inputs.count(total.variable) for op in self.graph.operators) == 1
        return total.variable if once and by == Ref(total.variable) and not self.graph.tensors[total.variable].shape else ""

    @property
    def counted_from(self) -> frozenset[str]:
        """Batch inputs from which totals are counted; no gradient flows to them through totals."""
        return frozenset(v for op in self.counting(self.totals) for v in op.inputs) & {v.value for v in self.graph.inputs}

    def stages(self, sites: Sequence[str], trains: bool = True) -> tuple[Stage, ...]:
        """Partition the graph into stages, as `split` does. A stage that reads totals also has the inputs they are counted from."""
        variables = {v.value: i for i, v in enumerate(self.graph.variables)}
        stages = []
        for stage in split(self.graph, sites, trains):
            totals_here = self.counted_by(stage)
            total_inputs = {v for op in self.counting(totals_here) for v in op.inputs if v in variables}
            stages.append(replace(stage, variables=tuple(sorted({*stage.variables, *total_inputs}, key=variables.__getitem__))))
        return tuple(stages)

    def counted_by(self, stage: Stage) -> tuple[Total, ...]:
        """Return the totals that a stage reads, and those needed to count them."""
        wanted = set(stage.variables)
        while True:
            totals_here = tuple(t for t in self.totals if t.variable in wanted)
            missing = {v for op in self.counting(totals_here) for v in op.inputs} - wanted
            if not missing & {t.variable for t in self.totals}:
                return totals_here
            wanted |= missing

    def counting(self, totals: Sequence[Total]) -> tuple[Operator, ...]:
        """Return the operators that count these totals in a microbatch, in order."""
        wanted = {total.value for total in totals}
        operators = []
        for op in reversed(self.graph.operators):
            if wanted.intersection(op.outputs):
                wanted.update(op.inputs)
                operators.append(op)
        return tuple(reversed(operators))


def counted(graph: Graph) -> Graph:
    """Return the graph with a sum and a count in place of every mean over targets that count."""
    tensors = dict(graph.tensors)
    operators: list[Operator] = []
    for op in graph.operators:
        operators += _counting(op, tensors) or (op,)
    return replace(graph, operators=tuple(operators), tensors=tensors) if len(operators) > len(graph.operators) else graph


def _counting(op: Operator, tensors: dict[str, Tensor]) -> list[Operator]:
    """Return the operators of a mean over targets that count, split into sum and count; empty for any other operator."""
    if not record_of(op).over_classes or tensors[op.inputs[0]].shape == tensors[op.inputs[1]].shape:
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


def normalised(part: Graph, full: Graph, additive: Additive) -> Normalised:
    """Return the graph of a microbatch whose losses add up to the batch's. Both graphs have counted means, and the same operators."""
    return _Rewriting(part, full, additive).result()


@dataclass
class _Rewriting:
    part: Graph
    full: Graph
    additive: Additive
    tensors: dict[str, Tensor] = field(init=False)
    operators: list[Operator] = field(default_factory=list)
    replaced: dict[str, str] = field(default_factory=dict)  # value -> the total that is read in its place
    shared: bool = False

    def __post_init__(self) -> None:
        self.tensors = dict(self.part.tensors)

    def result(self) -> Normalised:
        """Rewrite every operator in order, the loss last."""
        for op, other in zip(self.part.operators, self.full.operators, strict=True):
            self._operator(op, other)
        loss, form = self.part.loss, self.additive.forms[self.part.loss]
        if form is not P or loss in self.replaced:
            site = next(op.site for op in reversed(self.part.operators) if loss in op.outputs)
            loss = self._share(Ref(self.replaced.get(loss, loss)), f"{loss}_part", f"{site}_part", "").value
        read = {v for op in self.operators for v in op.inputs} | {loss}
        totals = tuple(Total(value, variable) for value, variable in self.replaced.items() if variable in read)
        constants = [Variable(t.variable, t.variable, self.tensors[t.variable]) for t in totals]
        if self.shared:
            constants.append(Variable(SHARE, SHARE, self.tensors[SHARE]))
        graph = replace(
            self.part, operators=tuple(self.operators), tensors=self.tensors, loss=loss, constants=(*self.part.constants, *constants)
        )
        return Normalised(graph, True, SHARE if self.shared else "", totals)

    def _operator(self, op: Operator, other: Operator) -> None:
        op = replace(op, args=self._read(op.args), kwargs=tuple((k, self._read(a)) for k, a in op.kwargs))  # type: ignore[arg-type]
        op = _numbers_of(op, other)
        if self.additive.forms[op.outputs[0]] is P:
            op = self._in_shares(op, other)
        if op.name in self.additive.averages:
            self.tensors.update({f"{out}_mean": self.tensors[out] for out in op.outputs})
            self.operators.append(replace(op, outputs=tuple(f"{out}_mean" for out in op.outputs)))
            for out in op.outputs:
                self._share(Ref(f"{out}_mean"), out, f"{op.site}_share", op.autocast)
        else:
            self.operators.append(op)
        for value in op.outputs:
            if value in self.additive.totals:
                self.replaced[value] = f"{value}_total"
                self.tensors[f"{value}_total"] = self.tensors[value]

    def _read(self, arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(self.replaced.get(arg.value, arg.value))
        return tuple(self._read(a) for a in arg) if isinstance(arg, tuple) else arg

    def _in_shares(self, op: Operator, other: Operator) -> Operator:
        """Multiply the operands of a sum that are no partial sums by the share."""
        summands = {v for v in other.inputs if self.additive.forms[v] is P}
        linear_in = set(op.inputs) if sums(op) else set(together(op) or ())
        if not summands or not linear_in:
            return op

        def share(arg: Arg, number: int) -> Arg:
            if isinstance(arg, tuple):
                return tuple(share(a, 10 * (number + 1) + i) for i, a in enumerate(arg))
            if isinstance(arg, Ref):
                return (
                    arg
                    if arg.value in summands or arg.value not in linear_in
                    else self._share(arg, f"{op.outputs[0]}_part{number}", f"{op.site}_share{number}", op.autocast)
                )
            if sums(op) and number < 2 and isinstance(arg, int | float):
                return self._share(arg, f"{op.outputs[0]}_part{number}", f"{op.site}_share{number}", op.autocast)
            return arg

        target = op.target.replace(".Scalar", ".Tensor") if sums(op) else op.target
        return replace(op, target=target, args=tuple(share(a, i) for i, a in enumerate(op.args)))

    def _share(self, of: Ref | int | float, out: str, site: str, autocast: str) -> Ref:
        """Return `of` times the microbatch's share of the batch."""
        self.shared = True
        kind = self.part.tensors[self.part.loss].dtype
        self.tensors.setdefault(SHARE, Tensor((), kind))
        self.tensors[out] = self.tensors[of.value] if isinstance(of, Ref) and self.tensors[of.value].is_float else self.tensors[SHARE]
        args = (of, Ref(SHARE)) if isinstance(of, Ref) else (Ref(SHARE), of)
        self.operators.append(Operator(f"{out}_share", "aten.mul.Tensor", args, (), (out,), site, autocast=autocast))
        return Ref(out)


def has_numbers_of(op: Operator, other: Operator) -> bool:
    """Return whether an operator of a microbatch has the same numbers as for the whole batch, except for sizes."""
    return _numbers_of(op, other) == op


def _numbers_of(op: Operator, other: Operator) -> Operator:
    """Return an operator of a microbatch with the numbers that it has for the whole batch, where these are no sizes."""
    if (op.args, op.kwargs) == (other.args, other.kwargs):
        return op
    at = record_of(op).fill_at
    if at is not None and len(op.args) > at:
        return replace(op, args=(*op.args[:at], other.args[at], *op.args[at + 1 :]))
    if not by_elements(op):
        return op

    def number(part: Arg, full: Arg) -> Arg:
        return full if isinstance(part, int | float) and isinstance(full, int | float) else part

    kwargs = dict(other.kwargs)
    return replace(
        op,
        args=tuple(number(a, b) for a, b in zip(op.args, other.args, strict=True)),
        kwargs=tuple((k, number(a, kwargs.get(k))) for k, a in op.kwargs),
    )
