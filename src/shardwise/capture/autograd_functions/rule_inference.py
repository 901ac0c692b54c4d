"""Infer the factor (sharding) rule of a user's autograd.Function by propagating placements through its forward and backward.

The joint graphs on global tensors and on shards are compared. A dimension can be sharded if the same code, run on each rank's shards
alone, computes shards (or partial sums) of the global results, gradients included.

Nothing is guessed: the operators on shards must equal those on global tensors one by one, with equal constants, and each must preserve
placements (shard, partial, replicated) by its own factor rule. So a size that the code reads as a number shows as a differing constant; if
it only scales a linear value (a mean, a division by the number of rows) the scale is tracked, too.

A dimension that would need a collective inside of the function stays unsharded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isclose
from typing import NamedTuple

from shardwise.capture.autograd_functions.trace import JointGraph
from shardwise.model.dims.labels import dims_by_label
from shardwise.model.graph import Operator, Ref, Tensor
from shardwise.model.union_find import UnionFind
from shardwise.ops import Op, is_elementwise, is_random, jointly_linear_in, record_of, rule_of
from shardwise.ops.rule import BLOCKED, Labels, Rule
from shardwise.ops.vocabulary import Linearity, ViewKind

AVERAGE, SUMMANDS = "average", "summands"  # how sharding a label that no output has leaves the outputs


class ScaledPlacement(NamedTuple):
    """Placement of a shard's value: R replicated, P partial sum, S sharded on dimension `dim`; scaled by n**power."""

    kind: str
    dim: int = -1
    power: int = 0


ShardedDims = Mapping[int, int]  # number of an input -> its sharded dimension
TraceShards = Callable[[ShardedDims, int], Sequence[tuple[JointGraph, JointGraph]]]  # n shards -> pairs of joint graphs (global, shard)


def infer_factor_rule(full: JointGraph, trace_shards: TraceShards) -> Rule:
    """Infer the factor rule; labels are f0, f1, ... in the order of the outputs' dimensions."""
    inputs, outputs = ([list((BLOCKED,) * len(full.tensors[v].shape)) for v in group] for group in (full.inputs, full.outputs))
    kernels: dict[str, str] = {}
    count = 0
    for places in _candidate_dims(full):
        size = next(full.tensors[full.inputs[i]].shape[d] for i, d in places.items())
        results = [_agreed_placements(trace_shards(places, n), places, n) for n in _trial_shard_counts(size)]
        if not results or results[0] is None or any(result != results[0] for result in results):
            continue
        label = f"f{count}"
        count += 1
        for i, dim in places.items():
            inputs[i][dim] = label
        for row, form in zip(outputs, results[0], strict=True):
            if form.kind == "S":
                row[form.dim] = label
        if any(form.kind == "P" for form in results[0]):
            kernels[label] = AVERAGE if results[0][0].power else SUMMANDS
    return Rule(tuple(map(tuple, inputs)), tuple(map(tuple, outputs)), kernels)


def _trial_shard_counts(size: int) -> list[int]:
    """Return the numbers of shards to try a rule with: the fewest, and the most with shards larger than 1."""
    divisors = [n for n in range(2, min(size, 4096) + 1) if size % n == 0]
    proper = [n for n in divisors if size // n > 1]
    return sorted({divisors[0], *proper[-1:]}) if divisors else []


def _agreed_placements(pairs: Sequence[tuple[JointGraph, JointGraph]], dims: ShardedDims, n: int) -> list[ScaledPlacement] | None:
    """Return the placements of the outputs if all pairs of joint graphs agree; None otherwise."""
    forms: list[list[ScaledPlacement] | None] = [propagate_placements(full, piece, dims, n) for full, piece in pairs]
    return forms[0] if forms and all(placements is not None and placements == forms[0] for placements in forms) else None


def _candidate_dims(full: JointGraph) -> list[dict[int, int]]:
    """Return the candidate sets of input dimensions, joined by the rules of the operators that read them."""
    joined = UnionFind[tuple[str, int]]()
    tensors = dict(full.tensors)
    for op in full.operators or ():
        rule = rule_of(op, tensors)
        if rule is None:
            continue
        for places in dims_by_label(op, rule).values():
            joined.union(places)
    for value, gradient in (*zip(full.outputs, full.seeds, strict=True), *zip(full.inputs, full.gradients, strict=True)):
        if gradient is not None:
            for dim in range(len(tensors[value].shape)):
                joined.union([(value, dim), (gradient, dim)])
    ends = [(v, d) for v in (*full.outputs, *full.inputs) for d, n in enumerate(tensors[v].shape) if n > 1]
    groups: dict[tuple[str, int], dict[int, int]] = {joined.root(at): {} for at in ends}
    repeated = set()
    for i, value in enumerate(full.inputs):
        for dim, size in enumerate(tensors[value].shape):
            if size > 1:
                group = groups[joined.root((value, dim))]
                if i in group:
                    repeated.add(joined.root((value, dim)))
                group[i] = dim
    sized = [(at, group) for at, group in groups.items() if group and at not in repeated]
    return [g for _, g in sized if len({tensors[full.inputs[i]].shape[d] for i, d in g.items()}) == 1]


def propagate_placements(full: JointGraph, shard: JointGraph, dims: ShardedDims, n: int) -> list[ScaledPlacement] | None:
    """Return the placements of the outputs; None if they cannot be inferred, or gradients have other placements than required.

    The gradient of a sharded input must be its shard, and the gradient of a replicated input a partial sum.
    """
    if full.operators is None or shard.operators is None or len(full.operators) != len(shard.operators):
        return None
    if (full.inputs, full.outputs, full.seeds, full.gradients) != (shard.inputs, shard.outputs, shard.seeds, shard.gradients):
        return None
    forms = {v: ScaledPlacement("S", dims[i]) if i in dims else ScaledPlacement("R") for i, v in enumerate(full.inputs)}
    for name, value in full.literals.items():
        if shard.literals.get(name) != value:
            return None
        forms[name] = ScaledPlacement("R")
    if not _has_expected_shapes(full, shard, forms, full.inputs, n):
        return None
    zeros = _zero_values(full)
    outputs: list[ScaledPlacement] | None = None
    for i, (op, other) in enumerate(zip(full.operators, shard.operators, strict=True)):
        if i == full.num_forward:
            outputs = _place_outputs(full, forms)
        if i >= full.num_forward and outputs is None:
            return None
        step = _place_operator(op, other, full.tensors, shard.tensors, forms, zeros, n)
        if step is None:
            return None
        forms.update(zip(op.outputs, step, strict=True))
        if not _has_expected_shapes(full, shard, forms, op.outputs, n):
            return None
    if outputs is None:
        outputs = _place_outputs(full, forms)
    if outputs is None:
        return None
    for i, gradient in enumerate(full.gradients):
        expected = ScaledPlacement("S", dims[i]) if i in dims else ScaledPlacement("P")
        if gradient is not None and forms[gradient] != expected and not (gradient in zeros and forms[gradient].kind != "S"):
            return None
    return outputs


def has_linear_backward(joint: JointGraph) -> bool:
    """Return whether backward maps partial sums to partial sums (is linear), unlike one that clips gradients."""
    if joint.operators is None:
        return False
    forms = {v: ScaledPlacement("R") for v in (*joint.inputs, *joint.literals)} | {
        seed: ScaledPlacement("P") for seed in joint.seeds if seed is not None
    }
    zeros = _zero_values(joint)
    for op in joint.operators:
        step = _place_operator(op, op, joint.tensors, joint.tensors, forms, zeros, 1)
        if step is None:
            return False
        forms.update(zip(op.outputs, step, strict=True))
    return all(gradient is None or gradient in zeros or forms[gradient] == ScaledPlacement("P") for gradient in joint.gradients)


def _zero_values(joint: JointGraph) -> set[str]:
    """Return the values that are zero everywhere, which fit every placement."""
    names = {name for name, value in joint.literals.items() if isinstance(value, tuple) and value[1] == 0}
    for op in joint.operators or ():
        record = record_of(op)
        passes = record.linear == Linearity.JOINT or record.view.kind in (ViewKind.COPY, ViewKind.ALIAS)
        if record.output.fill == 0 or (passes and op.inputs and names.issuperset(op.inputs)):
            names.update(op.outputs)
    return names


def _place_outputs(full: JointGraph, placements: dict[str, ScaledPlacement]) -> list[ScaledPlacement] | None:
    """Return the placements of the outputs, each a shard or a partial sum, and set those of their gradients."""
    forms_out = [placements[v] for v in full.outputs]
    scaled = {form.power for form in forms_out}
    if any(form.kind == "R" for form in forms_out) or not (
        scaled == {0} or (scaled == {1} and all(form.kind == "P" for form in forms_out))
    ):
        return None
    for form, seed in zip(forms_out, full.seeds, strict=True):
        if seed is not None:
            placements[seed] = form if form.kind == "S" else ScaledPlacement("R", power=-form.power)
    return forms_out


def _has_expected_shapes(
    full: JointGraph, shard: JointGraph, placements: Mapping[str, ScaledPlacement], values: Sequence[str], n: int
) -> bool:
    """Return whether shards have the shapes of their placements."""
    for value in values:
        shape, form = list(full.tensors[value].shape), placements[value]
        if form.kind == "S":
            if shape[form.dim] % n:
                return False
            shape[form.dim] //= n
        if tuple(shape) != shard.tensors[value].shape or full.tensors[value].dtype != shard.tensors[value].dtype:
            return False
    return True


def _place_operator(
    op: Operator,
    shard_op: Operator,
    tensors: Mapping[str, Tensor],
    shard_tensors: Mapping[str, Tensor],
    placements: Mapping[str, ScaledPlacement],
    zeros: set[str],
    n: int,
) -> list[ScaledPlacement] | None:
    """Return the placements of an operator's outputs; None if they cannot be inferred."""
    record = record_of(op)
    if (op.target, op.outputs, op.inputs) != (shard_op.target, shard_op.outputs, shard_op.inputs) or any(
        v not in placements for v in op.inputs
    ):
        return None
    scale = _constant_power(op, shard_op, n)
    if scale is None:
        return None
    rule = rule_of(op, dict(tensors))
    ins = [placements[v] for v in op.inputs]
    read: list[tuple[ScaledPlacement, Labels]] = [
        (form, (BLOCKED,) * len(tensors[v].shape)) for form, v in zip(ins, op.inputs, strict=True)
    ]
    if rule is not None:
        read = [(form, row) for form, row in zip(ins, rule.inputs, strict=True) if row is not None]
    cut = {row[form.dim] for form, row in read if form.kind == "S"}
    power = _output_power(op, placements, zeros)
    if power is None:
        return None
    power += scale
    if cut:
        (label, *further) = cut
        if further or not label or rule is None or any(label in row for form, row in read if form.kind != "S"):
            return None
        return _place_sharded(op, rule, label, [form for form, _ in read], power)
    if any(form.kind == "P" for form, _ in read):
        rounds = any(tensors[v].is_float for v in op.inputs) and not all(tensors[v].is_float for v in op.outputs)
        return None if rounds else [ScaledPlacement("P", power=power)] * len(op.outputs)  # linear: checked by `_output_power`
    results = [_place_replicated(record, rule, tensors[v].shape, shard_tensors[v].shape, row, power) for row, v in enumerate(op.outputs)]
    # Ranks draw different random numbers.
    return None if is_random(op) and any(form.kind == "R" for form in results) else results


def _place_sharded(op: Operator, rule: Rule, label: str, read: list[ScaledPlacement], power: int) -> list[ScaledPlacement] | None:
    """Return the placements of the outputs of an operator that is sharded on a label."""
    if any(form.kind == "P" for form in read):
        return None
    kernel, record = rule.kernels.get(label), record_of(op)
    if kernel is not None and not (kernel == "average" and record.linear):
        return None
    placements = []
    for row in rule.outputs:
        if label in row:
            placements.append(ScaledPlacement("S", row.index(label), power))
        elif record.reduction.is_sum and record.linear:  # a mean over a shard is n times too large
            placements.append(ScaledPlacement("P", power=power + (kernel == "average")))
        else:
            return None
    return placements


def _place_replicated(
    record: Op, rule: Rule | None, full: tuple[int, ...], shard: tuple[int, ...], row: int, power: int
) -> ScaledPlacement:
    """Return the placement of an output of replicated inputs: replicated, or sharded along a dimension of equal entries."""
    differ = [d for d, (a, b) in enumerate(zip(full, shard, strict=False)) if a != b]
    if len(differ) == 1 and len(full) == len(shard):
        labels: Labels = rule.outputs[row] if rule is not None else ()
        read = [r for r in (rule.inputs if rule is not None else ()) if labels[differ[0]] and labels[differ[0]] in (r or ())]
        spread = record.view.kind == ViewKind.EXPAND and rule is not None and not read
        if (record.output.sample_invariant and record.output.shape_at is not None) or spread:
            return ScaledPlacement("S", differ[0], power)
    return ScaledPlacement("R", power=power)


def _output_power(op: Operator, placements: Mapping[str, ScaledPlacement], zeros: set[str]) -> int | None:
    """Return the power of n that scales the output; None if the operator is not linear in a scaled or partial input."""
    ins = [placements[v] for v in op.inputs]
    if not any(form.power or form.kind == "P" for form in ins):
        return 0
    num_partial = sum(form.kind == "P" for form in ins)
    carried = jointly_linear_in(op, zeros)
    if carried is not None:
        scales = {(placements[v].power, placements[v].kind == "P") for v in carried}
        other_forms = [placements[v] for v in op.inputs if v not in carried and v not in zeros]
        return scales.pop()[0] if len(scales) == 1 and not any(f.power or f.kind == "P" for f in other_forms) else None
    linearity = record_of(op).linear
    if linearity == Linearity.MULTILINEAR:
        return sum(form.power for form in ins) if num_partial < 2 else None
    if linearity == Linearity.NUMERATOR and "rounding_mode" not in dict(op.kwargs):
        if len(ins) == 1:
            return ins[0].power if isinstance(op.args[0], Ref) else None
        return ins[0].power - ins[1].power if ins[1].kind != "P" else None
    return None


def _constant_power(op: Operator, shard_op: Operator, n: int) -> int | None:
    """Return the power of n by which a constant factor differs on shards, 0 if all constants are equal, else None."""
    record = record_of(op)
    if record.output.shape_at is not None:  # the shape argument differs on shards
        start = record.output.shape_at + 1
        return 0 if (op.args[start:], op.kwargs) == (shard_op.args[start:], shard_op.kwargs) else None
    if (op.args, op.kwargs) == (shard_op.args, shard_op.kwargs):
        return 0
    factor = record.linear == Linearity.MULTILINEAR and is_elementwise(op)
    if (
        not (factor or record.linear == Linearity.NUMERATOR)
        or op.kwargs != shard_op.kwargs
        or len(op.args) != 2
        or op.args[0] != shard_op.args[0]
    ):
        return None
    a, b = op.args[1], shard_op.args[1]
    if not all(isinstance(x, int | float) and not isinstance(x, bool) and x for x in (a, b)):
        return None
    for power in (1, -1):
        if isclose(float(b), float(a) * float(n) ** power, rel_tol=1e-12):  # type: ignore[arg-type]
            return power if factor else -power
    return None
